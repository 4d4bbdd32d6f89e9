"""``asyncllm chat``: a conversation in the terminal.

The main thread waits for the person, the event loop lives on another one: typing never holds
up the loop, and Ctrl-C interrupts the main thread's wait without any signal handler.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncllm.cli.arguments import sampling_options
from asyncllm.cli.conversation import Conversation, count_tokens, room_for_messages
from asyncllm.cli.flow import Flow
from asyncllm.cli.prompt_line import read_message, without_echo
from asyncllm.cli.session import (
    LoopThread,
    checked_config,
    loop_factory,
    model_name,
    open_engine,
)
from asyncllm.cli.text import printable, rate, seconds
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import AsyncLLMError, ContextLengthExceededError, EngineError
from asyncllm.outputs import Usage
from asyncllm.stream import TokenStream

_WIDEST = 92
_PROMPT = "› "


def run(arguments: argparse.Namespace) -> int:
    """The command."""
    config = checked_config(arguments)
    with LoopThread(loop_factory(arguments)) as loop:
        opening = open_engine(config)
        entering = loop.submit(opening.__aenter__())
        try:
            engine = entering.result()
        except KeyboardInterrupt:
            entering.cancel()
            raise
        try:
            return Chat(engine, loop, arguments).converse()
        finally:
            loop.submit(opening.__aexit__(None, None, None)).result()


class Chat:
    """One conversation, on a terminal or through a pipe."""

    def __init__(
        self, engine: AsyncLLMEngine, loop: LoopThread, arguments: argparse.Namespace
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._sampling = sampling_options(arguments)
        self._seed: int | None = arguments.seed
        self._conversation = Conversation(arguments.system)
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._failed = False
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("what there is", self._help),
            "/reset": ("forget what was said", self._reset),
            "/system": ("TEXT: a new system prompt; without TEXT none", self._set_system),
            "/save": ("FILE: write the conversation as JSON", self._save),
            "/stats": ("the engine's figures", self._stats),
            "/exit": ("leave; so does Ctrl-D", lambda _: None),
        }

    def converse(self) -> int:
        """Takes turns until the person leaves. Returns the exit code."""
        if not self._terminal:
            return self._answer_lines()
        self._greet()
        leaving = False
        while True:
            try:
                message = read_message(_PROMPT)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                if leaving:
                    return 0
                self._note("Ctrl-C again, or Ctrl-D, leaves.")
                leaving = True
                continue
            leaving = False
            if message == "/exit":
                return 0
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

    def _answer_lines(self) -> int:
        for line in sys.stdin:
            if line.strip():
                self._answer(line.strip())
        return 1 if self._failed else 0

    def _take_turn(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        if word in self._commands:
            self._commands[word][1](rest.strip())
        elif word.startswith("/") and "/" not in word[1:]:
            self._note(f"{word}: no such command; /help lists them.")
        else:
            with without_echo():
                print()
                self._answer(message)
                print()

    # --- an answer ---------------------------------------------------------------------

    def _answer(self, message: str) -> None:
        self._conversation.say("user", message)
        try:
            usage, text, reason = self._stream_answer()
        except EngineError:
            raise
        except AsyncLLMError as error:
            self._conversation.take_back()
            self._failed = True
            self._note(f"asyncllm: {' '.join(str(error).split())}", error=True)
            return
        self._conversation.say("assistant", text)
        if self._terminal and usage is not None:
            self._note(_figures(usage, reason))

    def _stream_answer(self) -> tuple[Usage | None, str, str | None]:
        self._make_room()
        sampling = dict(self._sampling)
        if self._seed is not None:
            sampling["seed"] = self._seed + len(self._conversation.messages)
        while True:
            try:
                stream = self._engine.chat(self._conversation.to_send(), **sampling)
                self._read(stream)
            except ContextLengthExceededError:
                if not self._drop_oldest():
                    raise
                continue
            completion = self._loop.submit(stream.result()).result()
            return completion.usage, completion.text, completion.finish_reason

    def _read(self, stream: TokenStream) -> None:
        """Prints a stream as it comes. Ctrl-C aborts it, and what was said stays; should the
        engine not let go of it, the next one leaves the program."""
        flow = Flow(sys.stdout, _width()) if self._terminal else None
        reading = self._loop.submit(_print(stream, flow))
        try:
            reading.result()
        except KeyboardInterrupt:
            stream.abort()
            if not self._terminal:
                raise
            reading.result()
        if flow is not None:
            flow.finish()
        else:
            print(flush=True)

    def _make_room(self) -> None:
        """Forgets the oldest turns until an answer fits behind the rest."""
        limit = room_for_messages(self._engine, self._sampling.get("max_tokens"))
        while count_tokens(self._engine, self._conversation.to_send()) > limit:
            if not self._drop_oldest():
                return

    def _drop_oldest(self) -> bool:
        if not self._conversation.drop_oldest_turn():
            return False
        self._note("The context is full: the oldest turn was forgotten.", error=True)
        return True

    # --- commands ----------------------------------------------------------------------

    def _help(self, _: str) -> None:
        for name, (what, _run) in self._commands.items():
            self._note(f"{name:8} {what}")
        self._note("A backslash at the end of a line goes on in the next; Ctrl-C stops an answer.")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._note("Forgotten.")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None
        self._note("The system prompt is set." if text else "There is no system prompt now.")

    def _save(self, name: str) -> None:
        if not name:
            self._note("/save FILE: the name of the file is missing.")
            return
        try:
            self._conversation.save(Path(name).expanduser())
        except OSError as error:
            self._note(f"/save: {error}")
        else:
            self._note(f"Saved {len(self._conversation.messages)} messages to {name}.")

    def _stats(self, _: str) -> None:
        stats = self._engine.stats()
        hits = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
        self._note(
            f"{stats.num_requests} requests, {stats.prompt_tokens} prompt tokens "
            f"({hits:.0%} from the prefix cache), {stats.generation_tokens} generated, "
            f"{stats.num_free_blocks} of {stats.num_blocks} KV blocks free"
        )

    def _note(self, text: str, *, error: bool = False) -> None:
        """A line that is not part of the conversation."""
        if self._terminal:
            with _dim():
                print(textwrap.fill(text, _width(), initial_indent="  ", subsequent_indent="  "))
        else:
            print(text, file=sys.stderr if error else sys.stdout, flush=True)


async def _print(stream: TokenStream, flow: Flow | None) -> None:
    async for delta in stream:
        text = printable(delta.text)
        if flow is not None:
            flow.write(text)
        else:
            print(text, end="", flush=True)


def _width() -> int:
    """Characters in a line that is good to read on this terminal."""
    return min(shutil.get_terminal_size().columns, _WIDEST)


@contextmanager
def _dim() -> Any:
    sys.stdout.write("\033[2m")
    try:
        yield
    finally:
        sys.stdout.write("\033[0m")
        sys.stdout.flush()


def _figures(usage: Usage, reason: str | None) -> str:
    ending = {"stop": "", "abort": ", stopped", "length": ", cut at its longest"}
    speed = "–"
    if usage.ttft is not None:
        speed = rate(usage.completion_tokens - 1, usage.total_time - usage.ttft)
    cached = f", {usage.cached_tokens} cached" if usage.cached_tokens else ""
    return (
        f"first token {seconds(usage.ttft)}, {speed}, "
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens{cached}"
        f"{ending.get(reason or '', '')}"
    )
