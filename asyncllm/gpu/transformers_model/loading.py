"""load_transformers_decoder: loads a model whose modules are transformers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.config import EngineConfig
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention
from asyncllm.gpu.ops.quantise import WeightQuantisers
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.transformers_model.build import ProbedModelPlan, build_transformers_decoder
from asyncllm.gpu.transformers_model.check import ReferenceLogprobs
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.decoder import TransformersDecoder
from asyncllm.gpu.transformers_model.families import is_tested
from asyncllm.gpu.transformers_model.weights import dummy_modules, load_modules
from asyncllm.validation import value_error


def load_transformers_decoder(
    config: EngineConfig,
    model: TransformersConfig,
    plan: ProbedModelPlan,
    ops: TorchOps,
    attention: Mapping[AttentionKind, Attention],
    groups: Sequence[KVGroup],
    dtype: torch.dtype,
    device: torch.device,
    quantisers: WeightQuantisers | None,
    progress: ProgressCallback | None,
) -> TransformersDecoder:
    """Load the modules and build the decoder.

    Unless the architecture is tested, its results are compared with those of the unchanged modules.

    Raises:
        InvalidRequestError: ``quantization`` for an architecture that is not tested.
    """
    load = dummy_modules if config.load_format == "dummy" else load_modules
    modules, owner = load(model, dtype, device, progress)
    reference = None
    if not is_tested(model):
        if quantisers is not None:
            raise value_error(
                "quantization", config.quantization,
                f"None for {model.architecture}, which is not among the tested architectures: "
                "rounded weights cannot be compared with the model's own results",
            )  # fmt: skip
        reference = ReferenceLogprobs.compute(modules, model, dtype, device)
    decoder = build_transformers_decoder(
        model, plan, ops, attention, modules, owner, dtype, quantisers
    )
    if reference is not None:
        reference.check(decoder, list(groups))
    return decoder
