"""TemplateSandbox: Jinja environment of chat templates, with limits on time and memory."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

_CHARACTERS_PER_ITEM = 16
"""Characters that a list item counts for in size limits; a bit of an integer counts as much."""

_COLLECTION_FILTER_NAMES = frozenset(
    "attr batch count d default dictsort first float groupby int items last length list map max "
    "min random reject rejectattr reverse select selectattr slice sort unique".split()
)
"""Filters that accept a list or a dict without converting it to text."""

_ARGUMENT_SIZED_METHOD_NAMES = frozenset(
    "batch center expandtabs indent join ljust rjust round slice to_bytes tojson translate urlize "
    "wordwrap zfill".split()
)
"""Filters and methods whose result is larger for a larger argument."""

_DYNAMIC_FORMAT_WIDTH_PATTERN = re.compile(r"%[-+ #0]*(?:\*|\d*\.\*)|\{[^{}]*\{")
"""Format field with a computed width or precision, such as ``%*d`` or ``{:{}}``."""


class TemplateLimitError(Exception):
    """Error for a template that exceeds its limits of time or memory."""


class TemplateOutputError(TemplateLimitError):
    """Error for a template that writes more than ``max_output_characters``."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one rendering.

    Attributes:
        max_output_characters: maximum number of characters of the rendered text.
        max_value_size: maximum size of an intermediate value: characters of a string, 16 for each
            item of a list. All intermediate values together may have 16 times this size.
        max_seconds: maximum processor time of the rendering thread.
    """

    max_output_characters: int
    max_value_size: int
    max_seconds: float


class RenderMeter:
    """Meter of the processor time and memory of one rendering.

    Its methods are called before an operation allocates memory, and raise TemplateLimitError if the
    operation would exceed the limits.
    """

    __slots__ = ("_characters_left", "_deadline", "_limits", "_num_charges")

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._characters_left = 16 * limits.max_value_size
        self._num_charges = 0
        self._deadline = time.thread_time() + limits.max_seconds

    def charge(self, size: int) -> None:
        """Charge an operation whose result has ``size`` characters, or one step of a loop."""
        self._characters_left -= max(size, 0)
        if size > self._limits.max_value_size or self._characters_left < 0:
            raise TemplateLimitError(f"makes more than {self._limits.max_value_size} characters")
        self._num_charges += 1
        # Reading the clock takes longer than most operations, so it is not read for each.
        if self._num_charges % 32 == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"takes more than {self._limits.max_seconds} s")

    def charge_text(self, *values: Any) -> int:
        """Charge the conversion of ``values`` to text and return its estimated length.

        A list that occurs several times within another is charged each time.
        """
        stack, size = list(values), 0
        while stack and size <= self._limits.max_value_size:
            value = stack.pop()
            if isinstance(value, str):
                size += len(value)
                continue
            size += 8 + value.bit_length() // 3 if isinstance(value, int) else 24
            if isinstance(value, Collection):
                stack.extend(value)
            if isinstance(value, Mapping):
                stack.extend(value.values())
        self.charge(size)
        return size

    def charge_call(self, name: str, value: Any, arguments: tuple[Any, ...]) -> None:
        """Charge a call of a filter or method, by the largest size that its result can have.

        Args:
            name: name of the filter or method.
            value: the object that it is applied to.
            arguments: the arguments of the call.
        """
        size = _value_size(value)
        if name not in _COLLECTION_FILTER_NAMES and not isinstance(value, (str, bytes)):
            size = self.charge_text(value)
        result_size = 0
        if name in _ARGUMENT_SIZED_METHOD_NAMES:
            result_size = (size + 1) * (max(map(self._argument_size, arguments), default=0) + 1)
        elif name == "replace":
            texts = [str(argument) for argument in arguments]
            times = max(map(str(value).count, texts), default=0)
            result_size = size + times * max(map(len, texts), default=0)
        elif name in ("format", "format_map"):
            text = str(value)
            if _DYNAMIC_FORMAT_WIDTH_PATTERN.search(text):
                raise TemplateLimitError("formats with a width that it computes")
            widths = sum(map(int, re.findall(r"\d+", text)))
            fields = text.count("%") + text.count("{")
            result_size = size + widths + fields * self.charge_text(arguments)
        self.charge(result_size)

    def _argument_size(self, value: Any) -> int:
        if isinstance(value, int):
            return abs(value)
        if isinstance(value, tuple):
            return sum(map(self._argument_size, value))
        return self.charge_text(value)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja environment with the functions and settings that Hugging Face's chat templates expect.

    Loops, calls, filters and operators report to a RenderMeter, which bounds the processor time
    and memory of a rendering. The time is checked between operations. A single operation is short,
    because its strings have bounded length.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
            finalize=self._finalize,
        )
        self._thread_state = threading.local()
        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = self._wrap_with_meter(name, function)
        # _MeteringFilterInserter inserts these filters. No template can call them, because their
        # names contain blanks.
        self.filters |= {
            " each": self._iterate_metered,
            " text": self.concat,
            " slice": self._charge_result,
        }
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _DictFactory()
        del self.globals["lipsum"]

    def render(
        self, template: jinja2.Template, values: dict[str, Any], limits: RenderLimits
    ) -> str:
        """Render ``template``.

        Raises:
            TemplateLimitError: for a template that needs more than ``limits``.
            Exception: any other error, from the template itself.
        """
        self._thread_state.meter = RenderMeter(limits)
        pieces, length = [], 0
        context = template.new_context(values)
        try:
            for piece in template.root_render_func(context):
                pieces.append(piece)
                length += len(piece)
                if length > limits.max_output_characters:
                    raise TemplateOutputError(
                        f"writes more than {limits.max_output_characters} characters"
                    )
        finally:
            del self._thread_state.meter
            # Macros and their context refer to each other. Break the cycle, so that a conversation
            # is freed without the garbage collector.
            context.parent.clear()
            context.vars.clear()
        return "".join(pieces)

    @property
    def _current_meter(self) -> RenderMeter:
        # During compilation there is no meter, so this raises. Jinja then does not fold constant
        # expressions, whose cost would escape the limits.
        return self._thread_state.meter

    # --- methods that Jinja calls ------------------------------------------------------------

    def _generate(self, source: Any, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_MeteringFilterInserter().visit(source), *args, **kwargs)

    def concat(self, pieces: Iterable[Any]) -> str:
        values = list(pieces)
        self._current_meter.charge_text(*values)
        return "".join(map(str, values))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Jinja wraps str.format; the method itself is in ``__wrapped__``.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            self._current_meter.charge_call(method.__name__, owner, (*args, *kwargs.values()))
        return self._charge_result(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator != "%":
            self._current_meter.charge(_binop_result_size(operator, left, right))
        elif isinstance(left, (str, bytes)):
            self._current_meter.charge_call("format", left, (right,))
        return super().call_binop(context, operator, left, right)

    def _finalize(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._current_meter.charge_text(value)
        return value

    def _wrap_with_meter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Jinja passes some filters the context or environment before the value.
        num_injected = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            arguments = (*args[num_injected + 1 :], *kwargs.values())
            self._current_meter.charge_call(name, args[num_injected], arguments)
            result = function(*args, **kwargs)
            # Compute a lazy result now, so that its size is known.
            return self._charge_result(list(result) if isinstance(result, Iterator) else result)

        return metered

    def _iterate_metered(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._current_meter.charge(0)
            yield value

    def _charge_result(self, value: Any) -> Any:
        self._current_meter.charge(_value_size(value))
        return value


def _value_size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return _CHARACTERS_PER_ITEM * value.bit_length()
    return _CHARACTERS_PER_ITEM * len(value) if isinstance(value, (list, tuple, dict)) else 0


def _binop_result_size(operator: str, left: Any, right: Any) -> int:
    """Upper bound of the size of a sum, a product or a power."""
    integers = isinstance(left, int) and isinstance(right, int)
    if operator == "+" or (operator == "*" and integers):
        return _value_size(left) + _value_size(right)
    if isinstance(right, int):
        return _value_size(left) * right
    return left * _value_size(right) if isinstance(left, int) else 0


class _MeteringFilterInserter(jinja2.visitor.NodeTransformer):
    """Inserts filters that report loops, ``~`` and slices to the meter. Without these filters,
    Jinja would compile loops, ``~`` and slices to plain Python, which reports nothing."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _with_filter(cast(jinja2.nodes.Expr, node.iter), " each")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Expr:
        self.generic_visit(node)
        return _with_filter(jinja2.nodes.List(node.nodes, lineno=node.lineno), " text")

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Expr:
        self.generic_visit(node)
        return _with_filter(node, " slice") if isinstance(node.arg, jinja2.nodes.Slice) else node


def _with_filter(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(jinja2.ext.Extension):
    """Jinja extension that ignores ``{% generation %}`` tags, which mark text for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, restricted. Attributes that begin with an underscore are refused, because
    they expose the interpreter's internals. Its ``repr`` does not contain its values, because the
    meter would not see their size."""

    __repr__ = object.__repr__

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in Jinja, no parameter is named ``self``, because an attribute may have this name.
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}: refused")
        super().__setitem__(name, value)


class _DictFactory:
    """Replacement for the type ``dict`` in templates. The type itself, and ``dict[0]``, give access
    to methods that change their arguments, such as ``dict.update``."""

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
    # Jinja's own filter escapes HTML characters, but a prompt is plain text.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
