"""The cut of top_k among the logits of one row: the place in order after the k-th token.

The k-th largest of the chunks' maxima bounds the k-th largest logit from below. Tokens at or above
that bound are rarely many more than k: one pass over the listed chunks collects them, and they are
sorted (bitonic, Batcher, 1968). If they are more than MAX_SORTED, for a large k or among ties,
quickselect (Hoare, 1961) finds the cut in as many passes as it takes.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker sees a kernel as the Python function that it is written as.

import triton
import triton.language as tl

from asyncllm.gpu.ops import gumbel

CHUNK = tl.constexpr(gumbel.CHUNK)
PRIORITY = tl.constexpr(0x9E3779B1)
PRIORITY_INVERSE = tl.constexpr(pow(0x9E3779B1, -1, 2**32))

SCANNED_CHUNKS = tl.constexpr(4)
"""Chunks that are read at a time."""

MAX_SORTED = tl.constexpr(256)
"""Most candidates that are sorted: two for each thread of a program."""


@triton.jit
def order_of(value):
    """Maps float32 numbers to integers in [0, 2**32) of the same order."""
    # Adding zero makes minus zero the same as zero.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def kth_largest(order, k):
    """The k-th largest element, found bit by bit from the highest; 0 if there are fewer."""
    found = tl.full([], 0, tl.int64)
    for step in range(32):
        candidate = found + (tl.full([], 1, tl.int64) << (31 - step))
        enough = tl.sum((order >= candidate).to(tl.int32), 0) >= k
        found = tl.where(enough, candidate, found)
    return found


@triton.jit
def listed_values(logits, listed, count, factor, vocab_size, start):
    """Tokens and logits of the listed chunks ``start`` to ``start + SCANNED_CHUNKS - 1``."""
    entry = start + tl.arange(0, SCANNED_CHUNKS)
    chunk = tl.load(listed + entry, mask=entry < count, other=0)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    real = (entry < count)[:, None] & (token < vocab_size)
    value = tl.load(logits + token, mask=real, other=float("-inf")).to(tl.float32) * factor
    return token, value, real


@triton.jit
def is_ahead(value, token, of_value, of_token):
    """Whether a token comes before another: by logit, descending, then by id."""
    return (value > of_value) | ((value == of_value) & (token < of_token))


@triton.jit
def value_of(logits, token, factor):
    return tl.load(logits + token).to(tl.float32) * factor


@triton.jit
def rank_of(
    logits, listed, count, factor, vocab_size, pivot_value, pivot, high_value, high, low_value, low
):
    """Counts the listed tokens ahead of the pivot, and picks a random token on each side of it.

    The random tokens lie between ``high`` and the pivot, and between the pivot and ``low``.
    """
    ranks = tl.zeros([SCANNED_CHUNKS, CHUNK], tl.int32)
    above = tl.full([SCANNED_CHUNKS, CHUNK], -2147483648, tl.int32)
    below = tl.full([SCANNED_CHUNKS, CHUNK], -2147483648, tl.int32)
    for start in range(0, count, SCANNED_CHUNKS):
        token, value, real = listed_values(logits, listed, count, factor, vocab_size, start)
        # An odd factor permutes the numbers of 32 bits: no two tokens have the same priority.
        priority = (token.to(tl.uint32) * PRIORITY).to(tl.int32, bitcast=True)
        ahead = is_ahead(value, token, pivot_value, pivot)
        at_pivot = (value == pivot_value) & (token == pivot)
        ranks += (real & ahead).to(tl.int32)
        after_high = is_ahead(high_value, high, value, token)
        between = real & ahead & after_high
        above = tl.where(between, tl.maximum(above, priority), above)
        before_low = is_ahead(value, token, low_value, low)
        between = real & (ahead == 0) & (at_pivot == 0) & before_low
        below = tl.where(between, tl.maximum(below, priority), below)
    rank = tl.sum(tl.sum(ranks, 1), 0)
    return rank, token_of(tl.max(tl.max(above, 1), 0)), token_of(tl.max(tl.max(below, 1), 0))


@triton.jit
def token_of(priority):
    return (priority.to(tl.uint32, bitcast=True) * PRIORITY_INVERSE).to(tl.int32, bitcast=True)


@triton.jit
def select_cut(logits, listed, count, factor, vocab_size, floor_value, k):
    """Finds the cut by quickselect: value and id of the first excluded token.

    Ahead of it are k listed tokens at or above the floor, or all of these if they are fewer.
    """
    among = (logits, listed, count, factor, vocab_size)
    infinite = floor_value * 0.0 + float("inf")
    pivot_value = floor_value
    pivot = vocab_size
    low_value = floor_value
    low = vocab_size
    high_value = infinite
    high = vocab_size * 0 - 1
    rank, above, below = rank_of(*among, pivot_value, pivot, high_value, high, low_value, low)
    searching = rank > k
    while searching:
        if rank > k:
            low_value = pivot_value
            low = pivot
            pivot = above
        else:
            high_value = pivot_value
            high = pivot
            pivot = below
        pivot_value = value_of(logits, pivot, factor)
        rank, above, below = rank_of(*among, pivot_value, pivot, high_value, high, low_value, low)
        searching = rank != k
    return pivot_value, pivot


@triton.jit
def sort_cut(logits, candidates, listed, count, factor, vocab_size, floor_value, lowest_order, k):
    """Finds the cut by sorting the listed tokens at or above both bounds.

    Returns value and id of the cut, and the number of these tokens. The cut is invalid if they are
    more than MAX_SORTED.

    Args:
        candidates: ``[MAX_SORTED]`` int64, scratch memory of the row.
        lowest_order: lower bound of ``order_of`` the k-th largest; 0 if unknown.
        k: at most MAX_SORTED.
    """
    found = count * 0
    for start in range(0, count, SCANNED_CHUNKS):
        token, value, real = listed_values(logits, listed, count, factor, vocab_size, start)
        order = order_of(value)
        wanted = real & (value >= floor_value) & (order >= lowest_order)
        # The key orders by logit, then by id: no two are equal.
        rank = (order - 2147483648) * 4294967296 + (4294967295 - token.to(tl.int64))
        rank = tl.reshape(rank, [SCANNED_CHUNKS * CHUNK])
        chosen = tl.reshape(wanted.to(tl.int32), [SCANNED_CHUNKS * CHUNK])
        place = found + tl.cumsum(chosen, 0) - 1
        tl.store(candidates + place, rank, mask=(chosen > 0) & (place < MAX_SORTED))
        found += tl.sum(chosen, 0)
    # Threads read values that others of the program have written.
    tl.debug_barrier()
    number = tl.arange(0, MAX_SORTED)
    rank = tl.load(candidates + number, mask=number < found, other=-9223372036854775808)
    rank = tl.sort(rank, descending=True)
    last_in = tl.sum(tl.where(number == k - 1, rank, 0), 0)
    cut_value = floor_value
    cut = vocab_size
    if found >= k:
        # The cut is right after the k-th token, whichever token comes next.
        token = (4294967295 - (last_in & 4294967295)).to(tl.int32)
        cut_value = value_of(logits, token, factor)
        cut = token + 1
    return cut_value, cut, found


@triton.jit
def top_k_cut(logits, candidates, listed, count, factor, vocab_size, floor_value, lowest_order, k):
    """Value and id of the cut of top_k.

    Ahead of it are k listed tokens at or above the floor, or all of these if they are fewer.
    """
    cut_value = floor_value
    cut = vocab_size
    found = vocab_size * 0 + MAX_SORTED + 1
    if k <= MAX_SORTED:
        cut_value, cut, found = sort_cut(
            logits, candidates, listed, count, factor, vocab_size, floor_value, lowest_order, k
        )
    if found > MAX_SORTED:
        cut_value, cut = select_cut(logits, listed, count, factor, vocab_size, floor_value, k)
    return cut_value, cut
