"""Broken kernels against the same checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

import asyncllm.gpu.ops.triton
from asyncllm.gpu.ops.base import AttentionShape
from tests import recurrent_checks
from tests.exact_experts import ROUTINGS
from tests.triton import checks
from tests.triton.cases import DECODE, PREFILL

PACKAGE = "asyncllm.gpu.ops.triton"
SOURCE = Path(asyncllm.gpu.ops.triton.__file__).parent

MUTATIONS = [
    ("attention_tile", "keys[None, :] <= positions", "keys[None, :] < positions", "prefill"),
    ("attention_tile", "positions[:, None] - window", "positions[:, None] - window - 1", "window"),
    ("attention_tile", "table + keys // BLOCK_SIZE, mask", "table + keys // 32, mask", "decode"),
    ("attention_tile", "acc * decay[:, None]", "acc", "splits"),
    ("attention_tile", "exists = keys < kv_len", "exists = keys <= kv_len", "decode"),
    ("attention_tile", "exists &= keys >= first_visible_key", "exists &= keys >= 0", "window"),
    ("decode_attention", "kv_head * GROUP + group_row", "kv_head + group_row", "splits"),
    ("decode_attention", "if split == 0:", "if split >= 0:", "sinks"),
    ("prefill_attention", "row_sum += 1.0", "row_sum += 0.0", "prefill sinks"),
    ("merge_attention", "split < used", "split < used - 1", "splits"),
    ("merge_attention", "(end - used)", "end", "shares"),
    ("merge_attention", "(0), splits, KEYS", "(0), splits + 2, KEYS", "shares"),
    ("decode_attention", "ends <= tl.program_id(0)", "ends < tl.program_id(0)", "shares"),
    ("merge_attention", "row >= tl.load(seq_lens)", "row > tl.load(seq_lens)", "tiles"),
    ("prefill_attention", "start += split * per_split", "start += split * KEYS", "tiles"),
    ("prefill_attention", "num_programs(0) - 1 -", "num_programs(0) -", "prefill"),
    ("prefill_attention", "num_queries - 1)", "num_queries - 2)", "prefill"),
    ("prefill_attention", "first <= tile", "first < tile", "prefill"),
    ("rope_cache", "half * cos - second", "half * cos + second", "rope"),
    ("rope_cache", "slot % BLOCK_SIZE", "(slot + 1) % BLOCK_SIZE", "rope"),
    ("top_k", "searching = rank != k", "searching = rank > k", "sampling"),
    ("top_k", "number == k - 1", "number == k", "top_k"),
    ("top_k", "threshold_token = token + 1", "threshold_token = token", "top_k"),
    ("top_k", "if found > MAX_SORTED_TOKENS", "if found > 2 * MAX_SORTED_TOKENS", "top_k"),
    ("top_k", "(sort_key >= min_sort_key)", "(sort_key > min_sort_key)", "top_k"),
    ("sampling", "(mass >= top_p * total)", "(mass > total)", "sampling"),
    ("sampling", "winner = tl.min(tl.where(score", "winner = tl.max(tl.where(score", "ties"),
    ("expert_pairs", "found < expert", "found < expert - 1", "pairs"),
    ("expert_pairs", "(count + (ROWS_PER_TILE - 1)) //", "count //", "pairs"),
    ("expert_pairs", "(row * TOP_K + place) * width", "row * TOP_K * width", "sum"),
    ("expert_pairs", "* factor", "* 1.0", "sum"),
    ("routing", "left = left & (experts != expert)", "left = left", "routing"),
    ("routing", "chosen *= weight_scale", "chosen *= 1.0", "scaled routing"),
    ("routing", "where(experts == expert, scores", "where(experts == expert, choice", "routing"),
    ("causal_conv", "first // TOKENS_PER_TILE - row)", "first // TOKENS_PER_TILE)", "conv"),
    ("causal_conv", "if (count == 1) |", "if (count == 0) |", "conv"),
    ("causal_conv", "at < 0) & (is_new == 0)", "at < 0)", "conv"),
    ("gated_delta", "GROUP) * KEY_DIM + keys[None", "GROUP) * KEY_DIM * 0 + keys[None", "delta"),
    (
        "gated_delta",
        "INCLUDE_LONG_ROWS) and (count != 1)",
        "INCLUDE_LONG_ROWS) and (count == 0)",
        "delta",
    ),
    ("decode_inputs", "number < num_changes", "number < num_changes - 1", "state"),
    ("decode_inputs", "first + tl.arange", "tl.arange", "state"),
    ("decode_inputs", "position % BLOCK_SIZE", "(position + 1) % BLOCK_SIZE", "state"),
]


def named(cases: list[Any], name: str) -> Any:
    return next(case for case in cases if case.name == name)


CHECKS: dict[str, Callable[[Any], None]] = {
    "decode": lambda m: checks.check_decode(m, named(DECODE, "group1"), "cpu", 80),
    "splits": lambda m: checks.check_decode(m, named(DECODE, "group4-splits"), "cpu", 80),
    "shares": lambda m: checks.check_decode(m, named(DECODE, "shares"), "cpu", 80),
    "tiles": lambda m: checks.check_prefill(m, named(PREFILL, "splits"), "cpu", 80),
    "sinks": lambda m: checks.check_decode(m, named(DECODE, "sinks-splits"), "cpu", 80),
    "prefill sinks": lambda m: checks.check_prefill(m, named(PREFILL, "sinks"), "cpu", 80),
    "prefill": lambda m: checks.check_prefill(m, named(PREFILL, "prefix"), "cpu", 80),
    "window": lambda m: checks.check_prefill(m, named(PREFILL, "window"), "cpu", 80),
    "rope": lambda m: checks.check_rope_cache(
        m.ops, AttentionShape(4, 2, 64, 1.0), "cpu", norm=False
    ),
    "state": lambda m: checks.check_step_state(m.fill_decode_inputs, "cpu", 16),
    "sampling": lambda m: checks.check_sampling(m.sample, checks.sampling_rows(20, 700), "cpu"),
    "top_k": lambda m: checks.check_top_k(m.sample, "cpu"),
    "ties": lambda m: checks.check_odd_rows(m.sample, "cpu"),
    "pairs": lambda m: checks.check_sort_pairs(m, 40, 5, "cpu"),
    "sum": lambda m: checks.check_sum_experts(m, torch.float32, "cpu"),
    "routing": lambda m: checks.check_routing(m.ops, ROUTINGS["correction"], "cpu"),
    "scaled routing": lambda m: checks.check_routing(m.ops, ROUTINGS["sigmoid"], "cpu"),
    "conv": lambda m: recurrent_checks.check_causal_conv(m.ops, 37, 4, torch.float32, 2e-5),
    "delta": lambda m: recurrent_checks.check_gated_delta(m.ops, (2, 4, 9, 12), torch.bfloat16),
}


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Imports a copy of the package under another name, with one module changed; its ops and
    kernels in one namespace."""

    def make(changed: str, old: str, new: str) -> SimpleNamespace:
        package = f"mutant_{tmp_path.name}"
        (tmp_path / package).mkdir()
        for path in SOURCE.glob("*.py"):
            text = path.read_text().replace(PACKAGE, package)
            if path.stem == changed:
                assert text.count(old) >= 1, f"{old!r} is not in {path.name}"
                text = text.replace(old, new)
            (tmp_path / package / path.name).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        names = ("decode_attention", "prefill_attention", "expert_pairs", "op_set")
        modules = [importlib.import_module(f"{package}.{name}") for name in names]
        found = {name: value for module in modules for name, value in vars(module).items()}
        return SimpleNamespace(**found, ops=found["TritonOps"]())

    return make


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_an_unchanged_copy_passes(check: str, mutate: Callable[..., SimpleNamespace]) -> None:
    CHECKS[check](mutate("tuning", "warps", "warps"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "old", "new", "check"), MUTATIONS, ids=[f"{m[0]}-{m[2]}" for m in MUTATIONS]
)
def test_a_broken_kernel_fails(
    changed: str, old: str, new: str, check: str, mutate: Callable[..., SimpleNamespace]
) -> None:
    made = mutate(changed, old, new)
    with pytest.raises((AssertionError, InterpreterError)):
        CHECKS[check](made)
