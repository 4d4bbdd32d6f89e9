"""Checks of every kernel, in the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.batch.step_inputs import KVGroupInputs, StepInputs
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.experts import ExpertsWeights, add_shared_expert
from asyncllm.gpu.ops.gumbel import (
    NO_TOKEN_LEFT,
    gumbel_keys,
    gumbel_sample,
    vocab_exponential_noise,
)
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.routing import RouterWeights, TorchRouting
from asyncllm.gpu.ops.triton import tuning
from tests.exact_experts import ROUTINGS, SOFTMAX, exact_experts, router_weights
from tests.step_inputs import captured, draw_scalars
from tests.triton.paged import (
    AttentionCase,
    PagedBatch,
    assert_close,
    attend_decodes,
    attend_prefills,
    expected_rows,
    make_batch,
    make_cache,
)


def check_decode(module: ModuleType, case: AttentionCase, device: str, capability: int) -> None:
    """Decode attention against float64, with a poisoned output."""
    batch = make_batch(case, device)
    shuffled, table = shuffle_table(batch.block_table)
    out = torch.full(batch.q.shape, torch.nan, dtype=case.dtype, device=device)
    tiles = tuning.decode_tiles(capability, case.head_dim, case.dtype.itemsize)
    kwargs: dict[str, Any] = options_of(case, batch) | {"tiles": tiles}
    kwargs["extra_splits"] = case.extra_splits
    given = module, batch.q, batch.cache
    lines = torch.arange(len(batch.block_table), device=device)
    attend_decodes(*given, batch.block_table, lines, batch.seq_lens, out=out, **kwargs)
    for row, expected in enumerate(expected_rows(case, batch)):
        assert_close(out[row : row + 1], expected, case.dtype, f"row {row}")
    indexed = attend_decodes(*given, table, shuffled, batch.seq_lens, **kwargs)
    assert torch.equal(indexed, out)


def options_of(case: AttentionCase, batch: PagedBatch) -> dict[str, Any]:
    return {
        "scale": case.scale, "splits": case.splits, "softcap": case.softcap, "window": case.window,
        "sinks": batch.sinks,
    }  # fmt: skip


def shuffle_table(block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's line in a table of another order, and that table."""
    count, random = len(block_table), torch.Generator().manual_seed(1)
    shuffled = torch.randperm(count, generator=random).to(block_table.device)
    table = torch.empty_like(block_table)
    table[shuffled] = block_table
    return shuffled, table


def check_prefill(module: ModuleType, case: AttentionCase, device: str, capability: int) -> None:
    """Prefill attention against float64; what is padding keeps its poison, and so do the rows of
    decodes before it."""
    batch = make_batch(case, device)
    tiles = tuning.prefill_tiles(capability, case.head_dim, case.dtype.itemsize)
    shuffled, table = shuffle_table(batch.block_table)
    decodes = 3
    q = torch.cat((batch.q[:1].expand(decodes, -1, -1) * torch.nan, batch.q))
    out, behind = (torch.full_like(each, torch.nan) for each in (batch.q, q))
    in_order = torch.arange(len(table), device=device)
    for queries, found, lines, blocks in (
        (batch.q, out, in_order, batch.block_table),
        (q, behind, shuffled, table),
    ):
        attend_prefills(
            module, queries, batch.cache, blocks, lines, batch.seq_lens, batch.query_start_loc,
            tiles=tiles, out=found, first_row=len(queries) - len(batch.q),
            **options_of(case, batch),
        )  # fmt: skip
    assert behind[:decodes].isnan().all()
    assert torch.equal(behind[decodes:].nan_to_num(-7.0), out.nan_to_num(-7.0))
    starts = batch.query_start_loc.tolist()
    for row, expected in enumerate(expected_rows(case, batch)):
        assert_close(out[starts[row] : starts[row + 1]], expected, case.dtype, f"row {row}")
    assert out[starts[-1] :].isnan().all()


