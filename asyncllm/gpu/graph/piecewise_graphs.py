"""PiecewiseGraphs: mixed steps as piecewise CUDA graphs, broken at each layer's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, GraphKey, StepGraphs, StepPart
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.language_model import StepOutput
from asyncllm.gpu.models.layers import EagerOp, StepContext
from asyncllm.gpu.step_memory import StepMemory


class PiecewiseGraphs:
    """Runs mixed steps as graphs with eager attention between them, and an eager last layer.

    The method is that of vLLM's breakable graphs. The layers run once under capture, on as many
    tokens as a bucket holds. At each EagerOp (attention or a recurrence) the capture ends
    and the next one begins, so that a captured segment depends on the number of tokens alone. Each
    replay calls these ops with the step's own plan and number of tokens. The segment before an op
    copies the op's inputs to tensors that all layers and buckets share. The op writes its
    output to another shared tensor, in which padded tokens are zeros. The last layer is not
    captured: after its EagerOp only the tokens in ``StepInputs.output_indices`` are computed.

    Args:
        capturer: captures graphs and breaks them.
        sizes: token counts that get graphs.

    Attributes:
        graphs: graphs of the captured layers, by number of tokens.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        memory: StepMemory,
        capturer: GraphCapturer,
        sizes: Sequence[int],
    ) -> None:
        self.model, self.cache, self.memory = model, cache, memory
        self.graphs = StepGraphs(self._run, capturer, sizes)
        self._break_graph = capturer.break_graph
        self._static_tensors: dict[tuple[object, ...], Tensor] = {}
        self._num_filled_rows: dict[tuple[int, torch.dtype], int] = {}
        self._captured_outputs: dict[object, Tensor] = {}
        self._shared_kv: tuple[int, ...] = ()
        self._context: StepContext | None = None
        self._num_tokens = 0

    def forward(self, step: StepInputs, bucket: int) -> StepOutput:
        """Runs a step in the graphs of ``bucket`` tokens.

        The step's input sections have to be padded to the largest bucket.
        """
        count = self._num_tokens = step.num_tokens
        context = self._context = self.model.make_context(step, self.cache)
        try:
            self.graphs.run(GraphKey(bucket, StepPart.ALL_BUT_LAST_LAYER))
        finally:
            self._context = None
        ends = {name: tensor[:count] for name, tensor in self._captured_outputs.items()}
        context.per_layer_embeddings = ends.get("per_layer_embeddings")
        context.shared_kv = {i: (ends["k", i], ends["v", i]) for i in self._shared_kv}
        return self.model.run_last_layer_and_head(ends["x"], ends.get("residual"), step, context)

    def close(self) -> None:
        """Drops the graphs and all tensors."""
        self.graphs.close()
        self._static_tensors.clear()
        self._captured_outputs.clear()

    def _run(self, key: GraphKey) -> None:
        """Runs all layers but the last, on as many tokens as the key's bucket holds."""
        step = self.memory.padded_inputs(key.bucket)
        inputs = self.model.step_context_token_kwargs(step, self.cache)
        context = _PiecewiseContext(plans=(), piecewise=self, **inputs)
        x, residual = self.model.run_all_but_last_layer(step, context)
        ends: dict[object, Tensor | None] = {
            "x": x, "residual": residual, "per_layer_embeddings": context.per_layer_embeddings,
        }  # fmt: skip
        self._shared_kv = tuple(context.shared_kv)
        for index, (k, v) in context.shared_kv.items():
            ends |= {("k", index): k, ("v", index): v}
        for name, tensor in ends.items():
            if tensor is not None:
                self._captured_outputs[name] = self._copy_to_static_tensor(name, tensor)

    def run_eager_op(self, op: EagerOp, out_width: int, tensors: Sequence[Tensor]) -> Tensor:
        """Runs an op outside the graphs (attention or a recurrence); returns its output tensor."""
        count, like = len(tensors[0]), tensors[0]
        op_inputs = [
            self._copy_to_static_tensor(index, tensor) for index, tensor in enumerate(tensors)
        ]
        out = self._static_tensor("out", (out_width,), like)
        self._break_graph(partial(self._run_eager_op, op, op_inputs, out))
        return out[:count]

    def _run_eager_op(self, op: EagerOp, op_inputs: Sequence[Tensor], out: Tensor) -> None:
        """Runs attention or a recurrence on the step's tokens; does nothing outside a step."""
        if self._context is None:
            return
        count, key = self._num_tokens, (out.shape[1], out.dtype)
        out[:count] = op(self._context, *(tensor[:count] for tensor in op_inputs))
        # An earlier, longer step has filled rows that are now padding: zero them.
        if (filled := self._num_filled_rows.get(key, 0)) > count:
            out[count:filled].zero_()
        self._num_filled_rows[key] = count

    def _copy_to_static_tensor(self, tensor_key: object, tensor: Tensor) -> Tensor:
        """Copies ``tensor`` into the key's static tensor, which has a fixed address; returns the
        static tensor."""
        fixed = self._static_tensor(tensor_key, tuple(tensor.shape[1:]), tensor)
        fixed[: len(tensor)].copy_(tensor)
        return fixed

    def _static_tensor(
        self, tensor_key: object, row_shape: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Tensor with one row per token of the largest bucket, allocated as zeros on first use.

        The first use is outside a capture: the largest bucket is captured first, and runs eagerly
        before its capture.
        """
        key = tensor_key, row_shape, like.dtype
        if key not in self._static_tensors:
            shape = self.graphs.buckets[-1], *row_shape
            self._static_tensors[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._static_tensors[key]


@dataclass(slots=True)
class _PiecewiseContext(StepContext):
    """StepContext of captured layers; attention and recurrences run eagerly between graphs."""

    piecewise: PiecewiseGraphs | None = None

    def run_eager_op(self, op: EagerOp, out_width: int, *tensors: Tensor) -> Tensor:
        assert self.piecewise is not None
        return self.piecewise.run_eager_op(op, out_width, tensors)
