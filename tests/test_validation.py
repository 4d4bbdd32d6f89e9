"""Validators: plain values for every kind of number, printable errors."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import EngineConfig, InvalidRequestError, SamplingParams
from asyncllm import validation as check
from asyncllm.core.batch import RowError
from tests.unprintable import UNPRINTABLE

NO_INTEGERS = [True, np.bool_(True), 1.0, np.float32(1), "1", None, [1], math.nan, Decimal(1), 1j]
NO_NUMBERS = [True, np.bool_(True), "1", None, [1.0], Decimal(1), 1j, math.nan, np.float32("nan")]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("on purpose")


def refused(validator: Any, value: Any, *limits: Any, **how: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        validator("field", value, *limits, **how)
    assert caught.value.param == "field"
    message = str(caught.value)
    assert message.startswith("field=")
    assert len(message) < 300
    return message


@pytest.mark.parametrize("kind", [int, np.int8, np.uint64, np.int64, torch.tensor, np.array])
def test_integers_of_every_kind_become_plain(kind: Any) -> None:
    found = check.integer("field", kind(7), 0, 7)
    assert (found, type(found)) == (7, int)


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_non_integers(value: Any) -> None:
    assert "expected an integer from 0 to 9" in refused(check.integer, value, 0, 9)


TOO_LARGE = [2**63, -(2**63) - 1, 10**400, -(10**400), 10**5000]


@pytest.mark.parametrize("value", [-1, 10, *TOO_LARGE], ids=check.describe)
def test_integers_out_of_range(value: int) -> None:
    refused(check.integer, value, 0, 9)


FLOATS = [kind(0.5) for kind in (float, np.float16, np.float32, np.float64, np.longdouble)]


@pytest.mark.parametrize("value", [*FLOATS, 1, np.int64(1), Fraction(1)])
def test_numbers_of_every_kind_become_plain(value: Any) -> None:
    found = check.number("field", value, 0, 1)
    assert (found, type(found)) == (value, float)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_non_numbers(value: Any) -> None:
    assert "expected a finite number from 0 to 1" in refused(check.number, value, 0, 1)


@pytest.mark.parametrize(
    "value",
    [math.inf, *TOO_LARGE, 1e300, Fraction(10**400), 1 + 1e-15, np.longdouble("1e400")],
    ids=check.describe,
)
def test_numbers_out_of_range(value: Any) -> None:
    refused(check.number, value, 0, 1)


def test_ends_of_a_range() -> None:
    assert check.number("field", 5e-324, 0, 1, exclusive_low=True) == 5e-324
    assert "above 0 to 1" in refused(check.number, 0, 0, 1, exclusive_low=True)
    assert "above 0" in refused(check.number, -0.0, 0, 1, exclusive_low=True)
    assert math.copysign(1, check.number("field", -0.0, 0, 1)) == 1
    assert "seconds above 0" in refused(check.seconds, 10**400, exclusive_low=True)
    assert check.seconds("field", 0) == 0


@given(st.integers() | st.floats() | st.fractions())
def test_a_number_is_in_its_range_or_refused(value: Any) -> None:
    try:
        found = check.number("field", value, -2, 2)
    except InvalidRequestError:
        assert not -2 <= value <= 2
    else:
        assert type(found) is float
        assert -2 <= found <= 2


def test_none_is_accepted_where_it_is_optional() -> None:
    for validator, limits in (
        (check.integer, (0,)),
        (check.number, (0, 1)),
        (check.boolean, ()),
        (check.string, ()),
    ):
        assert validator("field", None, *limits, optional=True) is None
        assert "or None" not in refused(validator, None, *limits)
        assert refused(validator, [], *limits, optional=True).endswith(" or None")


def test_booleans_are_not_numbers_and_may_be_numpy() -> None:
    assert check.boolean("field", np.bool_(False)) is False
    for value in (0, 1, "yes", None, np.int64(1), torch.tensor(True)):
        refused(check.boolean, value)


class Text(str):
    pass


def test_sequences_of_strings_are_tuples_of_them() -> None:
    assert check.strings("field", [Text("a"), "b"]) == ("a", "b")
    assert type(check.strings("field", [Text("a")])[0]) is str
    assert check.strings("field", (), optional=True) == ()
    assert check.strings("field", None, optional=True) is None
    for value in ("ab", 5, None):
        assert refused(check.strings, value).endswith("expected a sequence of strings")
    assert refused(check.strings, 5, optional=True).endswith("a sequence of strings or None")
    assert refused(check.strings, ["a", ""]).startswith("field=''")


def test_strings_are_valid_utf8() -> None:
    assert check.string("field", "Zoë \U0001f600") == "Zoë \U0001f600"
    assert check.string("field", "", allow_empty=True) == ""
    for value in ("", "\ud800", b"x", 5, None):
        refused(check.string, value)


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), {1, 2}, iter([1, 2])]
)
def test_token_ids_of_every_kind_become_plain(value: Any) -> None:
    found = check.token_ids("field", value, 3)
    assert found == (1, 2)
    assert {type(one) for one in found} == {int}


@pytest.mark.parametrize(
    ("value", "at_fault"),
    [
        ([1, 3], "3"),
        ([-1, 1], "-1"),
        ([1, True], "True"),
        ([1, 2.0], "2.0"),
        ([1, 10**400], "1000"),
        ([None], "None"),
        ([[1]], "[1]"),
        (np.array(1), "array(1)"),
        (np.array([[1]]), "array([1])"),
        (np.array([1.0]), "1.0"),
        ("12", "'12'"),
        (b"12", "b'12'"),
        ({1: 2}, "{1: 2}"),
        (5, "5"),
    ],
    ids=check.describe,
)
def test_token_ids_name_the_one_at_fault(value: Any, at_fault: str) -> None:
    message = refused(check.token_ids, value, 3)
    assert at_fault in message
    assert message.endswith("expected token ids, integers from 0 to 2")


def test_descriptions_are_short_and_never_raise() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (10**5000, "x" * 10**6, [1] * 10**6, {i: i for i in range(10**5)}, cyclic, deep):
        assert 0 < len(check.describe(value)) < 200
    assert check.describe(Unprintable()).startswith("<Unprintable")
    assert check.describe(10**5000) == "<int>"
    assert check.describe([1, "two", {"three": 3}]) == "[1, 'two', {'three': 3}]"


def test_long_dicts_are_described_by_few_keys() -> None:
    falling = dict.fromkeys(range(10**4, 0, -1), 1)
    assert check.describe(falling).startswith("{9992: 1, 9993: 1, ")


def test_repeated_token_ids_are_dropped() -> None:
    repeated = [5, 3] * 100_000
    params = SamplingParams(stop_token_ids=repeated, allowed_token_ids=repeated)
    assert (params.stop_token_ids, params.allowed_token_ids) == ((5, 3), (5, 3))
    params.check_limits(6, 0)


def num_calls(function: Callable[[], object]) -> int:
    """Number of calls that the interpreter makes in ``function``; a generator's steps count."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def lists_of(count: int) -> dict[str, Any]:
    """Fields of SamplingParams with ``count`` entries each, as far as they may have so many."""
    return {
        "logit_bias": {i: -0.5 * (i % 7) for i in range(min(count, 1024))},
        "stop_token_ids": list(range(count)),
        "allowed_token_ids": list(range(count, 0, -1)),
        "stop": [f"\N{SNOWMAN}{i}" for i in range(min(count, 64))],
    }


