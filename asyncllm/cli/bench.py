"""``asyncllm bench``: throughput and latency of one model on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncllm.cli.measure import LagMeter, format_machine_info, machine_info, percentile
from asyncllm.cli.session import checked_config, model_name, run_async, running_engine
from asyncllm.cli.text import format_bytes, format_seconds
from asyncllm.core.execution_report import ExecutionReport
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import InvalidRequestError
from asyncllm.outputs import Usage

_MAX_MEASURED_ABORTS = 32


@dataclass
class ConcurrencyResult:
    """Measurements at one concurrency; times in seconds."""

    concurrency: int
    num_requests: int = 0
    num_tokens: int = 0
    duration: float = 0.0
    ttft: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    loop_lag: list[float] = field(default_factory=list)
    cancel_to_free: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Summarise the measurements by medians and 99th percentiles."""
        figures: dict[str, Any] = {
            "concurrency": self.concurrency,
            "requests": self.num_requests,
            "output_tokens": self.num_tokens,
            "seconds": self.duration,
            "tokens_per_second": self.num_tokens / self.duration,
        }
        for name in ("ttft", "between_tokens", "loop_lag", "cancel_to_free"):
            values = getattr(self, name)
            figures[f"{name}_p50"] = percentile(values, 0.5)
            figures[f"{name}_p99"] = percentile(values, 0.99)
        return figures


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if arguments.json is not None:
        _check_writable(arguments.json)
    result = run_async(arguments, lambda: _main(arguments))
    if not arguments.env:
        _print_table(result["rows"])
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


async def _main(arguments: argparse.Namespace) -> dict[str, Any]:
    config = checked_config(arguments)
    machine = machine_info(config.device)
    async with running_engine(AsyncLLMEngine(config=config)) as engine:
        _check_lengths(engine, arguments)
        workload = Workload(engine, arguments.prompt_len, arguments.output_len, arguments.seed)
        await workload.warm_up()
        report = await engine.execution_report()
        print(format_machine_info(machine))
        print(describe_execution(report, config.attention_backend))
        result = {
            "machine": machine,
            "command": ["asyncllm", *sys.argv[1:]],
            "config": {k: str(v) for k, v in asdict(config).items() if v is not None},
            "execution": asdict(report),
            "rows": list[dict[str, Any]](),
        }
        if arguments.env:
            return result
        print(
            f"{model_name(engine)}: prompts of {arguments.prompt_len} tokens, answers of "
            f"{arguments.output_len}, {arguments.rounds} requests a stream"
        )
        context = arguments.prompt_len + arguments.output_len // 2
        try:
            for concurrency in arguments.concurrency:
                _show_progress(f"{concurrency} streams …")
                row = await workload.measure(concurrency, arguments.rounds)
                floor = {"step_floor": report.floor(concurrency * context)}
                result["rows"].append(row.summary() | floor)
        finally:
            _show_progress("")
    return result


def _check_writable(file: str) -> None:
    """Check that the output file can be written, before a benchmark of minutes."""
    try:
        Path(file).open("a", encoding="utf-8").close()
    except OSError as error:
        raise InvalidRequestError(f"--json {file}: {error.strerror}", param="json") from error


def _check_lengths(engine: AsyncLLMEngine, arguments: argparse.Namespace) -> None:
    """Refuse lengths beyond the context, where shortened answers would falsify the figures."""
    prompt_len, output_len = arguments.prompt_len, arguments.output_len
    context = engine.max_model_len
    if prompt_len + output_len > context:
        raise InvalidRequestError(
            f"--prompt-len {prompt_len} --output-len {output_len}: {prompt_len + output_len} "
            f"tokens, expected at most the context of {context}",
            param="output_len",
        )


