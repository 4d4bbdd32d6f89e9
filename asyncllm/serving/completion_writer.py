"""CompletionWriter: writes a completion in OpenAI's protocol, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.outputs import Completion, Delta, TokenLogprobs, Usage
from asyncllm.serving.answers import TokenUsage
from asyncllm.serving.choices import usage_fields
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.exchange import encode
from asyncllm.serving.running_usage import RunningUsage
from asyncllm.serving.token_logprobs import LegacyLogprobs, encode_logprobs, logprobs_size
from asyncllm.stream import TokenStream


@dataclass(slots=True)
class _Choice:
    """Progress of one choice's output.

    Attributes:
        echoed: whether the prompt of the choice was sent.
    """

    logprobs: LegacyLogprobs | None
    echoed: bool


class CompletionWriter:
    """Writer of one completion. Choices are ordered by prompt.

    Args:
        model: the client's name for the model.
        request: the client's request.
        tokenizer: the engine's tokenizer.
    """

    def __init__(self, model: str, request: CompletionRequest, tokenizer: Any) -> None:
        self._fields = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._request = request
        self._tokenizer = tokenizer
        self._outputs_per_prompt = request.num_outputs
        top = request.logprobs
        self._choices = [
            _Choice(None if top is None else LegacyLogprobs(tokenizer.spelling_of, top), False)
            for _ in range(len(request.prompts) * self._outputs_per_prompt)
        ]
        each_chunk = request.usage_of_stream == "each chunk"
        self._running = RunningUsage() if each_chunk else None
        self._head = "data: " + encode(self._fields)[:-1]

    def full_answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            self._choice(
                prompt_index * self._outputs_per_prompt + output.index,
                output.text,
                output.logprobs or (),
                output.finish_reason,
                completion.prompt_token_ids,
                completion.prompt_logprobs,
            )
            for prompt_index, completion in enumerate(completions)
            for output in completion.outputs
        ]
        usages = [completion.usage for completion in completions]
        return {**self._fields, "choices": choices, "usage": self._usage(usages)}

    def opening(self) -> str:
        return ""

    def chunks(self, delta: Delta, base: int, stream: TokenStream) -> str:
        index = base + delta.index
        prompt: tuple[Any, Any] = ((), None)
        if self._request.echo and not self._choices[index].echoed:
            prompt = stream.prompt_token_ids or (), stream.prompt_logprobs
        choice = self._choice(index, delta.text, delta.logprobs or (), delta.finish_reason, *prompt)
        usage = ',"usage":null' if self._request.usage_of_stream == "end" else ""
        if self._running is not None:
            usage = f',"usage":{self._running.add(delta, base, stream)}'
        if not choice["text"] and not delta.logprobs and delta.finish_reason is None:
            return ""
        written = encode_logprobs(choice) if choice["logprobs"] else encode(choice)
        return f'{self._head},"choices":[{written}]{usage}}}\n\n'

    def size(self, delta: Delta, base: int, stream: TokenStream) -> int:
        echoes = self._request.echo and not self._choices[base + delta.index].echoed
        prompt = stream.prompt_logprobs if echoes else None
        return logprobs_size(delta.logprobs) + logprobs_size(prompt)

    def final_chunks(self, usages: Sequence[Usage | None]) -> str:
        if self._request.usage_of_stream == "none":
            return ""
        return f'{self._head},"choices":[],"usage":{encode(self._usage(usages))}}}\n\n'

    def _usage(self, usages: Sequence[Usage | None]) -> TokenUsage:
        usage = usage_fields(usages)
        if not self._request.generates:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs | None],
        finish_reason: str | None,
        prompt_token_ids: Sequence[int],
        prompt_logprobs: Sequence[TokenLogprobs | None] | None,
    ) -> dict[str, Any]:
        choice, first = self._choices[index], None
        if not self._request.generates:
            text, logprobs = "", ()
        if self._request.echo and not choice.echoed:
            choice.echoed = True
            text = self._prompt_text(index // self._outputs_per_prompt, prompt_token_ids) + text
            if prompt_logprobs is not None:
                first = prompt_token_ids[0]
                logprobs = (*prompt_logprobs, *logprobs)
        return {
            "index": index,
            "text": text,
            "logprobs": None if choice.logprobs is None else choice.logprobs.write(logprobs, first),
            "finish_reason": finish_reason,
        }

    def _prompt_text(self, prompt_index: int, token_ids: Sequence[int]) -> str:
        prompt = self._request.prompts[prompt_index]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
