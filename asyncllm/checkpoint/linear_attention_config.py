"""LinearAttentionConfig: gated delta rules in a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Gated delta rule after a short convolution (Yang et al., 2025). It replaces attention in the
    layers where ``layers[layer]`` is True.

    Attributes:
        num_key_heads: heads of queries and of keys; each serves the same number of consecutive
            value heads.
        key_dim, value_dim: size of a head.
        conv_width: kernel size of the convolution, the current input included.
        grouped_by_key_head: a file groups the rows of q, k, v, z and of the gates by key head
            (Qwen3-Next), instead of all rows of q, then all of k, and so on.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    grouped_by_key_head: bool = False

    @property
    def key_size(self) -> int:
        """Total size of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Total size of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size
