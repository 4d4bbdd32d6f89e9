"""The ``asyncllm`` command.

Nothing heavy is imported before the command line is read: ``--help`` and ``--version`` load
neither torch nor rich.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for what failed, 2 for what was asked
    wrongly, 130 for Ctrl-C."""
    from asyncllm.cli.arguments import parse
    from asyncllm.errors import AsyncLLMError, InvalidRequestError

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
        # Whoever read the output has left; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _complain(error: Exception, code: int) -> int:
    print("asyncllm:", " ".join(str(error).split()), file=sys.stderr)
    return code
