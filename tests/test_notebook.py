"""The example notebook, in a real kernel."""

from __future__ import annotations

import json
import re
import sys
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


@pytest.mark.slow
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
