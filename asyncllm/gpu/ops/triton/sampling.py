"""sample: Gumbel-max sampling in two kernels, without a sort of the vocabulary.

The kernels compute ``gumbel.gumbel_sample``: the token drawn from a set of tokens is the one whose
logit plus Gumbel noise is largest. Tokens are sorted by logit, descending, then by id; "ahead"
means earlier in this order. For each chunk of 256 tokens the first kernel computes the maximum and
the sum of exponentials, and, in truncated rows, a token drawn from the chunk. The second kernel has
one program per row. If the row is not truncated, the program draws a chunk with a probability
proportional to the chunk's mass, then a token from that chunk. Otherwise:

- top_k: the k-th largest of the chunks' maxima is a lower bound of the k-th largest logit. Only
  chunks with a token at or above this bound are read again, rarely many more than k chunks;
  ``top_k.py`` finds the top-k threshold in them.
- top_p: the drawn token is the result if the tokens ahead of it have less than top_p of the mass.
  Otherwise top_p excludes the drawn token and every token after it, and the next draw is from the
  tokens ahead of it. That is rejection sampling with a pivot, as in FlashInfer's sampler. But here
  a token's noise is the same in every draw, so the last draw gives the same token as a single draw
  from all tokens that survive truncation.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.ops import gumbel
from asyncllm.gpu.ops.triton.operands import row_stride
from asyncllm.gpu.ops.triton.top_k import (
    CHUNKS_PER_SCAN,
    MAX_SORTED_TOKENS,
    is_ahead,
    kth_largest,
    load_listed_chunks,
    scaled_logit_of,
    sortable_bits_of,
    top_k_threshold,
)
from asyncllm.gpu.ops.triton.tuning import cdiv, next_power_of_2

CHUNK_TOKENS = tl.constexpr(gumbel.CHUNK_TOKENS)
MIN_TEMPERATURE = tl.constexpr(gumbel.MIN_TEMPERATURE)
NO_TOKEN_LEFT = tl.constexpr(gumbel.NO_TOKEN_LEFT)
LOWEST_FLOAT32 = tl.constexpr(-3.4028234663852886e38)

COUNTER_ROWS_PER_PROGRAM = tl.constexpr(4)
"""Rows of Philox counters per program of ``chunk_statistics_kernel``; a row covers four chunks."""

CHUNK_ARGUMENT_NAMES = ["listed_chunks", "chunk_max", "chunk_sum", "chunk_score", "chunk_token"]
"""Kernel arguments that Triton must not specialise on alignment. They share allocations, so their
alignments depend on the number of rows: a specialised kernel would be compiled again while requests
are served."""


@triton.jit
def philox_key(seed_states, positions, row, req_index):
    """Philox key of a row's noise: an output of SplitMix64, as in ``gumbel.gumbel_keys``.

    The generator's state is the request's seed; the output's index is the position of the sampled
    token, ``positions + 1``.
    """
    state = tl.load(seed_states + req_index).to(tl.uint64, bitcast=True)
    steps = (tl.load(positions + row).to(tl.int64) + 2).to(tl.uint64, bitcast=True)
    z = state + steps * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def log_exponential_variate(random_word):
    """Logarithm of an exponential variate from 32 random bits, see ``gumbel``."""
    u = tl.minimum((random_word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    series = 1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * (0.2 + u * 0.1666666667))))
    return tl.log(tl.where(u < 0.0625, u * series, -tl.log(1.0 - u)))


@triton.jit
def greedy_and_logit_factor(temperature):
    """Whether a row is greedy, and the factor on its logits, 1 or 1 / temperature."""
    greedy = temperature < MIN_TEMPERATURE
    return greedy, tl.where(greedy, 1.0, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)))


@triton.jit(do_not_specialize_on_alignment=CHUNK_ARGUMENT_NAMES)
def chunk_statistics_kernel(
    chunk_max,
    chunk_sum,
    chunk_score,
    chunk_token,
    logits,
    seed_states,
    positions,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    req_indices,
    vocab_size,
    num_chunks,
    stride_logits,
):
    """Computes each chunk's maximum, sum of exponentials and, in truncated rows, drawn token.

    Grid ``(rows, num_chunks / (4 * COUNTER_ROWS_PER_PROGRAM))``.
    """
    row = tl.program_id(0).to(tl.int64)
    req_index = tl.load(req_indices + row).to(tl.int64)
    if req_index < 0:
        return
    group = tl.program_id(1) * COUNTER_ROWS_PER_PROGRAM + tl.arange(0, COUNTER_ROWS_PER_PROGRAM)
    lane = tl.arange(0, CHUNK_TOKENS)
    greedy, logit_factor = greedy_and_logit_factor(tl.load(temperatures + req_index))
    counter = (group[:, None] * CHUNK_TOKENS + lane[None, :]).to(tl.uint32)
    zero = counter * 0
    key = philox_key(seed_states, positions, row, req_index)
    k = tl.load(top_ks + req_index).to(tl.int32)
    limited = (k > 0) & (k < vocab_size)
    truncated = limited | (tl.load(min_ps + req_index) > 0.0) | (tl.load(top_ps + req_index) < 1.0)
    draws = (greedy == 0) & truncated
    word0 = zero
    word1 = zero
    word2 = zero
    word3 = zero
    if draws:
        word0, word1, word2, word3 = tl.philox(key, counter, zero, zero, zero)
    for index in tl.static_range(4):
        chunk = group * 4 + index
        token = chunk[:, None] * CHUNK_TOKENS + lane[None, :]
        real = token < vocab_size
        at = logits + row * stride_logits + token
        value = tl.load(at, mask=real, other=float("-inf")).to(tl.float32) * logit_factor
        score = value
        if draws:
            if index == 0:
                score = value - log_exponential_variate(word0)
            elif index == 1:
                score = value - log_exponential_variate(word1)
            elif index == 2:
                score = value - log_exponential_variate(word2)
            else:
                score = value - log_exponential_variate(word3)
        largest = tl.max(value, 1)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        best = tl.max(score, 1)
        winner = tl.min(tl.where(score == best[:, None], token, vocab_size), 1)
        out = row * num_chunks + chunk
        exists = chunk < num_chunks
        tl.store(chunk_max + out, largest, mask=exists)
        tl.store(chunk_sum + out, tl.sum(tl.exp(value - base[:, None]), 1), mask=exists)
        tl.store(chunk_score + out, best, mask=exists)
        tl.store(chunk_token + out, winner, mask=exists)


@triton.jit
def log_exponential_noise(key, chunk, lane):
    """Logarithm of the exponential noise of the tokens with index ``lane`` in ``chunk``."""
    counter = (chunk // 4 * CHUNK_TOKENS + lane).to(tl.uint32)
    zero = counter * 0
    word0, word1, word2, word3 = tl.philox(key, counter, zero, zero, zero)
    index = chunk % 4
    word = tl.where(
        index < 2, tl.where(index == 0, word0, word1), tl.where(index == 2, word2, word3)
    )
    return log_exponential_variate(word)


@triton.jit
def sample_in_chunk(logits, chunk, logit_factor, vocab_size, key):
    """Token drawn from a chunk: the one whose logit plus Gumbel noise is largest."""
    lane = tl.arange(0, CHUNK_TOKENS)
    token = chunk * CHUNK_TOKENS + lane
    value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    score = value.to(tl.float32) * logit_factor - log_exponential_noise(key, chunk, lane)
    first = tl.min(tl.where(score == tl.max(score, 0), token, vocab_size), 0)
    return tl.minimum(first, vocab_size - 1)


@triton.jit
def sample_ahead_of_pivot(
    logits,
    listed_chunks,
    num_listed,
    logit_factor,
    vocab_size,
    max_logit,
    rng_key,
    pivot_value,
    pivot_token,
):
    """Mass of the tokens ahead of a pivot, and a token drawn from them; reads the listed chunks."""
    mass = tl.zeros([CHUNKS_PER_SCAN, CHUNK_TOKENS], tl.float32)
    best = tl.full([CHUNKS_PER_SCAN, CHUNK_TOKENS], float("-inf"), tl.float32)
    winner = tl.full([CHUNKS_PER_SCAN, CHUNK_TOKENS], 0, tl.int32)
    for start in range(0, num_listed, CHUNKS_PER_SCAN):
        token, value, real = load_listed_chunks(
            logits, listed_chunks, num_listed, logit_factor, vocab_size, start
        )
        noise = log_exponential_noise(rng_key, token // CHUNK_TOKENS, token % CHUNK_TOKENS)
        ahead = real & is_ahead(value, token, pivot_value, pivot_token)
        mass += tl.where(ahead, tl.exp(value - max_logit), 0.0)
        score = tl.where(ahead, value - noise, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        winner = tl.where(better, token, winner)
    top = tl.max(tl.max(best, 1), 0)
    first = tl.where(best == top, winner, vocab_size)
    return tl.sum(tl.sum(mass, 1), 0), tl.minimum(tl.min(tl.min(first, 1), 0), vocab_size - 1)


@triton.jit(do_not_specialize_on_alignment=CHUNK_ARGUMENT_NAMES)
def sample_tokens_kernel(
    out,
    last_sampled_tokens,
    candidates,
    listed_chunks,
    chunk_max,
    chunk_sum,
    chunk_score,
    chunk_token,
    logits,
    seed_states,
    positions,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    req_indices,
    vocab_size,
    num_chunks,
    stride_logits,
    CHUNKS: tl.constexpr,
):
    """Chooses a row's token from the statistics of its chunks; grid ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    req_index = tl.load(req_indices + row).to(tl.int64)
    if req_index < 0:
        tl.store(out + row, tl.full([], -1, tl.int64))
        return
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < num_chunks
    at = row * num_chunks + chunk
    maxima = tl.load(chunk_max + at, mask=exists, other=float("-inf"))
    sums = tl.load(chunk_sum + at, mask=exists, other=0.0)
    scores = tl.load(chunk_score + at, mask=exists, other=float("-inf"))
    max_logit = tl.max(maxima, 0)
    base = tl.where(max_logit == float("-inf"), 0.0, max_logit)
    total = tl.sum(sums * tl.exp(maxima - base), 0)
    key = philox_key(seed_states, positions, row, req_index)
    counter = chunk.to(tl.uint32)
    word, _, _, _ = tl.philox(key, counter, counter * 0 + 1, counter * 0, counter * 0)
    by_mass = tl.where(
        sums > 0.0, maxima + tl.log(sums) - log_exponential_variate(word), float("-inf")
    )
    # Draw a chunk for every row, even if the result is unused: keeping the inputs for a branch
    # would spill registers.
    heaviest = tl.min(tl.where(by_mass == tl.max(by_mass, 0), chunk, num_chunks - 1), 0)
    first = tl.min(tl.where(scores == tl.max(scores, 0), chunk, num_chunks - 1), 0)
    token = tl.load(chunk_token + row * num_chunks + first)
    greedy, logit_factor = greedy_and_logit_factor(tl.load(temperatures + req_index))
    k = tl.load(top_ks + req_index).to(tl.int32)
    top_p = tl.load(top_ps + req_index)
    min_p = tl.load(min_ps + req_index)
    limited = (k > 0) & (k < vocab_size)
    cut = limited | (min_p > 0.0)
    # The total mass is NaN if any logit is NaN or infinity.
    valid = total >= 0.5
    logits += row * stride_logits
    if valid & (greedy == 0) & (cut == 0) & (top_p >= 1.0):
        token = sample_in_chunk(logits, heaviest, logit_factor, vocab_size, key)
    if valid & (greedy == 0) & (cut | (top_p < 1.0)):
        listed_chunks += row * num_chunks
        min_logit = tl.maximum(max_logit + tl.log(min_p), LOWEST_FLOAT32)
        bound = scaled_logit_of(logits, token, logit_factor)
        sort_keys = sortable_bits_of(maxima)
        min_sort_key = sortable_bits_of(bound)
        if cut:
            bound = min_logit
            min_sort_key = tl.full([], 0, tl.int64)
            if limited:
                min_sort_key = kth_largest(tl.where(exists, sort_keys, -1), k)
        wanted = exists & (sort_keys >= min_sort_key) & (maxima >= bound)
        place = tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(listed_chunks + place, chunk, mask=wanted)
        num_listed = tl.sum(wanted.to(tl.int32), 0)
        tl.debug_barrier()
        among = (logits, listed_chunks, num_listed, logit_factor, vocab_size)
        if cut:
            cut_value = min_logit
            cut_token = vocab_size
            if limited:
                cut_value, cut_token = top_k_threshold(
                    logits, candidates + row * MAX_SORTED_TOKENS, listed_chunks, num_listed,
                    logit_factor, vocab_size, min_logit, min_sort_key, k,
                )  # fmt: skip
            total, token = sample_ahead_of_pivot(*among, max_logit, key, cut_value, cut_token)
        if top_p < 1.0:
            mass, following = sample_ahead_of_pivot(
                *among, max_logit, key, scaled_logit_of(logits, token, logit_factor), token
            )
            # The loop ends whatever the rounding error of ``mass``: once no token is ahead of
            # ``token``, ``mass`` is exactly 0.
            while (mass > 0.0) & (mass >= top_p * total):
                token = following
                mass, following = sample_ahead_of_pivot(
                    *among, max_logit, key, scaled_logit_of(logits, token, logit_factor), token
                )
    # Check the total mass, not the maximum: NaN in a chunk makes the total NaN, but a maximum may
    # hide it.
    invalid = tl.where(total == 0.0, NO_TOKEN_LEFT, -1)
    tl.store(out + row, tl.where(valid, token, invalid).to(tl.int64))
    tl.store(last_sampled_tokens + req_index, tl.where(valid, token, 0).to(tl.int64))


