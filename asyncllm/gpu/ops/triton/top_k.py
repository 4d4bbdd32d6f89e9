"""top_k_threshold: the smallest logit that top_k keeps in a row, and its token id.

The k-th largest of the chunks' maxima is a lower bound of the k-th largest logit. There are rarely
many more than k tokens at or above this bound. The caller lists the chunks that contain such
tokens. One pass over the listed chunks collects these tokens, and a bitonic sort (Batcher, 1968)
sorts them. If there are more than MAX_SORTED_TOKENS, because k is large or many logits are equal,
quickselect (Hoare, 1961) finds the threshold in several passes over the listed chunks.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import triton
import triton.language as tl

from asyncllm.gpu.ops import gumbel

CHUNK_TOKENS = tl.constexpr(gumbel.CHUNK_TOKENS)

TOKEN_ID_HASH_FACTOR = tl.constexpr(0x9E3779B1)
"""Odd factor that maps token ids, modulo 2**32, to keys in a pseudo-random order."""

TOKEN_ID_HASH_FACTOR_INVERSE = tl.constexpr(pow(0x9E3779B1, -1, 2**32))

CHUNKS_PER_SCAN = tl.constexpr(4)
"""Number of chunks that a program reads at a time."""

MAX_SORTED_TOKENS = tl.constexpr(256)
"""Maximum number of tokens to sort: two for each thread of a program."""


@triton.jit
def sortable_bits_of(value):
    """Maps float32 numbers to integers in [0, 2**32) that sort in the same order."""
    # Adding 0 turns minus zero into zero.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def kth_largest(sort_keys, k):
    """The k-th largest of integers in [0, 2**32), found bit by bit; 0 if there are fewer than k."""
    found = tl.full([], 0, tl.int64)
    for step in range(32):
        candidate = found + (tl.full([], 1, tl.int64) << (31 - step))
        enough = tl.sum((sort_keys >= candidate).to(tl.int32), 0) >= k
        found = tl.where(enough, candidate, found)
    return found


@triton.jit
def load_listed_chunks(logits, listed_chunks, num_listed, logit_factor, vocab_size, start):
    """Ids and logits of the tokens in chunks ``listed_chunks[start:start + CHUNKS_PER_SCAN]``."""
    entry = start + tl.arange(0, CHUNKS_PER_SCAN)
    chunk = tl.load(listed_chunks + entry, mask=entry < num_listed, other=0)
    token = chunk[:, None] * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)[None, :]
    real = (entry < num_listed)[:, None] & (token < vocab_size)
    value = tl.load(logits + token, mask=real, other=float("-inf")).to(tl.float32) * logit_factor
    return token, value, real


@triton.jit
def is_ahead(value, token, other_value, other_token):
    """Whether a token sorts before another: by logit, descending, then by id."""
    return (value > other_value) | ((value == other_value) & (token < other_token))


@triton.jit
def scaled_logit_of(logits, token, logit_factor):
    return tl.load(logits + token).to(tl.float32) * logit_factor


@triton.jit
def count_ahead_of_pivot(
    logits,
    listed_chunks,
    num_listed,
    logit_factor,
    vocab_size,
    pivot_value,
    pivot_token,
    high_value,
    high_token,
    low_value,
    low_token,
):
    """Counts the tokens ahead of the pivot in the listed chunks, and picks the next two pivots.

    The first is a random token between ``high_token`` and the pivot, the second a random token
    between the pivot and ``low_token``.
    """
    ranks = tl.zeros([CHUNKS_PER_SCAN, CHUNK_TOKENS], tl.int32)
    key_above = tl.full([CHUNKS_PER_SCAN, CHUNK_TOKENS], -2147483648, tl.int32)
    key_below = tl.full([CHUNKS_PER_SCAN, CHUNK_TOKENS], -2147483648, tl.int32)
    for start in range(0, num_listed, CHUNKS_PER_SCAN):
        token, value, real = load_listed_chunks(
            logits, listed_chunks, num_listed, logit_factor, vocab_size, start
        )
        # Give tokens pseudo-random keys: the largest key in a set of tokens picks a random token.
        key = (token.to(tl.uint32) * TOKEN_ID_HASH_FACTOR).to(tl.int32, bitcast=True)
        ahead = is_ahead(value, token, pivot_value, pivot_token)
        at_pivot = (value == pivot_value) & (token == pivot_token)
        ranks += (real & ahead).to(tl.int32)
        after_high = is_ahead(high_value, high_token, value, token)
        between = real & ahead & after_high
        key_above = tl.where(between, tl.maximum(key_above, key), key_above)
        before_low = is_ahead(value, token, low_value, low_token)
        between = real & (ahead == 0) & (at_pivot == 0) & before_low
        key_below = tl.where(between, tl.maximum(key_below, key), key_below)
    rank = tl.sum(tl.sum(ranks, 1), 0)
    return (
        rank,
        token_of_key(tl.max(tl.max(key_above, 1), 0)),
        token_of_key(tl.max(tl.max(key_below, 1), 0)),
    )


@triton.jit
def token_of_key(key):
    """Token id of a key, see ``TOKEN_ID_HASH_FACTOR``."""
    return (key.to(tl.uint32, bitcast=True) * TOKEN_ID_HASH_FACTOR_INVERSE).to(
        tl.int32, bitcast=True
    )


@triton.jit
def threshold_by_quickselect(
    logits, listed_chunks, num_listed, logit_factor, vocab_size, min_logit, k
):
    """Finds the top-k threshold by quickselect; see ``top_k_threshold``."""
    among = (logits, listed_chunks, num_listed, logit_factor, vocab_size)
    infinite = min_logit * 0.0 + float("inf")
    pivot_value = min_logit
    pivot_token = vocab_size
    low_value = min_logit
    low_token = vocab_size
    high_value = infinite
    high_token = vocab_size * 0 - 1
    rank, above, below = count_ahead_of_pivot(
        *among, pivot_value, pivot_token, high_value, high_token, low_value, low_token
    )
    searching = rank > k
    while searching:
        if rank > k:
            low_value = pivot_value
            low_token = pivot_token
            pivot_token = above
        else:
            high_value = pivot_value
            high_token = pivot_token
            pivot_token = below
        pivot_value = scaled_logit_of(logits, pivot_token, logit_factor)
        rank, above, below = count_ahead_of_pivot(
            *among, pivot_value, pivot_token, high_value, high_token, low_value, low_token
        )
        searching = rank != k
    return pivot_value, pivot_token


@triton.jit
def threshold_by_sort(
    logits,
    candidates,
    listed_chunks,
    num_listed,
    logit_factor,
    vocab_size,
    min_logit,
    min_sort_key,
    k,
):
    """Finds the top-k threshold by a sort; see ``top_k_threshold``.

    It sorts the tokens of the listed chunks whose logit is at least ``min_logit`` and whose sort
    key is at least ``min_sort_key``. Returns the threshold's value and id, and the number of such
    tokens. If that is more than MAX_SORTED_TOKENS, the threshold is invalid.

    Args:
        candidates: ``[MAX_SORTED_TOKENS]`` int64, scratch memory of the row.
        min_sort_key: lower bound of the k-th largest ``sortable_bits_of(logit)``; 0 if unknown.
        k: at most MAX_SORTED_TOKENS.
    """
    found = num_listed * 0
    for start in range(0, num_listed, CHUNKS_PER_SCAN):
        token, value, real = load_listed_chunks(
            logits, listed_chunks, num_listed, logit_factor, vocab_size, start
        )
        sort_key = sortable_bits_of(value)
        wanted = real & (value >= min_logit) & (sort_key >= min_sort_key)
        # Ranks order tokens by logit, then by id, so that no two ranks are equal.
        rank = (sort_key - 2147483648) * 4294967296 + (4294967295 - token.to(tl.int64))
        rank = tl.reshape(rank, [CHUNKS_PER_SCAN * CHUNK_TOKENS])
        chosen = tl.reshape(wanted.to(tl.int32), [CHUNKS_PER_SCAN * CHUNK_TOKENS])
        place = found + tl.cumsum(chosen, 0) - 1
        tl.store(candidates + place, rank, mask=(chosen > 0) & (place < MAX_SORTED_TOKENS))
        found += tl.sum(chosen, 0)
    # Wait for the program's other threads: the code below reads ranks that they write.
    tl.debug_barrier()
    number = tl.arange(0, MAX_SORTED_TOKENS)
    rank = tl.load(candidates + number, mask=number < found, other=-9223372036854775808)
    rank = tl.sort(rank, descending=True)
    last_in = tl.sum(tl.where(number == k - 1, rank, 0), 0)
    threshold_value = min_logit
    threshold_token = vocab_size
    if found >= k:
        # Of tokens with the threshold value, those with smaller ids than the threshold id are kept.
        # So the smallest threshold id that keeps the k-th token is that token's id plus 1.
        token = (4294967295 - (last_in & 4294967295)).to(tl.int32)
        threshold_value = scaled_logit_of(logits, token, logit_factor)
        threshold_token = token + 1
    return threshold_value, threshold_token, found


@triton.jit
def top_k_threshold(
    logits,
    candidates,
    listed_chunks,
    num_listed,
    logit_factor,
    vocab_size,
    min_logit,
    min_sort_key,
    k,
):
    """Finds the top-k threshold: a logit and an id that exclude all but the first k tokens.

    Tokens are sorted as by ``is_ahead``, and those ahead of the threshold are kept: the first k
    among the tokens of the ``listed_chunks`` whose logit is at least ``min_logit``, or all such
    tokens if there are fewer. The threshold's id may be one that no token has.
    """
    threshold_value = min_logit
    threshold_token = vocab_size
    found = vocab_size * 0 + MAX_SORTED_TOKENS + 1
    if k <= MAX_SORTED_TOKENS:
        threshold_value, threshold_token, found = threshold_by_sort(
            logits,
            candidates,
            listed_chunks,
            num_listed,
            logit_factor,
            vocab_size,
            min_logit,
            min_sort_key,
            k,
        )
    if found > MAX_SORTED_TOKENS:
        threshold_value, threshold_token = threshold_by_quickselect(
            logits, listed_chunks, num_listed, logit_factor, vocab_size, min_logit, k
        )
    return threshold_value, threshold_token
