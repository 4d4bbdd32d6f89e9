"""Checkpoints: reading, staging, mapping and refusals."""

from __future__ import annotations

import gc
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.reader import TensorInfo
from asyncllm.checkpoint.safetensors_reader import SafetensorsReader
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.models.architectures import (
    is_small_model,
    parameters,
)
from asyncllm.gpu.models.dense import DecoderBuilder
from asyncllm.gpu.weight_upload import PinnedUploader
from asyncllm.gpu.weights import dummy_weights, load_weights, weights_bytes
from tests.checkpoints import make_checkpoint
from tests.driver import Driver
from tests.families import make
from tests.live_bytes import LiveBytes
from tests.static_runner import make_decoder, make_runner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("source")
    make_checkpoint(path, "Qwen3ForCausalLM", head_dim=32, num_hidden_layers=2)
    return ModelConfig.from_directory(path)


@pytest.fixture
def copy(source: ModelConfig, tmp_path: Path) -> ModelConfig:
    shutil.copytree(source.path, tmp_path / "copy")
    return replace(source, path=tmp_path / "copy")


def read(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(load_weights(config, dtype, CPU))


def edit(config: ModelConfig, change) -> Path:
    path = config.path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def shard(tensors: dict[str, torch.Tensor], path: Path, count: int) -> Path:
    """So many files with tensors of each, and their index, which is returned."""
    path.mkdir(exist_ok=True)
    names, files = sorted(tensors), {}
    for number in range(count):
        file, part = f"part{number}.safetensors", names[number::count]
        save_file({name: tensors[name] for name in part}, path / file)
        files |= dict.fromkeys(part, file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return index


def refused(config: ModelConfig) -> str:
    with pytest.raises(ModelLoadError) as error:
        read(config)
    return str(error.value)


def test_parameters_are_packed_in_order(source):
    tensors = load_file(source.path / "model.safetensors")
    packed = read(source)
    assert list(packed) == [parameter.name for parameter in parameters(source)]
    layer = "model.layers.1."
    for name, parts in (
        ("layers.1.qkv.weight", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("layers.1.gate_up.weight", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        expected = torch.cat([tensors[f"{layer}{part}.weight"] for part in parts])
        assert torch.equal(packed[name], expected)
    assert torch.equal(packed["lm_head.weight"], tensors["lm_head.weight"])


class DictReader:
    """A checkpoint in memory."""

    quantisation_label = ignored_quantisation = ""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held = tensors
        names = {torch.float32: "F32", torch.int64: "I64"}
        self.tensors = {
            name: TensorInfo(Path("memory"), tuple(t.shape), names[t.dtype], t.nbytes)
            for name, t in tensors.items()
        }
        self.closed = False

    def tensor(self, name: str) -> torch.Tensor:
        assert not self.closed
        return self.held[name]

    def slices(self, name: str) -> Iterator[torch.Tensor]:
        return iter(self.tensor(name).split(7))

    def quantised_tensor(self, name: str) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def test_any_reader_of_checkpoints_loads_the_same_decoder(source, tmp_path):
    reader = DictReader(load_file(source.path / "model.safetensors"))
    elsewhere = replace(source, path=tmp_path)
    calls: list[list[tuple[int, int]]] = [[], []]
    found = {}
    for index, settings in enumerate(({}, {"open_reader": lambda path, dtype: reader})):
        model = elsewhere if settings else source
        report = calls[index].append
        weights = load_weights(
            model, torch.float32, CPU, lambda *now, report=report: report(now), **settings
        )
        decoder = make_decoder(source, weights)
        driver = Driver(make_runner(decoder, capturer=None))
        seq = driver.add([3, 1, 4, 1, 5], 6)
        driver.run([seq])
        found[index] = (seq.outputs, seq.logprobs)
    assert found[0] == found[1]
    assert calls[0] == calls[1]
    assert reader.closed


def test_a_readers_tensors_are_checked_as_a_files_are(source):
    tensors = load_file(source.path / "model.safetensors")
    changes = {
        "memory: tensor 'model.norm.weight' is missing": {"model.norm.weight": None},
        "memory: tensor 'surplus' is none": {"surplus": torch.zeros(3)},
        "is I64 of shape .*expected F64 or F32 or": {
            "model.norm.weight": torch.zeros(64, dtype=torch.int64)
        },
        r"F32 of shape \(63,\), expected .* of shape \(64,\)": {
            "model.norm.weight": torch.zeros(63)
        },
    }
    for words, change in changes.items():
        kept = {name: t for name, t in (tensors | change).items() if t is not None}
        reader = DictReader(kept)
        with pytest.raises(ModelLoadError, match=words):
            dict(load_weights(source, torch.float32, CPU, open_reader=lambda *_, r=reader: r))
        assert reader.closed


def test_reader_metadata(source):
    tensors = load_file(source.path / "model.safetensors")
    with closing(SafetensorsReader(source.path)) as reader:
        assert reader.tensors == {
            name: TensorInfo(source.path / "model.safetensors", tuple(t.shape), "F32", t.nbytes)
            for name, t in tensors.items()
        }
        assert all(torch.equal(reader.tensor(name), t) for name, t in tensors.items())
        assert pickle.loads(pickle.dumps(reader.tensors)) == reader.tensors


def test_a_parameter_may_have_a_dtype_of_its_own(source):
    plain = weights_bytes(source, torch.bfloat16)
    assert plain == sum(t.nbytes for t in read(source, torch.bfloat16).values())
    source = replace(source, float32_norm_weights=True)
    for load in (load_weights, dummy_weights):
        found = dict(load(source, torch.bfloat16, CPU))
        for name, tensor in found.items():
            assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
        assert sum(t.nbytes for t in found.values()) == weights_bytes(source, torch.bfloat16)
    assert weights_bytes(source, torch.bfloat16) > plain


def test_sizes_take_one_layer_for_all(source, monkeypatch):
    of_layer = DecoderBuilder.layer

    def first(builder: DecoderBuilder, layer: int):
        assert layer == 0
        return of_layer(builder, layer)

    monkeypatch.setattr(DecoderBuilder, "layer", first)
    sizes = [
        weights_bytes(replace(source, num_layers=count), torch.float32)
        for count in (1, 2, 10**15, 10**15 + 1)
    ]
    assert sizes[1] - sizes[0] == sizes[3] - sizes[2] > 0
    assert sizes[3] == sizes[0] + 10**15 * (sizes[1] - sizes[0])
    assert is_small_model(source)
    assert not is_small_model(replace(source, num_layers=10**15))


def test_parameters_are_listed_without_memory_for_them(source):
    huge = replace(source, vocab_size=2**43, path=Path("nowhere"))
    found, expected = parameters(huge), parameters(source)
    assert [p.name for p in found] == [p.name for p in expected]
    assert found[0].shape == (2**43, source.hidden_size)
    assert found[1:-1] == expected[1:-1]
    assert weights_bytes(huge, torch.float32) > 2**43 * source.hidden_size * 4


LISTING = """
import sys
from pathlib import Path
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.architectures import parameters
models = [ModelConfig.from_directory(Path(path)) for path in sys.argv[1:]]
before = set(sys.modules)
counts = [len(parameters(model)) for model in models]
print(counts, sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_a_listing_imports_nothing(tmp_path):
    """Arithmetic on torch's meta device takes seconds of imports when it is first used."""
    paths = [tmp_path / name for name in ("Glm4", "Gemma4-experts", "Qwen3Next", "GptOss")]
    for path in paths:
        make(path, path.name)
    expected = [len(parameters(ModelConfig.from_directory(path))) for path in paths]
    command = [sys.executable, "-c", LISTING, *map(str, paths)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"{expected} []"


def test_weights_are_taken_by_name(source):
    drawn = list(dummy_weights(source, torch.float32, CPU))
    with pytest.raises(RuntimeError, match=r"layers\.1\.down\.weight where norm\.weight is due"):
        make_decoder(source, [*drawn[:-2], drawn[-3], drawn[-1]])
    with pytest.raises(RuntimeError, match=r"left over: lm_head\.weight"):
        make_decoder(source, [*drawn, drawn[-1]])


def test_conversion_and_progress(source):
    tensors = load_file(source.path / "model.safetensors")
    total = sum(t.numel() * 4 for t in tensors.values())
    calls: list[tuple[int, int]] = []
    loaded = load_weights(source, torch.bfloat16, CPU, lambda done, of: calls.append((done, of)))
    for name, tensor in loaded:
        assert tensor.dtype == torch.bfloat16, name
    assert [of for _, of in calls] == [total] * len(tensors)
    assert calls[-1][0] == total
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_shards_and_a_single_file_are_the_same(source, tmp_path):
    index_file = shard(load_file(source.path / "model.safetensors"), tmp_path, 3)
    sharded = read(replace(source, path=tmp_path))
    for name, tensor in read(source).items():
        assert torch.equal(tensor, sharded[name])
    (tmp_path / "part1.safetensors").unlink()
    message = refused(replace(source, path=tmp_path))
    assert "1 of 3 files in weight_map are missing: part1.safetensors" in message
    for text, words in {
        '{"weight_map": {"a": "../elsewhere.safetensors"}}': "elsewhere",
        "{": "not valid JSON",
        "[]": "expected a JSON object",
        '{"weight_map": 3}': "weight_map is 3",
        '{"weight_map": {}}': "weight_map is {}",
    }.items():
        index_file.write_text(text)
        message = refused(replace(source, path=tmp_path))
        assert str(tmp_path) in message
        assert words in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, ["is missing", "(96, 64)"]),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(128), ["none of this architecture"]),
        (
            "model.layers.0.self_attn.k_proj.weight",
            torch.zeros(32, 64),
            ["(32, 64)", "(64, 64)"],
        ),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int64), ["I64"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(copy, name, value, words):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    path, message = edit(copy, change), refused(copy)
    for part in (str(path), name, *words):
        assert part in message


def test_harmless_surplus(copy, source):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    edit(copy, lambda tensors: tensors.update(frequencies))
    assert len(read(copy)) == len(read(source))


def test_the_head_beside_a_tied_embedding_is_a_copy_of_it(copy):
    """transformers would compute with another."""
    tied = replace(copy, tie_word_embeddings=True)
    message = refused(tied)
    assert "'lm_head.weight' is not 'model.embed_tokens.weight'" in message
    assert "tie_word_embeddings is True" in message
    same = "model.embed_tokens.weight"
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": tensors[same].clone()}))
    assert "lm_head.weight" not in read(tied)


@pytest.mark.parametrize("damage", ["half", "short", "empty", "pickle", "text"])
def test_damaged_file(copy, damage):
    path = copy.path / "model.safetensors"
    content = path.read_bytes()
    if damage == "pickle":
        torch.save({"model.norm.weight": torch.zeros(3)}, path)
    else:
        kept = {"half": content[: len(content) // 2], "short": content[:-1], "empty": b""}
        path.write_bytes(kept.get(damage, b"version https://example.invalid/spec\n" * 3))
    message = refused(copy)
    assert str(path) in message
    assert "not a whole safetensors file" in message


def test_a_file_without_tensors(copy):
    edit(copy, lambda tensors: tensors.clear())
    assert refused(copy) == f"{copy.path}: its safetensors files have no tensor"


def shards(path: Path, value: float) -> None:
    """Five files of a tensor each."""
    shard({f"t{i}": torch.full((4, 4), value) for i in range(5)}, path, 5)


@pytest.mark.parametrize("read", [1, 5])
def test_another_checkpoint_in_its_place_is_not_mixed_with_it(tmp_path, read):
    shards(tmp_path / "model", 1.0)
    shards(tmp_path / "next", 2.0)
    reader = SafetensorsReader(tmp_path / "model")
    for i in range(read):
        assert reader.tensor(f"t{i}").eq(1.0).all()
    for file in (tmp_path / "next").glob("*.safetensors"):
        file.replace(tmp_path / "model" / file.name)
    for i in range(5):
        with pytest.raises(ModelLoadError, match=rf"part{i}\.safetensors: was changed while"):
            reader.tensor(f"t{i}")
    reader.close()


def test_truncated_mapped_file_is_not_read(tmp_path):
    """A read behind its end would end the process."""
    shards(tmp_path, 1.0)
    reader = SafetensorsReader(tmp_path)
    assert reader.tensor("t0").eq(1.0).all()
    with (tmp_path / "part0.safetensors").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(ModelLoadError, match=r"part0\.safetensors: was changed while"):
        reader.tensor("t0")
    reader.close()


def test_mapped_weights_outlive_unlink(tmp_path):
    shards(tmp_path, 1.0)
    reader = SafetensorsReader(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert reader.tensor("t4").eq(1.0).all()
    with pytest.raises(ModelLoadError, match=r"part0\.safetensors: cannot be read \(No such file"):
        reader.tensor("t0")
    reader.close()


def test_os_errors_name_the_file(copy, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 4 bytes")  # torch's, of an errno

    monkeypatch.setattr("asyncllm.checkpoint.safetensors_reader.safe_open", refuse)
    message = refused(copy)
    assert f"{copy.path / 'model.safetensors'}: cannot be read (unable to mmap" in message


def test_no_file_at_all(copy):
    (copy.path / "model.safetensors").unlink()
    assert "model.safetensors" in refused(copy)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_the_files_are_closed_again(copy):
    decoder = make_decoder(copy, load_weights(copy, torch.float32, CPU))
    assert str(copy.path) not in Path("/proc/self/maps").read_text()
    assert decoder.embedding.shape == (256, 64)


def test_dummy_weights_are_deterministic_and_keep_global_seed(source):
    state = torch.get_rng_state()
    first = dict(dummy_weights(source, torch.float32, CPU))
    second = dict(dummy_weights(source, torch.float32, CPU))
    assert torch.equal(state, torch.get_rng_state())
    assert {name: t.shape for name, t in first.items()} == {
        name: t.shape for name, t in read(source).items()
    }
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["layers.0.qkv.weight"].std().item() == pytest.approx(1 / 8, rel=0.05)


class LateUploader(PinnedUploader):
    """A device that does nothing before it is waited for: a buffer that is filled again too
    early arrives with the wrong contents."""

    def __init__(self, **options: int) -> None:
        super().__init__(CPU, pin=False, **options)
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.most = 0

    def queue_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.started.append((source, target))
        self.most = max(self.most, len(self.started) - self.done)

    def record_event(self) -> int:
        return len(self.started)

    def wait(self, event: int) -> None:
        for source, target in self.started[self.done : event]:
            target.copy_(source)
        self.done = max(self.done, event)


def staged(
    config: ModelConfig, dtype: torch.dtype, chunk_bytes: int, *report: Any
) -> tuple[dict, LateUploader]:
    staging = LateUploader(chunk_bytes=chunk_bytes)
    return dict(load_weights(config, dtype, CPU, *report or [None], uploader=staging)), staging


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 4096, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_staged_weights_equal_directly_copied_ones(source, dtype, chunk_bytes):
    """Chunks that end within a row, and ones larger than any tensor."""
    expected = read(source, dtype)
    found, transfers = staged(source, dtype, chunk_bytes)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name]), name
    assert transfers.done == len(transfers.started) > 2
    # Two buffers on their way, each with its conversion, is what "double-buffered" says.
    assert transfers.most == (2 if dtype == torch.float32 else 4)


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_staged_conversion_is_exact_and_reports_the_same(copy, stored):
    edit(copy, lambda tensors: tensors.update({k: t.to(stored) for k, t in tensors.items()}))
    calls: list[list[tuple[int, int]]] = [[], []]
    plain = load_weights(copy, torch.float32, CPU, lambda *now: calls[0].append(now))
    expected = {name: tensor.clone() for name, tensor in plain}
    found, _ = staged(copy, torch.float32, 1000, lambda *now: calls[1].append(now))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert calls[0] == calls[1]
    assert calls[0][-1][0] == calls[0][-1][1] > 0


@pytest.mark.parametrize(
    ("dtype", "buffers"), [(torch.float32, 2), (torch.bfloat16, 4)], ids=["same", "converted"]
)
def test_staging_takes_its_buffers_and_no_more(source, dtype, buffers):
    """Beside the parameters: two chunks on the host, and two on the device to convert in."""
    chunk = 2048
    with LiveBytes() as live:
        staging = LateUploader(chunk_bytes=chunk)
        loaded = []
        for _, tensor in load_weights(source, dtype, CPU, uploader=staging):
            loaded.append(tensor)
        staging.started.clear()
        parameters = sum(tensor.nbytes for tensor in loaded)
        assert live.peak == parameters + buffers * chunk
        assert max(tensor.nbytes for tensor in loaded) > 10 * chunk
        del staging, tensor
        loaded.clear()
        gc.collect()
        assert live.now == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lent_weights_share_a_buffer_or_are_the_file(source, dtype):
    """What a packing op set is given: the same values and progress, and beside what is kept no more
    memory than the largest weight has that is put together of parts, or of another dtype."""
    calls: list[list[tuple[int, int]]] = [[], []]
    loaded = load_weights(source, dtype, CPU, lambda *now: calls[0].append(now))
    expected = {name: tensor.clone() for name, tensor in loaded}
    kept: list[torch.Tensor] = []
    most = 0
    with LiveBytes() as live:
        loaded = load_weights(
            source, dtype, CPU, lambda *now: calls[1].append(now), is_transient=True
        )
        for name, tensor in loaded:
            assert torch.equal(tensor, expected[name]), name
            if tensor.dim() == 1 or name == "embed.weight":
                kept.append(tensor)
            elif dtype != torch.float32 or "qkv" in name or "gate_up" in name:
                most = max(most, tensor.nbytes)
        del tensor
        gc.collect()
        small = sum(tensor.nbytes for tensor in kept)
        assert live.now == small
        # One byte is a comparison's.
        assert small + most <= live.peak <= small + most + 1
    for tensor in kept:
        assert any(torch.equal(tensor, each) for each in expected.values())
    assert calls[0] == calls[1]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_two_files_of_a_checkpoint_are_mapped_at_once(copy):
    expected = read(copy)
    path = copy.path / "model.safetensors"
    shard(load_file(path), copy.path, 7)
    path.unlink()
    most = 0
    for name, tensor in load_weights(copy, torch.float32, CPU, is_transient=True):
        assert torch.equal(tensor, expected[name])
        maps = Path("/proc/self/maps").read_text()
        most = max(most, sum(f"{copy.path}/part{n}.safetensors" in maps for n in range(7)))
    # And that of the tensor which was handed out before.
    assert 1 <= most <= 3


def test_staged_progress_is_the_same(source):
    calls: list[list[tuple[int, int]]] = [[], []]
    for index, staging in enumerate((None, LateUploader())):
        report = calls[index].append
        for _ in load_weights(
            source, torch.float32, CPU, lambda *now, report=report: report(now), staging
        ):
            pass
    assert calls[0] == calls[1]
    assert calls[0][-1][0] == calls[0][-1][1] > 0


def test_loading_that_is_given_up_waits_for_nothing(source):
    """A progress callback may raise, and the checkpoint is closed."""
    staging = LateUploader(chunk_bytes=4096)

    def give_up(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(load_weights(source, torch.float32, CPU, give_up, staging))
    assert 0 < staging.done <= len(staging.started)
