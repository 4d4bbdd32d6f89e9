"""ChatTemplate: messages to a prompt, in a sandbox, as transformers renders them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncllm.config_file import ConfigFile
from asyncllm.errors import InvalidRequestError, ModelLoadError

if TYPE_CHECKING:
    import jinja2

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "continue_final_message", "tokenize", "return_dict", "documents")


class ChatTemplate:
    """A model's chat templates; compiled when they are first used.

    Attributes:
        sources: name to Jinja source; the usual one is "default", one for calls with tools
            "tool_use". Empty for a model without a template.
        special_tokens: what templates see as ``bos_token``, ``eos_token`` and so on.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_directory(cls, path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Reads the templates of a tokenizer's directory.

        ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` come before
        ``chat_template.json``, and that before ``chat_template`` in
        ``tokenizer_config.json``, which is one template or a list of named ones.

        Raises:
            ModelLoadError: for a file that cannot be read or holds something else.
        """
        sources: dict[str, str] = {}
        if (path / "chat_template.jinja").is_file():
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

    def compile(self) -> None:
        """Compiles what ``render`` would compile at its first use, which takes some 50 ms
        with the import of jinja2: for a start, on a thread of its own. A template that does
        not compile is reported where it is used."""
        for source in self.sources.values():
            with contextlib.suppress(InvalidRequestError):
                self._compiled[source] = _compile(source)

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: dicts with a ``role``; ``content`` is a string, a list of text parts
                (joined by newlines), or absent. Dataclasses and pydantic models will do.
            tools: JSON schemas of functions, or None.
            add_generation_prompt: end with the header of the assistant's next message.
            chat_template: name of one of the model's templates, or the source of another.
            **variables: further variables that the template reads.

        Raises:
            InvalidRequestError: ``param`` is "messages", "tools", "chat_template" or
                "chat_template_kwargs"; the message names what is wrong, and where.
        """
        for name in _RESERVED:
            if name in variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs: {name!r} cannot be set", param="chat_template_kwargs"
                )
        chat = _check_messages(messages)
        schemas = _check_tools(tools)
        template = self._template(chat_template, with_tools=schemas is not None)
        values = {
            **self.special_tokens,
            **_plain(variables, "chat_template_kwargs", "chat_template_kwargs"),
        }
        try:
            return template.render(
                {
                    **values,
                    "messages": chat,
                    "tools": schemas,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template is a program from elsewhere: whatever it raises ends this request alone.
        except Exception as error:
            raise InvalidRequestError(
                f"messages: the chat template refused them ({type(error).__name__}: {error})",
                param="messages",
            ) from error

    def _template(self, chosen: str | None, *, with_tools: bool) -> jinja2.Template:
        if chosen is not None:
            source = self.sources.get(chosen, chosen)
        elif with_tools and "tool_use" in self.sources:
            source = self.sources["tool_use"]
        elif "default" in self.sources:
            source = self.sources["default"]
        elif self.sources:
            names = ", ".join(sorted(self.sources))
            raise InvalidRequestError(
                f"chat_template: the model has no default one, expected one of {names}",
                param="chat_template",
            )
        else:
            raise InvalidRequestError(
                "messages: the model has no chat template; pass chat_template, or a prompt",
                param="messages",
            )
        template = self._compiled.get(source)
        if template is None:
            template = _compile(source)
            if source in self.sources.values():
                self._compiled[source] = template
        return template


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error})") from error


def _named_templates(config: ConfigFile) -> dict[str, str]:
    value = config.values["chat_template"]
    if isinstance(value, str):
        return {"default": value}
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = None
    if named is None or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise config.bad("chat_template", "a template or a list of {name, template}")
    return named


def _compile(source: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidRequestError(
            f"chat_template: does not compile ({type(error).__name__}: {error})",
            param="chat_template",
        ) from error


def _environment() -> jinja2.Environment:
    """The environment that Hugging Face's chat templates are written for."""
    import jinja2
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils

    class GenerationBlock(jinja2.ext.Extension):
        """``{% generation %}`` marks what the assistant said, for training; here it is
        transparent."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Without underscored attributes, which lead into the interpreter's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            # Jinja's own signature: an attribute may be called "self".
            jinja2.utils.Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **kwargs).items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}: refused")
            super().__setitem__(name, value)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["namespace"] = Namespace
    environment.globals["dict"] = _DictFactory()
    return environment


class _DictFactory:
    """What templates use of ``dict``; the type itself has attributes that lead further."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt is not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        kind = "empty" if isinstance(messages, (list, tuple)) else f"a {type(messages).__name__}"
        raise _bad_messages("messages", kind, "a list of at least one message")
    chat = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        plain = _plain(message, where, "messages")
        if not isinstance(plain, dict):
            raise _bad_messages(where, f"a {type(message).__name__}", "a dict with a role")
        # Clients send null for what is not there, and templates only test for presence.
        plain = {key: value for key, value in plain.items() if value is not None}
        role = plain.get("role")
        if not isinstance(role, str):
            raise _bad_messages(f"{where}.role", repr(role), "a string, as 'user'")
        if "content" in plain:
            plain["content"] = _content(plain["content"], f"{where}.content")
        chat.append(_with_reasoning(plain))
    return chat


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _bad_messages(where, repr(content), "a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise _bad_messages(f"{where}[{i}]", repr(part), "{'type': 'text', 'text': …}")
        texts.append(text)
    return "\n".join(texts)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning goes by several names; templates read ``reasoning_content``, or
    ``thinking``."""
    for name in _REASONING_FIELDS:
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _check_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    plain = _plain(tools, "tools", "tools")
    if not isinstance(plain, (list, tuple)) or not all(isinstance(t, dict) for t in plain):
        raise InvalidRequestError("tools: expected a list of JSON schemas (dicts)", param="tools")
    return list(plain)


def _plain(value: Any, where: str, param: str) -> Any:
    """A copy made of JSON's types alone: nothing with methods of its own reaches a template,
    and what the caller changes later does not either."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {
            _plain(key, where, param): _plain(item, f"{where}.{key}", param)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items: Iterable[Any] = (_plain(v, f"{where}[{i}]", param) for i, v in enumerate(value))
        return tuple(items) if isinstance(value, tuple) else list(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _plain(fields, where, param)
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return _plain(dump(), where, param)
    kind = type(value).__name__
    raise InvalidRequestError(f"{where}: a {kind}, expected JSON types", param=param)


def _bad_messages(where: str, value: str, accepted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: is {value}, expected {accepted}", param="messages")
