"""TransformersDecoder: transformers' own modules as a language model of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from asyncllm.gpu.batch.state_rows import StateRows
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.language_model import StepOutput
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec
from asyncllm.gpu.transformers_model.attention import CurrentStep
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.probe import compute_logits, make_output_head


@dataclass(frozen=True, slots=True)
class LongRope:
    """Rotary embedding with short and long factors (LongRoPE, Ding et al., 2024).

    transformers takes the long factors in every step whose longest sequence exceeds the original
    context. Results would then depend on other sequences, and change within a sequence. Here the
    engine's ``max_model_len`` decides, once for all steps.

    Attributes:
        rotary_embedding: transformers' module.
        layer_type: type of the layers that use it; None for all layers.
        original_context: context in tokens before its extension to long sequences.
    """

    rotary_embedding: Any
    layer_type: str | None
    original_context: int
    config: Any

    @classmethod
    def find_all(cls, modules: nn.Module, config: Any) -> list[LongRope]:
        """Find a model's long RoPEs and turn off transformers' choice of factors per step."""
        ropes = []
        for module in modules.modules():
            rope: Any = module
            kinds: Any = getattr(rope, "rope_type", None)
            by_layer_type = dict(kinds) if isinstance(kinds, Mapping) else {None: kinds}
            for layer_type, kind in by_layer_type.items():
                if kind == "longrope":
                    parameters = config.rope_parameters
                    layer_parameters = parameters if layer_type is None else parameters[layer_type]
                    original = int(layer_parameters["original_max_position_embeddings"])
                    ropes.append(cls(rope, layer_type, original, config))
                    by_layer_type[layer_type] = "default"
                    rope.rope_type = "default" if layer_type is None else by_layer_type
        return ropes

    def choose_frequencies(self, max_positions: int) -> None:
        """Set the frequencies for sequences of at most ``max_positions`` tokens."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        buffer = getattr(self.rotary_embedding, f"{prefix}inv_freq")
        # transformers only checks whether ``seq_len`` exceeds the original context.
        length = self.original_context + (1 if max_positions > self.original_context else 0)
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
            self.config, buffer.device, seq_len=length, layer_type=self.layer_type
        )
        buffer.copy_(frequencies)


class TransformersDecoder:
    """LanguageModel that runs transformers' modules on the engine's flattened batch.

    All T tokens of a step are one sequence to the modules, ``[1, T]``. Tokens see one another only
    in attention and recurrent modules, which the engine replaces.

    Args:
        modules: the model, whose attention modules have PagedAttention handlers that read ``step``.
        base_name: name of the submodule that ends with the last norm.

    Attributes:
        embedding: empty tensor from which the runner reads the model's dtype and device; the real
            embedding is in ``base``.
        states: recurrent states of a sequence; () for a model without recurrent modules.
    """

    argmax_function = None
    """None: the output head is the model's own code, which writes all logits."""

    def __init__(
        self,
        model: TransformersConfig,
        ops: TorchOps,
        attention: Mapping[AttentionKind, Attention],
        modules: Any,
        base_name: str,
        step: CurrentStep,
        embedding: Tensor,
        states: Sequence[StateSpec],
    ) -> None:
        self.states = states
        self.model, self.ops, self.attention, self.step = model, ops, attention, step
        self.embedding = embedding
        self.base = getattr(modules, base_name)
        self.head = make_output_head(modules, base_name)
        self.long_ropes = LongRope.find_all(modules, model.config)

    def set_max_positions(self, count: int) -> None:
        """Choose the RoPE frequencies for sequences of at most ``count`` tokens."""
        for rope in self.long_ropes:
            rope.choose_frequencies(count)

    def with_few_layers(self) -> TransformersDecoder:
        """Return the decoder itself: the modules always run all of their layers."""
        return self

    def forward(self, step: StepInputs, cache: KVCache) -> StepOutput:
        """See ``LanguageModel.forward``."""
        hidden = self._run_base(step, cache)
        if step.output_indices is not None:
            hidden = hidden[step.output_indices]
        return StepOutput(self.logits(hidden[: step.num_logits]), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, H] -> [S, vocab_size]`` in the model's dtype."""
        return compute_logits(self.head, hidden)

    def _run_base(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        step = self.step
        step.slot_mappings = [group.slot_mapping for group in inputs.groups]
        step.plans = {
            kind: attention.plan(inputs, kind.window, kind.kv_group)
            for kind, attention in self.attention.items()
        }
        step.kv = cache.layers
        if self.states:
            assert cache.states is not None
            step.states, step.rows = cache.states.tensors, StateRows.of(inputs)
        try:
            output = self.base(
                input_ids=inputs.token_ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
            )
        finally:
            step.clear()
        return output.last_hidden_state[0]
