"""Count the code, the functions on a prompt's way, and the files that name a parameter.

    python -m tools.counts lines              # files, lines and lines of code by room
    python -m tools.counts path [--list]      # functions entered from a prompt to its first token
    python -m tools.counts parameter min_p    # source files in which the name stands

A room is a folder of ``asyncllm`` that has modules of its own, without its subfolders.

**lines.** A line of code holds a token of Python that is neither a comment nor part of the
docstring of a module, class or function; a string in any other place counts. Blank lines do not.
A line of C++ counts if something is left of it without comments.

**path.** The packaged model runs on this processor, without run-ahead (``async_scheduling=False``),
so that the count does not depend on the timing of steps. Two requests for the same prompt of a few
tokens are made, with default parameters, and the second is profiled. A function is a code object of
``asyncllm`` that was entered, by a call or by resuming it: methods, properties, helpers and lambdas
count; generated ``__init__`` methods, and functions in C++, are not seen; a comprehension belongs to
the function around it. Each function counts once, in the first of these parts that enters it:

- submission: on the caller's thread until ``engine.stream(prompt)`` returns;
- core: on the engine thread from the request's command (``EngineCore.on_add``) to the return of the
  first ``collect``, files outside ``gpu/`` and ``native/``;
- device: the same for files in ``gpu/`` and ``native/``. Without run-ahead, ``collect`` is where a
  step's kernels are launched, those of the draw included;
- way back: on the engine thread from there until the reader's loop has been notified, where it waits
  for the reader, and on the reader's thread in its first ``__anext__``. The launch of the second step
  lies in between.

The first three are the way from a prompt to the kernel.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import re
import sys
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from asyncllm import AsyncLLMEngine
from asyncllm.core.engine_core import EngineCore
from asyncllm.runtime.event_loop import wait_for

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "asyncllm"
OUTSIDE = "tests", "benchmarks", "examples", "integrations", "tools"
CPP = ".cpp", ".h"
FORTH = "submission", "core", "device"
BACK = "way back"
DEVICE = "gpu", "native"
PROMPT = "Once upon a time"

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_CPP_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def room(path: Path) -> str:
    """Folder of a file of the package; "top level" for ``asyncllm`` itself."""
    folder = path.parent.relative_to(PACKAGE).as_posix()
    return "top level" if folder == "." else folder


# --- lines ---------------------------------------------------------------------------------


class Size(NamedTuple):
    """Files, lines, and lines of code."""

    files: int
    lines: int
    code: int

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Size:
        texts = [(path.suffix, path.read_text(encoding="utf-8")) for path in paths]
        code = sum(code_lines(text) if kind == ".py" else cpp_lines(text) for kind, text in texts)
        return cls(len(texts), sum(len(text.splitlines()) for _, text in texts), code)


def code_lines(source: str) -> int:
    """Number of lines of Python that hold code."""
    docstrings = set(_docstrings(ast.parse(source)))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _docstrings(tree: ast.Module) -> Iterable[tuple[int, int]]:
    """Line and column at which each docstring begins."""
    owners = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].col_offset


def cpp_lines(source: str) -> int:
    """Number of lines of C++ that hold more than a comment."""
    bare = _CPP_COMMENT.sub(lambda m: m[1] or "\n" * m[0].count("\n"), source)
    return sum(bool(line.strip()) for line in bare.splitlines())


def sizes_by_room() -> dict[str, Size]:
    """Size of the package's Python in each room, the largest first."""
    rooms = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        rooms[room(path)].append(path)
    sizes = {name: Size.of(paths) for name, paths in rooms.items()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1].code))


def _sum(sizes: Iterable[Size]) -> Size:
    return Size(*(sum(column) for column in zip(*sizes, strict=True)))


def print_lines() -> None:
    rooms = sizes_by_room()
    engine = [size for name, size in rooms.items() if name not in ("serving", "cli")]
    cpp = (path for path in PACKAGE.rglob("*") if path.suffix in CPP)
    rows = [
        *((f"asyncllm, {name}", size) for name, size in rooms.items()),
        ("asyncllm", _sum(rooms.values())),
        ("asyncllm without serving and cli", _sum(engine)),
        ("asyncllm, C++", Size.of(cpp)),
        *((name, Size.of((REPOSITORY / name).rglob("*.py"))) for name in OUTSIDE),
    ]
    print(f"{'':<34}{'files':>7}{'lines':>9}{'code':>9}")
    for name, size in rows:
        print(f"{name:<34}{size.files:>7,}{size.lines:>9,}{size.code:>9,}")


