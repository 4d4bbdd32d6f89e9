"""Requests as the KV cache sees them."""

from __future__ import annotations

from asyncllm.core.request import Request, RequestGroup
from asyncllm.sampling_params import SamplingParams


def request(token_ids):
    return Request(
        RequestGroup("r"), SamplingParams(), token_ids=list(token_ids), max_model_len=1000
    )


def ids(request):
    return [[block.block_id for block in blocks] for blocks in request.blocks]
