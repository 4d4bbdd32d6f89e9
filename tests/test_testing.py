"""asyncllm.testing: engines that answer from a script, and the page about them."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import InvalidRequestError, KVCacheTooSmallError, RequestError
from asyncllm.testing import byte_tokenizer, fake_engine, fake_llm
from asyncllm.validation import describe

PAGE = (Path(__file__).parent.parent / "docs" / "testing.md").read_text(encoding="utf-8")


def snippets() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for source in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        names: dict[str, Any] = {}
        exec(compile(source, "docs/testing.md", "exec"), names)
        found |= {name: value for name, value in names.items() if name.startswith("test_")}
    return found


@pytest.mark.parametrize(("name", "test"), snippets().items())
def test_the_page(name: str, test: Callable[[], Any]) -> None:
    running = test()
    if inspect.iscoroutine(running):
        asyncio.run(running)


def test_every_snippet_of_the_page_is_a_test() -> None:
    assert len(snippets()) == PAGE.count("def test_") == 12


def test_testing_needs_no_torch() -> None:
    source = (
        "import sys\n"
        "from asyncllm.testing import fake_llm\n"
        "with fake_llm('Yes.') as llm:\n"
        "    print(llm.generate('?'), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("Yes. False\n", "")


TEXTS = ["", "a", "Hé 你好 🙂\n\t", " two  spaces ", "\x00\x7f", "<|im_end|"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_both_ways(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_turns_of_a_conversation() -> None:
    tokenizer = byte_tokenizer()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    assert tokenizer.apply_chat_template(chat, tools=[{"name": "é"}]) == (
        '<|im_start|>system\n[{"name": "é"}]<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n'
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode("<|im_start|><|im_end|>") == [256, 257]
    assert tokenizer.eos_token_id == 257


@pytest.mark.parametrize("run_ahead", [False, True])
async def test_answers_of_requests_that_are_preempted(run_ahead: bool) -> None:
    texts = {f"prompt {i}": f"{i}: " + "abc" * 8 for i in range(6)}
    limits: dict[str, Any] = {"num_blocks": 14, "block_size": 4, "max_model_len": 48}
    async with fake_engine(texts, **limits, async_scheduling=run_ahead) as engine:
        done = await asyncio.gather(*(engine.generate(prompt) for prompt in texts))
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_free_blocks == 14
    assert [completion.text for completion in done] == list(texts.values())


def test_the_question_is_the_last_message_of_the_user() -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "Yes."

    chat = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "user\nsecond"},
        {"role": "user", "content": "third <|im_end|>\n<|im_start|>user\nfourth"},
        {"role": "tool", "content": "fifth"},
    ]
    with fake_llm(answer) as llm:
        assert llm.chat(chat).text == llm.chat(chat[:2]).text == "Yes."
        llm.generate("as <|im_start|>it is")
        llm.generate([1, 2, 256])
    assert asked == [chat[2]["content"], "first", "as <|im_start|>it is", "\x01\x02<|im_start|>"]


def test_a_script_of_token_ids_and_failures() -> None:
    with fake_llm([72, "é", 33, KeyError("gone")], async_scheduling=True) as llm:
        assert llm.generate("x", max_tokens=4).text == "Hé!"
        for _ in range(2):
            with pytest.raises(RequestError, match="gone"):
                llm.generate("x", request_id="same")
        assert llm.generate("x", max_tokens=1, request_id="same").text == "H"


@pytest.mark.parametrize("answers", [{"y": "Yes."}, lambda prompt: {}[prompt], KeyError("x")])
def test_a_prompt_without_an_answer_fails_alone(answers: Any) -> None:
    with fake_llm(answers) as llm:
        with pytest.raises(RequestError, match="'x'"):
            llm.generate("x")
        assert llm.state == "running"


def test_settings_are_honoured_or_refused() -> None:
    with fake_llm("", num_blocks=8, block_size=4, max_num_seqs=3) as llm:
        assert llm.stats().num_blocks == 8
        assert llm.engine.model_config.max_position_embeddings == 32
    with pytest.raises(KVCacheTooSmallError, match="max_model_len=33: expected at most 32"):
        fake_llm("", num_blocks=8, block_size=4, max_model_len=33)
    with pytest.raises(InvalidRequestError, match="block_size=0"):
        fake_engine("", block_size=0)


class Stop(BaseException):
    """No Exception."""


WRONG: list[Any] = [None, 5, b"x", {}, ValueError, SystemExit("s"), itertools.repeat("a")]
WRONG += [["a", one] for one in (None, 5.5, SystemExit("s"), ValueError)]
WRONG += [[one] for one in (["a"], True, -1, 258, 10**400)]


@pytest.mark.parametrize("wrong", WRONG, ids=describe)
def test_a_wrong_answer_fails_its_request_alone(wrong: Any) -> None:
    with fake_llm({"bad": wrong, "good": "Yes."}) as llm:
        with pytest.raises(RequestError, match="answers"):
            llm.generate("bad")
        assert llm.generate("good").text == "Yes."


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), Stop("x"), StopIteration()]
)
def test_a_function_that_raises_fails_its_request_alone(error: BaseException) -> None:
    def answer(prompt: str) -> str:
        if prompt == "bad":
            raise error
        return "Yes."

    with fake_llm(answer) as llm:
        with pytest.raises(RequestError, match=type(error).__name__):
            llm.generate("bad")
        assert llm.generate("good").text == "Yes."


@pytest.mark.parametrize(
    "fail_at",
    [
        *({step: ValueError("x")} for step in (-1, "a", 1.5, True, 10**400)),
        *({1: fault} for fault in (None, "x", ValueError)),
        [ValueError("x")],
        5,
    ],
    ids=describe,
)
def test_failures_are_exceptions_at_steps(fail_at: Any) -> None:
    with pytest.raises(InvalidRequestError, match="fail_at"):
        fake_engine("Yes.", fail_at=fail_at)
