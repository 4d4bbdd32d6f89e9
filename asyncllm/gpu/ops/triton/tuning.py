"""Launch shapes by architecture and head size, looked up and never searched for.

The numbers come from what compiles without spills (Triton 3.6, 3.7 and 3.9) and within the
shared memory of each architecture. No GPU has measured them yet.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

INT32 = 2**31
"""The first number that 32 bits do not hold."""

SPLIT_TOKENS = 256
"""Fewest tokens of a sequence that a split of decode attention is worth."""

MAX_WAVE_SPLITS = 8
"""Most programs that share a sequence for the sake of a full last wave alone."""

PROGRAMS_PER_SM = 4
"""Decode attention programs that a multiprocessor has, by shared memory and registers, for heads of
128."""

_FEW_PROGRAMS = 2
"""On GPUs with 100 KB of shared memory to a multiprocessor; elsewhere of heads of more than 256."""

TILE_SPLIT_TOKENS = 512
"""Fewest keys that a split of a prefill's tile is worth: what it leaves to be merged is twice as
much as a step of its loop reads."""

SKEWED_TOKENS = 1024
"""Keys of one program that are not worth sharing them out anew."""

_HEAD_DIMS = (64, 128, 256, 512)
MAX_HEAD_DIM = _HEAD_DIMS[-1]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch shape of an attention kernel.

    Attributes:
        rows: query rows of a program, tokens times heads of one key/value head.
        keys: tokens of the KV cache per step of its loop.
        warps: per program.
        stages: of the software pipeline over the loop.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# Lowest capability: the tiles of heads of up to 64, 128, 256 and 512 elements. K and V are found
# through the block table, and the pipeline spends two stages on an indirection: 3 stages buffer
# one tile, 5 two. Of heads of 512 a tile of 32 keys takes 32 KB each for K and V.
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
        ValueError: for a larger head, or a GPU older than 8.0.
    """
    tiles = _find(_PREFILL, capability, head_dim)
    if 90 <= capability < 100 and 256 < head_dim < MAX_HEAD_DIM:
        # The masks of what a head is padded with take registers.
        tiles = replace(tiles, keys=16)
    if element_size > 2:
        # Tensor cores multiply float32 at full precision in software: registers are short.
        tiles = Tiles(16, 16, 8, 1) if head_dim > 256 else Tiles(32, 32, 8, 1)
    return tiles


def _find(table: dict[int, tuple[Tiles, ...]], capability: int, head_dim: int) -> Tiles:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size {head_dim}: expected at most {MAX_HEAD_DIM}")
    if capability >= 110:
        # Blackwell without the shared memory of a data centre's.
        capability = 89
    known = [arch for arch in table if arch <= capability]
    if not known:
        raise ValueError(f"compute capability {capability / 10}: expected at least 8.0")
    return table[max(known)][bisect_left(_HEAD_DIMS, head_dim)]


def decode_programs(capability: int, head_dim: int) -> int:
    """Decode attention programs that a multiprocessor has at a time."""
    has_less = 86 <= capability < 90 or capability >= 110
    if head_dim > 256:
        return 1 if has_less else _FEW_PROGRAMS
    return _FEW_PROGRAMS if has_less else PROGRAMS_PER_SM


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Launch shape of a grouped matrix product.

    Attributes:
        rows, columns: of a program's output.
        depth: elements of the sums per step of its loop.
        warps, stages: as of ``Tiles``.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FEW_ROWS = 16
"""Rows of a group, on average, up to which a grouped product has its smallest tiles."""


def product_tiles(num_rows: int, num_groups: int, element_size: int) -> ProductTiles:
    """Launch shape for so many rows in so many groups; it depends on shapes alone, so that it is
    fixed for a captured graph."""
    rows = FEW_ROWS if num_rows <= FEW_ROWS * num_groups else 64
    if element_size > 2:
        # Tensor cores multiply float32 at full precision in software: registers are short.
        return ProductTiles(rows // 2 if rows > FEW_ROWS else FEW_ROWS, 32, 32, 4, 1)
    return ProductTiles(rows, 64, 64, 4, 3)


def num_splits(
    batch: int, kv_heads: int, max_len: int, num_sms: int, per_sm: int = PROGRAMS_PER_SM
) -> int:
    """How many programs share one sequence and key/value head in decode attention.

    The fewest with which the places of the GPU are nearly as busy as they can be, as in
    FlashAttention's num_splits_heuristic: programs run in waves, and a last wave of a few takes as
    long as a full one. None has less than SPLIT_TOKENS tokens. It depends on shapes alone, so that
    it is fixed for a captured graph.

    Args:
        batch: rows of the launch, padding included.
        max_len: longest sequence that the launch may see, in tokens.
        num_sms: multiprocessors of the GPU.
        per_sm: programs that one of them has at a time.
    """
    places, programs = per_sm * num_sms, batch * kv_heads
    most = min(max(cdiv(places, programs), MAX_WAVE_SPLITS), cdiv(max_len, SPLIT_TOKENS))
    return _fewest_splits(programs, places, max(1, most))


def num_extra_shares(kv_heads: int, num_sms: int, per_sm: int = PROGRAMS_PER_SM) -> int:
    """Programs per key/value head, beyond one per row, among which decode attention shares out the
    keys of a skewed batch: two waves of them, so that a share is about half of what a place has to
    read in all."""
    return cdiv(2 * per_sm * num_sms, kv_heads)


def is_skewed(longest: int, total: int, splits: int, kv_heads: int, places: int) -> bool:
    """Whether a batch of decode rows would wait for its longest sequence: each of its splits has
    more than twice the keys that a place of the GPU has to read in all.

    Args:
        longest, total: tokens of the longest sequence, and of all.
        splits: that each sequence would have.
        places: programs that the GPU has at a time.
    """
    fair = total * kv_heads // places
    return cdiv(longest, splits) > 2 * fair + SKEWED_TOKENS


def num_tiles(num_tokens: int, num_seqs: int, group: int, tiles: Tiles) -> int:
    """Tiles of a prefill, at most: known without the lengths of its sequences."""
    return num_tokens // (tiles.rows // next_power_of_2(group)) + num_seqs


def num_tile_splits(num_tiles: int, kv_heads: int, max_len: int, num_sms: int) -> int:
    """How many programs share the keys of one tile and key/value head in a prefill: more than one
    where the tiles leave multiprocessors idle, a few new tokens behind a long prefix.

    A multiprocessor has one program of them, by registers.

    Args:
        max_len: the most keys that a tile sees.
    """
    programs = num_tiles * kv_heads
    most = min(cdiv(num_sms, programs), cdiv(max_len, TILE_SPLIT_TOKENS))
    return _fewest_splits(programs, num_sms, max(1, most))


@lru_cache(maxsize=4096)
def _fewest_splits(programs: int, places: int, most: int) -> int:
    shares = [wave_share(programs * splits, places) for splits in range(1, most + 1)]
    good = 0.9 * max(shares)
    return next(splits for splits, share in enumerate(shares, 1) if share >= good)


def wave_share(programs: int, places: int) -> float:
    """Share of the places that so many equal programs keep busy until the last has ended."""
    return programs / (cdiv(programs, places) * places)


def row_warps(width: int) -> int:
    """Warps of a kernel that holds a row of ``width`` elements in registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def block_dim_of(head_dim: int) -> int:
    """Elements of a head in a tile."""
    return max(16, next_power_of_2(head_dim))


def workspace_size(count: int, num_heads: int, head_dim: int) -> int:
    """Float32 elements for so many partial results of attention per head."""
    return count * num_heads * (block_dim_of(head_dim) + 2)
