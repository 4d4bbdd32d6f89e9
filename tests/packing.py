"""Quantised checkpoints, packed as the formats' own descriptions say: slowly, one integer after the
other, and with none of the package's code.

AutoAWQ's ``WQLinear_GEMM``, AutoGPTQ's ``QuantLinear.pack``, compressed-tensors' ``pack_to_int32``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
Packer = Callable[[Tensor, np.random.Generator], tuple[Parts, Tensor]]
"""A weight ``[out, in]`` to the tensors it is stored in, by suffix, and what they mean in
float32."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned integers along the last dimension to words of 32 bits, lowest bits first; what
    is missing of the last word is 0."""
    per_word = 32 // bits
    count = -(-values.shape[-1] // per_word)
    packed = np.zeros((*values.shape[:-1], count), np.uint64)
    for index in range(values.shape[-1]):
        place = np.uint64(index % per_word * bits)
        packed[..., index // per_word] |= values[..., index].astype(np.uint64) << place
    return packed.astype(np.uint32).view(np.int32)


def integers(
    weight: Tensor, bits: int, columns: np.ndarray, symmetric: bool, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Unsigned values ``[out, in]``, zero points and scales ``[out, groups]``, and the weight they
    stand for, by round-to-nearest; ``columns`` is the group of each input."""
    number = int(columns.max()) + 1
    zeros, scales = np.zeros((len(weight), number), int), torch.zeros(len(weight), number)
    top = 2**bits - 1
    for group in range(number):
        part = weight[:, columns == group]
        low, high = part.amin(1).clamp(max=0.0), part.amax(1).clamp(min=0.0)
        if symmetric:
            scale = 2.0 * torch.maximum(-low, high) / top
            zero = torch.full_like(scale, 2 ** (bits - 1))
        else:
            scale = (high - low) / top
            zero = (-low / scale).round().clamp(0, top)
        scales[:, group], zeros[:, group] = scale, zero.int().numpy()
    scales = scales.to(dtype)
    index = torch.from_numpy(columns)
    spread, offset = scales.float()[:, index], torch.from_numpy(zeros)[:, index]
    values = ((weight / spread).round() + offset).clamp(0, top)
    return values.int().numpy(), zeros, scales, (values - offset) * spread


def in_order(inputs: int, group: int) -> np.ndarray:
    return np.arange(inputs) // group


def awq(group: int) -> Packer:
    def pack(weight: Tensor, _: np.random.Generator) -> tuple[Parts, Tensor]:
        values, zeros, scales, exact = integers(
            weight, 4, in_order(weight.shape[1], group), False, torch.float16
        )

        def nibbles(array: np.ndarray) -> Tensor:
            by_eight = array.reshape(len(array), -1, 8)[:, :, AWQ_ORDER]
            return torch.from_numpy(words(by_eight, 4)[:, :, 0].copy())

        parts = {"qweight": nibbles(values.T), "qzeros": nibbles(zeros.T)}
        return parts | {"scales": scales.T.contiguous()}, exact

    return pack


def gptq(bits: int, group: int, *, act_order: bool, version: int, symmetric: bool) -> Packer:
    def pack(weight: Tensor, random: np.random.Generator) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        columns = in_order(inputs, group)
        if act_order:
            columns = random.permutation(columns)
        values, zeros, scales, exact = integers(weight, bits, columns, symmetric, torch.float16)
        stored = words(zeros.T, bits)
        if version == 1:
            # gptqmodel's convert_gptq_v2_to_v1_format: over the word, so that 0 - 1 borrows.
            stored = stored.view(np.uint32) - np.uint32(sum(1 << i for i in range(0, 32, bits)))
            stored = stored.view(np.int32)
        parts = {
            "qweight": torch.from_numpy(words(values, bits).T.copy()),
            "qzeros": torch.from_numpy(stored.copy()),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(columns.astype(np.int32)),
        }
        return parts, exact

    return pack


def packed_tensors(
    bits: int, group: int | None, *, symmetric: bool = True, act_order: bool = False
) -> Packer:
    """compressed-tensors' pack-quantized."""

    def pack(weight: Tensor, random: np.random.Generator) -> tuple[Parts, Tensor]:
        rows, inputs = weight.shape
        columns = in_order(inputs, group or inputs)
        if act_order:
            columns = random.permutation(columns)
        values, zeros, scales, exact = integers(weight, bits, columns, symmetric, torch.bfloat16)
        parts = {
            "weight_packed": torch.from_numpy(words(values, bits)),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, inputs]),
        }
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(words(zeros.T, bits).T.copy())
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(columns.astype(np.int32))
        return parts, exact

    return pack


def int8(*, symmetric: bool = True, per_tensor: bool = False) -> Packer:
    """compressed-tensors' int-quantized."""

    def pack(weight: Tensor, _: np.random.Generator) -> tuple[Parts, Tensor]:
        columns = in_order(weight.shape[1], weight.shape[1])
        flat = weight.reshape(1, -1) if per_tensor else weight
        if per_tensor:
            columns = np.zeros(flat.shape[1], int)
        values, zeros, scales, exact = integers(flat, 8, columns, symmetric, torch.float32)
        signed = torch.from_numpy((values - 128).astype(np.int8)).view(weight.shape)
        parts = {"weight": signed, "weight_scale": scales.view(-1) if per_tensor else scales}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        return parts, exact.view(weight.shape)

    return pack


