"""The process that ``ProbeProcess`` runs probes in.

A line of JSON on standard input names a probe and its options; a line on standard output has its
result or its error, and whether the device works behind it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

MODULE = "python -m benchmarks.gpu.child MODULE [PATH …]"


def run(module: str) -> None:
    """Answers until there is no more input, or the device is lost."""
    # What probes and libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    probes = importlib.import_module(module).PROBES
    for line in sys.stdin:
        request = json.loads(line)
        answer = answer_of(probes[request["probe"]], request["options"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if not answer["usable"]:
            return


def answer_of(probe: Any, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": probe(**options), "error": None, "usable": True}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0][:300]}"
        return {"result": None, "error": text, "usable": still_usable()}


def still_usable() -> bool:
    """Whether the device works, where there is one that this process has used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    from benchmarks.gpu.clock import usable

    return usable()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {MODULE}")
    sys.path[:0] = sys.argv[2:]
    run(sys.argv[1])
