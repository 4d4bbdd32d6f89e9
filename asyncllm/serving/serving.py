"""Serving: an engine, and how it is served; shared by the endpoints of one application."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncllm.engine import AsyncLLMEngine
from asyncllm.metrics import EngineMetrics
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.response_store import ResponseStore
from asyncllm.validation import describe


@dataclass(eq=False, repr=False)
class Serving:
    """State that the endpoints share.

    Attributes:
        model_names: of the one model; the first is told to clients that name none.
        timeout: seconds an answer may take, or None.
        ping_interval: seconds of silence, at most, before a stream of events has a comment.
        pacer: shared by all answers that are streamed.
        store: responses that can be continued.
        needs_token: clients have to send one.
        description: OpenAPI's, once it was asked for.
        draining: the server is about to close and takes no more.
    """

    engine: AsyncLLMEngine
    model_names: tuple[str, ...]
    timeout: float | None
    ping_interval: float
    pacer: FramePacer
    store: ResponseStore
    metrics: EngineMetrics | None = None
    needs_token: bool = False
    draining: bool = False
    description: bytes | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """The name under which an answer is given.

        Raises:
            ProtocolError: for a model that is not served.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            served = " or ".join(map(describe, self.model_names))
            raise ProtocolError(
                f"model: {describe(asked)} is not served here, expected {served}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return asked

    def check_open(self) -> None:
        """Raises ProtocolError while the server drains."""
        if self.draining:
            raise ProtocolError(
                "the server is about to close; ask another",
                code="server_shutting_down",
                status=503,
                headers={"Retry-After": "1"},
            )


def default_model_names(engine: AsyncLLMEngine) -> Sequence[str]:
    """``EngineConfig.served_model_name``, else the model as it was asked for; of a directory its
    last part."""
    config = engine.config
    if config.served_model_name is not None:
        return config.served_model_name
    name = config.model_name
    is_path = config.model is not None and os.path.exists(name)
    return (os.path.basename(name.rstrip("/")) or name,) if is_path else (name,)
