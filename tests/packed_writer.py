"""Kills writers of packed files at random moments, and looks at what they have left.

python -m tests.packed_writer FOLDER ROUNDS
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from asyncllm.gpu.packed.packed_file import PackedFile, write_packed_file
from asyncllm.gpu.packed.packed_folder import PACKED_FILE_SUFFIX, PackedFolder
from asyncllm.native.context import NativeContext
from asyncllm.native.shared_library import Library

SIZE = 1 << 21
LONGEST = 0.1
"""Seconds that a writer lives at most: some ten files."""


def write(folder: PackedFolder) -> None:
    """Writes files without end. The content of each is its name, so that a reader knows it."""
    context = NativeContext(Library(), 1)
    for index in itertools.count(os.getpid()):
        number = index % 8
        tensors = [("only", torch.full((SIZE,), number, dtype=torch.uint8))]
        with folder.lock(None):
            folder.make_room(SIZE)
            folder.write(
                f"{number}{PACKED_FILE_SUFFIX}",
                lambda opened, number=number, tensors=tensors: write_packed_file(
                    opened, context, {"number": number}, {}, tensors
                ),
                SIZE,
            )


def check(path: Path, context: NativeContext) -> tuple[int, int]:
    """Every packed file has to be whole. Returns the numbers of files and of dead writers' ones."""
    files = sorted(path.glob(f"*{PACKED_FILE_SUFFIX}"))
    for each in files:
        file = PackedFile(each, {os.geteuid()})
        file.verify(context)
        (entry,) = file.weights()
        tensor: Any = entry[1]
        assert (entry[0], file.key) == ("only", {"number": int(each.stem)})
        assert tensor.min() == tensor.max() == int(each.stem)
    left = {each.name for each in path.iterdir()} - {each.name for each in files}
    assert all(name.endswith(f"{PACKED_FILE_SUFFIX}-tmp") for name in left), left
    return len(files), len(left)


def main() -> None:
    path, rounds = Path(sys.argv[1]), int(sys.argv[2])
    # 5 of the 8 files fit, so that writers evict as well.
    folder, chance, context = PackedFolder(path, 5 * SIZE + 2**14), random.Random(0), None
    folder.make()
    torch.set_num_threads(
        1
    )  # OpenMP's threads would not exist in a child, which would wait for them.
    held = interrupted = 0
    for _ in range(rounds):
        child = os.fork()
        if not child:
            write(folder)
        time.sleep(chance.uniform(0.0, LONGEST))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        context = context or NativeContext(Library(), 1)
        held, left = check(path, context)
        interrupted += left > 0
    assert held > 1, held
    with folder.lock(None):
        assert check(path, NativeContext(Library(), 1)) == (held, 0)
    print(interrupted)


if __name__ == "__main__":
    main()
