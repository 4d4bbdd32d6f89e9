"""SCALARS: per-request sampling parameters on the device, with dtype and neutral value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from asyncllm.gpu.batch.sections import SectionTable

UNCOUNTED = 2**63 - 1
"""Value of ``counted_from`` for a request index without penalties, whose tokens need not be
counted."""


class Scalar(NamedTuple):
    """A sampling parameter that is stored as one number per request index.

    Attributes:
        neutral_value: the value that has no effect.
        parameter: the field of SamplingParams that holds the value; "" for a derived value.
    """

    dtype: torch.dtype
    neutral_value: float
    parameter: str = ""


DRAW_SCALARS: Mapping[str, Scalar] = MappingProxyType(
    {
        "states": Scalar(torch.int64, 0),
        "temperature": Scalar(torch.float32, 1.0, "temperature"),
        "top_k": Scalar(torch.int32, 0),
        "top_p": Scalar(torch.float32, 1.0, "top_p"),
        "min_p": Scalar(torch.float32, 0.0, "min_p"),
    }
)
"""Scalars of the draw, in the order of ``SampleArgs`` in ``native/src/interface.h``. ``states`` are
the bits of the seeds' 64-bit states; ``top_k`` is 0 for all tokens."""

LOGITS_STAGE_SCALARS: Mapping[str, Scalar] = MappingProxyType(
    {
        "restricted": Scalar(torch.int32, 0),
        "num_bias": Scalar(torch.int32, 0),
        "num_stop_ids": Scalar(torch.int32, 0),
        "min_end": Scalar(torch.int64, 0),
        "counted_from": Scalar(torch.int64, UNCOUNTED),
        "repetition": Scalar(torch.float32, 1.0, "repetition_penalty"),
        "frequency": Scalar(torch.float32, 0.0, "frequency_penalty"),
        "presence": Scalar(torch.float32, 0.0, "presence_penalty"),
    }
)
"""Scalars of the stages before the draw.

``restricted`` is 1 if the request index's row of ``LogitsTables.allowed`` is in force. ``num_bias``
and ``num_stop_ids`` count the entries of its rows of ``bias_ids`` and ``stop_ids``. ``min_end`` is
the position from which on stop ids may be sampled. ``counted_from`` is the position of the first
token that is not in ``LogitsTables.counts`` yet."""

SCALARS: Mapping[str, Scalar] = MappingProxyType({**DRAW_SCALARS, **LOGITS_STAGE_SCALARS})


def scalar_sections(table_rows: int) -> SectionTable:
    """Makes the section table of SCALARS, with ``table_rows`` elements per scalar."""
    return {name: (scalar.dtype, table_rows) for name, scalar in SCALARS.items()}
