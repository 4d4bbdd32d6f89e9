"""Command line: commands and their options."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

from asyncllm import __version__
from asyncllm.validation import describe

_Option = tuple[str, Callable[[str], Any], str, str | None]
"""Command-line option: name of the argument's attribute, type, metavar and help text."""


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"{describe(text)} is no JSON") from None


_SAMPLING_OPTIONS: tuple[_Option, ...] = (
    ("temperature", float, "X", "0 is greedy"),
    ("top_p", float, "X", None),
    ("top_k", int, "N", None),
    ("min_p", float, "X", None),
    ("repetition_penalty", float, "X", None),
    ("max_tokens", int, "N", "per answer"),
)
_ENGINE_OPTIONS: tuple[_Option, ...] = (
    ("device", str, "NAME", "auto, cpu, cuda or cuda:N"),
    ("dtype", str, "NAME", "auto, float32, bfloat16 or float16"),
    ("max_model_len", int, "N", "longest sequence"),
    ("max_num_seqs", int, "N", "requests in a batch"),
    ("max_num_batched_tokens", int, "N", "token budget of a step"),
    ("kv_cache_memory", str, "SIZE", 'bytes, or text as "4GiB"'),
    ("num_threads", int, "N", "CPU threads of the model"),
    ("quantization", str, "NAME", "int8 or int4, with native ops on a CPU"),
    ("load_format", str, "NAME", "auto, safetensors, or dummy for random weights"),
    ("packed_cache", str, "NAME", "auto, shared or off: files of packed weights"),
    ("packed_cache_dir", str, "DIR", "folder of these files"),
    ("hf_overrides", _parse_json, "JSON", "fields in place of config.json's"),
    ("chat_template", str, "FILE", "a Jinja template in place of the model's"),
    ("generation_config", str, "NAME", "auto, or none: the model's sampling defaults are ignored"),
)
_SERVER_OPTIONS: tuple[_Option, ...] = (
    ("host", str, "NAME", "address to listen on (127.0.0.1)"),
    ("port", int, "N", "0 takes a free one (8000)"),
    ("token_file", str, "FILE", "tokens, one a line; no other user sees them"),
    (
        "scheduling_policy",
        str,
        "NAME",
        "fcfs; priority or deadline also obey the clients' priority (fcfs)",
    ),
    ("timeout", float, "S", "seconds an answer may take"),
    ("drain", float, "S", "seconds to end in (30)"),
    ("max_body_size", int, "N", "bytes of a request, and of a WebSocket message (4194304)"),
)
_PACK_OPTIONS = tuple(
    option
    for option in _ENGINE_OPTIONS
    if option[0] in ("dtype", "num_threads", "quantization", "hf_overrides")
)
"""Options that packed weights depend on, and the number of threads that pack them."""
_MAX_OPTION_VALUE = 1_000_000
"""Maximum value of an option that counts something, such as streams or tokens."""

