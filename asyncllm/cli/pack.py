"""``asyncllm pack``: writes packed weights beside a model, for containers and read-only disks."""

from __future__ import annotations

import argparse

from asyncllm.cli.arguments import engine_options
from asyncllm.config import EngineConfig


def run(arguments: argparse.Namespace) -> int:
    """Write a model's file of packed weights, and print the path."""
    config = EngineConfig(model=arguments.model, device="cpu", **engine_options(arguments))
    from asyncllm.checkpoint.model_files import resolve_model
    from asyncllm.gpu.build import pack_model
    from asyncllm.gpu.transformers_model.config import read_config

    path = resolve_model(config.model)
    model = read_config(path, config.model_impl, overrides=config.hf_overrides)
    file = pack_model(config, model)
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    return 0