def sample(
    logits: Tensor, sampling_tensors: Mapping[str, Tensor], rows: RowsToSample, out: Tensor
) -> None:
    """Samples one token per row, see ``TorchOps.sample``.

    ``logits`` are float32, bfloat16 or float16, with contiguous rows. A row's token depends on that
    row alone.
    """
    (count, vocab_size), (req_indices, positions, last_sampled_tokens) = logits.shape, rows
    if not count:
        return
    num_chunks = cdiv(vocab_size, gumbel.CHUNK_TOKENS)
    floats = torch.empty((3, count, num_chunks), dtype=torch.float32, device=logits.device)
    indices = torch.empty((2, count, num_chunks), dtype=torch.int32, device=logits.device)
    candidates = torch.empty(
        (count, MAX_SORTED_TOKENS.value), dtype=torch.int64, device=logits.device
    )
    chunks = (*floats, indices[0])
    of_rows = (logits, sampling_tensors["states"], positions, sampling_tensors["temperature"])
    sizes = (vocab_size, num_chunks, row_stride("logits", logits))
    limits = (sampling_tensors["top_k"], sampling_tensors["top_p"], sampling_tensors["min_p"])
    chunk_statistics_kernel[(count, cdiv(num_chunks, 4 * COUNTER_ROWS_PER_PROGRAM.value))](
        *chunks, *of_rows, *limits, req_indices, *sizes, num_warps=4
    )
    sample_tokens_kernel[(count,)](
        out,
        last_sampled_tokens,
        candidates,
        indices[1],
        *chunks,
        *of_rows,
        *limits,
        req_indices,
        *sizes,
        CHUNKS=next_power_of_2(num_chunks),
        num_warps=4,
    )
