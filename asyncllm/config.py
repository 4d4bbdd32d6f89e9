"""EngineConfig: the settings of an engine, fixed before it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError
from asyncllm.logits_processor import LogitsProcessor
from asyncllm.structured.backends import StructuredOutputsBackend

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority", "deadline"]
CudaGraphs = Literal["auto", "decode", "off"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
Quantization = Literal["int8", "int4"]
GenerationConfig = Literal["auto", "none"]
ModelImpl = Literal["auto", "native", "transformers"]
PackedCache = Literal["auto", "shared", "off"]
ToolParser = Literal[
    "auto",
    "qwen3_coder",
    "hermes",
    "mistral_v11",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "gpt_oss",
    "llama3_json",
]
ReasoningParser = Literal["auto", "deepseek_r1", "qwen3", "mistral", "gpt_oss"]

PACKAGED_MODEL_NAME = "asyncllm/demo"
"""Name of the packaged model in metrics, servers and messages."""

_BYTES_PER_UNIT = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES_PER_UNIT |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_LOGITS_PROCESSOR_PATTERN = re.compile(r"[\w.]{1,256}:\w{1,256}")
_MAX_LOGITS_PROCESSORS = 64
_MAX_MODEL_NAMES = 64
_MAX_MODEL_NAME_LENGTH = 1024
_MAX_NUM_SEQS = 2**16
_INT32_MAX = 2**31 - 1
"""Maximum of settings that count tokens or blocks: positions and block ids are int32 on a
device."""


@check.refuse_unknown_fields("setting")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, validated at construction. The only environment variable that is read
    is ``XDG_CACHE_HOME``, for ``packed_cache_dir``.

    None lets the engine choose a value once it knows the model and the device. Numbers may be
    numpy's; each has an upper bound, which its error names.

    Attributes:
        model: local directory or hub id in the Hugging Face layout, or a GGUF file; None is the
            model in the package.
        tokenizer: directory, hub id or GGUF file of the tokenizer, if it is not the model's own.
        revision: branch, tag or commit on the hub.
        served_model_name: name of the model for servers, metrics, traces, callbacks and
            integrations: one name or up to 64, of at most 1024 characters each. Clients of a server
            may use any of them; everything else uses the first. Kept as a tuple. None uses
            ``model``; a server's clients see only the last part of a directory.
        dtype: type of weights and KV. "auto" is the checkpoint's type on a GPU. On a CPU it is
            bfloat16 for a 16-bit checkpoint of 32 million parameters or more, if native ops run or
            the processor has bfloat16 arithmetic; else float32.
        device: "auto", "cpu", "cuda" or "cuda:N"; "cuda" is the first GPU, even if the caller's
            thread has another current device, because the engine runs on its own thread.
        max_model_len: longest sequence in tokens; None is the model's context or the capacity of
            the KV cache, whichever is less.
        max_num_seqs: requests in a batch; None is 256 on a GPU, 64 on a CPU.
        max_num_batched_tokens: token budget of a step; "auto" is measured at start, so that a full
            step takes about 50 ms on a GPU, with 8192 tokens at most, and 250 ms on a CPU.
        block_size: tokens per KV block; None is the attention backend's preferred size: 16 on a
            GPU, 32 on a CPU, 256 for "flash_attn". Layers with smaller heads than others may use a
            multiple of it.
        kv_cache_memory: bytes for the KV cache, as a number or as "4GiB"; None is a quarter
            of the available memory, at most 4 GiB, on a CPU. On a GPU it is half of the memory that
            weights and steps leave within ``gpu_memory_utilization``: at most enough for
            ``max_num_seqs`` sequences of ``max_model_len``, and at least enough for one.
        gpu_memory_utilization: share of the GPU's memory that the engine may use. By default the KV
            cache gets at most half of the memory that weights and steps leave.
        num_blocks: usable KV blocks; overrides ``kv_cache_memory``. A block has the KV of all
            layers, or of one KV group's layers in a model with sliding windows.
        enable_prefix_caching: reuse the KV of shared prefixes. None is True, except for a model
            with recurrent layers if there is no memory for ``num_state_snapshots``.
        num_state_snapshots: number of recurrent states to keep for cached prefixes, in addition to
            those of running requests, in a model with recurrent layers. Each is as large as the KV
            of hundreds of tokens or more. "auto" is four times ``max_num_seqs``, or fewer, so
            that the states take at most an eighth of the memory that the weights leave, and on a
            CPU at most 1 GiB.
        attention_backend: "auto" ("triton" on CUDA, "native" or "torch" on a CPU), "torch",
            "native", "triton", "flash_attn", "flash_attn_3", or one that another distribution
            registers.
        cuda_graphs: "auto" captures decode steps, and pieces of steps with a prefill, when the
            engine starts; "decode" captures only decode steps and launches other steps op by op;
            "off" launches all steps op by op.
        cudagraph_capture_sizes: batch sizes to capture; None is the default set.
        async_scheduling: run one step ahead of the results; None is True on a GPU, and
            on a CPU where native ops take at most 10 ms for a full decode step, measured when the
            engine starts. On a CPU without native ops, True saves no time: the engine schedules
            ahead, but the CPU computes a step only when the engine waits for the step's result.
        scheduling_policy: "fcfs", "priority" (smaller first) or "deadline" (earliest first
            within a priority). The policy orders admission and preemption, not the requests that
            already run.
        max_queued_requests: maximum number of waiting requests; further ones raise
            EngineOverloadedError. If k owners wait, each may queue up to 1/k of this number even if
            the queue is full, up to twice this number in all.
        max_queued_tokens: maximum number of prompt tokens of all waiting requests, shared among
            owners like ``max_queued_requests``.
        max_logprobs: maximum ``logprobs`` of a request; -1 allows any number, up to the whole
            vocabulary.
        seed: seed of the generator that draws seeds for requests without one; None seeds it from
            the operating system.
        quantization: "int8" rounds the weights of linear layers to 8 bits while they are loaded,
            with a scale per output channel. "int4" rounds them to 4 bits, with a scale per 32
            inputs of an output channel, and the output head to 8 bits. None does not quantise.
            Needs a CPU with native ops, and a checkpoint that is not quantised itself.
        load_format: "auto", "safetensors", or "dummy" for random weights.
        packed_cache: files of packed weights, for native ops on a CPU. "auto" looks for a file in
            ``packed_cache_dir`` and beside the model, and maps it instead of reading and packing
            the checkpoint; a missing file is written after the start, in the background. "shared"
            writes a missing file before the start goes on, so that all processes with this model
            have one copy of the weights, and verifies a file once after a boot of the machine
            instead of at each start. "off" neither reads nor writes a file. A model of less than 32
            million parameters has none.
        packed_cache_dir: folder of these files; None is ``asyncllm/packed`` in the user's cache
            directory, which is ``$XDG_CACHE_HOME`` or ``~/.cache``.
        packed_cache_size: bytes of all files in that folder, as a number or as "20GiB"; the least
            recently used are removed.
        model_impl: "native" is the engine's own decoder. "transformers" runs transformers' modules
            with the engine's attention and linear layers, for any architecture that has the same
            results with them. "auto" is "native" for the architectures that it supports.
        hf_overrides: values that replace those of the checkpoint's ``config.json``: a dict of plain
            data, at most 16 deep, with at most 8,192 values and 65,536 characters in all. A dict is
            merged into a nested configuration such as ``text_config``; any other field is replaced
            as a whole. Not with a GGUF file, nor for ``quantization_config``.
        chat_template: template that replaces all templates of the model: its text, or the path of
            its file. A string without "{" is a path, and stored as one.
        generation_config: "auto" takes sampling parameters that a request leaves out from the
            model's ``generation_config.json``; "none" takes neutral values. EOS tokens are read
            from that file in both cases.
        trust_remote_code: let transformers run the checkpoint's own code for its tokenizer and
            model.
        num_threads: CPU threads for the model; None is one per core, or 1 for a model of less than
            32 million parameters, which more threads would slow down.
        step_timeout: seconds after which a step counts as hung; None is 60 on a GPU, whose kernels
            are compiled before the first step, and 600 on a CPU.
        tool_call_parser: how the model writes tool calls: "auto" is the tokenizer's own
            ``response_template``, else the format in its chat template; or "hermes", "qwen3_coder",
            "llama3_json", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "gpt_oss".
        reasoning_parser: how the model writes its reasoning: "auto" as for ``tool_call_parser``, or
            "deepseek_r1", "qwen3", "mistral", "gpt_oss"; None leaves reasoning in the text.
        structured_outputs_backend: "llguidance" or "xgrammar" loads that backend when the engine
            starts. "auto" loads llguidance at its first use; xgrammar, if it is installed, compiles
            the structural tags that llguidance refuses.
        logits_processors: subclasses of LogitsProcessor, or their names as "module:Class", 64 at
            most. Processors of the entry point group ``asyncllm.logits_processors`` are added to
            them.
        grammar_timeout: seconds that compiling a grammar may take before its requests fail.

    Raises:
        InvalidRequestError: for a value outside its range or a field that does not exist, with
            ``param`` set.
    """

    model: str | os.PathLike[str] | None = None
    tokenizer: str | os.PathLike[str] | None = None
    revision: str | None = None
    served_model_name: str | Sequence[str] | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | Literal["auto"] = "auto"
    block_size: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    enable_prefix_caching: bool | None = None
    num_state_snapshots: int | Literal["auto"] = "auto"
    attention_backend: str = "auto"
    cuda_graphs: CudaGraphs = "auto"
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    async_scheduling: bool | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    max_logprobs: int = 20
    seed: int | None = None
    quantization: Quantization | None = None
    load_format: LoadFormat = "auto"
    packed_cache: PackedCache = "auto"
    packed_cache_dir: str | os.PathLike[str] | None = None
    packed_cache_size: int | str = "32GiB"
    model_impl: ModelImpl = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    chat_template: str | os.PathLike[str] | None = None
    generation_config: GenerationConfig = "auto"
    trust_remote_code: bool = False
    num_threads: int | None = None
    step_timeout: float | None = None
    tool_call_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser | None = "auto"
    structured_outputs_backend: StructuredOutputsBackend = "auto"
    grammar_timeout: float = 10.0
    logits_processors: Sequence[type[LogitsProcessor] | str] = ()

    def __post_init__(self) -> None:
        self._check_choices()
        check.validate_field(self, check.integer, "max_model_len", 1, _INT32_MAX)
        check.validate_field(self, check.integer, "max_num_seqs", 1, _MAX_NUM_SEQS)
        check.validate_field(self, check.integer, "num_blocks", 1, _INT32_MAX - 1)
        check.validate_field(self, check.integer, "block_size", 1, 2**16)
        check.validate_field(self, check.integer, "num_threads", 1, 1024)
        check.validate_field(self, check.integer, "max_queued_requests", 1)
        check.validate_field(self, check.integer, "max_queued_tokens", 1)
        check.validate_field(self, check.integer, "max_logprobs", -1)
        check.validate_field(self, check.integer, "seed", 0, 2**64 - 1)
        if not check.equal_json(self.max_num_batched_tokens, "auto"):
            check.validate_field(self, check.integer, "max_num_batched_tokens", 1, _INT32_MAX)
        if not check.equal_json(self.num_state_snapshots, "auto"):
            check.validate_field(self, check.integer, "num_state_snapshots", 1, _MAX_NUM_SEQS)
        check.validate_field(self, check.number, "gpu_memory_utilization", 0, 1, exclusive_low=True)
        check.validate_field(self, check.seconds, "step_timeout", exclusive_low=True)
        check.validate_field(self, check.seconds, "grammar_timeout", exclusive_low=True)
        self._check_logits_processors()
        self._check_model_names()
        for name in ("kv_cache_memory", "packed_cache_size"):
            if name == "packed_cache_size" or getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        name = "cudagraph_capture_sizes"
        if self.cudagraph_capture_sizes is not None:
            sizes = check.bounded_tuple(name, self.cudagraph_capture_sizes, "batch sizes")
            checked = {check.integer(name, size, 1, _MAX_NUM_SEQS) for size in sizes}
            if not checked:
                raise check.value_error(name, sizes, "at least one batch size, or None")
            object.__setattr__(self, name, tuple(sorted(checked)))

    def _check_choices(self) -> None:
        for name, annotation in self.__annotations__.items():
            kind = annotation.removesuffix(" | None")
            if kind == "bool":
                check.validate_field(self, check.boolean, name)
            elif choices := get_args(globals().get(kind)):  # A Literal type defined above.
                optional = kind != annotation
                check.validate_field(self, check.choice, name, choices, optional=optional)
        check.validate_field(self, check.plain_data, "hf_overrides")
        check.validate_field(self, check.string, "attention_backend")
        check.validate_field(self, check.string, "revision")
        device = check.as_plain_str(self.device)
        if device is None or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", device):
            raise check.value_error("device", self.device, "auto, cpu, cuda or cuda:N")
        object.__setattr__(self, "device", device)
        for name in ("model", "tokenizer"):
            self._check_path(name, "a directory, a hub id or None")
        self._check_path("packed_cache_dir", "a directory or None")
        self._check_path("chat_template", "the text of a template, the path of a file, or None")
        template: Any = self.chat_template
        if isinstance(template, str) and "{" not in template:
            object.__setattr__(self, "chat_template", Path(template))

    def _check_path(self, name: str, accepted_values: str) -> None:
        """Check a path; replace a subclass of ``str`` by a plain ``str``."""
        value = getattr(self, name)
        if value is None:
            return
        path: Any = None
        with suppress(Exception):  # ``__fspath__`` of the application's object may raise anything
            path = os.fspath(value)
        try:
            path = check.string(name, path)
        except InvalidRequestError:
            raise check.value_error(name, value, accepted_values) from None
        if "\0" in path:
            raise check.value_error(name, value, "a path without null characters")
        if isinstance(value, str):
            object.__setattr__(self, name, path)

    def _check_logits_processors(self) -> None:
        name, accepted = "logits_processors", 'subclasses of LogitsProcessor, or "module:Class"'
        check.validate_field(self, check.bounded_tuple, name, accepted, _MAX_LOGITS_PROCESSORS)
        processor: Any
        for processor in self.logits_processors:
            is_class = isinstance(processor, type) and issubclass(processor, LogitsProcessor)
            is_name = isinstance(processor, str) and _LOGITS_PROCESSOR_PATTERN.fullmatch(processor)
            if not is_class and not is_name:
                raise check.value_error(name, processor, accepted)

    def _check_model_names(self) -> None:
        names: Any = self.served_model_name
        if names is None:
            return
        if isinstance(names, str):
            names = (names,)
        names = check.strings("served_model_name", names, _MAX_MODEL_NAMES, _MAX_MODEL_NAME_LENGTH)
        if not names:
            raise check.value_error("served_model_name", names, "at least one name, or None")
        object.__setattr__(self, "served_model_name", names)

    def with_overrides(self, overrides: Mapping[str, Any]) -> EngineConfig:
        """Copy the configuration with some fields replaced; the copy is checked again."""
        return replace(self, **overrides) if overrides else self

    @property
    def model_name(self) -> str:
        """Name of the model: the first ``served_model_name``, else the model's name or path as
        given, or PACKAGED_MODEL_NAME for the packaged model."""
        if self.served_model_name is not None:
            return self.served_model_name[0]
        return PACKAGED_MODEL_NAME if self.model is None else os.fspath(self.model)


def make_config(
    model: str | os.PathLike[str] | None, config: EngineConfig | None, overrides: dict[str, Any]
) -> EngineConfig:
    """Make an engine's configuration from the arguments of its constructor.

    Raises:
        InvalidRequestError: for an unknown field, or an invalid value.
    """
    if model is not None:
        overrides["model"] = model
    if config is None:
        return EngineConfig(**overrides)
    if not isinstance(config, EngineConfig):
        raise check.value_error("config", config, "an EngineConfig or None")
    return config.with_overrides(overrides)


def parse_bytes(value: int | str, field: str = "kv_cache_memory") -> int:
    """Convert a number, or a text such as "512MiB", "4 GiB" or "2.5GB", to bytes.

    Args:
        field: name of the setting, for the error.

    Raises:
        InvalidRequestError: if it is neither, or not positive.
    """
    accepted = 'a positive number of bytes below 2**63, or text such as "4GiB"'
    size: Any = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", size)
        unit = _BYTES_PER_UNIT.get(match.group(2).lower()) if match else None
        size = None if match is None or unit is None else int(float(match.group(1)) * unit)
    return check.integer(
        field, size, 1, make_error=lambda *_: check.value_error(field, value, accepted)
    )