def check_decode_replays(module: ModuleType, capability: int) -> None:
    """A CUDA graph's replay reads the lengths of the moment, with the splits that were
    captured."""
    case = AttentionCase("graph", 4, 128, (700, 0, 65), splits=3)
    batch = make_batch(case, "cuda")
    out = torch.empty_like(batch.q, memory_format=torch.contiguous_format)
    given = batch.q, batch.cache, batch.block_table, torch.arange(3, device="cuda"), batch.seq_lens
    options: dict[str, Any] = options_of(case, batch) | {
        "tiles": tuning.decode_tiles(capability, 128)
    }

    def run(target: Tensor) -> None:
        attend_decodes(module, *given, out=target, **options)

    run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    for lengths in ((700, 0, 65), (1, 0, 64), (0, 0, 0)):
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        expected = torch.empty_like(out)
        run(expected)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def check_norm(ops: Any, width: int, dtype: torch.dtype, device: str) -> None:
    random = torch.Generator().manual_seed(width)
    x, residual = torch.randn(2, 3, width, generator=random).to(dtype).to(device)
    weight = torch.randn(width, generator=random).to(dtype).to(device)
    norm = ops.rms_norm(weight, 1e-6)
    total = residual + x
    added, kept = norm.add_and_norm(x, residual.clone())
    assert torch.equal(kept, total)
    for found, source in ((norm(x), x), (added, total)):
        assert_close(found, _norm_in_float32(source.cpu().double(), weight), dtype)
    # With a multiple of x, and a weight in float32: rounded once.
    total, weight = residual + x * 0.25, weight.float()
    found, kept = ops.rms_norm(weight, 1e-6, 0.25).add_and_norm(x, residual.clone())
    assert torch.equal(kept, total)
    exact, half_unit = _norm_in_float32(total.cpu().double(), weight), torch.finfo(x.dtype).eps / 2
    assert bool(((found.cpu().double() - exact).abs() <= exact.abs() * half_unit + 1e-5).all())
    plain = ops.rms_norm(weight, 1e-6)
    assert torch.equal(plain(total), found)
    assert torch.equal(plain(torch.stack((total, total * 2), 1))[:, 0], found)
    # The sum is rounded before it is scaled, and again behind.
    rescaled = (total + x) * 0.7
    found, kept = ops.rms_norm(weight, 1e-6, 1.0, 0.7).add_and_norm(x, total.clone())
    assert torch.equal(kept, rescaled)
    assert torch.equal(found, plain(rescaled))


def _norm_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.cpu().double()


def check_activations(ops: Any, width: int, dtype: torch.dtype, device: str) -> None:
    random = torch.Generator().manual_seed(width)
    gate_up = (torch.randn(5, 2 * width, generator=random) * 4).to(dtype)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    gate, up = gate_up.double().chunk(2, -1)
    there = gate_up.to(device)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    for op, exact in ((ops.silu_mul, gate * gate.sigmoid()), (ops.gelu_mul, gelu)):
        found = op(there.clone())
        assert_close(found, exact * up, dtype)
        assert torch.equal(op(*there.clone().chunk(2, -1)), found)
    logits = there.clone()
    capped = ops.softcap(logits, 5.0)
    assert capped.data_ptr() == logits.data_ptr()
    assert_close(capped, 5 * (gate_up.double() / 5).tanh(), dtype)


