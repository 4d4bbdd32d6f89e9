"""WholeCalls: tool calls of a stream, each once it is whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncllm.outputs import ToolCall, ToolCallDelta


@dataclass(slots=True)
class WholeCalls:
    """Collects the fragments of one output.

    A client cannot be told that a call which it was shown turned out to be text. So a call is sent
    when it is known to be one, and what is streamed is what the whole answer has.

    Attributes:
        num_calls: that were whole so far.
    """

    num_calls: int = 0
    _open: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)

    def push(self, fragments: tuple[ToolCallDelta, ...]) -> list[ToolCall]:
        """The calls that are whole by now."""
        found = []
        for fragment in fragments:
            if fragment.id is not None:
                self._open[fragment.index] = (fragment.id, fragment.name or "", [])
            call_id, name, arguments = self._open[fragment.index]
            arguments.append(fragment.arguments)
            if fragment.done:
                del self._open[fragment.index]
                found.append(ToolCall(call_id, name, "".join(arguments)))
        self.num_calls += len(found)
        return found
