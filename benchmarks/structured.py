"""What structured output costs: compiles and masks, a batch under schemas, one row among others.

    python -m benchmarks.structured [--backend xgrammar] [--model DIRECTORY] [--pairs 9]

Compiles and masks are timed on a synthetic vocabulary of 152,000 byte-level tokens; rates on a
model, the packaged one unless another is named, as medians of ratios of two runs beside each other.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import time
from collections.abc import Iterable
from typing import Any

from asyncllm import LLM
from asyncllm.structured.backends import make_backend
from asyncllm.structured.grammar import Vocabulary
from asyncllm.structured.spec import parse_structured_outputs

SIZE = 152_000
ROWS, TOKENS = 16, 64

TEXT = (
    b'{"name": "A person of some age", "age": 41, "tags": ["one", "two", "three"], '
    b'"address": {"street": "Am Markt 5", "city": "Bonn"}, "active": true}'
)


def schema(number: int) -> dict[str, Any]:
    address = {
        "type": "object",
        "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        "required": ["street", "city"],
    }
    properties = {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": address,
        "active": {"type": "boolean"},
        f"extra_{number}": {"type": "null"},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "age", "tags", "address", "active"],
        "additionalProperties": False,
    }


def vocabulary() -> Vocabulary:
    """Bytes, words with and without a space, punctuation and CJK, as large vocabularies have."""
    rng = random.Random(0)
    tokens: dict[bytes, None] = {bytes([byte]): None for byte in range(256)}
    while len(tokens) < SIZE - 12_000:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 11)))
        tokens[(rng.choice(["", " "]) + rng.choice([word, word.capitalize()])).encode()] = None
    while len(tokens) < SIZE - 5_000:
        tokens["".join(rng.choices('"{}[]:,._-()/<>=\n\t ', k=rng.randint(2, 5))).encode()] = None
    while len(tokens) < SIZE:
        tokens["".join(chr(rng.randint(0x4E00, 0x9FFE)) for _ in range(2)).encode()] = None
    return Vocabulary(list(tokens), {}, lambda text: list(text.encode()))


def show(what: str, seconds: Iterable[float]) -> None:
    found = sorted(seconds)
    p50, p99 = found[len(found) // 2], found[int(len(found) * 0.99)]
    print(f"{what}: p50 {p50 * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms of {len(found)}")


def compiles_and_masks(name: str) -> None:
    words = vocabulary()
    began = time.perf_counter()
    backend = make_backend(name, words)
    print(f"{name} made ready for {SIZE} tokens in {time.perf_counter() - began:.2f} s")
    compiles, masks, accepts = [], [], []
    for number in range(40):
        spec = parse_structured_outputs({"json": schema(number)})
        assert spec is not None
        began = time.perf_counter()
        matcher = backend.compile(spec).new_matcher()
        compiles.append(time.perf_counter() - began)
        for byte in TEXT:
            began = time.perf_counter()
            matcher.bitmask()
            masks.append(time.perf_counter() - began)
            began = time.perf_counter()
            assert matcher.accept(byte)
            accepts.append(time.perf_counter() - began)
    show("compile", compiles)
    show("mask", masks)
    show("accept", accepts)


def rate(llm: LLM, constrained: int, measured: slice) -> float:
    """Tokens a second of the measured rows of a batch, the first of them under a schema."""
    form = {"regex": "[a-zA-Z0-9 ,.]+"}
    streams = [
        llm.stream(
            f"Story number {row}.",
            max_tokens=TOKENS,
            ignore_eos=True,
            structured_outputs=form if row < constrained else None,
        )
        for row in range(ROWS)
    ]
    done = [stream.result() for stream in streams]
    assert all(len(completion.token_ids) == TOKENS for completion in done)
    slowest = max(c.usage.total_time for c in done[measured] if c.usage is not None)
    return TOKENS * len(done[measured]) / slowest


def batches(model: str | None, pairs: int) -> None:
    with LLM(model, structured_outputs_backend="llguidance") as llm:
        rate(llm, ROWS, slice(ROWS))  # compiled, and warm
        whole, others = [], []
        for _ in range(pairs):
            free = rate(llm, 0, slice(ROWS))
            whole.append(rate(llm, ROWS, slice(ROWS)) / free)
            free = rate(llm, 0, slice(1, ROWS))
            others.append(rate(llm, 1, slice(1, ROWS)) / free)
        print(f"{ROWS} rows under a form: {statistics.median(whole):.3f} of the free rate")
        print(f"{ROWS - 1} rows beside one under a form: {statistics.median(others):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("llguidance", "xgrammar"), default="llguidance")
    parser.add_argument("--model", help="directory of a model; the packaged one without")
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    compiles_and_masks(options.backend)
    if options.backend == "llguidance":  # xgrammar takes no expressions.
        batches(options.model, options.pairs)


if __name__ == "__main__":
    main()