# --- path ----------------------------------------------------------------------------------


Functions = dict[CodeType, str]  # in the order in which they are entered, and their rooms


class Profile:
    """Functions of the package that two threads enter, for ``sys.setprofile`` on each.

    Args:
        core: the engine's.

    Attributes:
        parts: functions by part of the prompt's way.
        submitted: set by the caller, once it has submitted the prompt.
        read: set by the caller, once it has read a token.
    """

    def __init__(self, core: EngineCore) -> None:
        self.parts: dict[str, Functions] = {name: {} for name in (*FORTH, BACK)}
        self.submitted = False
        self.read = threading.Event()
        self._stage = 0
        self._add = core.on_add.__func__.__code__
        self._collect = type(core.executor).collect.__code__
        self._notify = core.output_processor.flush_wakeups.__func__.__code__

    def on_caller(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._enter(frame.f_code, BACK if self.submitted else "submission")

    def on_engine(self, frame: FrameType, event: str, _: Any) -> None:
        """Records from the command on, and stops the thread once the reader was notified."""
        code = frame.f_code
        if event == "call":
            if code is self._add:
                self._stage = 1
            if self._stage:
                self._enter(code, BACK if self._stage == 2 else "core")
        elif event == "return":
            if code is self._collect:
                self._stage = 2
            elif code is self._notify and self._stage == 2:
                sys.setprofile(None)
                self.read.wait()

    def _enter(self, code: CodeType, part: str) -> None:
        path, name = Path(code.co_filename), code.co_name
        if not path.is_relative_to(PACKAGE) or (name.startswith("<") and name != "<lambda>"):
            return
        where = room(path)
        if part == "core" and where.split("/")[0] in DEVICE:
            part = "device"
        if not any(code in functions for functions in self.parts.values()):
            self.parts[part][code] = where


async def profile_prompt() -> dict[str, Functions]:
    """Functions that one prompt enters, by part of its way; see the top of this file."""
    async with AsyncLLMEngine(device="cpu", async_scheduling=False, seed=0) as engine:
        core = engine._require_input_processor().submitter.core
        await engine.generate(PROMPT, max_tokens=4)
        profile = Profile(core)
        await wait_for(core.call(sys.setprofile, profile.on_engine))
        try:
            sys.setprofile(profile.on_caller)
            stream = engine.stream(PROMPT, max_tokens=4)
            profile.submitted = True
            await anext(stream)
        finally:
            sys.setprofile(None)
            profile.read.set()
        await stream.aclose()
    return profile.parts


def num_files(functions: Iterable[CodeType]) -> int:
    """Number of files that the functions are in."""
    return len({code.co_filename for code in functions})


def print_path(listed: bool) -> None:
    parts = asyncio.run(profile_prompt())
    forth = [code for name in FORTH for code in parts[name]]
    print(f"prompt to kernel: {len(forth)} functions in {num_files(forth)} files")
    for name, functions in parts.items():
        print(f"{name}: {len(functions)} functions in {num_files(functions)} files")
        for where, number in Counter(functions.values()).most_common():
            print(f"  {where}: {number}")
            for code in functions if listed else ():
                if functions[code] == where:
                    print(f"    {Path(code.co_filename).name}: {code.co_qualname}")


# --- parameter -----------------------------------------------------------------------------


def files_naming(name: str, folder: Path) -> list[Path]:
    """Source files in Python and C++ below a folder in which a name stands as a word, tests
    excluded."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".py", *CPP)
        and "tests" not in path.relative_to(folder).parts
        and word.search(path.read_text(encoding="utf-8"))
    ]


def print_parameter(name: str) -> None:
    for folder in (PACKAGE, REPOSITORY / "integrations"):
        paths = files_naming(name, folder)
        print(f"{folder.name}: {len(paths)} files")
        for path in paths:
            print(f"  {path.relative_to(folder).as_posix()}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.counts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("lines")
    kinds.add_parser("path").add_argument("--list", action="store_true")
    kinds.add_parser("parameter").add_argument("name")
    options = parser.parse_args(arguments)
    if options.kind == "lines":
        print_lines()
    elif options.kind == "path":
        print_path(options.list)
    else:
        print_parameter(options.name)


if __name__ == "__main__":
    main()