def test_long_lists_are_checked_by_as_many_calls_as_short_ones() -> None:
    """A request at the limits took 1 ms of its caller's thread, most of it in calls per entry."""
    long, short = lists_of(2045), lists_of(2)
    # A stop string takes three calls, and an id or a bias none.
    SamplingParams(**short)  # The first use of a codec imports it.
    few = num_calls(lambda: SamplingParams(**short))
    assert num_calls(lambda: SamplingParams(**long)) == few + 3 * (64 - 2)
    params = SamplingParams(**long)
    assert params.stop_token_ids == tuple(range(2045))
    assert params.allowed_token_ids == tuple(range(2045, 0, -1))
    assert params.stop == tuple(long["stop"])
    assert params.logit_bias == long["logit_bias"]
    biases = list((params.logit_bias or {}).values())
    assert {math.copysign(1, bias) for bias in biases if not bias} == {1}


def test_overrides_leave_the_other_lists_unchecked() -> None:
    params = SamplingParams(**lists_of(2045), extra_args={"a": [1]})
    found = params.resolve({"top_k": -1, "stop": "a"}, {}, lambda: 1)
    assert (found.top_k, found.stop, found.seed) == (0, ("a",), 1)
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "extra_args"):
        assert getattr(found, name) is getattr(params, name), name
    with pytest.raises(InvalidRequestError, match="detokenize"):
        params.resolve({"detokenize": False}, {}, lambda: 1)


