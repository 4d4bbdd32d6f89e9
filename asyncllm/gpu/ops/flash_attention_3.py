"""FlashAttention3: attention backend on the module flash_attn_interface (Shah et al., 2024)."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

from asyncllm.errors import EngineError
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.flash_attention import (
    AttentionFunction,
    FlashAttention,
    PrefillRows,
    import_library,
)

REQUIRED_ARGUMENTS = frozenset(
    "cache_seqlens page_table cu_seqlens_q max_seqlen_q softmax_scale causal window_size softcap "
    "num_splits".split()
)
"""Arguments that ``flash_attn_with_kvcache`` has to accept. They stand for a minimum version: the
module has no version number, and its early betas lack some of them."""

INSTALL_HINT = (
    "install flash-attn-3 from PyTorch's own index, not PyPI (docs/attention_backends.md), or "
    "build it from the folder hopper of Dao-AILab/flash-attention"
)


class FlashAttention3(FlashAttention):
    """Attention by FlashAttention 3, for Hopper.

    Blocks have to be zeroed before another sequence gets them. The library, according to reports on
    its repository, may load the last block of a sequence whole, and multiply values beyond the
    sequence by a weight of zero: NaN there would make the result NaN. It may also load the null
    block, which replaces the blocks before a window in the block table.

    Raises:
        EngineError: flash_attn_interface is missing or too old.
    """

    name = "flash_attn_3"
    needs_zeroed_blocks = True
    table_argument = "page_table"
    block_size = 16
    constraints: ClassVar = replace(
        FlashAttention.constraints, min_capability=(9, 0), max_capability=(9, 0)
    )

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._attend_varlen = self._attend_with_kv_cache = _import_function()

    def prefill_options(self, rows: PrefillRows) -> dict[str, Any]:
        return {"cache_seqlens": rows.seq_lens, "num_splits": 0}


def _import_function() -> AttentionFunction:
    library = import_library("flash_attn_3", "flash_attn_interface", INSTALL_HINT)
    function = getattr(library, "flash_attn_with_kvcache", None)
    missing = set(REQUIRED_ARGUMENTS)
    if function is not None:
        missing -= set(inspect.signature(function).parameters)
    if function is None or missing:
        raise EngineError(
            'attention_backend="flash_attn_3": this flash_attn_interface is too old, its '
            f"flash_attn_with_kvcache lacks {', '.join(sorted(missing))}: expected 3.0.0b1 or "
            'later; or choose attention_backend="auto"'
        )
    return function