class Workload:
    """Source of requests with random prompts of one length and answers of one length."""

    def __init__(self, engine: AsyncLLMEngine, prompt_len: int, output_len: int, seed: int) -> None:
        self._engine = engine
        self._output_len = output_len
        self._random = random.Random(seed)
        self._prompts = self._make_prompts(prompt_len)

    def _make_prompts(self, length: int) -> Iterator[list[int]]:
        vocab_size = self._engine.model_config.vocab_size
        while True:
            yield [self._random.randrange(vocab_size) for _ in range(length)]

    async def warm_up(self) -> None:
        """Run one request, so that the first measurement excludes one-time initialisation."""
        await self._engine.generate(
            next(self._prompts), max_tokens=min(8, self._output_len), ignore_eos=True
        )

    async def measure(self, concurrency: int, rounds: int) -> ConcurrencyResult:
        """Measure ``concurrency`` readers, each with ``rounds`` requests in turn."""
        result = ConcurrencyResult(concurrency)
        started = time.perf_counter()
        async with LagMeter() as meter:
            await asyncio.gather(*(self._run_requests(result, rounds) for _ in range(concurrency)))
        result.duration = time.perf_counter() - started
        result.loop_lag = meter.lags
        await self._measure_aborts(result)
        return result

    async def _run_requests(self, result: ConcurrencyResult, rounds: int) -> None:
        for _ in range(rounds):
            began = last = time.perf_counter()
            num_tokens = 0
            usage: Usage | None = None
            async for delta in self._engine.stream(
                next(self._prompts), max_tokens=self._output_len, ignore_eos=True
            ):
                now = time.perf_counter()
                if num_tokens == 0 and delta.token_ids:
                    result.ttft.append(now - began)
                elif delta.token_ids:
                    # The tokens of a delta arrived together, so they count as one gap.
                    result.between_tokens.append(now - last)
                last, usage = now, delta.usage
                num_tokens += len(delta.token_ids)
            assert usage is not None
            result.num_requests += 1
            result.num_tokens += num_tokens

    async def _measure_aborts(self, result: ConcurrencyResult) -> None:
        """Measure the time from an abort until the stream's blocks are free, one stream at a time,
        while the other streams run."""
        streams = [
            self._engine.stream(next(self._prompts), ignore_eos=True)
            for _ in range(result.concurrency)
        ]
        for stream in streams:
            await anext(stream)
        for stream in streams[:_MAX_MEASURED_ABORTS]:
            began = time.perf_counter()
            stream.abort()
            if (await stream.result()).finish_reason == "abort":
                result.cancel_to_free.append(time.perf_counter() - began)
        for stream in streams:
            stream.abort()
        for stream in streams:
            await stream.result()


def describe_execution(report: ExecutionReport, attention_backend: str) -> str:
    """Describe which ops run and why, and how many bytes a step reads."""
    count = report.num_threads
    threads = "" if count is None else f" on {count} thread{'s' * (count != 1)}"
    ops = report.op_set
    if report.instruction_set is not None:
        ops += f" ({report.instruction_set})"
    text = (
        f"ops {ops}, attention {report.attention_backend}, {report.dtype} on {report.device}"
        f"{threads}: {_explain_ops(report, attention_backend)}\n"
        f"a step reads {format_bytes(report.weight_bytes)} of weights, and "
        f"{report.kv_bytes_per_token / 1e3:.3g} kB for each token of its sequences"
    )
    if report.memory_bandwidth is not None:
        text += f"; its threads read {report.memory_bandwidth / 1e9:.3g} GB/s"
    return text


def _explain_ops(report: ExecutionReport, attention_backend: str) -> str:
    if attention_backend != "auto":
        return f"attention_backend={attention_backend!r}"
    if report.device != "cpu":
        return "the kernels for a GPU"
    from asyncllm.gpu.ops.registry import choose_native_ops

    choice = choose_native_ops()
    if choice.runs_native and report.op_set != "native":
        return "native ops do not take this model's shapes"
    return choice.reason


_TABLE_COLUMNS = (
    ("streams", "concurrency"),
    ("tok/s", "tokens_per_second"),
    ("first token p50", "ttft_p50"),
    ("p99", "ttft_p99"),
    ("next token p50", "between_tokens_p50"),
    ("p99", "between_tokens_p99"),
    ("floor", "step_floor"),
    ("loop lag p99", "loop_lag_p99"),
    ("cancel to free p99", "cancel_to_free_p99"),
)


def _format_cell(name: str, value: Any) -> str:
    if name == "concurrency":
        return str(value)
    return f"{value:.0f}" if name == "tokens_per_second" else format_seconds(value)


def _print_table(rows: list[dict[str, Any]]) -> None:
    cells = [[_format_cell(name, row[name]) for _, name in _TABLE_COLUMNS] for row in rows]
    widths = [
        max(len(title), *(len(line[i]) for line in cells))
        for i, (title, _) in enumerate(_TABLE_COLUMNS)
    ]
    titles = [title for title, _ in _TABLE_COLUMNS]
    print()
    for line in (titles, ["─" * width for width in widths], *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _show_progress(text: str) -> None:
    """Show the current measurement, if standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[2K{text}", end="", file=sys.stderr, flush=True)
