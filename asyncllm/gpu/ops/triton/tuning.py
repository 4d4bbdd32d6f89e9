"""Launch shapes by architecture and head size, from tables, without autotuning.

They compile without register spills (Triton 3.6, 3.7 and 3.9) and within the shared memory of each
architecture. No GPU has measured them yet.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

INT32_END = 2**31
"""One more than the largest signed 32-bit integer."""

SPLIT_TOKENS = 256
"""Fewest tokens per split of a sequence for which splitting decode attention pays."""

MAX_WAVE_SPLITS = 8
"""Most programs that share a sequence only to fill the last wave."""

PROGRAMS_PER_SM = 4
"""Concurrent decode attention programs of a multiprocessor, by shared memory and registers, for
heads of 128 elements."""

_FEW_PROGRAMS = 2
"""Concurrent programs on GPUs with 100 KB of shared memory per multiprocessor, and on others for
heads of more than 256 elements."""

TILE_SPLIT_TOKENS = 512
"""Fewest keys for which a split of a prefill's tile pays: its partial result, which has to be
merged, is twice as large as the keys and values that a step of its loop reads."""

SKEWED_TOKENS = 1024
"""Tokens beyond twice the average share that a split may have before a batch counts as skewed."""

_HEAD_DIMS = (64, 128, 256, 512)
MAX_HEAD_DIM = _HEAD_DIMS[-1]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch shape of an attention kernel.

    Attributes:
        rows: query rows of a program, tokens times query heads of one key/value head.
        keys: tokens of the KV cache per step of its loop.
        warps: warps per program.
        stages: stages of the loop's software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# By lowest compute capability, the tiles of heads of up to 64, 128, 256 and 512 elements. K and V
# are found through the block table, and the pipeline spends two stages on that indirection: 3
# stages buffer one tile, 5 buffer two. With heads of 512, a tile of 32 keys takes 32 KB each for K
# and V.
_DECODE = {
    80: (Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 2)),
    86: (Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 3), Tiles(16, 32, 4, 3)),
    90: (Tiles(16, 64, 4, 5), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 5), Tiles(16, 32, 4, 3)),
    100: (Tiles(16, 64, 4, 5), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 5), Tiles(16, 32, 4, 3)),
}
_PREFILL = {
    80: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 3), Tiles(32, 64, 8, 1)),
    86: (Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
    90: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2)),
    100: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 3)),
}


def decode_tiles(capability: int, head_dim: int, element_size: int = 2) -> Tiles:
    """Launch shape of decode attention; see ``prefill_tiles``."""
    tiles = _find(_DECODE, capability, head_dim)
    if element_size > 2:
        # The same bytes per step for wider elements.
        tiles = Tiles(tiles.rows, max(16, tiles.keys // 2), tiles.warps, 1)
    return tiles


def prefill_tiles(capability: int, head_dim: int, element_size: int = 2) -> Tiles:
    """Launch shape of prefill attention.

    Args:
        capability: compute capability as ``10 * major + minor``, e.g. 90.
        head_dim: up to 512.
        element_size: bytes of an element of q and of the cache.

    Raises:
        ValueError: a larger head, or a compute capability below 8.0.
    """
    tiles = _find(_PREFILL, capability, head_dim)
    if 90 <= capability < 100 and 256 < head_dim < MAX_HEAD_DIM:
        # A head padded to 512 elements needs masks, which take registers.
        tiles = replace(tiles, keys=16)
    if element_size > 2:
        # Tensor cores multiply float32 at full precision in software: registers are short.
        tiles = Tiles(16, 16, 8, 1) if head_dim > 256 else Tiles(32, 32, 8, 1)
    return tiles


def _find(table: dict[int, tuple[Tiles, ...]], capability: int, head_dim: int) -> Tiles:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size {head_dim}: expected at most {MAX_HEAD_DIM}")
    if capability >= 110:
        # Consumer Blackwell has less shared memory than the data centre's.
        capability = 89
    known = [arch for arch in table if arch <= capability]
    if not known:
        raise ValueError(f"compute capability {capability / 10}: expected at least 8.0")
    return table[max(known)][bisect_left(_HEAD_DIMS, head_dim)]


def decode_programs(capability: int, head_dim: int) -> int:
    """Concurrent decode attention programs of a multiprocessor."""
    has_less = 86 <= capability < 90 or capability >= 110
    if head_dim > 256:
        return 1 if has_less else _FEW_PROGRAMS
    return _FEW_PROGRAMS if has_less else PROGRAMS_PER_SM


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Launch shape of a grouped matrix product.

    Attributes:
        rows, columns: shape of a program's output.
        depth: elements of the reduced dimension per step of its loop.
        warps, stages: as in ``Tiles``.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


SMALL_GROUP_ROWS = 16
"""Average rows of a group up to which a grouped product takes its smallest tiles."""


def product_tiles(num_rows: int, num_groups: int, element_size: int) -> ProductTiles:
    """Launch shape of a grouped matrix product of ``num_rows`` in ``num_groups``.

    It depends on shapes alone, so that it is fixed in a captured graph.
    """
    rows = SMALL_GROUP_ROWS if num_rows <= SMALL_GROUP_ROWS * num_groups else 64
    if element_size > 2:
        # Tensor cores multiply float32 at full precision in software: registers are short.
        return ProductTiles(
            rows // 2 if rows > SMALL_GROUP_ROWS else SMALL_GROUP_ROWS, 32, 32, 4, 1
        )
    return ProductTiles(rows, 64, 64, 4, 3)


def num_splits(
    batch: int, kv_heads: int, max_len: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM
) -> int:
    """Number of programs that share one sequence and key/value head in decode attention.

    It is the smallest that keeps the GPU nearly as busy as possible, as in FlashAttention's
    num_splits_heuristic: programs run in waves, and a last wave of a few takes as long as a full
    one. None has fewer than SPLIT_TOKENS tokens. It depends on shapes alone, so that it is fixed in
    a captured graph.

    Args:
        batch: rows of the launch, padding included.
        max_len: longest possible sequence of the launch, in tokens.
        num_sms: multiprocessors of the GPU.
        programs_per_sm: concurrent programs of a multiprocessor.
    """
    places, programs = programs_per_sm * num_sms, batch * kv_heads
    most = min(max(cdiv(places, programs), MAX_WAVE_SPLITS), cdiv(max_len, SPLIT_TOKENS))
    return _fewest_splits(programs, places, max(1, most))


def num_extra_shares(kv_heads: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM) -> int:
    """Programs per key/value head, beyond one per row, for a skewed batch of decode rows. All
    programs together are two waves, so that a share is about half of the keys that each concurrent
    program has to read in all.
    """
    return cdiv(2 * programs_per_sm * num_sms, kv_heads)


def is_skewed(longest: int, total: int, splits: int, kv_heads: int, places: int) -> bool:
    """Whether a batch of decode rows would wait for its longest sequence.

    That is so if a split of that sequence has more than twice the average number of keys per
    concurrent program.

    Args:
        longest, total: tokens of the longest sequence, and of all.
        splits: splits of each sequence.
        places: concurrent programs of the GPU.
    """
    fair = total * kv_heads // places
    return cdiv(longest, splits) > 2 * fair + SKEWED_TOKENS


def num_tiles(num_tokens: int, num_seqs: int, group: int, tiles: Tiles) -> int:
    """Upper bound of a prefill's tiles, for sequences of any lengths."""
    return num_tokens // (tiles.rows // next_power_of_2(group)) + num_seqs


