"""TransformersConfig: configuration of a checkpoint that runs in transformers' own modules."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_choice import is_gguf
from asyncllm.checkpoint.importing import importing_transformers
from asyncllm.checkpoint.model_config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    ModelConfig,
    generation_defaults,
    has_native_decoder,
    quant_method,
    read_eos_token_ids,
)
from asyncllm.errors import AsyncLLMError, ModelLoadError
from asyncllm.validation import describe, describe_error

if TYPE_CHECKING:
    from torch import nn

DEFAULT_CONTEXT_TOKENS = 131_072
"""Context in tokens of a model that has only linear attention, if its configuration sets no limit:
the engine's buffers need one."""

_MODULE_COUNT_FIELDS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_experts num_local_experts "
    "n_routed_experts"
).split()
"""Fields of config.json that are numbers of modules or list entries. transformers makes these in a
loop, so a huge number would hang it."""

_SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """A decoder with transformers' configuration, perhaps a multimodal checkpoint's text part.

    Attributes:
        path: local directory of the files.
        architecture: name of the model's class, e.g. "Gemma3ForCausalLM".
        vocab_size: number of logits per token.
        max_position_embeddings: the model's context in tokens.
        dtype: the checkpoint's dtype: "float32", "bfloat16" or "float16"; "float32" if the files
            name none.
        eos_token_ids: token ids that end an output, those of ``generation_config`` first.
        quantization, generation_defaults: as in ModelConfig.
        config: transformers' configuration of the text model.
        model_class: the class of the model.
        is_text_part: whether the checkpoint has other parts too, such as a vision tower.
        skeleton: the model's modules on the meta device, without memory.
    """

    path: Path
    architecture: str
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: str | None
    generation_defaults: Mapping[str, Any]
    config: Any
    model_class: Any
    is_text_part: bool
    skeleton: nn.Module = field(repr=False, compare=False)

    @classmethod
    def from_directory(
        cls,
        path: str | os.PathLike[str],
        *,
        trust_remote_code: bool = False,
        overrides: Mapping[str, Any] | None = None,
        use_generation_defaults: bool = True,
    ) -> TransformersConfig:
        """Read a checkpoint's configuration and build its modules on the meta device.

        Args:
            trust_remote_code: run Python code that comes with the checkpoint.
            overrides: ``EngineConfig.hf_overrides``.
            use_generation_defaults: read ``generation_defaults``; False leaves them empty.

        Raises:
            ModelLoadError: files are missing or damaged, transformers does not know the model,
                it generates no text, or its quantisation is not supported.
        """
        directory = Path(path)
        file = ConfigFile.read(directory / "config.json").with_overrides(overrides)
        with (
            converting_transformers_errors(file.path, "transformers cannot read it"),
            importing_transformers(),
        ):
            whole_config = _read_config(
                directory, file, trust_remote_code, is_overridden=bool(overrides)
            )
            generation = ConfigFile.read_if_present(directory / "generation_config.json")
            config = copy.deepcopy(whole_config.get_text_config(decoder=True))
            # Take ``tie_word_embeddings`` from the whole model's configuration, which overrides the
            # text part's.
            if type(config) is not type(whole_config):
                config.tie_word_embeddings = whole_config.tie_word_embeddings
            # The checkpoint reader dequantises weights, so transformers must not unpack them again.
            vars(config).pop("quantization_config", None)
            model_class = _model_class(directory, file, whole_config, config, trust_remote_code)
            skeleton = build_skeleton(file.path, model_class, config)
            head = skeleton.get_output_embeddings()  # pyright: ignore[reportCallIssue]
            vocab_size = getattr(head, "out_features", None) or config.vocab_size
            fields = ConfigFile(file.path, config.to_dict())
            if fields.values.get("max_position_embeddings") is None:
                # The configuration object maps names such as GPT-2's n_positions to the usual name.
                context = getattr(config, "max_position_embeddings", None)
                if context is None and set(getattr(config, "layer_types", ())) == {
                    "linear_attention"
                }:
                    context = DEFAULT_CONTEXT_TOKENS
                fields = ConfigFile(
                    file.path, {**fields.values, "max_position_embeddings": context}
                )
            return cls(
                path=directory,
                architecture=model_class.__name__,
                vocab_size=vocab_size,
                max_position_embeddings=fields.integer(
                    "max_position_embeddings", high=MAX_POSITIONS
                ),
                dtype=_checkpoint_dtype(file, config, whole_config),
                eos_token_ids=read_eos_token_ids(generation, file, vocab_size),
                quantization=quant_method(file),
                generation_defaults=generation_defaults(generation, use_generation_defaults),
                config=config,
                model_class=model_class,
                is_text_part=type(config) is not type(whole_config),
                skeleton=skeleton,
            )

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters; shared parameters count once."""
        return sum(each.numel() for each in self.skeleton.parameters())


def read_config(
    path: Path,
    model_impl: str,
    trust_remote_code: bool = False,
    *,
    overrides: Mapping[str, Any] | None = None,
    use_generation_defaults: bool = True,
) -> ModelConfig | TransformersConfig:
    """Read the configuration for the implementation that ``EngineConfig.model_impl`` names.

    "auto" is the engine's own decoder if that has the architecture, else transformers' modules.

    Args:
        overrides: ``EngineConfig.hf_overrides``.
        use_generation_defaults: read ``generation_defaults``; False leaves them empty.

    Raises:
        ModelLoadError: files are missing or damaged, or the implementation does not cover the
            model.
    """
    native = model_impl == "native" or is_gguf(path)
    if native and model_impl == "transformers":
        raise ModelLoadError(
            f'{path}: model_impl="transformers" needs a checkpoint in safetensors: expected "auto" '
            'or "native" with GGUF'
        )
    if model_impl == "auto" and not native:
        file = ConfigFile.read(path / "config.json").with_overrides(overrides)
        native = has_native_decoder(file)
    if native:
        return ModelConfig.from_directory(
            path, overrides=overrides, use_generation_defaults=use_generation_defaults
        )
    return TransformersConfig.from_directory(
        path,
        trust_remote_code=trust_remote_code,
        overrides=overrides,
        use_generation_defaults=use_generation_defaults,
    )


@contextmanager
def converting_transformers_errors(path: Path, failure: str) -> Iterator[None]:
    """Convert errors of transformers or of a checkpoint's code to ModelLoadError.

    The message begins with ``path`` and ``failure``. SystemExit is converted too: no signal is
    delivered on the thread that loads a model, so the called code itself must have raised it.
    """
    try:
        yield
    except AsyncLLMError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelLoadError(f"{path}: {failure}: {describe_error(error)}") from error


def build_skeleton(path: Path, model_class: Any, config: Any) -> nn.Module:
    """Build the model on the meta device, with the attention that ``config`` names.

    Raises:
        ModelLoadError: the model's code refuses the configuration.
    """
    import torch

    with (
        converting_transformers_errors(path, f"transformers cannot build {model_class.__name__}"),
        torch.device("meta"),
    ):
        return model_class(copy.deepcopy(config)).eval()


def _check_fields(file: ConfigFile) -> None:
    """Check counts and data types in the file and its sections, before transformers reads them.

    Raises:
        ModelLoadError: a count is larger than in any real model; transformers would run a loop of
            that many iterations. Or a data type is unknown; transformers' own error would not name
            the field.
    """
    parts = [file.section(name) for name, value in file.values.items() if isinstance(value, dict)]
    for part in (file, *parts):
        for name in _MODULE_COUNT_FIELDS:
            if isinstance(part.values.get(name), int):
                part.integer(name, low=0, high=MAX_LAYERS)
    for part in (file, file.section("text_config")):
        for name in ("dtype", "torch_dtype"):
            part.choice(name, _SUPPORTED_DTYPES, _SUPPORTED_DTYPES[0])


def _read_config(
    directory: Path, file: ConfigFile, trust_remote_code: bool, *, is_overridden: bool
) -> Any:
    """Read transformers' configuration of the whole checkpoint."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    quant_method(file)
    _check_fields(file)
    config_class: Any = _remote_code_class(directory, file, "AutoConfig", trust_remote_code)
    if config_class is None:
        name = file.values.get("model_type")
        if not isinstance(name, str) or name not in CONFIG_MAPPING:
            if "auto_map" not in file or trust_remote_code:
                accepted = f"one that transformers {transformers.__version__} knows"
                raise file.field_error("model_type", accepted)
            raise ModelLoadError(
                f"{file.path}: model_type is {describe(name)}, which transformers "
                f"{transformers.__version__} knows only by the checkpoint's own code; "
                "trust_remote_code=True runs that"
            )
        config_class = CONFIG_MAPPING[name]
    if is_overridden:
        config = config_class.from_dict(copy.deepcopy(dict(file.values)))
    else:
        config = config_class.from_pretrained(directory, local_files_only=True)
    if config.is_encoder_decoder:
        raise ModelLoadError(
            f"{file.path}: is_encoder_decoder is True, expected a model with a decoder alone"
        )
    return config


