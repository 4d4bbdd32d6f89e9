"""The counts of ``tools/counts.py``: lines of code, and a prompt's functions."""

from __future__ import annotations

import asyncio

from tools import counts

SOURCE = '''"""A docstring
of two lines."""

X = """a string
of two lines"""  # a comment
"""A string under a constant."""


# a comment
def f(a,
      b):
    """A docstring."""

    "A string."
    return a  # a comment


class A:
    """A docstring."""
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert counts.code_lines(SOURCE) == 2 + 1 + 2 + 2 + 1
    assert counts.cpp_lines('// a\n\nint a; /* b\n c */\nf("// d");  // e\n/* g */ int h;\n') == 3


def test_prompt_functions_are_counted_once_by_part() -> None:
    parts = asyncio.run(counts.profile_prompt())
    names = {
        part: [f"{where}: {code.co_qualname}" for code, where in functions.items()]
        for part, functions in parts.items()
    }
    assert names["submission"][0] == "top level: AsyncLLMEngine.stream"
    assert names["submission"][-1] == "core: EngineCore.send"
    assert names["core"][:2] == ["core: EngineCore.on_add", "core: Scheduler.add"]
    assert "core: Scheduler.schedule" in names["core"]
    assert set(parts["core"].values()) == {"core"}
    assert names["device"][0] == "gpu: ModelRunner.launch"
    assert "gpu: ModelRunner.collect" in names["device"]
    assert all(where.startswith(("gpu", "native")) for where in parts["device"].values())
    for name in ("core: Scheduler.update", "core: Channel.put", "top level: TokenStream.__anext__"):
        assert name in names["way back"]
    functions = [code for part in parts.values() for code in part]
    assert len(functions) == len(set(functions))
    assert 0 < counts.num_files(functions) < len(functions)
