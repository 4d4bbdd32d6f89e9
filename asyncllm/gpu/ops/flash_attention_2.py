"""FlashAttention2: attention backend on the package flash_attn (Dao, 2023)."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from asyncllm.errors import EngineError
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.flash_attention import AttentionFunction, FlashAttention, PrefillRows

MIN_VERSION = (2, 7)


class FlashAttention2(FlashAttention):
    """Attention by FlashAttention 2.

    Blocks need not be zeroed for a new owner: according to its source, the library masks keys
    beyond the end of a sequence, and loads zeros instead of the values there.

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
        self._with_cache = library.flash_attn_with_kvcache
        self._varlen: AttentionFunction = library.flash_attn_varlen_func
        # By default some versions split the keys, which gives wrong results with a paged cache.
        splits = "num_splits" in inspect.signature(self._varlen).parameters
        self._varlen_options = {"num_splits": 1} if splits else {}

    def prefill(
        self, q: Tensor, cache: Tensor, rows: PrefillRows, window: tuple[int, int]
    ) -> Tensor:
        return self._varlen(
            q,
            cache[0],
            cache[1],
            cu_seqlens_q=rows.query_starts,
            cu_seqlens_k=rows.key_starts,
            max_seqlen_q=rows.max_queries,
            max_seqlen_k=rows.max_keys,
            block_table=rows.block_table,
            **self._varlen_options,
            **self.call_options(window),
        )


def _import_library() -> ModuleType:
    try:
        library = importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        raise EngineError(
            f'attention_backend="flash_attn": flash_attn cannot be imported ({error}): pip install '
            '"asyncllm[flash-attn]", or choose attention_backend="auto"'
        ) from error
    version = str(getattr(library, "__version__", "without a version"))
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < MIN_VERSION:
        raise EngineError(
            f'attention_backend="flash_attn": flash_attn {version} is too old: expected 2.7 or '
            'later; or choose attention_backend="auto"'
        )
    return library
