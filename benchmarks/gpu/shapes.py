"""ModelShape: the sizes of a model, the bytes that a step has to move, and the time that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention, by its sizes alone.

    Attributes:
        name: for tables.
        architecture: in transformers' naming.
        tied: embedding and output head are one matrix.
        itemsize: bytes of an element of weights and KV.
        context: tokens that the positions reach.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    itemsize: int = 2
    context: int = 40960

    @property
    def layer_parameters(self) -> int:
        """Of the projections of one layer; its norms are left out, some KB."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.ffn

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all layers and the output head once. Of
        an embedding that is a matrix of its own it reads a row per sequence, which is left
        out."""
        return (self.layers * self.layer_parameters + self.vocab * self.hidden) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def step_bytes(self, context: int) -> int:
        """Bytes that a decode step has to read.

        Args:
            context: tokens in the KV cache, summed over the batch.
        """
        return self.step_weight_bytes + context * self.kv_bytes_per_token

    def step_floor(self, context: int, bandwidth: float) -> float:
        """Seconds that a decode step takes at least, at ``bandwidth`` bytes/s."""
        return self.step_bytes(context) / bandwidth

    def config(self) -> dict[str, Any]:
        """The ``config.json`` of a checkpoint of this shape."""
        return {
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "eos_token_id": None,
            "bos_token_id": None,
            "dtype": {2: "bfloat16", 4: "float32"}[self.itemsize],
        }


QWEN3_06B = ModelShape(
    "Qwen3-0.6B shape",
    "Qwen3ForCausalLM",
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn=3072,
    vocab=151_936,
    tied=True,
)

LLAMA_8B = ModelShape(
    "8B Llama shape",
    "LlamaForCausalLM",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14_336,
    vocab=128_256,
    tied=False,
)


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """What one attention launch has to move and to compute.

    Attributes:
        batch: sequences.
        queries: query tokens of each sequence.
        prefix: tokens of each sequence before those.
        longest: tokens of the first sequence, where it has more than the others; 0 where not.
    """

    batch: int
    queries: int
    prefix: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    itemsize: int = 2
    longest: int = 0

    @property
    def name(self) -> str:
        """For tables; it has the head size above 128."""
        wide = f", heads of {self.head_dim}" if self.head_dim > 128 else ""
        if self.queries > 1:
            batch = f"{self.batch} × " if self.batch > 1 else ""
            return f"prefill {batch}{self.queries} after {self.prefix}{wide}"
        skewed = f", one of {self.longest}" if self.longest else ""
        return f"decode {self.batch} × {self.kv_len}{skewed}{wide}"

    @property
    def kv_len(self) -> int:
        """Tokens of each sequence but the longest, its queries included."""
        return self.prefix + self.queries

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [max(self.kv_len, self.longest)] + [self.kv_len] * (self.batch - 1)

    @property
    def kv_bytes(self) -> int:
        """K and V of all sequences."""
        return 2 * sum(self.lengths) * self.kv_heads * self.head_dim * self.itemsize

    @property
    def bytes(self) -> int:
        """K and V and queries read, outputs written, each once."""
        rows = 2 * self.batch * self.queries * self.heads * self.head_dim * self.itemsize
        return self.kv_bytes + rows

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, under the causal mask."""
        before = sum(self.lengths) - self.batch * self.queries
        pairs = self.queries * before + self.batch * (self.queries * (self.queries + 1) // 2)
        return 4 * pairs * self.heads * self.head_dim


def rotations(size: int, cache: int, limit: int = 128) -> int:
    """How many distinct inputs of ``size`` bytes defeat a cache of ``cache`` bytes: together
    four times as large, but no more than ``limit`` of them.

    One is enough if it is that large itself: its first bytes are gone when it ends.
    """
    return max(1, min(limit, -(-4 * cache // size)))
