"""The packaged model on held-out names, words, numbers and wordings."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from asyncllm import LLM
from tests.slow import slow_but

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "asyncllm" / "demo_model"
# The generators are no part of the package, so their folder has to be on the path first.
sys.path.insert(0, str(ROOT / "tools"))

from demo_model import chat, corpus, heldout, stories, tokens, wordings, words  # noqa: E402 (see above)

COUNT = 100
# More of those that are closest to their bound.
LARGER = 200


@pytest.fixture(scope="module")
def generate() -> Iterator[heldout.Generate]:
    """Greedy answers of the shipped model to rendered prompts, through the engine itself."""
    with LLM(dtype="float32", max_num_seqs=128) as llm:

        def answer(prompts: list[str]) -> list[str]:
            results = llm.generate(prompts, temperature=0.0, max_tokens=heldout.LONGEST)
            return [result.text for result in results]

        yield answer


OFTEN = "several turns", "tool calls"


@pytest.mark.parametrize("skill", slow_but(sorted(heldout.MAKERS), *OFTEN))
def test_skill(skill: str, generate: heldout.Generate) -> None:
    count = LARGER if skill.startswith(("questions", "adding")) else COUNT
    score = heldout.score(skill, generate, count)
    print(f"seed {heldout.SEEDS[0]}: {skill} {score.right} of {score.total}")
    for prompt, wanted, said in score.misses:
        print(f"{prompt!r}\n  wanted {wanted!r}\n  said {said!r}")
    assert score.rate >= heldout.LOWER_GOALS.get(skill, heldout.GOAL)


@pytest.mark.slow
def test_training_text_lacks_the_examination() -> None:
    seed = "leak"
    print(f"seed {seed}")
    vocabulary = tokens.pieces(tokens.load(MODEL / "tokenizer.json"))
    texts = [
        "".join(text for text, _ in pieces)
        for late in (False, True)
        for pieces in corpus.documents(seed, 3_000_000, vocabulary, late)
    ]
    seen = {word for text in texts for word in re.findall("[a-z]+", text.lower())}
    assert seen & words.HELD_WORDS == set()


def test_training_cannot_say_the_examination_wordings() -> None:
    assert wordings.shared() == []
    train = ("[How|What] is {v}[?|]",)
    assert wordings.pattern(train[0]).fullmatch(wordings.normal("How is {a}?"))


def test_training_stories_are_without_fault() -> None:
    print("seed 6")
    for late in (False, True):
        bank = words.Bank(random.Random(6), late=late, pieces=("ab", "cd", "er", "o"))
        for _ in range(2000):
            cast = stories.draw_cast(bank)
            asked, story = stories.turn(bank.rng, cast)
            assert heldout.story_faults(cast, story) == [], (asked, story)
            if not re.search(r"\b(girl|boy|her|his)\b", asked) and "hero" in cast.told:
                known = cast.hero.text in words.COMMON_GIRLS + words.COMMON_BOYS
                assert known or not re.search(r"\b(she|he|her|his|him)\b", story, re.I), story


def test_examination_is_the_same_every_time() -> None:
    assert heldout.items("JSON objects", 20) == heldout.items("JSON objects", 20)
    assert heldout.items("JSON objects", 20, 1) != heldout.items("JSON objects", 20, 2)


def test_template_equals_training_format() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    rng = random.Random(5)
    print("seed 5")
    bank = words.Bank(rng)
    for _ in range(50):
        task = corpus.calls.draw(bank)
        messages = [{"role": "system", "content": "Be brief."}, *corpus.call_messages(task)][
            rng.randint(0, 1) :
        ]
        for count in range(2, len(messages)):
            shown = tokenizer.apply_chat_template(
                messages[:count], tools=task.tools, tokenize=False, add_generation_prompt=True
            )
            assert shown == chat.render(messages[:count], task.tools)
        structured = [dict(message) for message in messages]
        at = next(i for i, m in enumerate(messages) if m["content"].startswith("<tool_call>"))
        call = {"type": "function", "function": task.call}
        structured[at] = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert tokenizer.apply_chat_template(
            structured, tools=task.tools, tokenize=False
        ) == tokenizer.apply_chat_template(messages, tools=task.tools, tokenize=False)


def test_template_takes_parts_and_refuses_unknown_roles() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        }
    ]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == (
        "<|im_start|>user\nHello<|im_end|>\n"
    )
    with pytest.raises(Exception, match="Unknown role: wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "Hi"}], tokenize=False)
    with pytest.raises(Exception, match="text only"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "image", "image": "x"}]}], tokenize=False
        )


def test_files_are_small_and_whole() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir() if path.is_file()) < 12_000_000
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 512
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 2048
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [
        tokenizer.token_to_id("<|im_end|>"),
        tokenizer.token_to_id("<|endoftext|>"),
    ]
    for mark in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(mark, add_special_tokens=False).ids) == 1
