"""Checks of a scheduler's blocks, slots and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from asyncllm.core.block_pool import NULL_BLOCK_ID, Block, BlockPool
from asyncllm.core.kv_cache import UNREACHABLE_NUM_TOKENS, KVCacheManager
from asyncllm.core.request import Request, Status
from asyncllm.core.scheduler import Scheduler
from asyncllm.core.waiting_queue import WaitingQueue


def check_scheduler(scheduler: Scheduler) -> None:
    """Check the requests and slots of a scheduler, its queue and its KV cache."""
    live = list(scheduler.requests())
    assert len(live) == len(set(live)), "a request is in two places"
    check_kv_cache(scheduler.kv, live)
    check_waiting_queue(scheduler.waiting, scheduler.running)
    holders = [*scheduler.running, *scheduler._idle_slots]
    held, free = {r.req_index for r in holders}, scheduler._free_req_indices
    assert scheduler._idle_slots.keys() <= scheduler.paused.keys()
    assert set(holders) == {r for r in live if r.req_index >= 0}
    assert len(held) == len(holders), "two requests share a slot"
    assert held.isdisjoint(free), "a slot is both held and free"
    assert len(held) + len(free) == scheduler.info.max_num_seqs, "a slot leaked"
    for first, members in scheduler.awaiting_prompt.items():
        assert not first.is_finished
        assert not first.num_output_tokens
        assert all(m.first_member is first and m.status is Status.WAITING for m in members)
    evictable = scheduler._idle_requests.entries
    for request in live:
        assert request.num_computed_tokens <= len(request.token_ids) + request.num_placeholders
        assert request.num_placeholders >= 0, request
        idle = bool(request.blocks) and request.status is not Status.RUNNING
        assert (request in evictable) == idle, request
    assert len(evictable) <= len(live), "a finished request is an idle holder"


def check_waiting_queue(queue: WaitingQueue, running: Iterable[Request]) -> None:
    """Check that the owners of a queue are those of the waiting and running requests."""
    counts = Counter(request.owner for request in running)
    live = counts.keys() | {request.owner for request in queue}
    assert queue._owners.keys() == live, "an owner without requests is known"
    for name, owner in queue._owners.items():
        assert owner.num_running == counts[name], f"owner {name!r}: requests miscounted"
    assert queue._num_entries == sum(len(owner.heap) for owner in queue._owners.values())


def check_kv_cache(kv: KVCacheManager, requests: list[Request]) -> None:
    """Check the blocks of a KV cache and of its snapshots. Each computed token that a later query
    sees needs a slot in a block of every group."""
    null = kv.pool.null_block
    held = [[b for blocks in r.blocks for b in blocks if b is not null] for r in requests]
    check_block_pool(kv.pool, held)
    if kv.states is not None:
        check_block_pool(kv.states.pool, [[save.block] for save in kv.states._pending_snapshots])
    for request in requests:
        assert len(request.blocks) in (0, len(kv.groups)), request
        assert bool(request.blocks) or request.num_computed_tokens == 0, request
        for group, blocks in zip(kv.groups, request.blocks, strict=False):
            assert request.num_computed_tokens <= len(blocks) * group.block_size, request
            assert request.num_covered_tokens <= len(blocks) * group.block_size, request
            num_null = request.num_out_of_window[group.index]
            expected = [i < num_null for i in range(len(blocks))]
            assert [b is null for b in blocks] == expected, request
            assert num_null <= group.first_visible_block(request.num_computed_tokens), request
            most = group.spec.max_blocks(UNREACHABLE_NUM_TOKENS, kv._step_tokens)
            assert len(blocks) - num_null <= most, request


def check_block_pool(pool: BlockPool, holders: Iterable[Sequence[Block]] = ()) -> None:
    """Check the reference counts, free list and index of a pool.

    Args:
        holders: the block lists of all requests, to compare reference counts with.
    """
    refs: Counter[int] = Counter()
    for blocks in holders:
        ids = [block.block_id for block in blocks]
        assert len(ids) == len(set(ids)), f"a request holds a block twice: {ids}"
        refs.update(ids)
    free_ids = {block.block_id for block in (*pool._unhashed, *pool._evictable)}
    assert NULL_BLOCK_ID not in free_ids, "the null block is free"
    assert NULL_BLOCK_ID not in refs, "a request holds the null block"
    for block in pool.blocks[1:]:
        expected = refs[block.block_id]
        assert block.ref_count == expected, f"{block}: {expected} requests hold it"
        assert (block.ref_count == 0) == (block.block_id in free_ids), f"{block} leaked"
        for block_hash in {block.hash, block.partial_hash} - {None}:
            assert pool._by_hash.get(block_hash) is block, f"{block} cannot be found"
    for block_hash, block in pool._by_hash.items():
        assert block_hash in (block.hash, block.partial_hash), "a hash names another block"
