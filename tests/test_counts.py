"""The counts of ``tools/counts.py``: lines of code, a prompt's functions, files of a parameter."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

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


def test_lines_are_counted_by_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "asyncllm"
    monkeypatch.setattr(counts, "REPOSITORY", tmp_path)
    monkeypatch.setattr(counts, "PACKAGE", package)
    files = {
        "engine.py": "a = 1\n",
        "gpu/runner.py": "a = 1\nb = 2\n\n",
        "gpu/ops/one.py": "a = 1\n" * 7,
        "gpu/ops/two.py": "# none\n",
        "serving/app.py": "a = 1\n" * 30,
        "native/op.cpp": "int a;\n// none\n",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("a = 1\n\n")
    counts.main(["lines"])
    rows = [line.rsplit(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[:9] == [
        ["asyncllm, serving", "1", "30", "30"],
        ["asyncllm, gpu/ops", "2", "8", "7"],
        ["asyncllm, gpu", "1", "3", "2"],
        ["asyncllm, top level", "1", "1", "1"],
        ["asyncllm", "5", "42", "40"],
        ["asyncllm without serving and cli", "4", "12", "10"],
        ["asyncllm, C++", "1", "2", "1"],
        ["tests", "1", "2", "1"],
        ["benchmarks", "0", "0", "0"],
    ]


def test_a_prompts_functions_are_counted_where_they_are_entered() -> None:
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


def test_a_parameters_files_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    counts.main(["parameter", "min_p"])
    package, integrations = capsys.readouterr().out.split("integrations: ")
    first, *paths = package.splitlines()
    assert first == f"asyncllm: {len(paths)} files"
    assert {"  sampling_params.py", "  native/src/sampler.cpp"} < set(paths)
    assert "  llm.py" not in paths
    assert integrations.startswith("2 files\n")
