"""An engine whose device is fake and whose tokens are bytes, under real grammars; JSON schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

from asyncllm import AsyncLLMEngine, EngineConfig
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.runtime.loading import LoadedModel
from asyncllm.structured.grammar import Grammar, Vocabulary
from asyncllm.testing import FakeExecutor, byte_tokenizer
from asyncllm.testing.byte_tokenizer import TURN_END
from tests.fakes import FakeModelConfig, engine_with


class ByteRig:
    """The fake executor draws among the tokens that a mask allows by a digest of all before."""

    def __init__(self, *, depth: int = 1, num_blocks: int = 257, eos: bool = True) -> None:
        self.tokenizer = byte_tokenizer()
        self.info = ExecutorInfo(
            vocab_size=self.tokenizer.vocab_size,
            num_blocks=num_blocks,
            kv_groups=(KVCacheSpec((0,), 4),),
            max_model_len=(num_blocks - 1) * 4,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            pipeline_depth=depth,
        )
        self.executor = FakeExecutor(self.info, record=True)
        self.model_config = FakeModelConfig((TURN_END,) if eos else ())

    def load(self, config: EngineConfig, progress: Any) -> LoadedModel:
        return LoadedModel(self.executor, self.tokenizer, self.model_config)

    def engine(self, **overrides: Any) -> AsyncLLMEngine:
        return engine_with(self.load, **overrides)


def byte_vocabulary(*pieces: bytes) -> Vocabulary:
    tokens = [bytes([byte]) for byte in range(256)] + list(pieces)
    return Vocabulary(tokens, {}, lambda text: list(text.encode()))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether an output may be ``text``, byte by byte."""
    matcher = grammar.new_matcher()
    for byte in text.encode():
        if matcher.is_terminated() or not matcher.accept(byte):
            return False
    return matcher.may_end()


def tokens_of(mask: bytes) -> set[int]:
    return {8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose outputs end: strings, arrays and free objects have bounds."""
    kinds = ["integer", "boolean", "null", "string", "enum", "const", "number"]
    kinds += ["object", "object", "array", "anyOf", "tuple"] if depth < 2 else []
    kind = rng.choice(kinds) if depth else rng.choice(["object", "array", "anyOf"])
    names = rng.sample(["name", "age", "city", "ok", "tag", "Größe", 'a"b'], rng.randint(1, 3))
    match kind:
        case "integer":
            low = rng.randint(-99, 99)
            return {"type": kind, "minimum": low, "maximum": low + rng.choice([0, 9, 500])}
        case "string":
            bound = {"minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
            pattern = {"pattern": rng.choice(["^[a-z]{1,4}$", "^(ab|c)d?$", "^[0-9]{2}-[0-9]{2}$"])}
            return {"type": kind} | rng.choice([bound, bound, pattern])
        case "number":
            return {"enum": [rng.randint(-9, 9) / 4, 1e300]}
        case "enum":
            return {"enum": rng.sample(["red", "grün", 3, None, True, 'q"\\', [1], {"k": 1}], 3)}
        case "const":
            return {"const": rng.choice(["x y", 7, [1, "a"], {"deep": {"er": None}}])}
        case "object":
            found = {name: random_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {
                "type": kind,
                "properties": found,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            size = {"minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 3)}
            return {"type": kind, "items": random_schema(rng, depth + 1)} | size
        case "tuple":
            parts = [random_schema(rng, depth + 1) for _ in names]
            size = {"minItems": len(parts), "maxItems": len(parts)}
            return {"type": "array", "prefixItems": parts} | size
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    return {"type": kind}


def assert_valid(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Options of requests, two of three with a schema."""
    rng = random.Random(7)
    asked = [{"structured_outputs": {"json": random_schema(rng)}} for _ in range(count)]
    asked[1::3] = [{} for _ in asked[1::3]]
    return asked


async def texts_of(
    rig: ByteRig, count: int = 12, max_unread: int | None = None, **overrides: Any
) -> list[Any]:
    """Texts, tokens and finish reasons of ``mixed_requests``, after a step for each that compiles
    its grammar. They are read one after the other; with ``max_unread`` the others pause."""
    slow = {} if max_unread is None else {"on_slow": "pause", "max_unread": max_unread}
    async with rig.engine(**overrides) as engine:
        for one in mixed_requests(count):
            await engine.generate("x", max_tokens=1, **one)
        await engine.pause()  # so that all are in the first steps
        streams = [
            engine.stream(f"prompt {i}", max_tokens=60, ignore_eos=True, **slow, **one)
            for i, one in enumerate(mixed_requests(count))
        ]
        await engine.resume()
        found = [await stream.result() for stream in streams]
        assert engine.stats().num_running == 0
        return [(c.text, c.token_ids, c.finish_reason) for c in found]
