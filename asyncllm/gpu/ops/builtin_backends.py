"""The backends of attention that come with asyncllm. Each imports its library when it is made."""

from __future__ import annotations

import torch

from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.ops.backend import AttentionRequest, Constraints
from asyncllm.gpu.ops.base import Attention
from asyncllm.gpu.ops.torch_attention import TorchAttention

CUDA = frozenset({"cuda"})
HALF = frozenset({torch.float16, torch.bfloat16})


class TorchBackend:
    """Plain torch: any device, and what every other backend is tested against."""

    constraints = Constraints(softcap=False)

    def default_block_size(self, device: torch.device) -> int:
        return 32 if device.type == "cpu" else 16

    def make(self, request: AttentionRequest) -> Attention:
        return TorchAttention(request.shape, request.dtype)


class TritonBackend:
    """Our own paged kernels."""

    constraints = Constraints(
        device_types=CUDA,
        min_capability=(8, 0),
        dtypes=HALF | {torch.float32},
        max_head_dim=256,
        block_multiple=16,
    )

    def default_block_size(self, device: torch.device) -> int:
        return 16

    def make(self, request: AttentionRequest) -> Attention:
        from asyncllm.gpu.ops.triton.toolchain import check_triton

        # First, because importing the kernels is an ImportError where Triton is missing.
        check_triton()
        from asyncllm.gpu.ops.triton.attention import TritonAttention

        attention = TritonAttention(request.shape, request.dtype, request.device)
        # A tile of prefill holds a whole group; its rows depend on the GPU, head and dtype.
        group, rows = request.shape.group_size, attention.prefill_tiles.rows
        if group > rows:
            raise InvalidRequestError(
                f'attention_backend="triton" takes at most {rows} query heads per key/value head '
                f"here, and this is {group}; "
                'or attention_backend="torch", which covers it on any device',
                param="attention_backend",
            )
        return attention


class FlashAttention2Backend:
    """FlashAttention 2 (Dao, 2023), the package flash_attn."""

    constraints = Constraints(
        device_types=CUDA,
        min_capability=(8, 0),
        dtypes=HALF,
        max_head_dim=256,
        head_dim_multiple=8,
        block_multiple=256,
    )

    def default_block_size(self, device: torch.device) -> int:
        return 256

    def make(self, request: AttentionRequest) -> Attention:
        from asyncllm.gpu.ops.flash_attention_2 import FlashAttention2

        return FlashAttention2(request.shape)


class FlashAttention3Backend:
    """FlashAttention 3 (Shah et al., 2024), the module flash_attn_interface, for Hopper."""

    constraints = Constraints(
        device_types=CUDA,
        min_capability=(9, 0),
        max_capability=(9, 0),
        dtypes=HALF,
        max_head_dim=256,
        head_dim_multiple=8,
    )

    def default_block_size(self, device: torch.device) -> int:
        return 16

    def make(self, request: AttentionRequest) -> Attention:
        from asyncllm.gpu.ops.flash_attention_3 import FlashAttention3

        return FlashAttention3(request.shape)