def test_numbers_and_ids_at_their_bounds() -> None:
    assert check.token_ids("field", [2**62, 2**62, 0]) == (2**62, 2**62, 0)
    assert check.token_ids("field", [2**63 - 2, 1]) == (2**63 - 2, 1)
    for value in ([2**63 - 1], [2**63], [2**64], [0, -1], [-1, 2**62]):
        refused(check.token_ids, value)
    assert check.numbers_in_range("field", [-2, 0.5, -0.0, 2], -2, 2) == [-2.0, 0.5, 0.0, 2.0]
    for value in ([math.nan], [0, math.nan, 1], [1, math.nan, 10**400], [math.inf, -math.inf]):
        refused(check.numbers_in_range, value, -2, 2)
    assert check.numbers_in_range("field", [], -2, 2) == []


def failing(base: type, *names: str) -> Any:
    def fail(*args: Any) -> Any:
        raise ValueError("on purpose")

    return type("Failing", (base,), dict.fromkeys(names, fail))


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "allowed_token_ids", "bad_words"])
def test_list_that_cannot_be_read_is_refused(name: str) -> None:
    for value in (failing(list, "__iter__", "__len__")(["a"]), failing(set, "__iter__")()):
        with pytest.raises(InvalidRequestError, match=f"^{name}=") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_stop_tokens_read_per_step_are_bounded() -> None:
    params = SamplingParams(stop_token_ids=range(127))
    for fields in ({"min_tokens": 1}, {"structured_outputs": {"regex": "a"}}):
        replace(params, **fields).check_limits(1000, 0, (1,))
        more = replace(params, stop_token_ids=range(128), **fields)
        name = next(iter(fields))
        with pytest.raises(InvalidRequestError, match=f"at most 127 token ids with {name}"):
            more.check_limits(1000, 0, (1,))
    replace(params, stop_token_ids=range(900)).check_limits(1000, 0, (1,))


@pytest.mark.parametrize("how", UNPRINTABLE)
def test_an_exception_is_explained_though_its_methods_raise(how: str) -> None:
    odd = UNPRINTABLE[how]()
    for told in (check.describe(odd), check.describe_error(odd)):
        assert type(told) is str
        assert 0 < len(told) < 200
    assert RowError.of(odd).kind == "Odd"
    assert check.describe_error(KeyError("x" * 200)) == f"KeyError: {'x' * 200!r}"


def test_equal_as_json_is() -> None:
    assert check.equal_json({"type": "text"}, {"type": "text"})
    for value in ({"type": "json"}, {}, {"type": "text", "x": 1}, [], np.array(["text"]), None):
        assert not check.equal_json(value, {"type": "text"})
    assert not check.equal_json({"type": np.zeros(2)}, {"type": "text"})
    assert not check.equal_json(np.zeros(2), [])
    assert not check.equal_json(1, True)


