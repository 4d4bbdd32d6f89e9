"""ResponseStore: keeps responses that can be continued and read again."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass

from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.response_input import (
    Message,
    estimate_memory_bytes,
    num_argument_characters,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to the end of a response. Instructions are not among them, because each request
    brings its own instructions.

    Attributes:
        memory_bytes: approximate bytes of the messages in memory.
        num_argument_characters: number of characters of the arguments of tool calls, which are
            parsed anew for each response.
    """

    messages: tuple[Message, ...] = ()
    memory_bytes: int = 0
    num_argument_characters: int = 0

    def with_messages(self, messages: tuple[Message, ...]) -> Conversation:
        return Conversation(
            (*self.messages, *messages),
            self.memory_bytes + estimate_memory_bytes(messages),
            self.num_argument_characters + num_argument_characters(messages),
        )


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Stored data of a response that has ended.

    Attributes:
        body: the response object, as JSON in UTF-8.
    """

    conversation: Conversation
    body: bytes


class SharedResponseBytes:
    """Bound on the total bytes of several ResponseStores. The oldest responses are dropped.

    Args:
        max_bytes: maximum number of bytes of all responses and conversations.
    """

    def __init__(self, max_bytes: int) -> None:
        self._num_bytes_left = max_bytes
        self._stores: OrderedDict[tuple[str, str], ResponseStore] = OrderedDict()

    def add(self, store: ResponseStore, key: tuple[str, str], num_bytes: int) -> None:
        self._stores[key] = store
        self._num_bytes_left -= num_bytes
        while self._num_bytes_left < 0:
            oldest_key, oldest_store = next(iter(self._stores.items()))
            oldest_store.remove(*oldest_key)

    def remove(self, key: tuple[str, str], num_bytes: int) -> None:
        del self._stores[key]
        self._num_bytes_left += num_bytes


class ResponseStore:
    """Store of the latest responses, by owner and id. Conversations share their messages, but
    each conversation counts with its full size.

    Args:
        max_responses: maximum number of responses; 0 stores none.
        max_bytes: maximum number of bytes of all responses and conversations; the oldest are
            dropped.
        shared_bytes: bound shared with other stores. Call ``clear`` before the store is dropped.
    """

    def __init__(
        self, max_responses: int, max_bytes: int, shared_bytes: SharedResponseBytes | None = None
    ) -> None:
        self._shared_bytes = shared_bytes
        self._max_responses = max_responses
        self._num_bytes_left = max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._responses.get((owner, response_id))

    def add(self, owner: str, response_id: str, stored_response: StoredResponse) -> None:
        num_bytes = _estimate_response_bytes(stored_response)
        self._responses[owner, response_id] = stored_response
        self._num_bytes_left -= num_bytes
        if self._shared_bytes is not None:
            self._shared_bytes.add(self, (owner, response_id), num_bytes)
        while len(self._responses) > self._max_responses or self._num_bytes_left < 0:
            self.remove(*next(iter(self._responses)))

    def remove(self, owner: str, response_id: str) -> bool:
        """Remove a response; returns False if there was none."""
        removed = self._responses.pop((owner, response_id), None)
        if removed is None:
            return False
        num_bytes = _estimate_response_bytes(removed)
        self._num_bytes_left += num_bytes
        if self._shared_bytes is not None:
            self._shared_bytes.remove((owner, response_id), num_bytes)
        return True

    def clear(self) -> None:
        for key in tuple(self._responses):
            self.remove(*key)


def _estimate_response_bytes(stored_response: StoredResponse) -> int:
    return stored_response.conversation.memory_bytes + sys.getsizeof(stored_response.body)


def response_not_found_error(response_id: str, param: str | None = None) -> ProtocolError:
    """Make the error for an id that is unknown, dropped, or another owner's.

    Args:
        param: the request's field with the id; None if the id was in the URL.
    """
    message = f"there is no response {response_id[:64]!r} here, or no more"
    if param is None:
        return ProtocolError(message, code="response_not_found", status=404)
    return ProtocolError(
        f"{param}: {message}; send the whole conversation as input",
        code="previous_response_not_found",
        param=param,
    )
