"""Decoders composed by hand of layers of several kinds, against plain torch."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig, RopeConfig
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.layers import (
    AttentionKind,
    AttentionMixer,
    DecoderLayer,
    GatedMLP,
    Layer,
    StepContext,
)
from asyncllm.gpu.models.rope import RopeSpec, inverse_frequencies
from asyncllm.gpu.ops.base import AttentionShape, RMSNorm
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.torch_ops import TorchOps
from tests.driver import Driver, Sequence
from tests.dummy_runner import MODEL as LLAMA
from tests.reference import Expected, Tally, compare
from tests.static_runner import make_decoder, make_runner

MODEL = ModelConfig(
    path=Path("nowhere"),
    architecture="by hand",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=96,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    tie_word_embeddings=False,
)
FULL = AttentionKind(AttentionShape(4, 2, 8, 8**-0.5, softcap=2.0))
NEAR = AttentionKind(AttentionShape(2, 2, 8, 0.5), window=5)
KINDS = (FULL, NEAR)
ROPES = (RopeConfig(theta=1e6), RopeConfig(theta=100.0))
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [100], list(range(40, 70))]
OUTPUT = 10


@dataclass(frozen=True)
class Spec:
    """A layer: the indices of its attention and RoPE table, and whether its sublayers have norms
    behind them and another activation, as Gemma's have."""

    kind: int
    rope: int
    sandwich: bool = False


