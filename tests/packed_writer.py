"""Writes a file of packed weights again and again, until it is killed.

    python -m tests.packed_writer FOLDER

The content of a file is its name, so that a reader knows what it has to have.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from asyncllm.gpu.packed.packed_file import write_packed_file
from asyncllm.gpu.packed.packed_folder import SUFFIX, PackedFolder
from asyncllm.native.context import Context
from asyncllm.native.shared_library import Library

SIZE = 1 << 21


def main() -> None:
    folder = PackedFolder(Path(sys.argv[1]), 40 * SIZE)
    context = Context(Library(), 1)
    folder.make()
    print("ready", flush=True)
    for index in itertools.count():
        number = index % 8
        tensors = [("only", torch.full((SIZE,), number, dtype=torch.uint8))]
        with folder.lock():
            folder.make_room(SIZE)
            folder.write(
                f"{number}{SUFFIX}",
                lambda opened, number=number, tensors=tensors: write_packed_file(
                    opened, context, {"number": number}, {}, tensors
                ),
                SIZE,
            )


if __name__ == "__main__":
    main()
