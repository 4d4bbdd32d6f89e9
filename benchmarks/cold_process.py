"""A process that starts an engine, reads its first token and prints how long each part took, as
JSON: seconds, by name.

    python -m benchmarks.cold_process CHECKPOINT DTYPE BEGAN BACKED FOLDER

BEGAN is when the process was started, in seconds of ``time.time()``. BACKED bytes of memory are
touched and freed again right before the weights are read, so that a virtual machine's host has
given it by then; the time of that is left out of all parts. FOLDER has packed files, or is "off".
The process ends when its file is written.
"""

import time

ENTERED = time.time()

import asyncio  # noqa: E402 - what is imported before the time is taken counts as the interpreter's
import json  # noqa: E402
import mmap  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any  # noqa: E402

PAGE = 4096


def touch_huge_pages(num_bytes: int) -> tuple[float, float]:
    """Seconds to write a byte of each page of as much memory, and to do that once more with new
    memory, of the pages that the first gave back."""
    return _touch(num_bytes), _touch(num_bytes)


def _touch(num_bytes: int) -> float:
    began = time.perf_counter()
    # Shared memory, which Python maps unless told, has pages of 4 KiB.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, num_bytes, flags=private) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[::PAGE] = bytes(len(range(0, num_bytes, PAGE)))
        return time.perf_counter() - began


class Parts:
    """Seconds of the parts of a start, by name.

    Attributes:
        excluded: seconds that were this measurement's own.
    """

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {"interpreter": ENTERED - began}
        self.began, self.excluded = began, 0.0

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        began, excluded = time.perf_counter(), self.excluded
        yield
        own = self.excluded - excluded
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began - own

    def measure(self, owner: Any, function: str, name: str) -> None:
        """Measures all calls of a function, before other modules import it by its name."""
        called = getattr(owner, function)

        def timed(*args: Any, **named: Any) -> Any:
            with self.measured(name):
                return called(*args, **named)

        setattr(owner, function, timed)

    def end(self) -> None:
        self.seconds["total"] = time.time() - self.began - self.excluded


def measure_weights(parts: Parts, backed: int) -> None:
    """The time in which weights are read and packed, or found, verified and mapped, and the CPU
    time of it: the system's, which makes pages, and the process's own."""
    from asyncllm.gpu.models import dense
    from asyncllm.gpu.packed.packed_file import PackedFile

    build_decoder: Callable[..., Any] = dense.build_decoder
    parts.seconds["checksums of the file"] = 0.0
    parts.measure(PackedFile, "verify", "checksums of the file")

    def timed(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        if backed:
            _touch(backed)
        parts.excluded += time.perf_counter() - began
        before = resource.getrusage(resource.RUSAGE_SELF)
        with parts.measured("weights"):
            decoder = build_decoder(*args, **named)
        after = resource.getrusage(resource.RUSAGE_SELF)
        parts.seconds["weights, system CPU"] = after.ru_stime - before.ru_stime
        parts.seconds["weights, own CPU"] = after.ru_utime - before.ru_utime
        return decoder

    owner: Any = dense
    owner.build_decoder = timed


def load(parts: Parts, backed: int) -> Callable[..., Any]:
    """``load_model``, measured."""

    def measured(config: Any, progress: Any) -> Any:
        with parts.measured("loading"):
            with parts.measured("import torch"):
                import torch  # noqa: F401 - for its time
            with parts.measured("other imports"):
                from asyncllm.gpu import calibration
                from asyncllm.runtime.loading import load_model
                from asyncllm.text.tokenizer import Tokenizer

                measure_weights(parts, backed)
                for function in ("calibrate_token_budget", "find_min_async_tokens"):
                    parts.measure(calibration, function, "calibration")
                import asyncllm.gpu.build  # noqa: F401 - for its time
            parts.measure(Tokenizer, "from_directory", "tokenizer, beside the weights")
            return load_model(config, progress)

    return measured


async def written(engine: Any) -> None:
    report = await engine.execution_report()
    while report.packed_weights == "packed at this start":
        # Each report keeps the engine busy for some tenths of a second.
        await asyncio.sleep(0.5)
        report = await engine.execution_report()


async def run(parts: Parts, checkpoint: str, dtype: str, backed: int, folder: str) -> None:
    with parts.measured("import asyncllm"):
        from asyncllm import AsyncLLMEngine
    make: Any = AsyncLLMEngine._with_loader
    packed = {"packed_cache": "off"} if folder == "off" else {"packed_cache_dir": folder}
    engine = make(load(parts, backed), model=checkpoint, dtype=dtype, device="cpu", **packed)
    async with engine:
        with parts.measured("first token"):
            prompt = list(range(1, 9))
            await anext(aiter(engine.stream(prompt, max_tokens=2, ignore_eos=True)))
        parts.end()
        await written(engine)


def main() -> None:
    checkpoint, dtype, began, backed, folder = sys.argv[1:]
    parts = Parts(float(began))
    asyncio.run(run(parts, checkpoint, dtype, int(backed), folder))
    print(json.dumps(parts.seconds))


if __name__ == "__main__":
    main()
