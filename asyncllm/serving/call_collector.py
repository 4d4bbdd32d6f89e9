"""ToolCallCollector: holds back each tool call of a stream until the call is complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncllm.outputs import ToolCall, ToolCallDelta


@dataclass(slots=True)
class ToolCallCollector:
    """Collector of one output's fragments of tool calls.

    A call is sent only when it is complete, because its first fragments may turn out to be text,
    and what was sent cannot be taken back. So a stream has the same calls as a whole answer.
    """

    _num_calls: int = 0
    _open_calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)

    def push(self, fragments: tuple[ToolCallDelta, ...]) -> list[tuple[int, ToolCall]]:
        """Add fragments; returns the calls that they complete, each with its number from 0 on."""
        complete = []
        for fragment in fragments:
            if fragment.id is not None:
                self._open_calls[fragment.index] = (fragment.id, fragment.name or "", [])
            call_id, name, arguments = self._open_calls[fragment.index]
            arguments.append(fragment.arguments)
            if fragment.done:
                del self._open_calls[fragment.index]
                complete.append((self._num_calls, ToolCall(call_id, name, "".join(arguments))))
                self._num_calls += 1
        return complete
