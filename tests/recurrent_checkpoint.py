"""A tiny checkpoint with recurrent states, and mistakes in handling them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncllm.gpu.batch.state_rows import StateRows
from asyncllm.gpu.model_runner import ModelRunner
from tests.driver import Sequence
from tests.families import make
from tests.reference import Expected, Tally, compare, generate
from tests.transformers_runner import load

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [100, 3, 9, 9, 41, 7, 200, 12, 13, 14, 15], [77], [90, 91]]
OUTPUT = 8


class Checkpoint:
    """A tiny model, and its own outputs."""

    def __init__(self, path: Path, family: str) -> None:
        self.path = path
        model = make(path, family)
        self.expected: list[Expected] = [generate(model, prompt, OUTPUT) for prompt in PROMPTS]

    def runner(self, **overrides: Any) -> ModelRunner:
        return load(self.path, **overrides)

    def check(self, seqs: list[Sequence]) -> None:
        tally = Tally()
        for seq, expected in zip(seqs, self.expected, strict=True):
            compare(seq, expected, tally)
        assert not tally.ties


def _roll(rows: StateRows) -> StateRows:
    slots = None if rows.slots is None else rows.slots.roll(1)
    spans = [replace(span, slot=(span.slot + 1) % 4) if span.start else span for span in rows.spans]
    return replace(rows, slots=slots, spans=spans)


def _keep(rows: StateRows) -> StateRows:
    return replace(
        rows, is_fresh=None, spans=[replace(span, is_fresh=False) for span in rows.spans]
    )


def _clear(rows: StateRows) -> StateRows:
    return replace(rows, spans=[replace(span, is_fresh=True) for span in rows.spans])


MISTAKES = {"a neighbour's state": _roll, "a state not zeroed": _keep, "a state forgotten": _clear}
