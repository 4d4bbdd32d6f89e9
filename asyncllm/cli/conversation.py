"""Conversation: the messages of a chat in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

Message = dict[str, str]


class Conversation:
    """Messages of a chat, with a system prompt.

    Attributes:
        system: the system prompt, or None; it is always sent.
        messages: messages of user and assistant in turn, oldest first.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []

    def messages_to_send(self, start: int = 0) -> list[Message]:
        """Messages to send: the system prompt, and the messages from ``start`` on."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages[start:]]

    def add_message(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def turn_starts(self) -> list[int]:
        """Indices at which turns start: those of the user's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def save(self, file: Path) -> None:
        """Write the messages to a file, as JSON that ``chat()`` accepts."""
        text = json.dumps(self.messages_to_send(), ensure_ascii=False, indent=2)
        file.write_text(text + "\n", encoding="utf-8")