_MODEL_HELP = "directory, GGUF file, or hub id with a GGUF quantisation or without: org/repo:Q4_K_M"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; ``command`` of the result names a module of ``asyncllm.cli``. Exits with
    code 2 for an invalid command line, and 0 after ``--help`` and ``--version``."""
    parser = argparse.ArgumentParser(
        prog="asyncllm",
        description="A streaming LLM engine that runs inside your application. Without a model "
        "named, every command runs the small one that ships in the package.",
    )
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    _add_demo(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_bench(commands)
    _add_pack(commands)
    _add_pull(commands)
    return parser.parse_args(argv)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that the command line sets."""
    return _explicit_options(arguments, _ENGINE_OPTIONS)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of SamplingParams that the command line sets, except the seed."""
    return _explicit_options(arguments, _SAMPLING_OPTIONS)


def _explicit_options(arguments: argparse.Namespace, options: Sequence[_Option]) -> dict[str, Any]:
    values = {name: getattr(arguments, name, None) for name, *_ in options}
    return {name: value for name, value in values.items() if value is not None}


def _add_demo(commands: Any) -> None:
    parser = _add_command(
        commands,
        "demo",
        "several streams at once, side by side",
        "Runs stories, questions, sums, JSON, a chat and a tool call at once and shows them "
        "as they stream.",
    )
    _add_integer_option(parser, "--streams", 8, "streams at once")


def _add_chat(commands: Any) -> None:
    parser = _add_command(
        commands,
        "chat",
        "talk to a model in the terminal",
        "Ctrl-C stops an answer; twice at the prompt, or Ctrl-D, leaves. /help lists commands. "
        "From a pipe, every line is a turn or a command; standard output has the answers alone.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")


def _add_serve(commands: Any) -> None:
    parser = _add_command(
        commands,
        "serve",
        "OpenAI's protocol over HTTP and WebSockets",
        "Serves chat completions, completions and responses at http://HOST:PORT/v1. SIGTERM and "
        "Ctrl-C let the answers in flight end; a second one does not wait for them.",
        has_sampling=False,
        uses_uvloop=importlib.util.find_spec("uvloop") is not None,
    )
    group = _add_group(parser, "server", _SERVER_OPTIONS)
    parser.set_defaults(
        host="127.0.0.1", port=8000, scheduling_policy="fcfs", drain=30.0, max_body_size=4 << 20
    )
    add = group.add_argument
    add("--token", action="append", metavar="TEXT", help="clients have to send it; repeatable")
    add("--origin", action="append", metavar="URL", help="pages that may ask; repeatable")
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="the model's name to clients and in metrics; repeatable",
    )
    _add_integer_option(group, "--max-connections", 1024, "connections at once")
    add(
        "--ignore-unsupported",
        action="store_true",
        help="ignore OpenAI's fields that ask for what is not done here, and log each once",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def _add_bench(commands: Any) -> None:
    parser = _add_command(
        commands,
        "bench",
        "measure throughput and latency",
        "Runs random prompts at several concurrencies and prints a table. Every stream "
        "generates exactly --output-len tokens.",
        has_sampling=False,
    )
    parser.add_argument(
        "--concurrency",
        type=_parse_concurrency_levels,
        default=(1, 4, 16, 64),
        metavar="N,N,…",
        help="streams at once, one row each (1,4,16,64)",
    )
    _add_integer_option(parser, "--prompt-len", 64, "tokens per prompt")
    _add_integer_option(parser, "--output-len", 64, "tokens per answer")
    _add_integer_option(parser, "--rounds", 2, "requests per stream and row")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    parser.add_argument(
        "--env", action="store_true", help="say which path the model takes here and why, no more"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")


def _add_pack(commands: Any) -> None:
    parser = commands.add_parser(
        "pack",
        help="write a model's packed weights beside it",
        description="Packs the weights as an engine with these settings does on this machine's "
        "processor, and writes them into the model's folder. Engines map that file, also in a "
        "container image or on a read-only disk.",
    )
    parser.add_argument("model", help=_MODEL_HELP)
    _add_group(parser, "engine", _PACK_OPTIONS)


def _add_pull(commands: Any) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model before it is needed",
        description="Downloads the files that an engine reads into huggingface_hub's cache and "
        "prints their path. Files that are complete are not downloaded again; Ctrl-C leaves "
        "nothing half-written.",
    )
    parser.add_argument("model", help=_MODEL_HELP)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (main)")


def _add_command(
    commands: Any,
    name: str,
    summary: str,
    description: str,
    *,
    has_sampling: bool = True,
    uses_uvloop: bool = False,
) -> argparse.ArgumentParser:
    """Add a command with the options that commands share.

    Args:
        has_sampling: add the options of sampling.
        uses_uvloop: default of ``--uvloop``.
    """
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument(
        "model", nargs="?", help=f"{_MODEL_HELP}; the model in the package if left out"
    )
    if has_sampling:
        group = _add_group(parser, "sampling (default: the model's own)", _SAMPLING_OPTIONS)
        group.add_argument("--seed", type=int, metavar="N", help="the same answers every time")
    group = _add_group(parser, "engine", _ENGINE_OPTIONS)
    group.add_argument(
        "--uvloop",
        action=argparse.BooleanOptionalAction,
        default=uses_uvloop,
        help="run on uvloop, if it is installed",
    )
    return parser


def _add_group(parser: argparse.ArgumentParser, title: str, options: Sequence[_Option]) -> Any:
    group = parser.add_argument_group(title)
    for name, kind, metavar, text in options:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    return group


def _add_integer_option(parser: Any, flag: str, default: int, help_text: str) -> None:
    parser.add_argument(
        flag,
        type=_parse_positive_int,
        default=default,
        metavar="N",
        help=f"{help_text} ({default})",
    )


def _parse_positive_int(text: str) -> int:
    if text.isdecimal() and len(text) < 8 and 1 <= int(text) <= _MAX_OPTION_VALUE:
        return int(text)
    raise argparse.ArgumentTypeError(f"{describe(text)} is no number from 1 to {_MAX_OPTION_VALUE}")


def _parse_concurrency_levels(text: str) -> tuple[int, ...]:
    return tuple(sorted({_parse_positive_int(part.strip()) for part in text.split(",")}))
