"""Letting the written model sit the examination, and writing down what it reached."""

from __future__ import annotations

import json
from pathlib import Path

from asyncllm import LLM

from . import card, heldout


def write_report(folder: Path, trained: dict, count: int = 200) -> card.Reports:
    """Examine the model in ``folder``, and write ``eval.json`` and the model card beside it."""
    with LLM(model=folder, dtype="float32", max_num_seqs=128) as llm:

        def generate(prompts: list[str]) -> list[str]:
            results = llm.generate(prompts, temperature=0.0, max_tokens=heldout.LONGEST)
            return [result.text for result in results]

        reports = {
            seed: [heldout.score(skill, generate, count, seed) for skill in heldout.MAKERS]
            for seed in heldout.SEEDS
        }
        shown = card.examples(generate)
    report = {
        "trained": trained,
        "scores": {
            seed: {score.skill: [score.right, score.total] for score in scores}
            for seed, scores in reports.items()
        },
    }
    (folder / "eval.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = (
        f"Trained from random weights on {trained['tokens'] / 1e6:.1f} million tokens (padding "
        f"included) in {trained['steps']} steps of {trained['batch_tokens']} tokens, from seed "
        f"{trained['seed']}, in {trained['seconds'] / 60:.0f} minutes on {trained['machine']}, "
        f"with {trained['versions']}, by\n`{trained['command']}`.\n"
    )
    card.write(folder, config, made, reports, shown)
    return reports
