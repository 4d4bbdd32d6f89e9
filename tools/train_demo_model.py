"""Make the model that ships in ``asyncllm/demo_model``: text, tokenizer, training, examination.

Run ``python tools/train_demo_model.py --out asyncllm/demo_model``. Everything it learns from is
written by the generators beside it; the seed decides all of it. ``--state`` names a folder where
the training is saved as it goes, from which a second call of the same command goes on.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import torch
from demo_model import chat, corpus, examine, export, tokens, words
from demo_model.network import Shape
from demo_model.trainer import Plan, Trainer

_TOKENIZER_CHARACTERS = 12_000_000
_SPACED_WORDS = 450


def build_tokenizer(seed: int, vocab: int) -> tokens.Tokenizer:
    """Train the tokenizer on text of its own."""
    texts = []
    for document in corpus.documents(f"{seed}/tokenizer", _TOKENIZER_CHARACTERS):
        text = "".join(piece for piece, _ in document)
        for mark in (*chat.SPECIAL, *chat.MARKS):
            text = text.replace(mark, "\n")
        texts.append(text)
    spaced = tokens.frequent(texts, _SPACED_WORDS, words.DRAWN)
    return tokens.train(texts, vocab, spaced)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="folder to save to and to go on from")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--chunks", type=int, default=Plan.chunks)
    parser.add_argument("--stop-after", type=int, help="leave after this many chunks (a trial)")
    parser.add_argument("--export-only", action="store_true", help="write what --state holds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores", help="for the model card")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-examine", action="store_true")
    return parser.parse_args()


def _trained(trainer: Trainer, options: argparse.Namespace) -> dict:
    return {
        "seed": options.seed, "steps": trainer.step, "tokens": trainer.tokens,
        "batch_tokens": trainer.plan.batch_tokens, "seconds": round(trainer.seconds),
        "machine": options.machine,
        "command": "python tools/train_demo_model.py --out asyncllm/demo_model",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"tokenizers {tokens.VERSION}",
    }


def _save(trainer: Trainer, state: Path) -> None:
    # A half-written file must not replace a whole one.
    torch.save(trainer.state(), state / "state.part")
    os.replace(state / "state.part", state / "state.pt")


def main() -> None:
    """Make the model."""
    options = _options()
    plan = Plan(
        seed=options.seed, chunks=options.chunks, device=options.device,
        compile=not (options.no_compile or options.export_only),
    )
    shape = Shape()
    tokenizer = build_tokenizer(plan.seed, shape.vocab)
    export.write_tokenizer(tokenizer, shape.context, options.out)
    trainer = Trainer(plan, shape, tokenizer)
    if options.state:
        options.state.mkdir(parents=True, exist_ok=True)
        if (options.state / "state.pt").exists():
            trainer.resume(options.state / "state.pt")
    last = options.stop_after or plan.chunks
    while trainer.chunk < last and not options.export_only:
        print(trainer.run_chunk(), flush=True)
        if options.state:
            _save(trainer, options.state)
    export.write_model(trainer.network, tokenizer, options.out)
    if not options.no_examine:
        reports = examine.write_report(options.out, _trained(trainer, options))
        for seed, scores in reports.items():
            for score in scores:
                print(f"seed {seed}: {score.skill} {score.right} of {score.total}")


if __name__ == "__main__":
    main()
