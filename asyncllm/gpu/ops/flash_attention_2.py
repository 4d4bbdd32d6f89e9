"""FlashAttention2: attention backend on the package flash_attn (Dao, 2023)."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

from asyncllm.errors import EngineError
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.flash_attention import FlashAttention, PrefillRows, import_library

MIN_VERSION = (2, 7)


class FlashAttention2(FlashAttention):
    """Attention by FlashAttention 2.

    Blocks need not be zeroed for a new owner: the library, according to its source code, masks
    keys beyond the end of a sequence, and loads zeros instead of the values there.

    Raises:
        EngineError: flash_attn is missing or too old.
    """

    name = "flash_attn"
    needs_zeroed_blocks = False
    table_argument = "block_table"
    block_size = 256
    constraints: ClassVar = replace(FlashAttention.constraints, block_multiple=256)

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        library = _import_library()
        self._attend_with_kv_cache = library.flash_attn_with_kvcache
        self._attend_varlen = library.flash_attn_varlen_func
        # By default some versions split the keys, which gives wrong results with a paged cache.
        splits = "num_splits" in inspect.signature(self._attend_varlen).parameters
        self._varlen_options = {"num_splits": 1} if splits else {}

    def prefill_options(self, rows: PrefillRows) -> dict[str, Any]:
        lengths = {"cu_seqlens_k": rows.key_starts, "max_seqlen_k": rows.max_keys}
        return lengths | self._varlen_options


def _import_library() -> ModuleType:
    library = import_library("flash_attn", "flash_attn", 'pip install "asyncllm[flash-attn]"')
    version = str(getattr(library, "__version__", "without a version"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < MIN_VERSION:
        raise EngineError(
            f'attention_backend="flash_attn": flash_attn {version} is too old: expected 2.7 or '
            'later; or choose attention_backend="auto"'
        )
    return library
