"""The ``asyncllm`` command.

Nothing heavy is imported before the command line is read: ``--help`` and ``--version`` load
neither torch nor rich.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, or 1 for a failure, 2 for wrong arguments, 130 for
    Ctrl-C."""
    from asyncllm.cli.arguments import parse
    from asyncllm.errors import AsyncLLMError, InvalidRequestError

    _open_missing_streams()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the encoding lacks must not end a command.
            stream.reconfigure(errors="replace")
    arguments = parse(argv)
    try:
        code = import_module(f"asyncllm.cli.{arguments.command}").run(arguments)
        sys.stdout.flush()  # Flush here, so that an error is raised now instead of at exit.
        return code
    except InvalidRequestError as error:
        return _print_error(error, 2)
    except AsyncLLMError as error:
        return _print_error(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # The process that reads the pipe has ended.
        return 1
    except OSError as error:  # Writing may fail, for example because the disk is full.
        _drop_output()
        return _print_error(error, 1)


def _open_missing_streams() -> None:
    """Open the null device for standard streams that the caller has closed. Python sets them to
    None, and the next files or sockets would get their file descriptors."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115  # until the end
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # likewise
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # likewise


def _drop_output() -> None:
    """Discard buffered output, so that flushing standard output at exit does not raise."""
    with suppress(OSError):  # Standard output may have no file descriptor.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(error: Exception, code: int) -> int:
    print("asyncllm:", " ".join(str(error).split()), file=sys.stderr)
    return code
