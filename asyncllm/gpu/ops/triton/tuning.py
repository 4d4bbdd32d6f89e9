"""Launch shapes of kernels by GPU architecture and head size, from tables, without autotuning.

With these shapes kernels compile without register spills (Triton 3.6, 3.7 and 3.9) and within the
shared memory of each architecture. ``python -m benchmarks.gpu --stage tune`` on an H100 chose the
shapes of compute capability 9.0 for heads of 128 and 512 elements; the others are not measured.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

INT32_END = 2**31
"""One more than the largest signed 32-bit integer."""

MIN_SPLIT_TOKENS = 256
"""Minimum number of tokens per split of a sequence in decode attention; shorter splits are
slower."""

MAX_WAVE_FILLING_SPLITS = 8
"""Maximum number of splits of a sequence, unless filling a single wave of programs takes more."""

PROGRAMS_PER_SM = 4
"""Number of decode attention programs that fit a multiprocessor's shared memory and registers, for
heads of up to 256 elements."""

_LOW_MEMORY_PROGRAMS_PER_SM = 2
"""Number of decode attention programs that fit a multiprocessor with 100 KB of shared memory, or a
larger one if heads have more than 256 elements."""

MIN_TILE_SPLIT_TOKENS = 512
"""Minimum number of keys per split of a prefill tile. Shorter splits do not pay: a split's partial
result, which has to be merged, is twice as large as the keys and values that one step of its loop
reads."""

SKEW_MARGIN_TOKENS = 1024
"""A batch is skewed if its longest split has more tokens than this number plus twice the average
number of tokens per program."""

_HEAD_DIMS = (64, 128, 256, 512)
MAX_HEAD_DIM = _HEAD_DIMS[-1]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch shape of an attention kernel.

    Attributes:
        rows: query rows per program. A query row is one query head of one token; all query heads
            of a program share a key/value head.
        keys: cached tokens per step of the kernel's loop.
        warps: warps per program.
        stages: stages of the loop's software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# Tiles by minimum compute capability, for heads of up to 64, 128, 256 and 512 elements. A
# prefetched tile needs two pipeline stages, one to load its block ids and one to load K and V. One
# more stage computes, so that n prefetched tiles need 2n + 1 stages. With heads of 512 elements, a
# tile of 32 keys takes 32 KB for K and as much for V.
_DECODE_TILES = {
    80: (Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 2)),
    86: (Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 3), Tiles(16, 32, 4, 3)),
    90: (Tiles(16, 64, 4, 5), Tiles(16, 128, 4, 3), Tiles(16, 32, 4, 5), Tiles(16, 32, 4, 3)),
    100: (Tiles(16, 64, 4, 5), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 5), Tiles(16, 32, 4, 3)),
}
_PREFILL_TILES = {
    80: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 3), Tiles(32, 64, 8, 1)),
    86: (Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
    90: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 5), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 3)),
    100: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 3)),
}


def decode_tiles(capability: int, head_dim: int, element_size: int = 2) -> Tiles:
    """Launch shape of decode attention; arguments and errors as in ``prefill_tiles``."""
    tiles = _find_tiles(_DECODE_TILES, capability, head_dim)
    if element_size > 2:
        # Halve the keys per tile: float32 elements have twice the bytes of 16-bit elements.
        tiles = Tiles(tiles.rows, 32 if tiles.keys > 32 else 16, tiles.warps, 1)
    return tiles


def prefill_tiles(capability: int, head_dim: int, element_size: int = 2) -> Tiles:
    """Launch shape of prefill attention.

    Args:
        capability: compute capability as ``10 * major + minor``, e.g. 90.
        head_dim: up to 512.
        element_size: bytes per element of q and of the cache.

    Raises:
        ValueError: the head is larger than 512, or the compute capability is below 8.0.
    """
    tiles = _find_tiles(_PREFILL_TILES, capability, head_dim)
    if 90 <= capability < 100 and 256 < head_dim < MAX_HEAD_DIM:
        # Heads padded to 512 elements are masked, and the masks take registers.
        tiles = replace(tiles, keys=16)
    if element_size > 2:
        # Use small tiles: tensor cores multiply full-precision float32 in software, which takes
        # many registers.
        tiles = Tiles(16, 16, 8, 1) if head_dim > 256 else Tiles(32, 32, 8, 1)
    return tiles


def _find_tiles(table: dict[int, tuple[Tiles, ...]], capability: int, head_dim: int) -> Tiles:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size {head_dim}: expected at most {MAX_HEAD_DIM}")
    if capability >= 110:
        # Consumer Blackwell has as little shared memory as Ada; data centre Blackwell has more.
        capability = 89
    known = [arch for arch in table if arch <= capability]
    if not known:
        raise ValueError(f"compute capability {capability / 10}: expected at least 8.0")
    return table[max(known)][bisect_left(_HEAD_DIMS, head_dim)]


def decode_programs_per_sm(capability: int, head_dim: int) -> int:
    """Number of decode attention programs per multiprocessor that the choice of splits assumes.

    It is the number of programs that run at the same time, except for heads of 65 to 128 elements
    on Hopper: three of those run, but the result is four. With three as the result, short rows
    would be split, and merging the splits costs more than a partly filled last wave (on an H100,
    256 rows of 512 tokens took 0.87 of the time with one split instead of two).
    """
    has_less = 86 <= capability < 90 or capability >= 110
    if head_dim > 256:
        return 1 if has_less else _LOW_MEMORY_PROGRAMS_PER_SM
    return _LOW_MEMORY_PROGRAMS_PER_SM if has_less else PROGRAMS_PER_SM


@dataclass(frozen=True, slots=True)
class GroupedMatmulTiles:
    """Launch shape of a grouped matrix product.

    Attributes:
        rows, columns: shape of a program's output tile.
        depth: elements of the reduced dimension per step of the kernel's loop.
        warps, stages: as in ``Tiles``.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


