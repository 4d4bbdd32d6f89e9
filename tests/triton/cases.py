"""Attention cases: DECODE and PREFILL are small enough for the interpreter and cover every
branch, the long ones need a GPU."""

from __future__ import annotations

import torch

from tests.triton.paged import AttentionCase

HALF = torch.float16
FULL = torch.float32

DECODE = [
    AttentionCase("group1", 1, 64, (1, 0, 65, 130)),
    AttentionCase("group4-splits", 4, 128, (300, 0, 1, 64), splits=3),
    AttentionCase("group5-head80", 5, 80, (97, 0, 64), dtype=HALF),
    AttentionCase("group7-head256", 7, 256, (70, 1), splits=2, dtype=HALF),
    AttentionCase("group8-pages256", 8, 64, (257, 256, 0, 1), block_size=256, splits=2),
    AttentionCase("group16-head96", 16, 96, (33, 128), kv_heads=1),
    AttentionCase("group24", 24, 64, (66, 0), kv_heads=1, splits=2),
    AttentionCase("window", 4, 64, (120, 40, 41, 0), window=40, splits=2, dtype=HALF),
    AttentionCase("window-of-1", 2, 64, (129, 1), window=1, splits=3),
    AttentionCase("softcap", 4, 80, (100, 3), softcap=2.0, dtype=HALF),
    AttentionCase("softcap-splits", 1, 64, (150,), softcap=0.5, splits=4),
    AttentionCase("sinks", 4, 64, (1, 0, 65), sinks=True),
    AttentionCase("sinks-splits", 5, 64, (300, 0, 1, 64), sinks=True, splits=3, window=200),
    AttentionCase("more-splits-than-tiles", 2, 64, (1, 130, 0), splits=19),
    AttentionCase("shares", 4, 64, (900, 0, 3, 300, 64), extra_splits=3),
    AttentionCase(
        "shares-rare", 20, 64, (270, 0, 600), kv_heads=1, extra_splits=5, sinks=True, softcap=2.0
    ),
    AttentionCase("float32", 4, 64, (70, 0, 16), dtype=FULL, splits=2),
    AttentionCase("head512-splits", 8, 512, (300, 0, 65), kv_heads=1, splits=3),
    AttentionCase(
        "head320-rare", 16, 320, (90, 33), kv_heads=1, window=40, softcap=2.0, sinks=True
    ),
    AttentionCase("blocks-first", 4, 64, (90, 17), layout="blocks"),
    AttentionCase("heads-first-48", 4, 64, (90, 17), layout="heads", block_size=48),
    AttentionCase("dims-before-slots", 4, 80, (50,), layout="dims", dtype=HALF),
]

PREFILL = [
    AttentionCase("whole", 4, 64, (70, 1, 33), (70, 1, 33)),
    AttentionCase("prefix", 4, 128, (200, 131, 65), (40, 3, 1), padded_tokens=5),
    AttentionCase("group1", 1, 64, (150, 20), (140, 20), kv_heads=1),
    AttentionCase("group5-head80", 5, 80, (90, 64), (60, 1), dtype=HALF),
    AttentionCase("group7", 7, 64, (67, 66), (37, 19), dtype=HALF),
    AttentionCase("group8-pages256", 8, 64, (300, 256), (20, 2), block_size=256, kv_heads=1),
    AttentionCase("group16-head256", 16, 256, (40, 70), (9, 5), kv_heads=1, dtype=HALF),
    AttentionCase("head96", 4, 96, (50,), (50,)),
    AttentionCase("empty-rows", 4, 64, (0, 40, 0, 5, 0), (0, 40, 0, 5, 0), padded_tokens=3),
    AttentionCase("one-row", 2, 64, (64,), (64,), padded_tokens=64),
    AttentionCase("many-decodes", 4, 64, (5, 64, 65, 1, 20, 30), (1, 1, 1, 1, 1, 1)),
    AttentionCase("window", 4, 64, (180, 50), (70, 50), window=20, dtype=HALF),
    AttentionCase("window-of-1", 2, 64, (100,), (80,), window=1),
    AttentionCase("softcap", 4, 64, (80, 70), (80, 2), softcap=2.0, dtype=HALF),
    AttentionCase("sinks", 7, 64, (70, 40), (70, 2), sinks=True),
    AttentionCase("sinks-window", 8, 64, (180, 50), (70, 50), window=33, sinks=True, kv_heads=1),
    AttentionCase("splits", 4, 64, (200, 40), (5, 3), kv_heads=1, splits=3, padded_tokens=2),
    AttentionCase(
        "splits-rare", 3, 64, (150, 9), (5, 9), kv_heads=1, splits=5, window=60, sinks=True
    ),
    AttentionCase("float32", 2, 64, (70, 40), (30, 40), dtype=FULL),
    AttentionCase("head512", 8, 512, (70, 33), (9, 1), kv_heads=1, padded_tokens=2),
    AttentionCase("head320", 16, 320, (70,), (3,), kv_heads=1, splits=2, dtype=HALF),
    AttentionCase("blocks-first", 4, 64, (90,), (30,), layout="blocks"),
    AttentionCase("heads-first-48", 4, 64, (90,), (30,), layout="heads", block_size=48),
    AttentionCase("dims-before-slots", 4, 80, (50,), (10,), layout="dims", dtype=HALF),
]