def test_sampling_params_are_plain_and_bounded() -> None:
    params = SamplingParams(
        n=np.int64(1),
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),  # pyright: ignore[reportArgumentType]
        top_k=np.int64(2**40),
        seed=np.uint64(2**64 - 1),
        max_tokens=np.int32(5),
        ignore_eos=np.bool_(True),
        stop=None,  # pyright: ignore[reportArgumentType]
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(5): np.float32(0.5)},
        bad_words=[],
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=2**40,
        seed=2**64 - 1,
        max_tokens=5,
        ignore_eos=True,
        stop_token_ids=(3, 4),
        logit_bias={5: 0.5},
    )
    for name in ("n", "temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos"):
        assert type(getattr(params, name)) in (int, float, bool), name
    assert {type(one) for one in (*params.stop_token_ids, *(params.logit_bias or ()))} == {int}


TOKEN_IDS = [[None], [5, None], [None, 5], itertools.repeat(5), range(10**12)]
BAD_PARAMS: dict[str, list[Any]] = {
    "temperature": [1e300, np.float64(101)],
    "repetition_penalty": [1e300, 5e-324],
    "top_k": [2**63],
    "seed": [10**400],
    "max_tokens": [10**5000],
    "min_tokens": [2**63],
    "logprobs": [10**400],
    "prompt_logprobs": [np.zeros(2)],
    "n": [10**400],
    "presence_penalty": [10**400],
    "logit_bias": [{1: 10**400}, {10**400: 1}, {True: 1}, {None: 1}, {1: None}],
    "stop": ["x" * 1025, ["x"] * 65, ["\ud800"], [None], range(10**12), itertools.repeat("a")],
    "stop_token_ids": [[2**63], *TOKEN_IDS],
    "allowed_token_ids": TOKEN_IDS,
    "logits_processors": [[None], itertools.repeat(print)],
    "bad_words": [[None], np.zeros(2)],
    "structured_outputs": [np.zeros(2)],
    "detokenize": [None, 0, "no", [True]],
}
BAD_SETTINGS: dict[str, list[Any]] = {
    "num_blocks": [2**31],
    "max_num_seqs": [2**17],
    "max_model_len": [2**31],
    "max_num_batched_tokens": [2**31, np.zeros(2)],
    "block_size": [10**9],
    "num_threads": [2**32],
    "max_queued_requests": [2**63],
    "max_queued_tokens": [10**400],
    "seed": [2**64],
    "step_timeout": [10**400, 1e12, True],
    "gpu_memory_utilization": [True, 10**400],
    "kv_cache_memory": [2**63, 10**5000, "9" * 400, "9999999999TiB"],
    "cudagraph_capture_sizes": [(2**63,), 5, ()],
    "device": ["cuda:99999999999999999999"],
    "dtype": [np.zeros(2)],
    "async_scheduling": [1],
    "revision": [5],
}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        pytest.param(kind, field, value, id=f"{field}-{check.describe(value)}")
        for kind, table in ((SamplingParams, BAD_PARAMS), (EngineConfig, BAD_SETTINGS))
        for field, values in table.items()
        for value in values
    ],
)
def test_fields_out_of_range(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        kind(**{field: value})
    assert caught.value.param == field
    assert len(str(caught.value)) < 300


def test_configuration_is_plain() -> None:
    config = EngineConfig(
        num_blocks=np.int64(5),
        step_timeout=np.float32(2),
        gpu_memory_utilization=1,
        async_scheduling=np.bool_(True),  # pyright: ignore[reportArgumentType]
        kv_cache_memory=np.int64(2**20),
        cudagraph_capture_sizes=np.array([4, 2, 2]),  # pyright: ignore[reportArgumentType]
    )
    assert config == EngineConfig(
        num_blocks=5,
        step_timeout=2.0,
        gpu_memory_utilization=1.0,
        async_scheduling=True,
        kv_cache_memory="1MiB",
        cudagraph_capture_sizes=(2, 4),
    )
    assert type(config.num_blocks) is int
    assert config.async_scheduling is True
