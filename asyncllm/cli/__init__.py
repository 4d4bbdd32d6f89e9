"""The ``asyncllm`` command.

Nothing heavy is imported before the command line is read: ``--help`` and ``--version`` load
neither torch nor rich.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for what failed, 2 for what was asked
    wrongly, 130 for Ctrl-C."""
    from asyncllm.cli.arguments import parse
    from asyncllm.errors import AsyncLLMError, InvalidRequestError

    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal or a file's encoding lacks ends no command.
            stream.reconfigure(errors="replace")
    arguments = parse(argv)
    try:
        return arguments.run(arguments)
    except InvalidRequestError as error:
        return _complain(error, 2)
    except AsyncLLMError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has left; the rest of the buffer must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _complain(error: Exception, code: int) -> int:
    print("asyncllm:", " ".join(str(error).split()), file=sys.stderr)
    return code
