"""ResponseHistory: the conversations that a connection can continue."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from asyncllm.serving.protocol_error import ProtocolError

Messages = tuple[dict[str, Any], ...]


class ResponseHistory:
    """The last ``limit`` responses of one connection, each with the whole conversation up to
    its end. Instructions are not part of it: each response has its own.

    Shared messages are stored once; each conversation is bounded by the context.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._conversations: OrderedDict[str, Messages] = OrderedDict()

    def up_to(self, response_id: str | None) -> Messages:
        """The conversation that ends with a response; empty for None.

        Raises:
            ProtocolError: ``previous_response_not_found``.
        """
        if response_id is None:
            return ()
        conversation = self._conversations.get(response_id)
        if conversation is None:
            raise ProtocolError(
                f"previous_response_id: this connection has no response {response_id[:64]!r} "
                f"among its last {self._limit}; send the whole conversation as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return conversation

    def add(self, response_id: str, conversation: Messages) -> None:
        self._conversations[response_id] = conversation
        if len(self._conversations) > self._limit:
            self._conversations.popitem(last=False)
