"""Runners whose steps are recorded programs of native ops."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.core.executor import ExecutorInfo
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.graph.recorded_step import RecordedStep
from asyncllm.gpu.graph.streams import DeviceStream
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.architectures import parameters
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_plan
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.native_attention import NativeAttention
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.program import Program
from asyncllm.gpu.ops.quantise import QUANTISERS
from tests import static_runner
from tests.driver import state_of
from tests.dummy_runner import MODEL as LLAMA
from tests.native_library import ISAS, context

QWEN3 = replace(LLAMA, architecture="Qwen3ForCausalLM", tie_word_embeddings=False, num_layers=3)

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [100], list(range(40, 70)), [7] * 9]


def make_decoder(
    model: ModelConfig, dtype: torch.dtype = torch.float32, *, isa: str = ISAS[0] if ISAS else "",
    quantised: str | None = None, threads: int = 2,
) -> Decoder:  # fmt: skip
    generator = torch.Generator().manual_seed(3)

    def weights():
        for parameter in parameters(model):
            tensor = torch.randn(parameter.shape, generator=generator)
            if len(parameter.shape) > 1:
                tensor *= 1.5 * parameter.shape[-1] ** -0.5
            elif not parameter.name.endswith("bias"):
                tensor = 1 + 0.2 * tensor
            yield parameter.name, tensor.to(dtype)

    own = context(threads, isa)
    attention = {kind: NativeAttention(own, kind.shape, dtype) for kind in attention_kinds(model)}
    quantisers = QUANTISERS[quantised] if quantised else None
    decoder = build_decoder(model, NativeOps(own), attention, weights(), quantisers)
    decoder.set_max_positions(96)
    return decoder


def make_runner(
    decoder: Decoder, max_tokens: int = 128, layers: tuple[tuple[int, ...], ...] = ()
) -> ModelRunner:
    groups = kv_plan(decoder.model).kv_groups(decoder.attention, 4)
    if layers:
        groups = static_runner.kv_groups(decoder.model, 4, *layers)
    info = ExecutorInfo(
        decoder.model.vocab_size, 81, tuple(g.spec for g in groups), 96, 6, max_tokens
    )
    cache = KVCache(groups, 81, decoder.embedding.dtype, torch.device("cpu"))
    return ModelRunner(decoder, cache, info)


def program_of(runner: ModelRunner) -> RecordedStep:
    replay = state_of(runner).forward_pass
    assert isinstance(replay, RecordedStep), runner.execution
    return replay


def run_program(program: Program, *sizes: int) -> None:
    """A run of a step's program by itself, on its inputs as they are."""
    failed, context = (ctypes.c_int64 * 1)(), program.context
    given = (ctypes.c_int64 * len(sizes))(*sizes)
    status = context.functions.run(context.handle, program.args, given, failed)
    if status:
        program.raise_failure(status, failed[0], sizes)


def op_by_op(runner: ModelRunner) -> ModelRunner:
    """The same runner, whose ops are called one by one."""
    state = state_of(runner)
    state.forward_pass = ForwardPass(state.model, state.cache, state.memory)
    state.stream = runner._stream = DeviceStream()
    return runner
