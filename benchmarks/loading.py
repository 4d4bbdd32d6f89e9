"""Loading a checkpoint of each weight format: time, and memory beyond the weights that are held.

python -m benchmarks.loading [--quick] [--only NAME,…] [--json FILE] [--keep {packed,plain}]

Each is a Qwen3 of random bits, loaded in a process of its own into a bfloat16 model: its parameters
are made and kept, packed where native ops take them so, and nothing else is. The files are in the
page cache. CPU times are of one thread, so that what the machine does besides changes them little.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.architectures import parameters
from asyncllm.gpu.ops.linear_weights import LinearWeights, WeightSpec
from asyncllm.gpu.ops.native_weights import native_type_code
from asyncllm.gpu.weights import load_weights
from benchmarks.common import Report, options

MIB = 1 << 20
REPEATS = 2
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

Make = Callable[[int, int], dict[str, Tensor]]


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.rand(shape).mul_(0.01).to(dtype)


def awq(out: int, inputs: int) -> dict[str, Tensor]:
    groups = inputs // 128
    return {
        "qweight": ints(inputs, out // 8),
        "qzeros": ints(groups, out // 8),
        "scales": scales(groups, out),
    }


def gptq(out: int, inputs: int) -> dict[str, Tensor]:
    groups = inputs // 128
    return {
        "qweight": ints(inputs // 8, out),
        "qzeros": ints(groups, out // 8),
        "scales": scales(groups, out),
        "g_idx": (torch.randperm(inputs) // 128).int(),
    }


def fp8(out: int, inputs: int) -> dict[str, Tensor]:
    weight = ints(out, inputs, dtype=torch.int8) & 0x77
    return {
        "weight": weight.view(torch.float8_e4m3fn),
        "weight_scale_inv": scales(-(-out // 128), -(-inputs // 128), dtype=torch.float32),
    }


def pack4(out: int, inputs: int) -> dict[str, Tensor]:
    return {
        "weight_packed": ints(out, inputs // 8),
        "weight_scale": scales(out, inputs // 128, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([out, inputs]),
    }


def int8(out: int, inputs: int) -> dict[str, Tensor]:
    return {"weight": ints(out, inputs, dtype=torch.int8), "weight_scale": scales(out, 1)}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"0": group}}


SAFETENSORS: dict[str, tuple[dict[str, Any] | None, Make]] = {
    "plain": (None, lambda out, inputs: {"weight": torch.randn(out, inputs).bfloat16()}),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, gptq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "pack-4": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
        pack4,
    ),
    "int-8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8),
}
GGUF = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    (path / "config.json").write_text(json.dumps(SHAPE))
    return {
        name: (rows, *parameter.shape[1:])
        for parameter in parameters(ModelConfig.from_directory(path))
        for name, rows in parameter.parts
    }


def write_safetensors(path: Path, quantization: dict[str, Any] | None, make: Make) -> Path:
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(path).items():
        if "_proj." in name:
            parts = make(*shape)
            tensors |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
        else:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    if quantization is not None:
        config = SHAPE | {"quantization_config": quantization}
        (path / "config.json").write_text(json.dumps(config))
    return path


def write_gguf(path: Path, kind: str) -> Path:
    import gguf
    import numpy as np

    from benchmarks.peer_gguf import gguf_name

    file = path / "model.gguf"
    writer = gguf.GGUFWriter(file, "qwen3")
    for name, value in (
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("feed_forward_length", "intermediate_size"),
        ("head_count", "num_attention_heads"),
        ("head_count_kv", "num_key_value_heads"),
        ("key_length", "head_dim"),
    ):
        getattr(writer, f"add_{name}")(SHAPE[value])
    quant = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[quant]
    random = np.random.default_rng(0)
    for name, shape in tensor_shapes(path).items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, np.float32))
        else:
            raw = random.integers(0, 60, (shape[0], shape[1] // elements * size), np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def anonymous_bytes() -> int:
    """What the process holds beside mapped files (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


class Peak:
    """The most that the process holds while the block runs, looked at every 2 ms."""

    def __enter__(self) -> Peak:
        self.begin = self.most = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, anonymous_bytes())


def load(path: Path, dtype: str, threads: int, keep: str) -> dict[str, float]:
    """In a process of its own: seconds, bytes held, and the most held beside them.

    Args:
        keep: "packed" keeps the forms that native ops take, "plain" dequantises all.
    """

    def takes(spec: WeightSpec) -> bool:
        return keep == "packed" and native_type_code(spec) is not None

    torch.set_num_threads(threads)
    if path.is_file():
        # The tokenizer of a GGUF file imports it in every engine.
        import transformers.integrations.gguf.dequant  # noqa: F401 - for what it loads
    model = ModelConfig.from_directory(path)
    start, cpu = time.perf_counter(), time.thread_time()
    with Peak() as peak:
        held = list(
            load_weights(model, getattr(torch, dtype), torch.device("cpu"), accepts_weights=takes)
        )
    seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
    num_bytes = sum(
        each.num_bytes if isinstance(each, LinearWeights) else each.nbytes for _, each in held
    )
    return {
        "seconds": seconds,
        "cpu": cpu,
        "held": num_bytes,
        "beside": peak.most - peak.begin - num_bytes,
        "elements": sum(math.prod(tensor.shape) for _, tensor in held),
    }


def measure(report: Report, name: str, path: Path, threads: int, repeats: int, keep: str) -> None:
    command = [sys.executable, "-m", "benchmarks.loading", "--load", str(path), str(threads), keep]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(repeats)]
    best = min(runs, key=lambda run: run["seconds"])
    stored = sum(f.stat().st_size for f in ([path] if path.is_file() else path.glob("*.safe*")))
    report.section(name)
    report.add("read", stored / MIB, "MiB")
    report.add("held", best["held"] / MIB, "MiB")
    report.add("best load", best["seconds"], "s", f"of {repeats} runs")
    cpu = min(run["cpu"] for run in runs)
    report.add("least CPU time of the loading thread", cpu, "s")
    report.add("elements a second of it", best["elements"] / cpu / 1e6, "M")
    report.add("most beside what is held", max(r["beside"] for r in runs) / MIB, "MiB")


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        print(json.dumps(load(Path(sys.argv[2]), "bfloat16", int(sys.argv[3]), sys.argv[4])))
        return
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="names of formats, by commas")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--keep", choices=("packed", "plain"), default="packed")
    args = parser.parse_args()
    wanted = [name for name in args.only.split(",") if name]
    report = Report("loading", {"threads": str(args.num_threads)})
    if args.quick:
        SHAPE["num_hidden_layers"] = 1
    for name in wanted or [*SAFETENSORS, *GGUF]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            if name in SAFETENSORS:
                path = write_safetensors(path, *SAFETENSORS[name])
            else:
                path = write_gguf(path, name)
            repeats = 1 if args.quick else REPEATS
            measure(report, name, path, args.num_threads, repeats, args.keep)
    report.write(args.json)


if __name__ == "__main__":
    main()
