"""Letting the written model sit the examination, and writing down what it reached."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from . import card, heldout
from .heldout import Generate


def reference(folder: Path, limit: int = 260, rows: int = 128) -> Generate:
    """Greedy answers of the model in ``folder``, by the transformers library."""
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stops = network.generation_config.eos_token_id
    pad = network.generation_config.pad_token_id

    def part(prompts: list[str]) -> list[str]:
        coded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        longest = max(len(ids) for ids in coded)
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in coded])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in coded])
        out = network.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, temperature=None, top_p=None,
            max_new_tokens=limit, eos_token_id=stops, pad_token_id=pad,
        )
        return [tokenizer.decode(row[longest:].tolist()) for row in out]

    def generate(prompts: list[str]) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        said = [""] * len(prompts)
        for start in range(0, len(order), rows):
            some = order[start : start + rows]
            for at, text in zip(some, part([prompts[at] for at in some]), strict=True):
                said[at] = text
        return said

    return generate


def examine(generate: Generate, count: int = 200) -> list[heldout.Score]:
    """The scores of every skill."""
    return [heldout.score(skill, generate, count) for skill in heldout.MAKERS]


def write_report(folder: Path, trained: dict, count: int = 200) -> list[heldout.Score]:
    """Examine the model in ``folder``, and write ``eval.json`` and the model card beside it."""
    generate = reference(folder)
    scores = examine(generate, count)
    report = {
        "trained": trained,
        "seed": heldout.SEED,
        "scores": {score.skill: [score.right, score.total] for score in scores},
    }
    (folder / "eval.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = (
        f"Trained from random weights on {trained['tokens'] / 1e6:.1f} million tokens (padding "
        f"included) in {trained['steps']} steps of {trained['batch_tokens']} tokens, from seed "
        f"{trained['seed']}, in {trained['seconds'] / 60:.0f} minutes on {trained['machine']}, "
        f"with {trained['versions']}, by `{trained['command']}`.\n"
    )
    card.write(folder, config, made, scores, generate)
    return scores