def fp8(
    suffix: str, block: tuple[int, int] | None, dtype: torch.dtype = torch.float32, dims: int = 2
) -> Packer:
    """A scale per block; ``(1, 0)`` is a row, None all of the tensor."""

    def pack(weight: Tensor, _: np.random.Generator) -> tuple[Parts, Tensor]:
        rows, columns = weight.shape
        high, wide = block or weight.shape
        wide = wide or columns
        grid = torch.zeros(-(-rows // high), -(-columns // wide))
        values, exact = torch.zeros_like(weight), torch.zeros_like(weight)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                tile = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale = (weight[tile].abs().max() / 448.0).to(dtype)
                grid[i, j] = scale.float()
                values[tile] = weight[tile] / grid[i, j]
                exact[tile] = values[tile].to(torch.float8_e4m3fn).float() * grid[i, j]
        scale = grid.to(dtype).reshape(grid.shape if dims == 2 else (-1,) if dims else ())
        return {"weight": values.to(torch.float8_e4m3fn), suffix: scale}, exact

    return pack


def compressed(form: str, weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"format": form, "config_groups": {"group_0": group | fields}, "ignore": ["lm_head"]}
    return config | {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    pack: Packer
    lm_head: bool = False


GROUP4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CASES = {
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"}, awq(32)),
    "gptq": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "lm_head": True},
        gptq(4, 32, act_order=False, version=1, symmetric=False),
        lm_head=True,
    ),
    "gptq-act-order": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        gptq(4, 16, act_order=True, version=1, symmetric=True),
    ),
    "gptq-v2-8": Case(
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
        gptq(8, 32, act_order=False, version=2, symmetric=False),
    ),
    "gptq-2-row": Case(
        {"quant_method": "gptq", "bits": 2, "group_size": -1, "checkpoint_format": "gptq"},
        lambda weight, random: gptq(
            2, weight.shape[1], act_order=False, version=1, symmetric=False
        )(weight, random),
    ),
    "fp8-block": Case(
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
        fp8("weight_scale_inv", (32, 32)),
    ),
    "fp8-ragged": Case(
        {"quant_method": "fp8", "weight_block_size": [24, 40], "fmt": "e4m3"},
        fp8("weight_scale_inv", (24, 40), torch.bfloat16),
    ),
    "fp8-ue8m0": Case(
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        fp8("weight_scale_inv", (32, 32), torch.float8_e8m0fnu),
    ),
    "fp8-tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", None, dims=0)
    ),
    "fbgemm": Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
        fp8("weight_scale", (1, 0)),
    ),
    "ct-pack-4": Case(compressed("pack-quantized", GROUP4), packed_tensors(4, 32)),
    "ct-pack-4-zeros": Case(
        compressed("pack-quantized", GROUP4 | {"symmetric": False}),
        packed_tensors(4, 32, symmetric=False),
    ),
    "ct-pack-4-order": Case(
        compressed("pack-quantized", GROUP4 | {"actorder": "group"}),
        packed_tensors(4, 32, act_order=True),
    ),
    "ct-pack-8": Case(
        compressed("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        packed_tensors(8, None, symmetric=False),
    ),
    "ct-int": Case(
        compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            input_activations={"num_bits": 8, "type": "int", "dynamic": True},
        ),
        int8(),
    ),
    "ct-int-zeros": Case(
        compressed("int-quantized", {"strategy": "channel", "symmetric": False}),
        int8(symmetric=False),
    ),
    "ct-int-tensor": Case(
        compressed("naive-quantized", {"strategy": "tensor"}), int8(per_tensor=True)
    ),
    "ct-float": Case(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        fp8("weight_scale", (1, 0), torch.bfloat16),
    ),
    "ct-float-tensor": Case(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        fp8("weight_scale", None, dims=1),
    ),
    "ct-float-block": Case(
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 32]},
        ),
        fp8("weight_scale", (48, 32)),
    ),
}


def quantise_checkpoint(path: Path, case: Case, model: torch.nn.Module | None = None) -> Parts:
    """Packs the linear layers of a plain checkpoint in place, sets its configuration, and returns
    all its tensors as they are to be read. ``model`` gets those weights."""
    random = np.random.default_rng(7)
    tensors: Parts = {}
    for file in sorted(path.glob("*.safetensors")):
        held, stored = load_file(file), {}
        for name, tensor in held.items():
            stem = name.removesuffix("weight")
            wanted = "_proj." in name or (case.lm_head and name.startswith("lm_head"))
            if stem == name or not wanted:
                stored[name] = tensors[name] = tensor
                continue
            parts, tensors[name] = case.pack(tensor, random)
            stored |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
        save_file(stored, file, {"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": case.config}))
    if model is not None:
        model.load_state_dict(tensors)
    return tensors


def repack(plain: Path, path: Path, case: Case) -> Path:
    """A copy of the plain checkpoint in ``path``, packed as ``case`` says."""
    shutil.copytree(plain, path, dirs_exist_ok=True)
    quantise_checkpoint(path, case)
    return path
