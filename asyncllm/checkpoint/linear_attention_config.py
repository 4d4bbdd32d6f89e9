"""LinearAttentionConfig: configuration of a model's gated-delta-rule layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Configuration of layers with a short convolution and a gated delta rule (Yang et al., 2025),
    in place of attention.

    Attributes:
        layers: one entry per layer: whether it has the gated delta rule.
        num_key_heads: number of key heads, and of query heads. Each key head serves the same number
            of consecutive value heads.
        key_dim, value_dim: size of a key head and of a value head.
        conv_width: kernel size of the convolution, the current input included.
        grouped_by_key_head: whether the checkpoint's projections have the rows of q, k, v, z and
            the gates grouped by key head (Qwen3-Next). Otherwise all rows of q come first, then all
            rows of k, and so on.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    grouped_by_key_head: bool = False

    @property
    def total_key_dim(self) -> int:
        """Total size of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def total_value_dim(self) -> int:
        """Total size of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Number of channels of the convolution: those of q, k and v."""
        return 2 * self.total_key_dim + self.total_value_dim
