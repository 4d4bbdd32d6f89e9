"""The decode stage: times of the attention kernels, beside what the memory can do and beside
other implementations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention import TritonAttention
from benchmarks.gpu.baselines import flash3_calls, varlen_calls
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.paged_inputs import (
    PagedInputs,
    decode_calls,
    inputs_bytes,
    make_inputs,
    prefill_calls,
)
from benchmarks.gpu.shapes import AttentionLoad, rotations
from benchmarks.gpu.stage import Stage

BATCHES = (1, 8, 24, 32, 64, 72, 96, 128, 256)
CONTEXTS = (512, 4096, 32_768)
SKEWED = AttentionLoad(128, 1, 499, longest=32_768)
"""One long sequence among short ones."""
QUERIES = (512, 2048, 8192)
PREFIXES = (0, 4096, 32_768)

MAX_LEN = 40_960
"""Tokens that a captured decode step is made for: its number of splits is fixed for them."""

LARGE = 65_536
"""Tokens of KV past which decode attention is held to its goal."""

DECODE_GOAL = Goal("at least", 0.75)
MEMORY_SHARE = 0.8
POINT_SECONDS = 15.0


def decode_loads() -> list[AttentionLoad]:
    """The largest first: those have goals."""
    loads = [AttentionLoad(batch, 1, context - 1) for batch in BATCHES for context in CONTEXTS]
    return sorted([*loads, SKEWED], key=lambda load: sum(load.lengths), reverse=True)


def prefill_loads() -> list[AttentionLoad]:
    return [AttentionLoad(1, queries, prefix) for prefix in PREFIXES for queries in QUERIES]


def run(stage: Stage, clock: Clock) -> None:
    """Measures on the current CUDA device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    bench = DecodeBench(
        stage,
        clock,
        TritonAttention(attention_shape(), torch.bfloat16, torch.device("cuda")),
        cache=properties.L2_cache_size,
        memory=int(properties.total_memory * MEMORY_SHARE),
    )
    report = stage.report
    report.section("copy bandwidth")
    if not stage.attempt("copy bandwidth", 20, bench.measure_copy):
        return
    report.section("decode attention, 32 query and 8 key/value heads of 128, bfloat16")
    loads = decode_loads()
    large = [load for load in loads if sum(load.lengths) > LARGE]
    for load in large:
        stage.attempt(load.name, POINT_SECONDS, lambda load=load: bench.measure_decode(load))
    bench.score()
    report.section("prefill attention, one sequence")
    for load in prefill_loads():
        stage.attempt(load.name, POINT_SECONDS, lambda load=load: bench.measure_prefill(load))
    report.section("decode attention, up to 64k tokens of KV")
    for load in loads[len(large) :]:
        stage.attempt(load.name, POINT_SECONDS, lambda load=load: bench.measure_decode(load))


def attention_shape() -> AttentionShape:
    load = AttentionLoad(1, 1, 0)
    return AttentionShape(load.heads, load.kv_heads, load.head_dim, load.head_dim**-0.5)


