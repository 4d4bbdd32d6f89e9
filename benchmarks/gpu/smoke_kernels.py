"""A case or two of every kernel and of each of its paths, for the smoke stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asyncllm.gpu.ops.triton import decode_attention, prefill_attention
from benchmarks.gpu.kernels import (
    check_decoder,
    experts_family,
    recurrent_family,
    sampling_family,
    small_families,
)
from tests.triton import checks
from tests.triton.cases import DECODE, PREFILL

Check = Callable[[], object]

ATTENTION = {
    "attention": ("group4-splits", "prefix"),
    "windows": ("window", "window"),
    "sinks": ("sinks-splits", "sinks-window"),
    "soft caps": ("softcap-splits", "softcap"),
    "float32": ("float32", "float32"),
    "heads of 512": ("head512-splits", "head512"),
}
"""A case of decode and one of prefill attention each."""


def checks_of(device: str, capability: int) -> dict[str, list[Check]]:
    """What is checked, by name; nothing runs before it is called."""
    found: dict[str, list[Check]] = {}
    decode, prefill = ({case.name: case for case in cases} for cases in (DECODE, PREFILL))
    for name, (first, second) in ATTENTION.items():
        found[name] = [
            partial(checks.check_decode, decode_attention, decode[first], device, capability),
            partial(checks.check_prefill, prefill_attention, prefill[second], device, capability),
        ]
    for family in (*small_families(device), sampling_family(device)):
        found[family.name] = [next(iter(family.cases.values()))]
    # Small tiles and large ones, of either activation; every op and dtype.
    for family in (experts_family(device), recurrent_family(device)):
        found[family.name] = list(family.cases.values())
    # Its layers differ in their windows, and so do their KV groups.
    found["a decoder of two KV groups"] = [partial(check_decoder, device)]
    return found
