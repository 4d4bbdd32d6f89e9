"""ExecutionMode: how steps run on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncllm.config import EngineConfig
from asyncllm.gpu.batch.grammar_masks import num_mask_words
from asyncllm.gpu.batch.sampling_inputs import LogitsTables
from asyncllm.gpu.graph.capturer import CudaGraphCapturer
from asyncllm.gpu.graph.cuda_graphs import (
    GraphCapturer,
    default_batch_sizes,
    default_token_counts,
)
from asyncllm.gpu.graph.streams import CudaStream, DeviceStream
from asyncllm.gpu.ops.logits import logits_processing_bytes
from asyncllm.validation import value_error

ESTIMATED_GRAPH_BYTES = 8 * 2**20
"""Estimated bytes of one graph of a whole step; CaptureStats has the measured bytes. Nothing is
reserved for graphs of half a step and graphs with balanced splits: their activations use the
memory pool of the other graphs, and the driver's memory for their nodes is not counted."""

GPU_STEP_TIMEOUT_SECONDS = 60.0
"""Default timeout of a step on a GPU, in seconds. It is generous: no step compiles a kernel, and
the largest step takes a few seconds."""


@dataclass(frozen=True, slots=True)
class ExecutionMode:
    """Device, stream and limits of an engine's steps.

    Attributes:
        stream: stream on which the steps' work is queued.
        make_capturer: makes the capturer of CUDA graphs; None runs without graphs and keeps the
            batch's state on the host.
        max_num_seqs, token_budget, pipeline_depth, step_timeout: defaults of settings that the
            configuration leaves open.
        shares_memory: whether a KV cache without a configured size leaves half or more of the free
            memory to the application.
    """

    device: torch.device
    stream: DeviceStream
    make_capturer: Callable[[], GraphCapturer] | None
    max_num_seqs: int
    token_budget: int
    pipeline_depth: int
    step_timeout: float = 600.0
    shares_memory: bool = False


def execution_mode_for(config: EngineConfig, device: torch.device) -> ExecutionMode:
    """Chooses the mode: synchronous steps on a CPU, a second step in flight on a GPU."""
    if device.type != "cuda":
        return ExecutionMode(device, DeviceStream(), None, 64, 2048, 1)
    make = GraphCapturer if config.cuda_graphs == "off" else lambda: CudaGraphCapturer(device)
    return ExecutionMode(
        device, CudaStream(device), make, 256, 8192, 2, GPU_STEP_TIMEOUT_SECONDS, shares_memory=True
    )


def graph_batch_sizes(
    config: EngineConfig, mode: ExecutionMode, max_num_seqs: int
) -> tuple[int, ...]:
    """Batch sizes for which decode steps are captured as CUDA graphs.

    Raises:
        InvalidRequestError: a graph setting would have no effect, or a size exceeds
            ``max_num_seqs``.
    """
    sizes = config.cudagraph_capture_sizes
    eagerly = f": steps run eagerly on device {mode.device}"
    if mode.make_capturer is None and config.cuda_graphs == "decode":
        raise value_error("cuda_graphs", config.cuda_graphs, f'"auto" or "off"{eagerly}')
    if mode.make_capturer is None or config.cuda_graphs == "off":
        if sizes is not None:
            reason = eagerly if mode.make_capturer is None else ' with cuda_graphs="off"'
            raise value_error("cudagraph_capture_sizes", sizes, f"None{reason}")
        return ()
    if sizes is not None and sizes[-1] > max_num_seqs:
        raise value_error(
            "cudagraph_capture_sizes", sizes, f"sizes up to max_num_seqs={max_num_seqs}"
        )
    return default_batch_sizes(max_num_seqs) if sizes is None else sizes


def graph_token_counts(
    config: EngineConfig, mode: ExecutionMode, max_tokens: int
) -> tuple[int, ...]:
    """Token counts, up to ``max_tokens``, for which mixed steps are captured as CUDA graphs."""
    if mode.make_capturer is None or config.cuda_graphs != "auto":
        return ()
    return default_token_counts(max_tokens)


def graph_reserve_bytes(
    batch_sizes: tuple[int, ...], max_num_seqs: int, vocab_size: int, logit_bytes: int
) -> int:
    """Bytes to keep for CUDA graphs and sampling stages, beside the peak of the largest step.

    The sampling stages need a copy of the logits, grammar masks, the tables of rules and penalties,
    and two buffers of processed logits: one in the memory pool of the graphs, and one outside it
    for mixed steps, whose sampling is not captured.

    Args:
        logit_bytes: bytes of an element of the logits.
    """
    received = max_num_seqs * (logit_bytes * vocab_size + 4 * num_mask_words(vocab_size))
    processed = 2 * logits_processing_bytes(max_num_seqs, vocab_size)
    tables = LogitsTables.num_bytes(max_num_seqs, vocab_size)
    return len(batch_sizes) * ESTIMATED_GRAPH_BYTES + received + processed + tables
