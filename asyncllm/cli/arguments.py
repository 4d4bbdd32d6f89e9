"""The command line: commands, their options, and what they become."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from asyncllm import __version__
from asyncllm.validation import describe

_ENGINE_OPTIONS = (
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "num_threads",
    "load_format",
)
_MAX_COUNT = 1_000_000
_SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with ``run``, the function of the command, among them. Exits with code 2
    for a command line that cannot be read, 0 after ``--help`` and ``--version``."""
    return make_parser().parse_args(argv)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncllm",
        description="A streaming LLM engine that runs inside your application. Without a model "
        "named, every command runs the small one that ships in the package.",
    )
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_chat(commands)
    _add_bench(commands)
    return parser


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that were given."""
    return _given(arguments, _ENGINE_OPTIONS)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of SamplingParams that were given, but for the seed."""
    return _given(arguments, _SAMPLING_OPTIONS)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        "asyncllm.cli.demo",
        "several streams at once, side by side",
        "Runs stories, questions, sums, JSON, a chat and a tool call at once and shows them "
        "as they stream.",
    )
    parser.add_argument(
        "--streams", type=_count, default=8, metavar="N", help="streams at once (8)"
    )
    _add_sampling(parser)
    _add_engine(parser)


def _add_chat(commands: Any) -> None:
    parser = _command(
        commands,
        "chat",
        "asyncllm.cli.chat",
        "talk to a model in the terminal",
        "Ctrl-C stops an answer; twice at the prompt, or Ctrl-D, leaves. /help lists commands. "
        "From a pipe, every line is a turn or a command; standard output has the answers alone.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_sampling(parser)
    _add_engine(parser)


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        "asyncllm.cli.bench",
        "measure throughput and latency",
        "Runs random prompts at several concurrencies and prints a table. Every stream "
        "generates exactly --output-len tokens.",
    )
    parser.add_argument(
        "--concurrency",
        type=_counts,
        default=(1, 4, 16, 64),
        metavar="N,N,…",
        help="streams at once, one row each (1,4,16,64)",
    )
    parser.add_argument(
        "--prompt-len", type=_count, default=64, metavar="N", help="tokens per prompt (64)"
    )
    parser.add_argument(
        "--output-len", type=_count, default=64, metavar="N", help="tokens per answer (64)"
    )
    parser.add_argument(
        "--rounds", type=_count, default=2, metavar="N", help="requests per stream and row (2)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    _add_engine(parser)


def _command(
    commands: Any, name: str, module: str, summary: str, description: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument(
        "model", nargs="?", help="directory or hub id; the model in the package if left out"
    )
    parser.set_defaults(run=_imported(module))
    return parser


def _imported(module: str) -> Callable[[argparse.Namespace], int]:
    return lambda arguments: importlib.import_module(module).run(arguments)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's own)")
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--max-tokens", type=int, metavar="N", help="per answer")
    group.add_argument("--seed", type=int, metavar="N", help="the same answers every time")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="requests in a batch")
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="token budget of a step"
    )
    group.add_argument("--kv-cache-memory", metavar="SIZE", help='bytes, or text as "4GiB"')
    group.add_argument("--num-threads", type=int, metavar="N", help="CPU threads of the model")
    group.add_argument(
        "--load-format", metavar="NAME", help="auto, safetensors, or dummy for random weights"
    )
    group.add_argument("--uvloop", action="store_true", help="run on uvloop, if it is installed")


def _count(text: str) -> int:
    if text.isdecimal() and len(text) < 8 and 1 <= int(text) <= _MAX_COUNT:
        return int(text)
    raise argparse.ArgumentTypeError(f"{describe(text)} is no number from 1 to {_MAX_COUNT}")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part.strip()) for part in text.split(",")}))