def _remote_code_class(
    directory: Path, file: ConfigFile, auto_class: str, trust_remote_code: bool
) -> Any:
    """Import the checkpoint's own class for a transformers auto class.

    None if it has no such class, or its code is not trusted.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = file.section("auto_map").values.get(auto_class)
    if reference is None or not trust_remote_code:
        return None
    return get_class_from_dynamic_module(reference, directory, local_files_only=True)


def _model_class(
    directory: Path, file: ConfigFile, whole_config: Any, text_config: Any, trust_remote_code: bool
) -> Any:
    """Find the model class that generates text.

    It is the first of these that exists: the checkpoint's own class, if its code is trusted; the
    class that ``architectures`` names; transformers' class for the type of the text configuration.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    own_class = _remote_code_class(directory, file, "AutoModelForCausalLM", trust_remote_code)
    if own_class is not None:
        return own_class
    names = file.values.get("architectures")
    for name in (
        names if isinstance(names, list) and type(text_config) is type(whole_config) else ()
    ):
        named_class = getattr(transformers, str(name), None)
        if str(name).endswith(("ForCausalLM", "LMHeadModel")) and named_class is not None:
            return named_class
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)]
    except KeyError as error:
        raise ModelLoadError(
            f"{file.path}: architectures is {describe(names)}, and transformers "
            f"{transformers.__version__} has no model that generates text for the "
            f"configuration {type(text_config).__name__}; expected one with a class …ForCausalLM"
        ) from error


def _checkpoint_dtype(file: ConfigFile, text_config: Any, whole_config: Any) -> str:
    dtype = getattr(text_config, "dtype", None) or getattr(whole_config, "dtype", None)
    if dtype is None:
        return "float32"
    name = str(dtype).removeprefix("torch.")
    return ConfigFile(file.path, {"dtype": name}).choice("dtype", _SUPPORTED_DTYPES)