def num_tile_splits(num_tiles: int, kv_heads: int, max_len: int, num_sms: int) -> int:
    """Number of programs that share the keys of one tile and key/value head in a prefill.

    It is more than one where tiles leave multiprocessors idle, as a few new tokens behind a long
    prefix do. Registers allow a multiprocessor one program at a time.

    Args:
        max_len: most keys that a tile sees.
    """
    programs = num_tiles * kv_heads
    most = min(cdiv(num_sms, programs), cdiv(max_len, TILE_SPLIT_TOKENS))
    return _fewest_splits(programs, num_sms, max(1, most))


@lru_cache(maxsize=4096)
def _fewest_splits(programs: int, places: int, most: int) -> int:
    shares = [wave_utilisation(programs * splits, places) for splits in range(1, most + 1)]
    good = 0.9 * max(shares)
    return next(splits for splits, share in enumerate(shares, 1) if share >= good)


def wave_utilisation(programs: int, places: int) -> float:
    """Share of the GPU that equal programs keep busy until the last has ended."""
    return programs / (cdiv(programs, places) * places)


def row_warps(width: int) -> int:
    """Warps of a kernel that holds a row of ``width`` elements in registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def block_dim_of(head_dim: int) -> int:
    """Elements of a head in a tile, padded to a power of two of at least 16."""
    return max(16, next_power_of_2(head_dim))


def workspace_size(count: int, num_heads: int, head_dim: int) -> int:
    """Float32 elements for ``count`` partial results of attention per head."""
    return count * num_heads * (block_dim_of(head_dim) + 2)
