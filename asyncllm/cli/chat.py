"""``asyncllm chat``: a conversation in the terminal.

The main thread waits for input; the event loop runs on another thread. So typing never blocks the
loop, and Ctrl-C interrupts the wait without a signal handler.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

from anyio.from_thread import BlockingPortal, start_blocking_portal

from asyncllm.cli.arguments import sampling_options
from asyncllm.cli.conversation import Conversation
from asyncllm.cli.prompt_line import read_message, without_echo
from asyncllm.cli.session import checked_config, loop_factory, model_name, running_engine
from asyncllm.cli.text import format_rate, format_seconds, strip_control_characters
from asyncllm.cli.word_wrapper import WordWrapper
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import EngineOverloadedError, RequestError
from asyncllm.outputs import Completion, Usage
from asyncllm.stream import TokenStream
from asyncllm.text.template_input import TemplateInput

_MAX_LINE_CHARACTERS = 92
"""Maximum number of characters in a line, so that long answers stay readable."""

_INPUT_PROMPT = "› "


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    engine = AsyncLLMEngine(config=checked_config(arguments))
    options = {"loop_factory": loop_factory(arguments)}
    with (
        start_blocking_portal("asyncio", options) as loop,
        loop.wrap_async_context_manager(running_engine(engine)),
    ):
        return Chat(engine, loop, arguments).converse()


class Chat:
    """One conversation, on a terminal or through a pipe."""

    def __init__(
        self, engine: AsyncLLMEngine, loop: BlockingPortal, arguments: argparse.Namespace
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._sampling = sampling_options(arguments)
        self._seed: int | None = arguments.seed
        self._conversation = Conversation(arguments.system)
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._has_failed = False
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("what there is", self._print_help),
            "/reset": ("forget what was said", self._reset_conversation),
            "/system": ("TEXT: a new system prompt; without TEXT none", self._set_system),
            "/save": ("FILE: write the conversation as JSON", self._save_conversation),
            "/stats": ("the engine's figures", self._print_stats),
            "/exit": ("leave; so does Ctrl-D", lambda _: None),
        }

    def converse(self) -> int:
        """Run the conversation until the user leaves; returns the exit code."""
        if self._is_terminal:
            self._greet()
        is_leaving = False
        while True:
            try:
                message = read_message(_INPUT_PROMPT if self._is_terminal else None)
            except EOFError:
                if self._is_terminal:
                    print()
                return self._exit_code()
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print()
                if is_leaving:
                    return 0
                self._print_note("Ctrl-C again, or Ctrl-D, leaves.")
                is_leaving = True
                continue
            is_leaving = False
            if message.split(" ")[0] == "/exit":
                return self._exit_code()
            if message:
                self._take_turn(message)

    def _greet(self) -> None:
        from rich.console import Console
        from rich.text import Text

        name = model_name(self._engine)
        hint = "  /help lists commands, Ctrl-D leaves"
        Console().print(
            Text.assemble((" asyncllm ", "bold reverse"), (f"  {name}", "bold"), (hint, "dim"))
        )

    def _exit_code(self) -> int:
        """Exit code: 1 after a failure if input is a pipe; 0 on a terminal, where the user has seen
        the message."""
        return 1 if self._has_failed and not self._is_terminal else 0

    def _take_turn(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        if word in self._commands:
            self._commands[word][1](rest.strip())
        elif word.startswith("/") and "/" not in word[1:]:
            self._report_error(f"{word}: no such command; /help lists them.")
        elif self._is_terminal:
            with without_echo():
                print()
                self._answer_message(message)
                print()
        else:
            self._answer_message(message)

    # --- an answer ---------------------------------------------------------------------

    def _answer_message(self, message: str) -> None:
        """Send the conversation with ``message``. A refused message is removed again."""
        self._conversation.add_message("user", message)
        try:
            start, answer = self._stream_answer()
        except (RequestError, EngineOverloadedError) as error:
            self._conversation.messages.pop()
            self._report_error(f"asyncllm: {' '.join(str(error).split())}")
            return
        if start:
            self._print_note("The context is full: the oldest messages were forgotten.")
            del self._conversation.messages[:start]
        self._conversation.add_message("assistant", answer.text)
        if self._is_terminal and answer.usage is not None:
            self._print_note(_format_timings(answer.usage, answer.finish_reason))

    def _stream_answer(self) -> tuple[int, Completion]:
        """Send as many of the latest turns as fit. Returns the index of the first message sent, and
        the answer."""
        sampling = dict(self._sampling)
        if self._seed is not None:
            sampling["seed"] = self._seed + len(self._conversation.messages)
        start = self._first_fitting_turn()
        stream = self._engine.chat(self._conversation.messages_to_send(start), **sampling)
        self._print_stream(stream)
        return start, self._loop.call(stream.result)

    def _first_fitting_turn(self) -> int:
        """Index of the first message to send, so that the prompt and its answer fit the context.

        It is the first message of a turn. As many of the newest turns as fit are sent, but at least
        the newest one. An answer needs room for ``max_tokens``, by default a quarter of the
        context.
        """
        context = self._engine.max_model_len
        max_tokens = self._sampling.get("max_tokens", context // 4)
        room = context - min(max_tokens, context // 2)

        def fits(start: int) -> bool:
            messages = self._conversation.messages_to_send(start)
            return len(self._engine.tokenizer.encode_chat(TemplateInput(messages, {}))) <= room

        starts = self._conversation.turn_starts()
        return starts[bisect_left(starts, True, hi=len(starts) - 1, key=fits)]

    def _print_stream(self, stream: TokenStream) -> None:
        """Print a stream as it arrives. Ctrl-C aborts it and keeps the text so far; if the engine
        hangs, a second Ctrl-C leaves the program."""
        wrapper = WordWrapper(sys.stdout, _line_width()) if self._is_terminal else None
        reading = self._loop.start_task_soon(_print_answer, stream, wrapper)
        try:
            reading.result()
        except KeyboardInterrupt:
            stream.abort()
            if not self._is_terminal:
                raise
            reading.result()
        if wrapper is not None:
            wrapper.finish()
        else:
            print(flush=True)

    # --- commands ----------------------------------------------------------------------

    def _print_help(self, _: str) -> None:
        for name, (description, _run) in self._commands.items():
            self._print_note(f"{name:8} {description}")
        self._print_note(
            "A backslash at the end of a line goes on in the next; Ctrl-C stops an answer."
        )

    def _reset_conversation(self, _: str) -> None:
        self._conversation.messages.clear()
        self._print_note("Forgotten.")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None
        self._print_note("The system prompt is set." if text else "There is no system prompt now.")

    def _save_conversation(self, name: str) -> None:
        if not name:
            self._report_error("/save FILE: the name of the file is missing.")
            return
        try:
            self._conversation.save(Path(name).expanduser())
        except OSError as error:
            self._report_error(f"/save {name}: {error.strerror}")
        else:
            self._print_note(f"Saved {len(self._conversation.messages)} messages to {name}.")

    def _print_stats(self, _: str) -> None:
        stats = self._engine.stats()
        hits = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
        self._print_note(
            f"{stats.num_requests} requests, {stats.prompt_tokens} prompt tokens "
            f"({hits:.0%} from the prefix cache), {stats.generation_tokens} generated, "
            f"{stats.num_free_blocks} of {stats.num_blocks} KV blocks free"
        )

    def _print_note(self, text: str) -> None:
        """Print a notice, such as a warning; on standard error if output is a pipe."""
        if self._is_terminal:
            text = textwrap.fill(text, _line_width(), initial_indent="  ", subsequent_indent="  ")
            print(f"\033[2m{text}\033[0m", flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _report_error(self, text: str) -> None:
        self._has_failed = True
        self._print_note(text)


async def _print_answer(stream: TokenStream, wrapper: WordWrapper | None) -> None:
    """Print the answer, and on a terminal the reasoning before it."""
    is_reasoning = False
    async for delta in stream:
        text = strip_control_characters(delta.text)
        if wrapper is None:
            print(text, end="", flush=True)
            continue
        if delta.reasoning:
            is_reasoning = True
            wrapper.write(strip_control_characters(delta.reasoning))
        if is_reasoning and text:
            is_reasoning = False
            text = f"\n\n{text}"
        wrapper.write(text)


def _line_width() -> int:
    """Line width in characters: that of the terminal, but at most _MAX_LINE_CHARACTERS."""
    return min(shutil.get_terminal_size().columns, _MAX_LINE_CHARACTERS)


def _format_timings(usage: Usage, reason: str | None) -> str:
    ending = {"stop": "", "abort": ", stopped", "length": ", cut at its longest"}
    speed = "–"
    if usage.ttft is not None:
        speed = format_rate(usage.completion_tokens - 1, usage.total_time - usage.ttft)
    cached = f", {usage.cached_tokens} cached" if usage.cached_tokens else ""
    return (
        f"first token {format_seconds(usage.ttft)}, {speed}, "
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens{cached}"
        f"{ending.get(reason or '', '')}"
    )