SPECS = (Spec(1, 1), Spec(0, 0), Spec(1, 0, sandwich=True), Spec(0, 1, sandwich=True))


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def draw_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden, inner = MODEL.hidden_size, MODEL.intermediate_size

    def matrix(rows: int, columns: int, scale: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    weights = {"embed": matrix(MODEL.vocab_size, hidden, 3.0)}
    weights["lm_head"] = matrix(MODEL.vocab_size, hidden)
    names = ["norm"]
    for index, spec in enumerate(SPECS):
        shape = KINDS[spec.kind].shape
        weights[f"{index}.qkv"] = matrix((shape.num_heads + 4) * 8, hidden, 2.5)
        weights[f"{index}.o"] = matrix(hidden, shape.num_heads * 8)
        weights[f"{index}.gate_up"] = matrix(2 * inner, hidden)
        weights[f"{index}.down"] = matrix(hidden, inner)
        names += [f"{index}.norm{number}" for number in range(4)]
    for name in names:
        weights[name] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    return weights


WEIGHTS = draw_weights()


pytestmark = pytest.mark.usefixtures("one_thread")


class CappedAttention:
    """Row by row in float64, with a soft cap; lengths are read on the host."""

    name = "capped"
    needs_zeroed_blocks = False

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def plan(self, step: StepInputs, window: int | None, group: int) -> Any:
        ends = range(step.num_rows + 1)
        if step.host is not None:
            ends = step.host.query_start_loc.tolist()
        tables, lengths = step.row_block_tables(group).long(), step.seq_lens.tolist()
        return list(zip(map(slice, ends, ends[1:]), tables, lengths, strict=True)), window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: Any) -> Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for tokens, table, length in plan[0]:
            if length:
                blocks = table[: -(-length // cache.shape[2])]
                keys, values = cache[:, blocks].flatten(1, 2)[:, :length]
                out[tokens] = attend(q[tokens], keys, values, self.shape, plan[1]).to(q.dtype)
        return out.view(q.shape[0], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, window: int | None) -> Tensor:
    """The last tokens of one sequence, ``q [n, Hq, D]``, over all of it in float64."""
    k, v = (x.double().repeat_interleave(shape.group_size, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    keys = torch.arange(len(k))
    queries = keys[-len(q) :].unsqueeze(1)
    hidden = (keys > queries) | (keys <= queries - (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@dataclass
class SandwichLayer:
    """A layer of another family: nothing but this class is needed for it."""

    kind: Hashable
    norms: list[RMSNorm]
    mixer: AttentionMixer
    mlp: GatedMLP

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        before, behind, between, after = self.norms
        normed, residual = before.add_and_norm(x, residual)
        x = behind(self.mixer(normed, step))
        residual = residual if step.output_tokens is None else residual[step.output_tokens]
        normed, residual = between.add_and_norm(x, residual)
        return after(self.mlp(normed)), residual


def compose(kinds: tuple[AttentionKind, ...] = KINDS) -> Decoder:
    ops = TorchOps()
    attention = {kind: CappedAttention(kind.shape) for kind in kinds}

    def linear(name: str) -> Any:
        return ops.linear(LinearWeights(WEIGHTS[name]))

    layers: list[Layer] = []
    for index, spec in enumerate(SPECS):
        norms = [ops.rms_norm(WEIGHTS[f"{index}.norm{n}"], 1e-6) for n in range(4)]
        mixer = AttentionMixer(
            qkv=linear(f"{index}.qkv"),
            rope_and_cache=ops.rope_and_cache(KINDS[spec.kind].shape, None, None, 1e-6),
            attention=attention[KINDS[spec.kind]],
            o=linear(f"{index}.o"),
            attention_index=kinds.index(KINDS[spec.kind]),
            rope_index=spec.rope,
            kv_index=index,
        )
        act = gelu_mul if spec.sandwich else ops.silu_mul
        mlp = GatedMLP(linear(f"{index}.gate_up"), act, linear(f"{index}.down"))
        if spec.sandwich:
            layers.append(SandwichLayer(spec, norms, mixer, mlp))
        else:
            layers.append(DecoderLayer(spec, norms[0], mixer, norms[2], mlp))
    decoder = Decoder(
        MODEL,
        ops,
        attention,
        [RopeSpec(rope, 8) for rope in ROPES],
        ops.embedding(WEIGHTS["embed"]),
        layers,
        ops.rms_norm(WEIGHTS["norm"], 1e-6),
        linear("lm_head"),
    )
    decoder.set_max_positions(MODEL.max_position_embeddings)
    return decoder


def expected_logits(
    tokens: list[int],
    kinds: tuple[AttentionKind, ...] = KINDS,
    ropes: tuple[RopeConfig, ...] = ROPES,
    sandwich: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The whole sequence at once, without a cache: ``[n, vocab_size]``."""
    weights = {name: weight.to(dtype) for name, weight in WEIGHTS.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name], 1e-6)

    x = weights["embed"][torch.tensor(tokens)]
    for index, spec in enumerate(SPECS):
        kind, behind = kinds[spec.kind], sandwich and spec.sandwich
        heads = kind.shape.num_heads
        angles = torch.arange(len(tokens)).outer(inverse_frequencies(ropes[spec.rope], 8)).to(dtype)
        cos, sin = (f(torch.cat((angles, angles), -1)).unsqueeze(1) for f in (torch.cos, torch.sin))
        qkv = (norm(x, f"{index}.norm0") @ weights[f"{index}.qkv"].T).view(len(tokens), -1, 8)
        qk, v = qkv[:, : heads + 2], qkv[:, heads + 2 :]
        low, high = qk.chunk(2, -1)
        qk = qk * cos + torch.cat((-high, low), -1) * sin
        mixed = attend(qk[:, :heads], qk[:, heads:], v, kind.shape, kind.window)
        out = mixed.flatten(1).to(dtype) @ weights[f"{index}.o"].T
        x = x + (norm(out, f"{index}.norm1") if behind else out)
        gate, up = (norm(x, f"{index}.norm2") @ weights[f"{index}.gate_up"].T).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if spec.sandwich else F.silu(gate)
        out = (gate * up) @ weights[f"{index}.down"].T
        x = x + (norm(out, f"{index}.norm3") if behind else out)
    return norm(x, "norm") @ weights["lm_head"].T


def check(seqs: list[Sequence], **changes: Any) -> None:
    tally = Tally()
    for seq in seqs:
        logprobs, single = (
            expected_logits(seq.tokens, **changes, dtype=dtype).double().log_softmax(-1)
            for dtype in (torch.float64, torch.float32)
        )
        noise = float((logprobs - single).abs().max())
        logprobs = logprobs[len(seq.prompt) - 1 : -1]
        compare(seq, Expected(logprobs.argmax(-1).tolist(), logprobs, noise), tally)
    assert tally.tokens == OUTPUT * len(seqs)
    assert not tally.ties


def run(decoder: Decoder, chunk: int = 0, *, static: bool = False) -> list[Sequence]:
    driver = Driver(make_runner(decoder, capturer=GraphCapturer() if static else None, depth=1))
    seqs = [driver.add(prompt, OUTPUT) for prompt in PROMPTS]
    driver.run(seqs, chunk=chunk)
    return seqs


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_layers_of_two_kinds_by_hand(chunk, static):
    """A full layer with a soft cap and a near one with a window, each with either of two RoPE
    bases, and layers that another family brings along."""
    check(run(compose(), chunk, static=static))


def test_the_order_of_the_kinds_is_the_decoders_own():
    assert KINDS[::-1] != KINDS
    check(run(compose(KINDS[::-1]), 7))


@pytest.mark.parametrize(
    "mistake",
    [
        {"ropes": ROPES[::-1]},
        {"kinds": (replace(FULL, shape=replace(FULL.shape, softcap=None)), NEAR)},
        {"kinds": (FULL, replace(NEAR, window=None))},
        {"kinds": (FULL, replace(NEAR, window=6))},
        {"kinds": (FULL, replace(NEAR, shape=replace(NEAR.shape, scale=0.3)))},
        {"sandwich": False},
    ],
    ids=["ropes", "softcap", "no-window", "window", "scale", "norms"],
)
def test_the_comparison_sees_mistakes(mistake):
    with pytest.raises(AssertionError):
        check(run(compose()), **mistake)


def test_descriptions_are_plain_data():
    assert pickle.loads(pickle.dumps(KINDS)) == KINDS


def test_attention_is_skipped_where_no_row_is_sampled(monkeypatch):
    decoder = make_decoder(LLAMA)
    (attention,) = decoder.attention.values()
    calls = []
    call = type(attention).__call__
    monkeypatch.setattr(
        type(attention), "__call__", lambda self, *args: calls.append(1) or call(self, *args)
    )
    driver = Driver(make_runner(decoder, capturer=None))
    seq = driver.add(PROMPTS[2])
    driver.launch([(seq, 9)])
    driver.collect()
    assert len(calls) == LLAMA.num_layers - 1
    driver.launch([(seq, 0)])
    driver.collect()
    assert len(calls) == 2 * LLAMA.num_layers - 1
