"""SCALAR_PARAMS: sampling parameters of one number per request, with dtype and neutral value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from asyncllm.gpu.batch.sections import SectionTable

NO_POSITION_COUNTED = 2**63 - 1
"""Value of ``counted_from`` for a request index without penalties: its tokens are not counted."""


class ScalarParam(NamedTuple):
    """A sampling parameter that is stored as one number per request index.

    Attributes:
        neutral_value: the value that has no effect.
        field_name: the field of SamplingParams that holds the value; "" for a derived value.
    """

    dtype: torch.dtype
    neutral_value: float
    field_name: str = ""


SAMPLE_OP_PARAMS: Mapping[str, ScalarParam] = MappingProxyType(
    {
        "states": ScalarParam(torch.int64, 0),
        "temperature": ScalarParam(torch.float32, 1.0, "temperature"),
        "top_k": ScalarParam(torch.int32, 0),
        "top_p": ScalarParam(torch.float32, 1.0, "top_p"),
        "min_p": ScalarParam(torch.float32, 0.0, "min_p"),
    }
)
"""Parameters of the op ``sample``, in the order of ``SampleArgs`` in ``native/src/interface.h``.

``states`` are 64-bit RNG states made from the seeds, as int64. If ``top_k`` is 0, all tokens are
kept."""

LOGITS_PROCESSING_PARAMS: Mapping[str, ScalarParam] = MappingProxyType(
    {
        "restricted": ScalarParam(torch.int32, 0),
        "num_bias": ScalarParam(torch.int32, 0),
        "num_stop_ids": ScalarParam(torch.int32, 0),
        "min_end": ScalarParam(torch.int64, 0),
        "counted_from": ScalarParam(torch.int64, NO_POSITION_COUNTED),
        "repetition": ScalarParam(torch.float32, 1.0, "repetition_penalty"),
        "frequency": ScalarParam(torch.float32, 0.0, "frequency_penalty"),
        "presence": ScalarParam(torch.float32, 0.0, "presence_penalty"),
    }
)
"""Parameters of the stages that process logits before tokens are sampled.

``restricted`` is 1 if the request index's row of ``LogitsTables.allowed`` is in force. ``num_bias``
and ``num_stop_ids`` count the entries of its rows of ``bias_ids`` and ``stop_ids``. ``min_end`` is
the position from which on stop ids may be sampled. ``counted_from`` is the position of the first
token that is not in ``LogitsTables.counts`` yet."""

SCALAR_PARAMS: Mapping[str, ScalarParam] = MappingProxyType(
    {**SAMPLE_OP_PARAMS, **LOGITS_PROCESSING_PARAMS}
)


def scalar_param_sections(num_rows: int) -> SectionTable:
    """Sections of a buffer that has ``num_rows`` elements for each of SCALAR_PARAMS."""
    return {name: (param.dtype, num_rows) for name, param in SCALAR_PARAMS.items()}