WIDE_DECODE = [
    AttentionCase("head512-one-split", 16, 512, (1, 0, 130, 64), dtype=HALF),
    AttentionCase("head512-shares", 8, 512, (600, 0, 3, 300), kv_heads=1, extra_splits=3),
    AttentionCase("head512-group5-rare", 5, 512, (97, 200), splits=3, window=70, softcap=2.0),
    AttentionCase("head512-group32-sinks", 32, 512, (70, 1), kv_heads=1, sinks=True, splits=2),
    AttentionCase("head512-float32", 4, 512, (40, 0), kv_heads=1, dtype=FULL, splits=2),
    AttentionCase("head264-pages256", 8, 264, (257, 3), block_size=256, splits=2, dtype=HALF),
    AttentionCase("head266-dims", 4, 266, (50,), layout="dims"),
]
"""Heads of more than 256; beside those of DECODE, which every run has."""

WIDE_PREFILL = [
    AttentionCase("head512-prefix", 8, 512, (150, 20, 33), (40, 20, 1)),
    AttentionCase("head512-splits", 16, 512, (200, 40), (5, 3), kv_heads=1, splits=3, dtype=HALF),
    AttentionCase("head512-group5-rare", 5, 512, (150, 30), (70, 30), window=33, softcap=2.0),
    AttentionCase("head512-window-splits", 4, 512, (150, 9), (5, 9), splits=5, window=60),
    AttentionCase("head512-sinks", 8, 512, (70, 40), (70, 2), kv_heads=1, sinks=True),
    AttentionCase(
        "head320-rare", 16, 320, (90, 6), (5, 6), splits=2, window=40, softcap=2.0, sinks=True
    ),
    AttentionCase("head512-float32", 4, 512, (40, 9), (20, 9), kv_heads=1, dtype=FULL),
    AttentionCase("head264-pages256", 8, 264, (257, 3), (20, 3), block_size=256, dtype=HALF),
    AttentionCase("head266-dims", 4, 266, (50,), (10,), layout="dims"),
]

LONG_DECODE = [
    AttentionCase("32k", 4, 128, (32768, 20000, 1), splits=66, kv_heads=1),
    AttentionCase("skewed", 4, 128, (32768, *range(0, 720, 10)), extra_splits=132, kv_heads=8),
    AttentionCase("batch256", 2, 128, tuple(range(0, 1024, 4)), kv_heads=8),
]

LONG_PREFILL = [
    AttentionCase("2048-queries", 4, 128, (2048,), (2048,), kv_heads=1),
    AttentionCase("long-prefix", 4, 128, (16384,), (128,), kv_heads=1),
    AttentionCase("32k-prefix", 4, 128, (32768, 1), (16, 1), kv_heads=1),
    AttentionCase("32k-prefix-split", 4, 128, (32768, 1), (20, 1), kv_heads=8, splits=8),
    AttentionCase("long-window", 4, 128, (8192, 100), (512, 1), kv_heads=1, window=1024),
]