class DecodeBench:
    """The kernels for one shape of heads, and what was measured of them.

    Args:
        cache: bytes of the device's last cache, which inputs have to defeat.
        memory: bytes that inputs may take.

    Attributes:
        shares: per load past LARGE, bytes/s as a share of the copy bandwidth.
    """

    def __init__(
        self,
        stage: Stage,
        clock: Clock,
        attention: TritonAttention,
        *,
        cache: int,
        memory: int,
    ) -> None:
        self.stage = stage
        self.clock = clock
        self.shares: dict[str, float] = {}
        self._attention = attention
        self._cache = cache
        self._memory = memory

    def measure_copy(self) -> None:
        self.stage.report.add("copy, read and written", self.clock.copy_bandwidth() / 1e12, "TB/s")

    def measure_decode(self, load: AttentionLoad) -> None:
        """As it is captured for MAX_LEN, and with the splits of the true length."""
        inputs = self._inputs(load)
        if inputs is None:
            return
        name = load.name
        seconds = self.clock.median(decode_calls(self._attention, inputs, MAX_LEN))
        share = load.bytes / seconds / self.clock.copy_bandwidth()
        if sum(load.lengths) > LARGE:
            self.shares[name] = share
        splits = self._attention.num_splits(load.batch, MAX_LEN, None)
        is_skewed = self._attention.has_skewed_lengths(
            load.batch, np.array(load.lengths), MAX_LEN, None
        )
        kind = "balanced splits" if is_skewed else f"{splits} splits"
        note = f"{share:.0%} of copy bandwidth, {kind}"
        self.stage.report.add(name, seconds, "µs", note)
        longest = max(load.lengths)
        exact = self._attention.num_splits(load.batch, longest, None)
        if exact != splits:
            other = self.clock.median(decode_calls(self._attention, inputs, longest))
            share = load.bytes / other / self.clock.copy_bandwidth()
            self._add(name, f"{exact} splits", other, seconds, f"{share:.0%} of copy bandwidth")
        ours = decode_calls(self._attention, inputs, MAX_LEN)[0]
        self._measure_baselines(name, inputs, ours, seconds)

    def measure_prefill(self, load: AttentionLoad) -> None:
        inputs = self._inputs(load)
        if inputs is None:
            return
        name = load.name
        calls = prefill_calls(self._attention, inputs)
        seconds = self.clock.median(calls)
        rate = load.flops / seconds / 1e12
        self.stage.report.add(name, seconds, "ms", f"{rate:.0f} TFLOP/s")
        self._measure_baselines(name, inputs, calls[0], seconds)

    def score(self) -> None:
        """The goal is for each load past LARGE, so the worst of them decides."""
        worst = min(self.shares, key=self.shares.__getitem__, default=None)
        value = None if worst is None else self.shares[worst]
        note = "" if worst is None else f"the worst of {len(self.shares)}: {worst}"
        name = "decode attention past 64k tokens, of copy bandwidth"
        self.stage.scores.add(name, value, "", DECODE_GOAL, note)

    def _inputs(self, load: AttentionLoad) -> PagedInputs | None:
        """None, with a line that says so, where they do not fit."""
        torch.cuda.empty_cache()
        count = rotations(load.kv_bytes, self._cache)
        wanted = inputs_bytes(load, count)
        if wanted > self._memory:
            note = f"left out: {wanted / 2**30:.0f} GiB do not fit"
            self.stage.report.add(load.name, None, "µs", note)
            return None
        return make_inputs(load, count, self._attention.device)

    def _measure_baselines(
        self, name: str, inputs: PagedInputs, ours: Callable[[], Tensor], seconds: float
    ) -> None:
        baselines: dict[str, Callable[[], list[Callable[[], Tensor]]]] = {
            "gather + varlen_attn": lambda: varlen_calls(inputs, gather=True),
            "varlen_attn alone": lambda: varlen_calls(inputs, gather=False),
            "FlashAttention 3": lambda: flash3_calls(inputs),
        }
        expected = ours()
        for label, make in baselines.items():
            # Alone, it reads one input over and over: from the cache, if that holds it.
            if label.endswith("alone") and inputs.count > 1 and inputs.load.queries == 1:
                continue
            try:
                calls = make()
                note = difference(calls[0](), expected)
                # Launching costs little of a prefill, and not everything can be captured.
                other = self.clock.median(calls, graph=inputs.load.queries == 1)
                self._add(name, label, other, seconds, note)
            except ImportError:
                continue
            except (RuntimeError, TypeError, ValueError, AssertionError) as error:
                reason = (str(error).splitlines() or [""])[0][:120]
                note = f"not measured: {type(error).__name__}: {reason}"
                self.stage.report.add(f"  {name}, {label}", None, "µs", note)

    def _add(self, name: str, label: str, seconds: float, ours: float, note: str) -> None:
        ratio = f"ours takes {ours / seconds:.2f} of it"
        self.stage.report.add(f"  {name}, {label}", seconds, "µs", f"{ratio}; {note}")


def difference(found: Tensor, expected: Tensor) -> str:
    """How far two outputs are apart, by the norm: a baseline that computes something else is
    no baseline."""
    found, expected = found.float().flatten(), expected.float().flatten()
    error = float((found - expected).norm() / expected.norm())
    return f"outputs differ by {error:.1e}" + ("" if error < 2e-2 else ", TOO FAR")
