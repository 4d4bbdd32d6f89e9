"""What telling tool calls and reasoning from text costs the reader, per delta.

All times are CPU times of the one thread that works. Beside them stand those of transformers'
incremental parser on the same text, which makes events of it and no deltas.

python -m benchmarks.parsing [--quick] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from asyncllm.outputs import Delta, make_token_delta
from asyncllm.tool_calls.chat_syntax import ChatSyntaxes
from asyncllm.tool_calls.families import REASONING_FAMILIES, TOOL_CALL_FAMILIES
from asyncllm.tool_calls.message_parser import MessageParser
from benchmarks.common import Report, cpu_time_of, options

CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "'
TOOLS = {"write": {}}
FORMAT = ChatSyntaxes([], None, "hermes", "qwen3").syntax_for(True)
TEMPLATE = load_response_template(
    {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": REASONING_FAMILIES["qwen3"].reasoning_field,
            "tool_calls": TOOL_CALL_FAMILIES["hermes"].calls_field,
            "content": {},
        },
    }
)


def ours(opening: str) -> Callable[[Delta], object]:
    assert FORMAT is not None
    parser = MessageParser(FORMAT, TOOLS)
    parser.push(Delta(opening, (0,)))
    return parser.push


def theirs(opening: str) -> Callable[[Delta], object]:
    parser = ResponseParser(TEMPLATE, prefix="")
    parser.feed(opening)
    return lambda delta: parser.feed(delta.text)


def cost(push: Callable[[Delta], object], piece: str, behind: int, count: int) -> float:
    """Seconds for a delta of ``piece``, with ``behind`` characters of it read already."""
    if behind:
        push(Delta(piece * (behind // len(piece)), (0,)))
    deltas = [make_token_delta(0, piece, None) for _ in range(count)]

    def read() -> None:
        for delta in deltas:
            push(delta)

    return cpu_time_of(read) / count


def main() -> None:
    asked = options(__doc__).parse_args()
    report = Report("Parsing an answer, for each delta of a token")
    count = 100 if asked.quick else 1000
    for name, make in (("asyncllm", ours), ("transformers", theirs)):
        report.section(name)
        for what, opening in (("text", ""), ("thoughts", "<think>"), ("arguments", CALL)):
            for behind in (0, 1 << 16, 1 << 20):
                values = [cost(make(opening), "word ", behind, count) for _ in range(3)]
                report.add(f"{what} behind {behind >> 10} KiB", min(values), "µs")
    report.write(asked.json)


if __name__ == "__main__":
    main()
