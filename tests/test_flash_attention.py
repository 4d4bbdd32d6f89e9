"""The FlashAttention backends on stand-ins of their libraries, against plain torch.

The stand-ins compute exactly what their arguments say, so what is shown here is that the
arguments are right: layout, lengths, tables, scale, causality, windows. What the libraries do
with them, no test here sees.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncllm.errors import EngineError
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops import flash_attention
from asyncllm.gpu.ops.backend import AttentionRequest
from asyncllm.gpu.ops.base import Attention, AttentionShape
from asyncllm.gpu.ops.flash_attention import FlashAttention
from asyncllm.gpu.ops.flash_attention_2 import FlashAttention2
from asyncllm.gpu.ops.flash_attention_3 import FlashAttention3
from asyncllm.gpu.ops.registry import make_attention
from asyncllm.gpu.ops.torch_attention import TorchAttention
from tests import flash_attn_standin
from tests.step_inputs import captured, planned
from tests.triton.paged import attend

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)
DTYPE = torch.float16
VERSIONS: list[tuple[type[FlashAttention], int]] = [
    (FlashAttention2, 256),
    (FlashAttention3, 16),
    (FlashAttention3, 48),
]
WINDOWS = [None, 1, 40, 300]

STEPS = {
    "mixed": ((300, 1), (5, 1), (255, 1), (0, 1), (0, 70), (40, 33), (256, 1), (511, 2)),
    "decodes": ((511, 1), (512, 1), (0, 1), (17, 1)),
    "prefills": ((0, 90), (90, 3), (0, 2), (600, 1), (0, 1)),
    "one row": ((130, 40),),
}
"""Per row: tokens in the cache before the step, and tokens of the step."""


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    for module in (flash_attn_standin.flash_attn_2(), flash_attn_standin.flash_attn_3()):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@dataclass
class Step:
    """A step on a cache of which every token that no row owns is NaN."""

    q: Tensor
    cache: Tensor
    inputs: StepInputs
    table: np.ndarray
    starts: np.ndarray
    block_size: int

    @property
    def clean(self) -> Tensor:
        """The cache as a backend gets it that reads blocks to their end."""
        return self.cache.nan_to_num(0.0)

    def rows(self, padded: int) -> StepInputs:
        """The decode rows by slot, in another order of slots, and padded ones."""
        inputs, count = self.inputs, self.inputs.num_rows
        slots = torch.arange(count).flip(0) + 2
        table = torch.zeros((count + 4, self.table.shape[1]), dtype=torch.int32)
        table[slots] = torch.from_numpy(self.table)[inputs.req_indices]
        zeros = torch.zeros(padded, dtype=torch.int32)
        return captured(
            table,
            torch.cat((slots, torch.full((padded,), -1))),
            torch.cat((torch.from_numpy(self.starts), zeros)),
            torch.cat((inputs.seq_lens, zeros)),
            self.block_size,
        )


def make_step(name: str, block_size: int) -> Step:
    """Queries and cache are parts of wider tensors, as they are in the model."""
    rows, random = STEPS[name], torch.Generator().manual_seed(len(name) + block_size)
    starts, counts = np.array(rows, dtype=np.int64).T
    lengths = starts + counts
    owned = -(-lengths // block_size)
    cache = torch.full((2, int(owned.sum()) + 3, block_size, 3, 2, 16), torch.nan, dtype=DTYPE)
    cache = cache[:, :, :, 1]
    order = (torch.randperm(cache.shape[1] - 1, generator=random) + 1).tolist()
    # Entries beyond a row's blocks name one that no row owns.
    table = np.full((len(rows), int(owned.max()) + 2), order.pop(), dtype=np.int32)
    for row, length in enumerate(lengths.tolist()):
        table[row, : owned[row]] = [order.pop() for _ in range(owned[row])]
        for block in range(owned[row]):
            part = cache[:, table[row, block], : length - block * block_size]
            part.copy_(torch.randn(part.shape, generator=random))
    merged = torch.randn(int(counts.sum()), 10, 16, generator=random).to(DTYPE)
    # A line per request index, in another order than the rows, of unused ones too.
    lines = np.arange(len(rows))[::-1] * 2 + 1
    lines = np.ascontiguousarray(lines)
    by_request = np.full((2 * len(rows) + 1, table.shape[1]), order.pop(), dtype=np.int32)
    by_request[lines] = table
    inputs = planned(by_request, lines, starts, counts, block_size)
    return Step(merged[:, :6], cache, inputs, by_request, starts, block_size)


def run(attention: Attention, step: Step, cache: Tensor, window: int | None) -> Tensor:
    q = step.q.to(cache.dtype)
    k, v = own_tokens(step, cache)
    return attention(q, k, v, cache, attention.plan(step.inputs, window, 0))


def own_tokens(step: Step, cache: Tensor) -> tuple[Tensor, Tensor]:
    """The step's own k and v, ``[T, Hk, D]``, as they are in the cache."""
    inputs, found = step.inputs, []
    for row, start in enumerate(step.starts.tolist()):
        positions = np.arange(start, int(inputs.seq_lens[row]))
        blocks = step.table[inputs.req_indices[row], positions // step.block_size]
        found.append(cache[:, blocks, positions % step.block_size])
    k, v = torch.cat(found, 1)
    return k, v


def expected(step: Step, window: int | None) -> Tensor:
    """From the plain backend in float64."""
    exact = TorchAttention(SHAPE, torch.float64)
    return run(exact, step, step.clean.double(), window)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Within the rounding of the result; NaN never passes."""
    assert found.shape == wanted.shape
    assert found.dtype == DTYPE
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-5)


def check(attention: FlashAttention, name: str, block_size: int, window: int | None) -> None:
    step = make_step(name, block_size)
    assert_close(run(attention, step, step.cache, window), expected(step, window))


def check_decode(attention: FlashAttention, block_size: int, window: int | None) -> None:
    step = make_step("decodes", block_size)
    rows = step.rows(padded=3)
    q = torch.cat((step.q, torch.randn(3, 6, 16).to(DTYPE)))
    found = attention(q, q[:, :2], q[:, :2], step.cache, attention.plan(rows, window, 0))
    assert_close(found[:4], expected(step, window))
    assert torch.isfinite(found).all()
    exact = TorchAttention(SHAPE, torch.float64)
    cache = step.clean.double()
    plan = exact.plan(rows, window, 0)
    assert_close(found[:4], exact(q.double(), q, q, cache, plan)[:4])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("version", "block_size"), VERSIONS)
def test_step_equals_plain_torch(version, block_size, name, window):
    check(version(SHAPE), name, block_size, window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("version", "block_size"), VERSIONS)
def test_padded_decode_rows_equal_plain_torch(version, block_size, window):
    check_decode(version(SHAPE), block_size, window)


@pytest.mark.parametrize(("version", "block_size"), VERSIONS)
def test_the_soft_cap(version, block_size):
    step = make_step("mixed", block_size)
    found = run(version(replace(SHAPE, softcap=0.7)), step, step.cache, 40)
    inputs, ends = step.inputs, step.inputs.query_start_loc
    for row, length in enumerate(inputs.seq_lens.tolist()):
        used = step.table[inputs.req_indices[row], : -(-length // block_size)]
        k, v = step.cache[:, used].flatten(1, 2)[:, :length]
        queries = slice(int(ends[row]), int(ends[row + 1]))
        assert_close(found[queries], attend(step.q[queries], k, v, 0.3, 0.7, 40).flatten(1))


def test_bfloat16_stays_bfloat16():
    step = make_step("mixed", 256)
    half = step.cache.bfloat16()
    found = run(FlashAttention2(SHAPE), step, half, None)
    assert found.dtype == torch.bfloat16
    exact = run(TorchAttention(SHAPE, torch.float64), step, half.nan_to_num(0.0).double(), None)
    torch.testing.assert_close(found.double(), exact, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize(("version", "block_size"), VERSIONS)
def test_a_decode_step_reads_nothing_on_the_host(version, block_size, monkeypatch):
    """Shapes are all that a captured graph may depend on."""
    calls = []

    def called(q, k_cache, v_cache, **options):
        calls.append(options)
        return torch.empty_like(q)

    attention = version(SHAPE)
    attention._attend_with_kv_cache = called
    step = make_step("decodes", block_size)
    rows = step.rows(padded=4)
    with FakeTensorMode() as mode:
        fields: dict[str, Any] = {
            name: mode.from_tensor(value)
            for name in StepInputs.__slots__
            if isinstance(value := getattr(rows, name), Tensor)
        }
        table = mode.from_tensor(rows.groups[0].block_table)
        rows = replace(rows, groups=[replace(rows.groups[0], block_table=table)], **fields)
        q, cache = mode.from_tensor(torch.zeros(8, 6, 16)), mode.from_tensor(step.cache)
        out = attention(q, q, q, cache, attention.plan(rows, 40, 0))
    assert out.shape == (8, 96)
    (options,) = calls
    table = options["page_table" if version is FlashAttention3 else "block_table"]
    assert table.shape == (8, rows.groups[0].block_table.shape[1])
    assert options["cache_seqlens"].shape == (8,)
    assert options["num_splits"] == 0


@pytest.mark.parametrize(("version", "block_size"), VERSIONS)
def test_a_plan_cuts_the_tables_to_the_longest_row(version, block_size):
    """The tables of all request indices are on the device, and as wide as any sequence."""
    inputs = make_step("mixed", block_size).inputs
    wide = torch.nn.functional.pad(inputs.groups[0].block_table, (0, 8000))
    inputs = replace(inputs, groups=[replace(inputs.groups[0], block_table=wide)])
    plan = version(SHAPE).plan(inputs, None, 0)
    width = -(-int(inputs.seq_lens.max()) // block_size)
    assert plan.block_table.shape == (4, width)
    assert plan.prefill.block_table.shape == (4, width)
    assert plan.prefill.key_starts.tolist() == [0, *inputs.seq_lens[4:].cumsum(0).tolist()]


def test_paged_rows_are_never_split_by_flash_attn(monkeypatch):
    splits = []

    def varlen(*args, num_splits=0, **options):
        splits.append(num_splits)
        return flash_attn_standin.varlen_2(*args, **options)

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", varlen)
    check(FlashAttention2(SHAPE), "mixed", 256, None)
    assert splits == [1]


def moved(starts: Tensor, index: int) -> Tensor:
    """Starts of which one is one later."""
    starts = starts.clone()
    starts[index] += 1
    return starts


def reversed_rows(table: Tensor) -> Tensor:
    return table.flip(0).contiguous()


WRONG_PLANS: dict[str, list[tuple[str, Callable[[Tensor], Tensor]]]] = {
    "queries shifted": [("prefill.query_starts", lambda starts: starts + 1)],
    "keys shifted": [
        ("prefill.key_starts", lambda starts: moved(starts, -1)),
        ("prefill.seq_lens", lambda lengths: moved(lengths, -1)),
    ],
    "lengths short by one": [("seq_lens", lambda lengths: lengths - 1)],
    "tables swapped": [("block_table", reversed_rows)],
    "tables of prefills swapped": [("prefill.block_table", reversed_rows)],
}


@pytest.mark.parametrize("mistake", WRONG_PLANS)
@pytest.mark.parametrize(("version", "block_size"), VERSIONS[:2])
def test_a_wrong_plan_is_noticed(version, block_size, mistake):
    class Broken(version):
        def plan(self, step, window, group):
            plan = super().plan(step, window, group)
            for path, change in WRONG_PLANS[mistake]:
                of, _, name = path.rpartition(".")
                part = getattr(plan, of) if of else plan
                setattr(part, name, change(getattr(part, name)))
            return plan

    with pytest.raises((AssertionError, RuntimeError)):
        check(Broken(SHAPE), "mixed", block_size, None)


@pytest.mark.parametrize(
    ("option", "value"),
    [("softmax_scale", 0.25), ("causal", False), ("window_size", (40, 0)), ("softcap", 5.0)],
)
@pytest.mark.parametrize(("version", "block_size"), VERSIONS[:2])
def test_a_wrong_option_is_noticed(version, block_size, option, value):
    class Broken(version):
        def call_options(self, window):
            wrong = super().call_options(window) | {option: value}
            # Either alone hides the keys after a query.
            return wrong | ({"window_size": (39, -1)} if option == "causal" else {})

    with pytest.raises(AssertionError):
        check(Broken(SHAPE), "mixed", block_size, 40)


def test_a_window_that_leaves_out_the_own_key_is_noticed(monkeypatch):
    monkeypatch.setattr(flash_attention, "_window_size", lambda window: (window, 0))
    with pytest.raises(AssertionError):
        check_decode(FlashAttention3(SHAPE), 16, 40)


def test_tables_in_the_order_of_slots_are_noticed(monkeypatch):
    def unordered(step, group):
        return step.groups[group].block_table[: step.num_rows]

    monkeypatch.setattr(StepInputs, "row_block_tables", unordered)
    with pytest.raises(AssertionError):
        check_decode(FlashAttention2(SHAPE), 256, None)


@pytest.mark.parametrize(
    ("version", "module", "advice"),
    [
        (FlashAttention2, "flash_attn", r"asyncllm\[flash-attn\]"),
        (FlashAttention3, "flash_attn_interface", "flash-attn-3 from PyTorch's own index.*hopper"),
    ],
)
def test_a_missing_library_is_named(monkeypatch, version, module, advice):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EngineError, match=f"{module} cannot be imported.*{advice}") as error:
        version(SHAPE)
    assert 'attention_backend="auto"' in str(error.value)


@pytest.mark.parametrize(("version", "works"), [("2.6.3", False), ("2.7.0", True), ("3.0", True)])
def test_an_old_flash_attn_is_named(monkeypatch, version, works):
    monkeypatch.setattr(sys.modules["flash_attn"], "__version__", version)
    if works:
        assert FlashAttention2(SHAPE).name == "flash_attn"
        return
    with pytest.raises(EngineError, match=r"2\.6\.3 is too old: expected 2\.7 or later"):
        FlashAttention2(SHAPE)


def test_an_old_flash_attn_interface_is_named(monkeypatch):
    def first_beta(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False):
        raise NotImplementedError

    module = sys.modules["flash_attn_interface"]
    monkeypatch.setattr(module, "flash_attn_with_kvcache", first_beta)
    with pytest.raises(EngineError, match=r"lacks cu_seqlens_q, .*page_table.*3\.0\.0b1"):
        FlashAttention3(SHAPE)
    monkeypatch.delattr(module, "flash_attn_with_kvcache")
    with pytest.raises(EngineError, match="too old"):
        FlashAttention3(SHAPE)


def request(version: type[FlashAttention], block_size: int, **shape) -> AttentionRequest:
    windows = frozenset({None, 4096})
    device = torch.device("cpu")
    return AttentionRequest(replace(SHAPE, **shape), DTYPE, device, block_size, windows)


def made_with(version: type[FlashAttention], block_size: int, monkeypatch, wrong, **shape):
    """Makes the backend on a library whose calls pass through ``wrong``, which gets the function's
    keyword arguments and returns those to call it with, and what to do with the result."""
    name = "flash_attn_interface" if version is FlashAttention3 else "flash_attn"
    for function in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
        exact = getattr(sys.modules[name], function, None)
        if exact is None:
            continue

        @functools.wraps(exact)
        def broken(q, k, v, exact=exact, **options):
            options, after = wrong(options)
            return after(exact(q, k, v, **options))

        monkeypatch.setattr(sys.modules[name], function, broken)
    return version.make(request(version, block_size, **shape))


@pytest.mark.parametrize(("version", "block_size"), VERSIONS[:2])
def test_right_library_passes_its_check(version, block_size, monkeypatch):
    calls = []

    def right(options):
        calls.append(options)
        return options, lambda out: out

    made = made_with(version, block_size, monkeypatch, right)
    assert made.name == version.name
    assert {call["window_size"] for call in calls} == {(-1, -1), (block_size + 2, 0)}
    # Decode rows, prefill rows, and a step with both, with each window.
    assert len(calls) == 8


def _option(name, change):
    return lambda options: (options | {name: change(options[name])}, lambda out: out)


def _prefill(after):
    """What is wrong with rows of several queries alone."""
    return lambda options: (options, after if "cu_seqlens_q" in options else lambda out: out)


WRONG = {
    "another scale": _option("softmax_scale", lambda scale: scale * 1.1),
    "a window of one key more": _option(
        "window_size", lambda size: size if size[0] < 0 else (size[0] + 1, size[1])
    ),
    "no window": _option("window_size", lambda size: (-1, -1)),
    "one key less": _option("cache_seqlens", lambda lengths: (lengths - 1).clamp(min=0)),
    "other blocks": _option("page_table", lambda table: table.flip(0).contiguous()),
    "a prefill of NaN": _prefill(lambda out: out * torch.nan),
    "rough rounding": lambda options: (options, lambda out: (out * 16).round() / 16),
    "a prefill that is off": _prefill(lambda out: out * 1.01),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_library_is_refused_with_figures(wrong, monkeypatch):
    says = (
        r"attention_backend='flash_attn_3' does not compute what plain torch does \("
        r"(decode|prefill) rows, (no window|window 19)\): a row is off by (inf|[0-9.]+) of its "
        r'norm, expected at most 0\.00195; .*"auto"'
    )
    with pytest.raises(EngineError, match=says) as error:
        made_with(FlashAttention3, 16, monkeypatch, WRONG[wrong])
    assert ("window 19" in str(error.value)) or "window of" not in wrong


def test_a_library_that_raises_is_refused(monkeypatch):
    def fail(options):
        raise RuntimeError("no kernel image is available")

    with pytest.raises(EngineError, match=r"fails its check at start \(decode rows.*kernel image"):
        made_with(FlashAttention3, 16, monkeypatch, fail)


def test_the_check_reaches_an_engine_that_starts(monkeypatch):
    """By way of the registry, on a device that the backend covers."""
    cpu = replace(FlashAttention3.constraints, device_types=frozenset({"cpu"}))
    monkeypatch.setattr(FlashAttention3, "constraints", cpu)
    chosen = request(FlashAttention3, 16)
    made, block_size = make_attention("flash_attn_3", replace(chosen, block_size=None))
    assert (made.name, block_size) == ("flash_attn_3", 16)
    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_with_kvcache", zeros_3)
    with pytest.raises(EngineError, match="a row is off by 1 of its norm"):
        make_attention("flash_attn_3", chosen)


@functools.wraps(flash_attn_standin.with_kvcache_3)
def zeros_3(q, k_cache, v_cache, **options):
    return torch.zeros_like(q)
