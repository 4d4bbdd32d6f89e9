"""Models on packed GGUF blocks, against transformers on dequantised weights."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncllm import EngineConfig
from asyncllm.checkpoint.experts_config import ActivationConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.reader import GGUFQuantisedTensor
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.formats.gguf_reader import GGUFReader
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.weight_scope import _reorder_rows
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.linear_weights import GGUF_BLOCK_SIZES, LinearWeights, join_weights
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.native_weights import native_type_code, pack_new_weights
from asyncllm.gpu.packed.packed_file import PackedFile, PackedWeightRecorder, write_packed_file
from asyncllm.gpu.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.driver import Driver, Sequence
from tests.linear_weights import rounded
from tests.native_library import context, needs_native

gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
from tests.gguf_blocks import (  # noqa: E402
    block_weights,
    dequantised_blocks,
    random_blocks,
    set_floats,
)
from tests.gguf_files import permute, write_gguf  # noqa: E402
from tests.slow import slow_but  # noqa: E402

CPU = torch.device("cpu")
pytestmark = needs_native

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
KINDS = {
    # Llama's q and k have another order of rows, and v is of another type.
    "q4_k_m": ("LlamaForCausalLM", False, {
        "token_embd": "q4_k", "output.": "q6_k", "attn_v": "q6_k", "blk.0.ffn_down": "q6_k",
        "": "q4_k",
    }),
    "q5_k_m": ("LlamaForCausalLM", False, {
        "token_embd": "q5_k", "output.": "q6_k", "blk.1.attn_v": "q6_k", "": "q5_k",
    }),
    # Tied, and three types in one layer.
    "others": ("Qwen3ForCausalLM", True, {
        "token_embd": "q5_1", "attn_q.": "iq4_nl", "attn_k.": "q4_1", "attn_v": "q5_0",
        "ffn_gate": "Q8_0", "ffn_up": "q4_1", "ffn_down": "q5_0", "": "q4_k",
    }),
    "tied": ("Qwen3ForCausalLM", True, {"token_embd": "q6_k", "": "q4_k"}),
}  # fmt: skip
"""Architecture, whether its head is tied, and the types by parts of the stored names."""
PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6], list(range(40))]
OUTPUT = 12


@dataclass
class Case:
    """A file, and transformers' model of what it means, with inputs rounded as the kernels do.

    Attributes:
        num_bytes: of its tensors.
    """

    path: Path
    reference: Any
    num_bytes: int


def kind_of(kinds: dict[str, str], stored: str) -> str:
    return next(kind for part, kind in kinds.items() if part in stored)


def drawn_blocks(scheme: Any, shape: tuple[int, int], seed: int, rms: float) -> np.ndarray:
    """Random blocks of weights of this size, whose minima lie about their middle."""
    blocks = random_blocks(scheme, *shape, seed)
    middle = {"q4_1": -7.5, "q5_1": -15.5, "q4_k": 7.5, "q5_k": 15.5}.get(scheme, 0.0)
    set_floats(scheme, blocks, 1 / 64, middle / 64)
    size = float(np.square(dequantise(scheme, blocks)).mean()) ** 0.5
    set_floats(scheme, blocks, rms / size / 64, middle * rms / size / 64)
    return blocks


def dequantise(scheme: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[scheme.upper()])


def make_case(path: Path, name: str) -> Case:
    from benchmarks.peer_gguf import gguf_name

    architecture, tied, kinds = KINDS[name]
    model = make_checkpoint(path, architecture, **SIZES, head_dim=64, tie_word_embeddings=tied)
    raw: dict[str, Any] = {}
    meant = load_file(path / "model.safetensors")
    for seed, (full_name, tensor) in enumerate(meant.items()):
        kind = kind_of(kinds, gguf_name(full_name))
        if tensor.dim() < 2 or kind not in GGUF_BLOCK_SIZES:
            continue
        rms = float(tensor.square().mean()) ** 0.5
        blocks = drawn_blocks(kind, (tensor.shape[0], tensor.shape[1]), seed, rms)
        meant[full_name] = torch.from_numpy(dequantise(kind, blocks).copy())
        rotated = "q_proj" in full_name or "k_proj" in full_name
        if rotated and architecture == "LlamaForCausalLM":
            blocks = permute(blocks, 4 if "q_proj" in full_name else 2)
        raw[full_name] = blocks, gguf.GGMLQuantizationType[kind.upper()]
    others = {part: kind.upper() for part, kind in kinds.items()}
    written = write_gguf(path / "model.gguf", path, meant, others, raw=raw)
    return case_of(path / "model.gguf", model, meant | written)


def case_of(path: Path, model: Any, meant: dict[str, torch.Tensor]) -> Case:
    model.load_state_dict(meant, strict=not model.config.tie_word_embeddings)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            linear: Any = module
            linear.forward = rounding_linear(module.weight.detach().double())
    return Case(path, model, sum(t.num_bytes for t in gguf_tensors(path)))


def gguf_tensors(path: Path) -> list[Any]:
    from asyncllm.checkpoint.gguf_file import GGUFFile

    return [*GGUFFile(path).tensors.values()]


def rounding_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (rounded(x.flatten(0, -2)) @ weight.T).view(*x.shape[:-1], -1).float()

    return forward


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: make_case(tmp_path_factory.mktemp(name), name))


def make_runner(path: Path, **settings: Any) -> ModelRunner:
    config = EngineConfig(
        **{
            "device": "cpu", "dtype": "float32", "attention_backend": "native", "num_blocks": 64,
            "num_threads": 1, "async_scheduling": False, "packed_cache": "off",
        }
        | settings
    )  # fmt: skip
    return build_model_runner(config, ModelConfig.from_directory(path))


def run(path: Path, company: bool, chunk: int = 512) -> list[Sequence]:
    runner = make_runner(path)
    assert "one native program" in runner.execution
    found: list[Sequence] = []
    for prompts in [PROMPTS] if company else [[prompt] for prompt in PROMPTS]:
        driver = Driver(runner)
        sequences = [driver.add(prompt, OUTPUT) for prompt in prompts]
        driver.run(sequences, chunk=chunk)
        found += sequences
    runner.close()
    return found


def difference(case: Case, sequences: list[Sequence]) -> float:
    """The largest difference of log-probabilities, in units of how much they vary; of tokens, how
    much worse they are than the reference's."""
    worst = 0.0
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.error is None
        ids = torch.tensor([prompt + sequence.outputs])
        with torch.no_grad():
            rows = case.reference(ids).logits[0].double().log_softmax(-1)[len(prompt) - 1 : -1]
        for row, token, entry in zip(rows, sequence.outputs, sequence.logprobs, strict=True):
            wrong = [float(row.max() - row[token])]
            for candidate in (entry.sampled, *entry.top):
                wrong.append(abs(float(row[candidate.token_id]) - candidate.logprob))
            worst = max(worst, max(wrong) / float(rows.std()))
    return worst