def check_experts(
    ops: Any, device: str, *, tokens: int, clamped: bool = False, gelu: bool = False,
    biased: bool = False, count: int = 7, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Widths that fill no tile; one expert that no token has; a row that is NaN harms no other."""
    width, inner, top_k = 72, 40, 3
    config = ActivationConfig(limit=1.0, alpha=1.7) if clamped else ActivationConfig(gelu=gelu)
    random = torch.Generator().manual_seed(tokens)

    def layer(rows: int, columns: int) -> LinearWeights:
        values = torch.randn(count * rows, columns, generator=random) * columns**-0.5
        bias = torch.randn(count * rows, generator=random) if biased else None
        bias = None if bias is None else bias.to(dtype)
        return LinearWeights(values.to(dtype), bias)

    weights = ExpertsWeights(count, layer(2 * inner, width), layer(width, inner))
    x = torch.randn(tokens, width, generator=random).to(dtype)
    ids = torch.randn(tokens, count - 1, generator=random).topk(top_k).indices.int() + 1
    factors = torch.rand(tokens, top_k, generator=random)
    shared = torch.randn(tokens, width, generator=random).to(dtype)
    gate = torch.randn(tokens, 1, generator=random).to(dtype)
    given = x, ids, factors, shared, gate
    expected = exact_experts(weights, config, *given)
    there = ExpertsWeights(count, *(_to(part, device) for part in (weights.gate_up, weights.down)))
    experts = ops.experts(there, config, top_k)
    arguments = [each.to(device) for each in given]
    clean = experts(*arguments)
    assert clean.dtype == dtype
    assert_close(clean, expected, dtype)
    assert_close(experts(*arguments[:3]), exact_experts(weights, config, *given[:3]), dtype)
    arguments[0] = arguments[0].clone()
    arguments[0][:1] = torch.nan
    found = experts(*arguments)
    assert found[:1].isnan().all()
    assert torch.equal(found[1:], clean[1:])


def check_sort_pairs(module: ModuleType, tokens: int, num_experts: int, device: str) -> None:
    """By expert, of one in their order; the tiles of each; one has none."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(1, num_experts, (tokens, 3), generator=random).int()
    pairs, starts, tile_ends = (
        each.flatten().cpu() for each in module.sort_pairs(ids.to(device), num_experts, 16)
    )
    assert torch.equal(pairs.long(), ids.flatten().argsort(stable=True))
    counts = ids.flatten().bincount(minlength=num_experts)
    assert torch.equal(starts[1:].long(), counts.cumsum(0))
    assert starts[0] == 0
    assert torch.equal(tile_ends.long(), ((counts + 15) // 16).cumsum(0))


def check_sum_experts(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """A token's experts, and a shared one that is a part of wider rows, with a gate or without."""
    random = torch.Generator().manual_seed(5)
    tokens, top_k, width = 5, 3, 1100
    x = torch.randn(tokens, top_k * width, generator=random)
    shared = torch.randn(tokens, width + 7, generator=random).to(dtype)[:, 7:]
    gate = torch.randn(tokens, 2, generator=random).mul(3).to(dtype)[:, 1:]
    summed = x.view(tokens, top_k, width).double().sum(1)
    for given in ((None, None), (shared, None), (shared, gate)):
        expected = add_shared_expert(
            summed, *(None if each is None else each.double() for each in given)
        )
        out = torch.full((tokens, width), torch.nan, dtype=dtype, device=device)
        there = [None if each is None else each.to(device) for each in given]
        module.sum_experts(out, x.to(device), top_k, *there)
        assert_close(out, expected, dtype)


def check_routing(ops: Any, config: RoutingConfig, device: str) -> None:
    """Against the same in plain torch, of logits that tie nowhere."""
    weights = router_weights(config)
    x = torch.randn(19, 40, generator=torch.Generator().manual_seed(4))
    expected = TorchRouting(config, weights)(x)
    there = RouterWeights(
        _to(weights.linear, device),
        *(None if w is None else w.to(device) for w in (weights.correction, weights.expert_scale)),
    )
    found = ops.routing(config, there)(x.to(device))
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-4, atol=0)
    assert ops.routing(config, there)(x[:0].to(device))[0].shape == (0, config.top_k)


def check_routing_without_numbers(ops: Any, name: str) -> None:
    """Such a row has experts all the same, different ones, and weights that are no numbers; others
    are what they were."""
    for config in (ROUTINGS["renormalised"], ROUTINGS[name]):
        x = torch.randn(5, 40, generator=torch.Generator().manual_seed(4))
        routing = ops.routing(config, router_weights(config))
        clean = [each.clone() for each in routing(x)]
        x[1], x[3] = torch.nan, torch.inf
        ids, weights = routing(x)
        for row in (1, 3):
            assert len(set(ids[row].tolist())) == config.top_k
            assert set(ids[row].tolist()) <= set(range(12))
            assert weights[row].isnan().any()
        for found, expected in zip((ids, weights), clean, strict=True):
            assert torch.equal(found[::2], expected[::2])


def check_routing_ties(ops: Any) -> None:
    """The first of equal ones come first."""
    ties = RouterWeights(LinearWeights(torch.zeros(12, 40)))
    assert ops.routing(SOFTMAX, ties)(torch.ones(2, 40))[0].tolist() == [[0, 1, 2]] * 2


def _to(layer: LinearWeights, device: str) -> LinearWeights:
    bias = None if layer.bias is None else layer.bias.to(device)
    return LinearWeights(layer.values.to(device), bias)


def check_rope_cache(
    ops: Any, shape: AttentionShape, device: str, *, norm: bool, whole: bool = False,
    wide: bool = False, scaled: bool = False, values: bool = False, block_size: int = 16,
    layout: str = "layers", dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Every element of q, k, v and of the cache is looked at.

    Args:
        whole: the norm is over all heads.
        wide: the norm's weight is in float32.
        scaled: queries have cosines and sines of their own.
        values: these are normed as well.
    """
    random = torch.Generator().manual_seed(0)
    tokens, blocks, padded = 7, 6, 2
    num_q, num_k, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    merged = torch.randn(tokens, (num_q + 2 * num_k) * dim, generator=random).to(dtype)
    counts = (num_q, num_k) if whole else (1, 1)
    q_weight, k_weight = (torch.rand(count * dim, generator=random) + 0.5 for count in counts)
    if not wide:
        q_weight, k_weight = q_weight.to(dtype), k_weight.to(dtype)
    positions = torch.randint(0, 400, (tokens,), generator=random)
    angles = torch.outer(torch.arange(400.0), 100.0 ** -(torch.arange(dim // 2) / dim))
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    if scaled:
        table = torch.stack((table * 1.5, table), 1)
    # Padded rows write slot 0, in the null block.
    free = torch.randperm((blocks - 1) * block_size, generator=random)[:tokens] + block_size
    slots = torch.where(torch.arange(tokens) < tokens - padded, free, 0)
    heads = merged.view(tokens, -1, dim)
    weights = (q_weight, k_weight) if norm else None
    expected = _turned(heads, (num_q, num_k), weights, table[positions], whole=whole)
    if values:
        v = expected[2]
        expected = *expected[:2], v * (v.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    weights = (q_weight.to(device), k_weight.to(device)) if norm else (None, None)
    v_weight = torch.ones(dim, dtype=q_weight.dtype, device=device) if values else None
    op = ops.rope_and_cache(shape, *weights, 1e-6, v_weight)
    cache = make_cache(layout, blocks, block_size, num_k, dim, dtype)
    strides = cache.stride()
    cache = torch.empty_strided(cache.shape, strides, dtype=dtype, device=device)
    cache.fill_(torch.nan)
    rotary = ops.rotary(table.to(device), positions.to(device))
    found = op(merged.to(device).clone(), rotary, cache, slots.to(device))
    for part, wanted in zip(found, expected, strict=True):
        assert_close(part, wanted, dtype)
    if not (whole or scaled):
        alone = ops.rope(shape, weights[0], 1e-6)
        q = alone(merged[:, : num_q * dim].to(device).clone(), rotary)
        assert torch.equal(q, found[0])
    if not values:
        assert torch.equal(found[2].cpu(), heads[:, num_q + num_k :])
    _check_cache(cache.cpu(), slots, torch.stack([part.cpu() for part in found[1:]]), padded)


def _turned(
    heads: Tensor,
    counts: tuple[int, int],
    weights: tuple[Tensor, Tensor] | None,
    rows: Tensor,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 q, k and v."""
    q, k, v = heads.double().split((*counts, counts[1]), 1)
    tables = rows.double().unsqueeze(1) if rows.dim() == 2 else rows.double()
    turned = []
    for index, x in enumerate((q, k)):
        cos, sin = tables[:, min(index, tables.shape[1] - 1), None].chunk(2, -1)
        if weights is not None:
            dims = (-2, -1) if whole else -1
            x = x * (x.square().mean(dims, keepdim=True) + 1e-6).rsqrt()
            x = x * weights[index].double().view(-1, x.shape[-1])
        first, second = x.chunk(2, -1)
        turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    return turned[0], turned[1], v


def _check_cache(cache: Tensor, slots: Tensor, kv: Tensor, padded: int) -> None:
    """The slots hold k and v to the bit, and nothing else has been written."""
    flat = cache.reshape(2, -1, *cache.shape[3:])
    real = len(slots) - padded
    assert torch.equal(flat[:, slots[:real]], kv[:, :real])
    untouched = torch.ones(flat.shape[1], dtype=torch.bool)
    untouched[slots] = False
    assert flat[:, untouched].isnan().all()


def decode_rows(block_size: int, device: str) -> StepInputs:
    """Slots out of order, tokens known and not, padding; what is computed is poison."""
    random = torch.Generator().manual_seed(block_size)
    width, num_slots = 5, 9
    table = torch.randint(1, 1 << 30, (num_slots + 1, width), generator=random, dtype=torch.int32)
    slots = torch.tensor([3, 5, 7, 0, -1, -1])
    positions = torch.randint(0, width * block_size, (len(slots),), generator=random)
    positions[0], positions[1], positions[4:] = 0, block_size, 0
    # More than two tiles of the kernel; the first two rows read what is changed.
    entries = torch.tensor([2 * width + 3, 2 * width + 4, 5 * width + 1, 3 * width])
    changed = torch.full((300,), num_slots * width)
    new_blocks = torch.zeros(300, dtype=torch.int32)
    changed[:2], new_blocks[:2] = entries[:2], torch.tensor([71, 72])
    changed[200:202], new_blocks[200:202] = entries[2:], torch.tensor([73, 74])
    changed[-1], new_blocks[-1] = 7 * width, 75
    return captured(
        table.to(device),
        slots.to(device),
        positions.to(device),
        torch.full((len(slots),), -7, dtype=torch.int32, device=device),
        block_size,
        previous_tokens=torch.tensor([-1, 8, -1, 0, 7, -1], device=device),
        table_changes=(changed.to(device), new_blocks.to(device)),
        token_ids=torch.full((len(slots),), -7, device=device),
        slot_mapping=torch.full((len(slots),), -7, device=device),
        last_sampled_tokens=torch.randint(9, 1000, (num_slots + 1,), generator=random).to(device),
    )


ROWS = ("req_indices", "previous_tokens", "positions", "token_ids", "seq_lens")


def check_step_state(
    decode_inputs: Callable[[StepInputs, KVGroupInputs], None], device: str, block_size: int
) -> None:
    """Computed against plain indexing. Changes are made before they are read, also without rows."""
    rows = decode_rows(block_size, device)
    (group,) = rows.groups
    assert group.table_changes is not None
    assert rows.previous_tokens is not None
    assert rows.last_sampled_tokens is not None
    expected = group.block_table.cpu().clone()
    for entry, value in zip(*(changes.tolist() for changes in group.table_changes), strict=True):
        expected[divmod(entry, expected.shape[1])] = value
    none = replace(rows, **{name: getattr(rows, name)[:0] for name in ROWS})
    alone = replace(
        group, block_table=group.block_table.clone(), slot_mapping=group.slot_mapping[:0]
    )
    decode_inputs(none, alone)
    assert torch.equal(alone.block_table.cpu(), expected)
    decode_inputs(rows, group)
    assert torch.equal(group.block_table.cpu(), expected)
    for row, slot in enumerate(rows.req_indices.tolist()):
        position, known = int(rows.positions[row]), int(rows.previous_tokens[row])
        block, token, length = 0, 0, 0
        if slot >= 0:
            block = int(group.block_table[slot, position // block_size])
            token = known if known >= 0 else int(rows.last_sampled_tokens[slot])
            length = position + 1
        assert rows.token_ids[row] == token
        assert rows.seq_lens[row] == length
        assert group.slot_mapping[row] == block * block_size + position % block_size


def sampling_rows(
    rows: int, vocab_size: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits from flat to peaked, and parameters that meet in all combinations."""
    random = torch.Generator().manual_seed(seed)
    sharpness = torch.tensor([0.01, 1.0, 3.0])[torch.arange(rows) % 3]
    logits = torch.randn(rows, vocab_size, generator=random) * sharpness.unsqueeze(1)
    states = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
    positions = torch.randint(0, 100_000, (rows,), generator=random)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=random)]

    temperature = pick(0.0, 0.6, 1.0, 1.7)
    top_k = pick(0, 0, 1, 3, 40, vocab_size - 1, vocab_size + 5).to(torch.int32)
    return logits, states, positions, temperature, top_k, pick(1.0, 0.95, 0.4, 0.01), pick(0, 0.05)


def draw(sample: Callable[..., None], arguments: Sequence[Tensor]) -> Tensor:
    """The tokens of an op set's ``sample`` for the arguments of ``gumbel_sample``."""
    logits, states, positions, *parameters = arguments
    lines = torch.arange(len(logits), device=logits.device)
    out = torch.empty_like(lines)
    sampling = draw_scalars(states, *parameters)
    sample(logits, sampling, RowsToSample(lines, positions - 1, torch.empty_like(lines)), out)
    return out


def check_sampling(sample: Callable[..., None], arguments: tuple[Tensor, ...], device: str) -> None:
    """Equal to the plain function, token for token."""
    found = draw(sample, [value.to(device) for value in arguments]).cpu()
    expected = gumbel_sample(*arguments)
    differing = (found != expected).nonzero().flatten().tolist()
    for row in differing:
        _explain(row, int(found[row]), int(expected[row]), arguments)
    assert len(differing) <= len(expected) // 1000, f"{len(differing)} near ties"


def check_top_k(sample: Callable[..., None], device: str) -> None:
    """Cuts among fewer candidates than are sorted, as many, more, and all of them alike; behind
    min_p, and before top_p."""
    vocab_size, rows = 12 * 256 - 3, 7
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, vocab_size, generator=random)
    logits[2, 256:] = -torch.inf
    # So many share the largest logit that a sort does not hold them.
    logits[3] = 0.0
    logits[4] = -torch.inf
    logits[4, :300] = torch.arange(300) * 1e-3
    logits[6] = -torch.inf
    logits[6, [9, 700, 3000]] = torch.tensor([1.0, 2.0, 2.0])
    top_k = torch.tensor([1, 11, 250, 5, 10, 7, 5], dtype=torch.int32)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.7, 0.0])
    top_p = torch.tensor([1.0, 0.6, 1.0, 1.0, 1.0, 1.0, 1.0])
    states, ones = torch.arange(rows) * 977 + 5, torch.ones(rows)
    arguments = (logits, states, torch.arange(rows), ones, top_k, top_p, min_p)
    check_sampling(sample, arguments, device)


def _explain(row: int, found: int, expected: int, arguments: tuple[Tensor, ...]) -> None:
    """A difference is excused where rounding decides: the scores of both tokens tie."""
    logits, states, positions, temperature = (value[row : row + 1] for value in arguments[:4])
    noise = vocab_exponential_noise(gumbel_keys(states, positions), logits.shape[1])
    scores = logits.double() / temperature.double().unsqueeze(1) - noise.double().log()
    gap = float(scores[0, expected] - scores[0, found])
    assert abs(gap) < 1e-4, f"row {row}: token {found} instead of {expected}, gap {gap:.3g}"


def check_odd_rows(sample: Callable[..., None], device: str) -> None:
    """Ties go to the first token; rows that are no numbers have no token and affect no others."""
    vocab_size = 700
    logits = torch.zeros(8, vocab_size)
    logits[1, 300] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 699] = -3.0
    logits[5, [7, 650]] = 2.0
    logits[6, [256, 650]] = 2.0
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    top_k = torch.tensor([0, 0, 0, 5, 5, 0, 1, 0], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.9, 1.0, 1.0, 1e-6])
    seeds = torch.arange(8) * 977
    arguments = (logits, seeds, torch.arange(8), temperature, top_k, top_p, torch.zeros(8))
    found = draw(sample, [value.to(device) for value in arguments]).tolist()
    assert found == [0, -1, -1, NO_TOKEN_LEFT, 699, 7, 256, 0]
    assert gumbel_sample(*arguments).tolist() == found


def check_company(sample: Callable[..., None], device: str) -> None:
    """A row's token is the same alone, in a batch, in another order, and by slot."""
    arguments = sampling_rows(8, 1300, seed=5)
    there = [value.to(device) for value in arguments]
    together = draw(sample, there)
    for row in (0, 3, 7):
        assert draw(sample, [value[row : row + 1] for value in there]) == together[row]
    slots = torch.tensor([6, 2, -1, 5], device=device)
    rows = slots.clamp(min=0)
    last_sampled_tokens = torch.full((8,), -5, device=device)
    sampling, found = draw_scalars(there[1], *there[3:]), torch.empty_like(slots)
    drawn = RowsToSample(slots, there[2][rows] - 1, last_sampled_tokens)
    sample(there[0][rows], sampling, drawn, found)
    assert found.tolist() == torch.where(slots >= 0, together[rows], -1).tolist()
    expected = torch.full((8,), -5)
    expected[[6, 2, 5]] = together[[6, 2, 5]].cpu()
    assert last_sampled_tokens.tolist() == expected.tolist()