MAX_SMALL_GROUP_ROWS = 16
"""Average number of rows per group up to which a grouped product uses its smallest tiles."""


def grouped_matmul_tiles(num_rows: int, num_groups: int, element_size: int) -> GroupedMatmulTiles:
    """Launch shape of a grouped matrix product of ``num_rows`` rows in ``num_groups`` groups.

    It depends on shapes alone, so that it is fixed in a captured graph.
    """
    rows = MAX_SMALL_GROUP_ROWS if num_rows <= MAX_SMALL_GROUP_ROWS * num_groups else 64
    if element_size > 2:
        # Use small tiles: tensor cores multiply full-precision float32 in software, which takes
        # many registers.
        return GroupedMatmulTiles(
            rows // 2 if rows > MAX_SMALL_GROUP_ROWS else MAX_SMALL_GROUP_ROWS, 32, 32, 4, 1
        )
    return GroupedMatmulTiles(rows, 64, 64, 4, 3)


def num_splits(
    batch: int, kv_heads: int, max_len: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM
) -> int:
    """Number of splits of a sequence in decode attention.

    Programs run in waves, and a last wave of few programs takes as long as a full one. So the
    result is the smallest number of splits that keeps the GPU nearly as busy as the best number, as
    in FlashAttention's num_splits_heuristic. A sequence of ``max_len`` tokens has at most one split
    per MIN_SPLIT_TOKENS, rounded up. The result depends on shapes alone, so that it is fixed in a
    captured graph.

    Args:
        batch: number of rows of the launch, padding included.
        max_len: length of the longest possible sequence of the launch.
        num_sms: number of multiprocessors of the GPU.
        programs_per_sm: programs that run on a multiprocessor at the same time.
    """
    num_concurrent_programs, programs = programs_per_sm * num_sms, batch * kv_heads
    max_splits = min(
        max(cdiv(num_concurrent_programs, programs), MAX_WAVE_FILLING_SPLITS),
        cdiv(max_len, MIN_SPLIT_TOKENS),
    )
    return _fewest_splits(programs, num_concurrent_programs, max(1, max_splits))


def num_extra_splits(kv_heads: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM) -> int:
    """Maximum number of balanced splits, beyond one per row, of a skewed batch of decode rows.

    With one program per extra split and key/value head, the extra splits fill two waves.
    """
    return cdiv(2 * programs_per_sm * num_sms, kv_heads)


def has_skewed_lengths(
    max_seq_len: int, total_tokens: int, splits: int, kv_heads: int, num_concurrent_programs: int
) -> bool:
    """Whether the longest sequence would delay a batch of decode rows.

    It does if the number of keys in one of its splits exceeds twice the average number of keys per
    concurrent program by more than SKEW_MARGIN_TOKENS.

    Args:
        max_seq_len, total_tokens: tokens of the longest sequence, and of all sequences.
        splits: number of splits per sequence.
        num_concurrent_programs: number of programs that run on the GPU at the same time.
    """
    fair = total_tokens * kv_heads // num_concurrent_programs
    return cdiv(max_seq_len, splits) > 2 * fair + SKEW_MARGIN_TOKENS


def num_tiles(num_tokens: int, num_seqs: int, group_size: int, tiles: Tiles) -> int:
    """Upper bound of the number of prefill tiles, for sequences of any lengths."""
    return num_tokens // (tiles.rows // next_power_of_2(group_size)) + num_seqs


def num_tile_splits(num_tiles: int, kv_heads: int, max_len: int, num_sms: int) -> int:
    """Number of splits of the keys of a prefill tile.

    It is more than one where there are fewer tiles than multiprocessors, as for a few new tokens
    after a long prefix. A multiprocessor has registers for one program at a time.

    Args:
        max_len: maximum number of keys that a tile sees.
    """
    programs = num_tiles * kv_heads
    max_splits = min(cdiv(num_sms, programs), cdiv(max_len, MIN_TILE_SPLIT_TOKENS))
    return _fewest_splits(programs, num_sms, max(1, max_splits))


@lru_cache(maxsize=4096)
def _fewest_splits(programs: int, num_concurrent_programs: int, max_splits: int) -> int:
    rates = [
        wave_utilisation(programs * splits, num_concurrent_programs)
        for splits in range(1, max_splits + 1)
    ]
    good = 0.9 * max(rates)
    return next(splits for splits, rate in enumerate(rates, 1) if rate >= good)


def wave_utilisation(num_programs: int, num_concurrent_programs: int) -> float:
    """Fraction of the GPU that equally long programs keep busy until the last one ends."""
    num_waves = cdiv(num_programs, num_concurrent_programs)
    return num_programs / (num_waves * num_concurrent_programs)


def num_row_warps(width: int) -> int:
    """Number of warps for a kernel that holds a row of ``width`` elements in registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def block_dim_of(head_dim: int) -> int:
    """Size of a head in a tile, padded to a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def workspace_elements(num_partials: int, num_heads: int, head_dim: int) -> int:
    """Number of float32 elements for ``num_partials`` partial results of attention per head."""
    return num_partials * num_heads * (block_dim_of(head_dim) + 2)