LIMIT = 0.05
"""An input that lies between two integers may be rounded to either, so noise is not float32's."""


@pytest.mark.parametrize("name", slow_but(KINDS, "q4_k_m", "others"))
def test_tokens_and_logprobs_equal_dequantised_weights(load_case, name):
    """Alone, in company and in chunks, with equal bits."""
    case = load_case(name)
    alone = run(case.path, company=False)
    assert difference(case, alone) < LIMIT
    assert len({token for sequence in alone for token in sequence.outputs}) > 10
    for company, chunk in ((True, 512), (True, 3), (False, 7)):
        found = run(case.path, company, chunk)
        for one, other in zip(alone, found, strict=True):
            assert (one.outputs, one.logprobs) == (other.outputs, other.logprobs)


def without_minima(scheme: str, blocks: torch.Tensor) -> None:
    if scheme in ("q4_1", "q5_1", "q4_k", "q5_k"):
        blocks[:, :, 2:4] = 0


def neighbours_scales(scheme: str, blocks: torch.Tensor) -> None:
    if scheme == "q6_k":
        blocks[:, :, 192:208] = blocks[:, :, 192:208].roll(1, 2)
    elif scheme in ("q4_k", "q5_k"):
        # Of the first four spans, without the upper bits, which are the last four's.
        low = blocks[:, :, 4:8] & 63
        blocks[:, :, 4:8] = (blocks[:, :, 4:8] & 192) | low.roll(1, 2)


