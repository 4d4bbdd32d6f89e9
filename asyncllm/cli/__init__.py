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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for what failed, 2 for what was asked
    wrongly, 130 for Ctrl-C."""
    from asyncllm.cli.arguments import parse
    from asyncllm.errors import AsyncLLMError, InvalidRequestError

    _open_missing()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal or a file's encoding lacks ends no command.
            stream.reconfigure(errors="replace")
    arguments = parse(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()  # what cannot be written is found out here, and not at exit
        return code
    except InvalidRequestError as error:
        return _complain(error, 2)
    except AsyncLLMError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # its reader has left
        return 1
    except OSError as error:  # a full disk, say
        _drop_output()
        return _complain(error, 1)


def _open_missing() -> None:
    """Gives the standard streams that the caller has closed to the null device. They are None to
    Python, and their numbers would be those of the next files and sockets."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115  # until the end
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # likewise
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # likewise


def _drop_output() -> None:
    """The rest of the buffer must not raise at exit."""
    with suppress(OSError):  # of an output that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception, code: int) -> int:
    print("asyncllm:", " ".join(str(error).split()), file=sys.stderr)
    return code
