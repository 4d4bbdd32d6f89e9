"""Notebooks: the example in a real kernel, and what a session of cells does to an engine."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture(autouse=True)
def kernel(tmp_path, monkeypatch):
    """A kernel of this very interpreter, which finds this very checkout."""
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(notebook):
    """Executes the cells in order; returns what each code cell printed."""
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def notebook(*sources):
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(source)) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


def test_the_example_runs():
    example = nbformat.read(EXAMPLE, as_version=4)
    outputs = run(example)
    start, story, broken, together, stories, times, long, after, _, later, facade, end = outputs
    assert (start, end) == ("", "")
    assert len(story) > 40
    aborted, free, blocks = map(int, re.findall(r"(\d+)", broken.splitlines()[-1]))
    assert aborted == 1
    assert free == blocks > 0
    assert [line.partition("?")[0] for line in together.splitlines()] == [
        "What is 2 plus 3",
        "What is 4 plus 4",
        "What is 1 plus 6",
    ]
    assert stories == "['length', 'length', 'length']\n"
    [table] = re.findall(r"(?s)<table.*?</table>", html_of(example, "side_by_side(prompts"))
    texts = re.findall(r"(?s)<b>Tell me a story about .*?</b><br>(.{40,}?)</td>", table)
    assert len(texts) == 3
    assert times == ""
    plot = html_of(example, "median_ttft(count):")
    widths = [int(width) for width in re.findall(r'width="(\d+)" height="16"', plot)]
    assert (len(widths), max(widths)) == (6, 340)
    assert long == "[400, 400, 400]\n"
    assert "0 running, " in after
    assert "completion_tokens=" in later
    assert len(facade.splitlines()) == 2


def html_of(example, source):
    """What the cell with ``source`` shows."""
    [cell] = [cell for cell in example.cells if source in cell.source]
    shown = [output.data["text/html"] for output in cell.outputs if "data" in output]
    return shown[-1]


def test_the_example_is_stored_without_outputs():
    example = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(example)
    for cell in example.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


def test_an_engine_lives_across_cells_and_errors():
    outputs = run(
        notebook(
            """
            import asyncio, threading
            from asyncllm import EngineClosedError, LLM
            from tests.fakes import fake

            rig = fake(step_time=0.01)
            engine = rig.engine()
            await engine.start()
            """,
            # A stream begun in one cell is read in the next.
            """
            stream = engine.stream([1], max_tokens=20)
            first = await anext(stream)
            """,
            """
            result = await stream.result()
            print(list(result.token_ids) == rig.executor.reference([1], 20))
            """,
            # A cell that is interrupted leaves the engine as it was.
            """
            try:
                async with asyncio.timeout(0.02):
                    await engine.generate([2], max_tokens=250)
            except TimeoutError:
                pass
            async for delta in engine.stream([3], max_tokens=250):
                break
            await engine.generate([4], max_tokens=1)
            stats = engine.stats()
            print(stats.num_aborted, stats.num_free_blocks == stats.num_blocks)
            """,
            """
            rig.executor.step_time = 0
            tasks = [asyncio.create_task(engine.generate([i], max_tokens=9)) for i in range(5)]
            """,
            # The facade blocks the notebook's loop; the tasks' tokens come all the same.
            """
            with LLM(engine=engine) as llm:
                inside = llm.generate([[7], [8]], max_tokens=30)
            print([list(c.token_ids) for c in inside]
                  == [rig.executor.reference([i], 30) for i in (7, 8)])
            """,
            """
            done = await asyncio.gather(*tasks)
            print([list(c.token_ids) for c in done]
                  == [rig.executor.reference([i], 9) for i in range(5)])
            """,
            """
            await engine.aclose()
            try:
                engine.stream([1])
            except EngineClosedError:
                print([t.name for t in threading.enumerate() if t.name.startswith("asyncllm")])
            """,
        )
    )
    assert [text.strip() for text in outputs] == [
        "",
        "",
        "True",
        "2 True",
        "",
        "True",
        "True",
        "[]",
    ]
