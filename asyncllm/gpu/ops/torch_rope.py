"""TorchRopeAndCache, TorchRope: QK-norm, RoPE and the KV write in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.head_norms import check_head_norm, norms_span_all_heads
from asyncllm.gpu.ops.torch_norms import TorchRMSNorm, make_torch_norm


class TorchRopeAndCache:
    """``RopeAndCache`` in plain torch, which norms and rotates q and k in place in ``qkv``.

    Args:
        q_norm, k_norm: weights of per-head norms, ``[D]``, or of norms over all heads, ``[Hq * D]``
            and ``[Hk * D]``; None for no norm. The norms round like ``TorchOps.rms_norm``.
        v_norm: ``[D]``, weight of a per-head norm of v; None for no norm.
    """

    def __init__(
        self,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.v_norm = None
        if v_norm is not None:
            check_head_norm(shape, v_norm)
            self.v_norm = make_torch_norm(v_norm, eps)
        self.norm: TorchRMSNorm | None = None
        self.whole_norms: tuple[TorchRMSNorm, TorchRMSNorm] | None = None
        if q_norm is None or k_norm is None:
            return
        if norms_span_all_heads(shape, q_norm, k_norm):
            self.whole_norms = make_torch_norm(q_norm, eps), make_torch_norm(k_norm, eps)
        else:
            counts = shape.num_heads, shape.num_kv_heads
            weights = zip((q_norm, k_norm), counts, strict=True)
            self.norm = make_torch_norm(torch.cat([w.expand(n, -1) for w, n in weights]), eps)

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``RopeAndCache``.

        Args:
            rotary: cosines and sines of each token's angles, ``[T, 1, D]`` each; or ``[T, 2, D]``
                each, with separate angles for queries and keys. The first half of the sines is
                negated.
        """
        shape, (cos, sin) = self.shape, rotary
        num_q, num_k = shape.num_heads, shape.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_q + 2 * num_k, shape.head_dim)
        qk = heads[:, : num_q + num_k]
        source = qk
        if self.norm is not None:
            source = self.norm(qk)
        elif self.whole_norms is not None:
            q, k, _ = qkv.split([count * shape.head_dim for count in (num_q, num_k, num_k)], 1)
            q_norm, k_norm = self.whole_norms
            source = torch.cat((q_norm(q), k_norm(k)), 1).view(qk.shape)
        if cos.shape[1] == 2:
            cos, sin = (
                torch.cat((each[:, :1].expand(-1, num_q, -1), each[:, 1:].expand(-1, num_k, -1)), 1)
                for each in rotary
            )
        rotate(source, cos, sin, qk)
        if self.v_norm is not None:
            values = heads[:, num_q + num_k :]
            values.copy_(self.v_norm(values))
        write_kv(cache, slot_mapping, heads[:, num_q:])
        return heads[:, :num_q], heads[:, num_q : num_q + num_k], heads[:, num_q + num_k :]


class TorchRope:
    """``Rope`` in plain torch: norms and rotates q in place.

    Args:
        norm: ``[D]``, weight of a per-head norm of q; None for no norm.
    """

    def __init__(self, shape: AttentionShape, norm: Tensor | None, eps: float) -> None:
        self.shape, self.norm = shape, None
        if norm is not None:
            check_head_norm(shape, norm)
            self.norm = make_torch_norm(norm, eps)

    def __call__(self, q: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads = q.view(len(q), self.shape.num_heads, self.shape.head_dim)
        cos, sin = (each[:, :1] for each in rotary)
        rotate(heads if self.norm is None else self.norm(heads), cos, sin, heads)
        return heads


def rotate(source: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Applies RoPE, in GPT-NeoX order, to ``source [T, heads, D]``, and writes it to ``out``.

    A roll by half a head times a sine with a negated first half equals ``rotate_half(x) * sin``, so
    that three ops suffice for all heads.
    """
    rolled = source.roll(source.shape[-1] // 2, -1)
    torch.mul(source, cos, out=out)
    out.addcmul_(rolled, sin)


def write_kv(cache: Tensor, slot_mapping: Tensor, kv: Tensor) -> None:
    """Writes keys and values to the tokens' slots in a ``cache`` of any layout.

    Args:
        kv: ``[T, 2 * Hk, D]``, keys before values.
    """
    _, _, block_size, *head = cache.shape
    pair = kv.view(kv.shape[0], 2, *head).transpose(0, 1)
    if cache.is_contiguous():
        cache.view(2, -1, *head).index_copy_(1, slot_mapping, pair)
    else:
        cache[:, slot_mapping // block_size, slot_mapping % block_size] = pair
