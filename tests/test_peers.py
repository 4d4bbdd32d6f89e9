"""The comparison with other engines: its checkpoint, its figures, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from subprocess import Popen
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from benchmarks import peer_checkpoint, peers
from benchmarks.common import Report


def test_every_token_of_the_checkpoint_is_text(tmp_path):
    peer_checkpoint.write_tokenizer(tmp_path, 1024)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    # Those behind the bytes stand for themselves.
    assert [tokenizer.decode([token]) for token in (257, 258, 932, 1023)] == [
        "aa",
        "ab",
        "zz",
        "adm",
    ]
    assert all(tokenizer.decode([token]) for token in range(1024))


def test_ratios_are_of_the_same_round(capsys):
    """The machine was twice as slow in the second."""
    ours, theirs = (peers.Engine(name, Mock(Popen)) for name in ("asyncllm", "other"))
    for slow in (1.0, 2.0, 1.0):
        for engine, factor in ((ours, slow), (theirs, slow * 3.0)):
            engine.rounds.append(
                {"A first token": factor, "A between tokens": factor, "B": 100 / factor}
            )
    report = Report("peers")
    peers.tell(report, [ours, theirs], {"third": "not installed"})
    figures = {(figure.name, figure.unit): figure for figure in report.figures}
    assert figures["other", "ms"].note == "3.00 of asyncllm's; 3000 to 6000"
    assert figures["other", "tok/s"].note == "0.33 of asyncllm's; 17 to 33"
    assert figures["asyncllm", "tok/s"].note == "50 to 100"
    assert "third: not installed" in capsys.readouterr().out


def test_the_same_prompts_for_every_engine():
    first, again = (peers.draw_prompts(3, [128, 5], 1000) for _ in range(2))
    assert first == again != peers.draw_prompts(4, [128, 5], 1000)
    assert [len(prompt) for prompt in first] == [128, 5]
    assert all(0 < token < 1000 for prompt in first for token in prompt)


@pytest.mark.slow
def test_one_command_measures_and_names_the_missing(tmp_path):
    """With an interpreter that has no packages for one of the engines."""
    report = tmp_path / "report.json"
    base_executable = vars(sys)["_base_executable"]  # outside the virtual environment
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.peers", "--shape", "tiny", "--rounds", "1"),
            *("--folder", str(tmp_path), "--json", str(report), "--dtype", "float32"),
            *("--python", f"openvino-genai={base_executable}"),
        ],
        capture_output=True,
        text=True,
        cwd=peers.ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "openvino-genai: not installed" in done.stdout
    figures = json.loads(report.read_text())["figures"]
    assert [figure["name"] for figure in figures] == ["asyncllm", "transformers"] * len(peers.UNITS)
    assert all(figure["value"] > 0 for figure in figures)
