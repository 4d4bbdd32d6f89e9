"""LinearAttentionConfig: gated delta rules in a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """A gated delta rule behind a short convolution (Yang et al., 2025) in place of attention, in
    the layers where ``layers[layer]`` is True.

    Attributes:
        num_key_heads: of queries and of keys; each serves equally many value heads, which follow
            one another.
        key_dim, value_dim: size of a head.
        conv_width: inputs that an output of the convolution sees, its own included.
        by_key_head: a file has the rows of q, k, v and z of each key head together, and those of
            the gates (Qwen3-Next), and not all of q, then all of k, and so on.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    by_key_head: bool = False

    @property
    def key_size(self) -> int:
        """Of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size