def swapped_bits(scheme: str, blocks: torch.Tensor) -> None:
    if scheme == "q6_k":
        high = blocks[:, :, 128:192]
        blocks[:, :, 128:192] = high >> 4 | high << 4
    elif scheme == "q5_k":
        high = blocks[:, :, 16:48]
        blocks[:, :, 16:48] = high >> 4 | high << 4


MUTATIONS = {
    "a minimum is forgotten": ("q4_k_m", without_minima),
    "a minimum of a small block is forgotten": ("others", without_minima),
    "a scale is that of the neighbouring span": ("q4_k_m", neighbours_scales),
    "a scale of 16 inputs is that of its neighbour": ("tied", neighbours_scales),
    "high bits of Q5_K are swapped": ("q5_k_m", swapped_bits),
    "high bits of Q6_K are swapped": ("tied", swapped_bits),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_mistakes(load_case, monkeypatch, mutation):
    name, mutate = MUTATIONS[mutation]
    case, quantised_tensor = load_case(name), GGUFReader.quantised_tensor

    def mutated(self: GGUFReader, name: str) -> Any:
        found = quantised_tensor(self, name)
        if not isinstance(found, GGUFQuantisedTensor):
            return found
        rows = found.read_rows(0, found.shape[0]).clone()
        mutate(found.scheme, rows.view(len(rows), -1, GGUF_BLOCK_SIZES[found.scheme][1]))  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(found, read_rows=lambda start, stop: rows[start:stop])

    monkeypatch.setattr(GGUFReader, "quantised_tensor", mutated)
    assert difference(case, run(case.path, company=True)) > 20 * LIMIT


def test_the_comparison_sees_a_head_that_is_not_tied(load_case, monkeypatch):
    case, tied = load_case("tied"), NativeOps.tied_embedding

    def apart(self: NativeOps, weights: LinearWeights, *more: Any) -> Any:
        other = dataclasses.replace(weights, values=weights.values.roll(1, 0))
        return tied(self, weights, *more)[0], tied(self, other, *more)[1]

    monkeypatch.setattr(NativeOps, "tied_embedding", apart)
    assert difference(case, run(case.path, company=True)) > 20 * LIMIT


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_little_more_than_the_file(load_case, name):
    """Nothing but vectors is dequantised."""
    case, own = load_case(name), context(1)
    held = 0
    weights = load_weights(
        ModelConfig.from_directory(case.path), torch.float32, CPU,
        accepts_weights=lambda spec: native_type_code(spec) is not None,
    )  # fmt: skip
    for _, each in weights:
        if isinstance(each, LinearWeights):
            held += sum(pack_new_weights(own, part).num_bytes for part in each.single_scheme_parts)
        else:
            assert each.dim() == 1
            held += each.nbytes
    assert held < 1.15 * case.num_bytes


@pytest.mark.parametrize("name", ["q4_k_m", "others"])
def test_the_file_of_packed_weights_has_the_same_bits(load_case, tmp_path, name):
    """An embedding of its own, and layers of several types, from the file of a start before."""
    case, own = load_case(name), context(1)

    def accepts(spec: Any) -> bool:
        return native_type_code(spec) is not None

    config, recorded, fresh = ModelConfig.from_directory(case.path), [], {}
    for key, each in load_weights(config, torch.float32, CPU, accepts_weights=accepts):
        if isinstance(each, LinearWeights):
            recorder = PackedWeightRecorder()
            layer = NativeOps(own).make_linear(dataclasses.replace(each, panels=recorder))
            recorded.append((key, recorder))
            fresh[key] = layer, each.spec
    with (tmp_path / "packed").open("w+b") as file:
        write_packed_file(file.fileno(), own, "key", {}, recorded)
    (tmp_path / "packed").chmod(0o600)
    found = PackedFile(tmp_path / "packed", {os.geteuid()})
    found.verify(own)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    read = dict(found.weights())
    assert list(read) == list(fresh)
    for key, (layer, spec) in fresh.items():
        stored: Any = read[key]
        assert stored.spec == spec
        again = NativeOps(own).make_linear(stored)
        own_x = x[:, : spec.shape[1]]
        assert torch.equal(layer(own_x), again(own_x))


def test_rows_of_several_forms_are_reordered_within_each():
    parts = [
        block_weights("q4_k", 6, 256, 1, bias=True),
        block_weights("q6_k", 4, 256, 2, bias=True),
    ]
    whole = join_weights(parts)
    assert whole.shape == (10, 256)
    assert whole.num_bytes == 6 * 144 + 4 * 210
    order = torch.tensor([5, 0, 1, 2, 3, 4, 9, 6, 7, 8])
    x, ops = torch.randn(2, 256), NativeOps(context(1))
    turned = ops.linear(_reorder_rows(whole, order))(x)
    assert torch.equal(turned, ops.linear(whole)(x)[:, order])
    apart = torch.cat([ops.linear(part)(x) for part in parts], 1)
    assert torch.equal(ops.linear(whole)(x), apart)
    with pytest.raises(ModelLoadError, match="rows 0 to 5 of scheme 'q4_k' are in another order"):
        _reorder_rows(whole, order.flip(0))


@pytest.mark.parametrize("scheme", ["q4_k", "q6_k", "q5_0"])
def test_experts_stay_packed(scheme):
    """Stacked: each expert's rows are a layer of their own."""
    count, hidden, inner, ops = 5, 256, 256, NativeOps(context(2))
    gate_up = block_weights(scheme, count * 2 * inner, hidden, seed=1)
    down = block_weights(scheme, count * hidden, inner, seed=2)
    for part, rms in ((gate_up, 0.1), (down, 0.1)):
        middle = 7.5 if scheme == "q4_k" else 0.0
        size = float(dequantised_blocks(part).square().mean()) ** 0.5
        set_floats(scheme, part.values.numpy(), rms / size / 16, middle * rms / size / 16)
    experts = ops.experts(ExpertsWeights(count, gate_up, down), ActivationConfig(), 2)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, hidden, generator=generator)
    ids = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in x]).int()
    weights = torch.rand(9, 2, generator=generator)
    expected = torch.zeros(9, hidden, dtype=torch.float64)
    first, second = dequantised_blocks(gate_up).double(), dequantised_blocks(down).double()
    for token, (own, factors) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, factor in zip(own, factors, strict=True):
            row = rounded(x[token : token + 1])
            both = row @ first[expert * 2 * inner : (expert + 1) * 2 * inner].T
            gate, up = both.chunk(2, 1)
            middle_rows = rounded((torch.nn.functional.silu(gate) * up).float())
            expected[token] += factor * (
                middle_rows @ second[expert * hidden : (expert + 1) * hidden].T
            ).squeeze(0)
    error = (experts(x, ids, weights).double() - expected).norm() / expected.norm()
    assert error < 1e-3
    assert (experts(x[:1], ids[:1], weights[:1]) == experts(x, ids, weights)[:1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_llama_cpp_types_stay_packed(tmp_path, tied):
    """A Q4_K_M file of llama.cpp's own tool, by the interpreter that LLAMA_CPP_PYTHON names."""
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if python is None:
        pytest.skip("LLAMA_CPP_PYTHON names no interpreter that has llama_cpp and gguf")
    model = make_checkpoint(
        tmp_path, "Qwen3ForCausalLM", **SIZES, head_dim=64, tie_word_embeddings=tied
    )
    path = tmp_path / "q4_k_m.gguf"
    command = [python, "-m", "benchmarks.peer_gguf", str(tmp_path), "q4_k_m", str(path)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with closing(GGUFReader(path, torch.float32)) as reader:
        assert reader.quantisation_label == "gguf, F32, Q4_K, Q6_K"
        meant = {name: reader.tensor(name) for name in reader.tensors}
    case = case_of(path, model, meant)
    assert difference(case, run(case.path, company=True)) < LIMIT
