"""Request: limits, finish conditions and block hashes."""

from __future__ import annotations

import hashlib
import struct

import pytest

from asyncllm.core.block_hashes import root_hash
from asyncllm.core.request import Request, RequestGroup, Status
from asyncllm.sampling_params import SamplingParams


def request(
    token_ids=(1, 2, 3), group=None, *, cache_salt=None, max_model_len=100, eos=(), **params
):
    return Request(
        group or RequestGroup("r", arrived_at=7.0),
        SamplingParams(**params),
        token_ids=list(token_ids or ()),
        max_model_len=max_model_len,
        eos_token_ids=eos,
        cache_salt=cache_salt,
    )


def test_members_of_a_group_are_numbered():
    group = RequestGroup("g", arrived_at=3.0)
    members = [request(group=group) for _ in range(3)]
    assert group.members == members
    assert [one.index for one in members] == [0, 1, 2]
    members[1].status = Status.FINISHED
    assert group.unfinished_requests == [members[0], members[2]]


def test_members_of_a_group_share_their_stop_tokens():
    group = RequestGroup("g", arrived_at=3.0)
    params = SamplingParams(stop_token_ids=[7, 8])
    first = Request(group, params, max_model_len=9, eos_token_ids=(1,))
    other = Request(group, params, max_model_len=9, eos_token_ids=(1,), first_member=first)
    assert first.stop_token_ids == {1, 7, 8}
    assert other.stop_token_ids is first.stop_token_ids


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "expected"),
    [(None, 100, 100), (20, 100, 23), (96, 100, 99), (97, 100, 100), (98, 100, 100)],
)
def test_total_is_limited_by_the_request_and_by_the_context(max_tokens, max_model_len, expected):
    for token_ids in ((1, 2, 3), None):
        one = request(token_ids, max_tokens=max_tokens, min_tokens=2, max_model_len=max_model_len)
        if token_ids is None:
            assert (one.num_prompt_tokens, one.max_total_tokens, one.min_total_tokens) == (0, 0, 0)
            assert one.token_ids == []
            one.set_prompt([1, 2, 3])
        assert one.token_ids == [1, 2, 3]
        assert (one.num_prompt_tokens, one.min_total_tokens) == (3, 5)
        assert one.max_total_tokens == expected


@pytest.mark.parametrize(
    ("output", "reason", "stop_reason"),
    [
        ([50], None, None),  # below min_tokens
        ([60], None, None),
        ([9, 8], None, None),
        ([9, 50], "stop", None),  # an end of sequence is no stop_reason
        ([9, 60], "stop", 60),
        ([9, 8, 7, 6], "length", None),
        ([9, 8, 7, 60], "stop", 60),
        ([9, 8, 7, 6, 5], "length", None),
    ],
)
def test_finish_conditions(output, reason, stop_reason):
    one = request(max_tokens=4, min_tokens=2, stop_token_ids=(60,), eos=(50, 51))
    assert one.stop_token_ids == {50, 51, 60}
    one.token_ids += output
    assert one.check_stop(output[-1]) == reason
    assert one.stop_reason == stop_reason
    assert (one.num_output_tokens, one.output_token_ids) == (len(output), output)


def test_an_end_of_sequence_may_be_ignored():
    one = request(ignore_eos=True, stop_token_ids=(60,), eos=(50,))
    assert (one.eos_token_ids, one.stop_token_ids) == ((), {60})
    one.token_ids.append(50)
    assert one.check_stop(50) is None


@pytest.mark.parametrize("salt", [None, "", "a"])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_hashes_are_a_chain_of_blake2b(salt, block_size):
    token_ids = [5, 0, 2**31, 7, 8, 9, 2**32 - 1, 3, 4, 5, 6]
    seed = b"" if salt is None else b"salt\0" + salt.encode()
    parent = hashlib.blake2b(seed, digest_size=16, person=b"asyncllm-kv").digest()
    assert root_hash(salt) == parent
    expected = []
    for begin in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[begin : begin + block_size]
        parent = hashlib.blake2b(
            parent + struct.pack(f"={block_size}I", *block), digest_size=16
        ).digest()
        expected.append(parent)
    one = request(token_ids[:2], cache_salt=salt)
    for token_id in token_ids[2:]:
        before = list(one.extend_hashes(block_size))
        one.token_ids.append(token_id)
        # Each is computed once, and stays.
        assert one.extend_hashes(block_size)[: len(before)] == before
    assert one.extend_hashes(block_size) == expected
    assert one.block_hashes == {block_size: expected}
