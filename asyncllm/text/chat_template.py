"""ChatTemplate: renders messages to a prompt, in a sandbox as transformers does."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import jinja2

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.small_file import read_small_file
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.text.template_input import TemplateInput
from asyncllm.text.template_sandbox import RenderLimits, TemplateLimitError, TemplateSandbox
from asyncllm.validation import argument_error, value_error

_MAX_SOURCE_CHARACTERS = 1 << 17
"""Maximum number of characters of a template: ten times the longest known one. Compiling a template
of this length holds the GIL for a second; one of a few megabytes would hold it for a minute."""


_MAX_CACHED_TEMPLATES = 8
"""Maximum number of cached templates that calls passed as ``chat_template``."""


class ChatTemplate:
    """A model's chat templates, compiled at first use.

    Attributes:
        sources: Jinja sources by name: "default", and "tool_use" for conversations with tools.
            Empty if the model has no template.
        special_tokens: special tokens by the name of their template variable, such as
            ``bos_token``.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._sandbox = TemplateSandbox()
        self._compiled_templates: dict[str, jinja2.Template] = {}
        self._compile_cached = lru_cache(_MAX_CACHED_TEMPLATES)(self._compile)

    @classmethod
    def from_directory(cls, path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Read the templates in a tokenizer's directory.

        The first of these places that has a template wins:

        - ``chat_template.jinja`` together with ``additional_chat_templates/*.jinja``;
        - ``chat_template.json``;
        - ``chat_template`` in ``tokenizer_config.json``: one template or a list of named ones.

        Raises:
            ModelLoadError: for a file that cannot be read, or has no template where one should be.
        """
        sources: dict[str, str] = {}
        if (path / "chat_template.jinja").exists():
            sources["default"] = _read_text(path / "chat_template.jinja")
        for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
            sources[file.stem] = _read_text(file)
        if not sources:
            for name in ("chat_template.json", "tokenizer_config.json"):
                config = ConfigFile.read_if_present(path / name)
                if "chat_template" in config:
                    sources = _named_templates(config)
                    break
        return cls(sources, special_tokens)

    @classmethod
    def from_source_or_path(
        cls, source_or_path: str | os.PathLike[str], special_tokens: Mapping[str, str]
    ) -> ChatTemplate:
        """Make a ChatTemplate from ``EngineConfig.chat_template``.

        Args:
            source_or_path: a ``str`` is the template's source; an ``os.PathLike`` names its file.

        Raises:
            ModelLoadError: for a file that cannot be read.
            InvalidRequestError: for a template that is too long or does not compile.
        """
        source = (
            source_or_path if isinstance(source_or_path, str) else _read_text(Path(source_or_path))
        )
        template = cls({"default": source}, special_tokens)
        template._compile(source)
        return template

    def compile(self) -> None:
        """Compile the model's templates in advance, so that no request waits 50 ms for this.

        A template that does not compile raises its error when it is used.
        """
        for source in self.sources.values():
            with contextlib.suppress(InvalidRequestError):
                self._compile(source)

    def reads_variable(self, variable: str, chat_template: str | None = None) -> bool:
        """Whether a template contains the name of a variable, such as ``tools``.

        Args:
            chat_template: name or source of the template; None: whether any of the model's
                templates contains it.
        """
        name_pattern = re.compile(rf"\b{re.escape(variable)}\b")
        if chat_template is None:
            sources = tuple(self.sources.values())
        else:
            sources = (self._find_source(chat_template),)
        return any(name_pattern.search(source) for source in sources)

    def is_compiled(self, conversation: TemplateInput) -> bool:
        return self._choose_source(conversation) in self._compiled_templates

    def render(
        self,
        conversation: TemplateInput,
        limits: RenderLimits,
        change_string: Callable[[str], str] | None = None,
    ) -> str:
        """Render the prompt of a conversation.

        Args:
            change_string: function that is applied to every string of the conversation, except
                variables that override one of ``special_tokens``.

        Raises:
            InvalidRequestError: for a template that is missing, does not compile, or raises an
                error.
            TemplateLimitError: for a template that needs more than ``limits``.
        """
        source = self._choose_source(conversation)
        template = self._compiled_templates.get(source) or self._compile_cached(source)
        try:
            values = conversation.values
            if change_string is not None:
                values = conversation.with_changed_strings(
                    change_string, unchanged_names=self.special_tokens
                )
            return self._sandbox.render(template, {**self.special_tokens, **values}, limits)
        except TemplateLimitError:
            raise
        # A template is the model author's program. Any exception that it raises must end only this
        # request.
        except Exception as error:
            problem = f"the chat template refused them ({type(error).__name__}: {error!s:.1000})"
            raise argument_error("messages", problem) from error

    def _choose_source(self, conversation: TemplateInput) -> str:
        if conversation.chat_template is not None:
            return self._find_source(conversation.chat_template)
        if conversation.values["tools"] is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
        if self.sources:
            names = ", ".join(sorted(self.sources))
            problem = f"the model has no default one, expected one of {names}"
            raise argument_error("chat_template", problem)
        problem = "the model has no chat template; pass chat_template, or a prompt"
        raise argument_error("messages", problem)

    def _find_source(self, chat_template: str) -> str:
        """Source of the template that ``chat_template`` names, or ``chat_template`` itself.

        A text without "{" is refused: as a template it would be the whole prompt, so it must be the
        path of a file, or an unknown name.
        """
        if chat_template in self.sources or "{" in chat_template:
            return self.sources.get(chat_template, chat_template)
        names = ", ".join(map(repr, sorted(self.sources))) or "none"
        accepted = f"the text of a template, or the name of one of the model's ({names})"
        raise value_error("chat_template", chat_template, accepted)

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            problem = f"has {len(source)} characters, expected at most {_MAX_SOURCE_CHARACTERS}"
            raise argument_error("chat_template", problem)
        try:
            template = self._sandbox.from_string(source)
        # Python's compiler raises a SyntaxError of its own, for example for too many nested loops.
        except Exception as error:
            problem = f"does not compile ({type(error).__name__}: {error!s:.1000})"
            raise argument_error("chat_template", problem) from error
        if source in self.sources.values():
            self._compiled_templates[source] = template
        return template


def _read_text(path: Path) -> str:
    try:
        return io.TextIOWrapper(io.BytesIO(read_small_file(path)), encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error})") from error


def _named_templates(config: ConfigFile) -> dict[str, str]:
    value = config.values["chat_template"]
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        templates = None
    if templates is None or not all(
        isinstance(text, str) for pair in templates.items() for text in pair
    ):
        raise config.field_error("chat_template", "a template or a list of {name, template}")
    return templates
