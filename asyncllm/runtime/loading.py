"""Loading: makes an engine's executor, tokenizer and grammar compiler from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncllm import validation as check
from asyncllm.checkpoint.progress import LoadStage, ProgressCallback
from asyncllm.config import EngineConfig
from asyncllm.core.engine_core import close_executor
from asyncllm.core.executor import Executor
from asyncllm.runtime.tokenizer_load import TokenizerLoad
from asyncllm.structured.backends import GrammarBackends
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.grammar import Vocabulary

if TYPE_CHECKING:
    from asyncllm.text.tokenizer import Tokenizer
    from asyncllm.tool_calls.chat_syntax import ChatSyntaxes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Executor, tokenizer and configuration of a loaded model. ``model_config`` must have
    ``eos_token_ids`` and ``generation_defaults``. If ``chat_syntaxes`` is None, the first
    conversation makes them from the chat template."""

    executor: Executor
    tokenizer: Tokenizer
    model_config: Any
    chat_syntaxes: ChatSyntaxes | None = None


def make_grammar_compiler(config: EngineConfig, loaded_model: LoadedModel) -> GrammarCompiler:
    """Make the grammar compiler of an engine. If the configuration names a backend, it is prepared
    now, which holds the GIL for up to a second if the vocabulary is large.

    Raises:
        InvalidRequestError: if the configured backend is not installed.
    """
    tokenizer, size = loaded_model.tokenizer, loaded_model.executor.info.vocab_size

    def vocabulary() -> Vocabulary:
        names = {i: tokenizer.backend.id_to_token(i) for i in tokenizer.special_token_ids}
        special = {i: name for i, name in names.items() if name is not None}
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return Vocabulary(tokenizer.token_bytes(size), special, encode)

    backends = GrammarBackends(config.structured_outputs_backend, vocabulary)
    if config.structured_outputs_backend != "auto":
        backends.check_installed()
        backends.prepare()
    return GrammarCompiler(backends, config.grammar_timeout)


def check_logits_processors(config: EngineConfig, executor: Executor) -> None:
    """Raise InvalidRequestError for logits processors that the executor cannot run, because it is
    in another process or has no model."""
    in_process = getattr(executor, "in_process", None)
    if config.logits_processors and (in_process is None or not in_process.logits_processors):
        accepted = "none with an executor that runs in another process, or has no model"
        raise check.value_error("logits_processors", config.logits_processors, accepted)


Loader = Callable[[EngineConfig, ProgressCallback], LoadedModel]


def load_model(config: EngineConfig, progress: ProgressCallback) -> LoadedModel:
    """Load model, tokenizer and configuration.

    Called on the engine thread, which owns the model.

    Raises:
        ModelLoadError: for files that are missing, damaged or of an unsupported kind.
        InvalidRequestError: for settings that the model or the machine does not support.
        KVCacheTooSmallError: if the KV cache cannot hold ``max_model_len``.
    """
    from asyncllm.checkpoint.model_files import resolve_model, resolve_tokenizer
    from asyncllm.gpu.build import build_model_runner
    from asyncllm.gpu.transformers_model.config import read_config

    path = resolve_model(
        config.model,
        config.revision,
        with_weights=config.load_format != "dummy",
        with_code=config.trust_remote_code,
        progress=progress,
    )
    tokenizer_path = path
    if config.tokenizer is not None:
        tokenizer_path = resolve_tokenizer(config.tokenizer, progress=progress)
    model_config = read_config(
        path,
        config.model_impl,
        config.trust_remote_code,
        overrides=config.hf_overrides,
        use_generation_defaults=config.generation_config == "auto",
    )
    tokenizer_load = TokenizerLoad(partial(_read_tokenizer, tokenizer_path, config))

    def report_progress(done: int, total: int, stage: LoadStage = "weights") -> None:
        tokenizer_load.begin()
        progress(done, total, stage)

    if not _can_read_in_parallel(tokenizer_path, model_config):
        tokenizer_load.result()
    try:
        executor = build_model_runner(config, model_config, report_progress)
    except BaseException:
        # Raise the tokenizer's error instead, if there is one, as if the tokenizer had been read
        # before the weights.
        tokenizer_load.result()
        raise
    try:
        tokenizer, syntaxes = tokenizer_load.result()
    except BaseException:
        close_executor(executor)
        raise
    return LoadedModel(executor, tokenizer, model_config, syntaxes)


def _read_tokenizer(path: Path, config: EngineConfig) -> tuple[Tokenizer, ChatSyntaxes]:
    from asyncllm.text.tokenizer import Tokenizer
    from asyncllm.tool_calls.chat_syntax import ChatSyntaxes

    tokenizer = Tokenizer.from_directory(path, trust_remote_code=config.trust_remote_code)
    if config.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(config.chat_template)
    # Compile the template now: otherwise, the first chat would compile it on the event loop.
    tokenizer.chat_template.compile()
    syntaxes = ChatSyntaxes.from_tokenizer(tokenizer, config)
    syntaxes.import_response_parser()
    return tokenizer, syntaxes


def _can_read_in_parallel(path: Path, model_config: Any) -> bool:
    """Whether the tokenizer can be read on a thread of its own. False if both the tokenizer and the
    model import transformers: two threads may see half-initialised modules."""
    from asyncllm.checkpoint.gguf_choice import is_gguf
    from asyncllm.checkpoint.model_config import ModelConfig

    if not isinstance(model_config, ModelConfig):
        return False
    return is_gguf(path) or (path / "tokenizer.json").is_file()
