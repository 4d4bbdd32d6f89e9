"""Concurrent imports of transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.processes import python

STAND_IN = """
import sys, threading, types
first, second = sys.test_events
first.set()
second.wait(10)
complete = types.ModuleType(__name__)
complete.AutoConfig = "complete"
sys.modules[__name__] = complete
"""
"""As transformers, it puts another module in its place when it is complete."""

PROGRAM = """
import sys, threading
from asyncllm.checkpoint.importing import importing_transformers
first, second = sys.test_events = threading.Event(), threading.Event()
found = []

def engine():
    first.wait(10)
    threading.Timer(0.1, second.set).start()
    with importing_transformers():
        from transformers import AutoConfig
    found.append(AutoConfig)

def application():
    import transformers

def another_engine():
    with importing_transformers():
        from transformers import AutoConfig
    found.append(AutoConfig)

threads = [threading.Thread(target=target) for target in (engine, OTHER)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(20)
print(*found)
"""


@pytest.mark.parametrize(
    ("other", "found"), [("application", "complete"), ("another_engine", "complete complete")]
)
def test_waiting_import_sees_a_complete_module(tmp_path: Path, other: str, found: str) -> None:
    (tmp_path / "transformers.py").write_text(STAND_IN)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ran = python("-c", PROGRAM.replace("OTHER", other), timeout=60, env=os.environ | path)
    assert (ran.stdout.strip(), ran.stderr) == (found, "")


@pytest.mark.slow
def test_engines_on_transformers_modules_start_at_once() -> None:
    program = """
import threading
from asyncllm import LLM

found = []

def generate(model_impl):
    with LLM(model_impl=model_impl, num_blocks=64, max_num_batched_tokens=64) as llm:
        found.append(llm.generate("Once upon", max_tokens=8, temperature=0).text)

kinds = ("transformers", "native", "transformers", "native", "transformers")
threads = [threading.Thread(target=generate, args=(kind,)) for kind in kinds]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found), len(set(found)))
"""
    ran = python("-c", program)
    assert ran.stdout == "5 1\n", ran.stderr
