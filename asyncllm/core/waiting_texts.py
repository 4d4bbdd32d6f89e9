"""WaitingTexts: the memory of the long texts of queued requests."""

from __future__ import annotations

from asyncllm.core.request import RequestGroup

MAX_WAITING_TEXT_BYTES = 2**26
"""Maximum memory in bytes of the long texts of queued requests: prompts until they are tokenised,
grammars, and lists and dicts of parameters. Requests without long texts are not refused for it."""

MIN_LONG_TEXT_BYTES = 2**14
"""Minimum size of a group's texts. Groups with fewer bytes are not counted."""

MAX_COUNTED_PROMPT_BYTES = MAX_WAITING_TEXT_BYTES // 4
"""Maximum number of bytes counted for one prompt, so that one cannot fill the queue."""


class WaitingTexts:
    """Total memory of the long texts of queued groups. An object that groups share counts once.

    Attributes:
        num_bytes: bytes of all groups together.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._prompt_bytes: dict[RequestGroup, int] = {}
        self._num_groups_by_param_id: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._prompt_bytes)

    def has_room(self, group: RequestGroup) -> bool:
        """Whether a group's texts can be added; true for a group without long texts."""
        return not has_long_texts(group) or (
            self.num_bytes + _num_prompt_bytes(group) + self._num_own_param_bytes(group)
            <= MAX_WAITING_TEXT_BYTES
        )

    def add(self, group: RequestGroup) -> None:
        """Add a group's texts to the total, if they are long. Its ``param_bytes`` must not change
        afterwards."""
        if not has_long_texts(group):
            return
        self._prompt_bytes[group] = num_bytes = _num_prompt_bytes(group)
        self.num_bytes += num_bytes + self._num_own_param_bytes(group)
        for param_id in group.param_bytes:
            num_groups = self._num_groups_by_param_id.get(param_id, 0)
            self._num_groups_by_param_id[param_id] = num_groups + 1

    def remove_prompt(self, group: RequestGroup) -> None:
        """Subtract the text of a group's prompt. Call this once the prompt is tokenised."""
        if group in self._prompt_bytes:
            self.num_bytes -= self._prompt_bytes[group]
            self._prompt_bytes[group] = 0

    def remove(self, group: RequestGroup) -> None:
        """Subtract a group's texts from the total; does nothing for a group that is not in it."""
        num_prompt_bytes = self._prompt_bytes.pop(group, None)
        if num_prompt_bytes is None:
            return
        self.num_bytes -= num_prompt_bytes
        for param_id, num_bytes in group.param_bytes.items():
            self._num_groups_by_param_id[param_id] -= 1
            if not self._num_groups_by_param_id[param_id]:
                del self._num_groups_by_param_id[param_id]
                self.num_bytes -= num_bytes

    def _num_own_param_bytes(self, group: RequestGroup) -> int:
        """Bytes of the group's parameters that it shares with no counted group."""
        counted = self._num_groups_by_param_id
        return sum(size for param_id, size in group.param_bytes.items() if param_id not in counted)


def has_long_texts(group: RequestGroup) -> bool:
    """Whether a group's texts have at least MIN_LONG_TEXT_BYTES."""
    num_bytes = group.num_text_bytes
    if group.param_bytes:
        num_bytes += sum(group.param_bytes.values())
    return num_bytes >= MIN_LONG_TEXT_BYTES


def _num_prompt_bytes(group: RequestGroup) -> int:
    return min(group.num_text_bytes, MAX_COUNTED_PROMPT_BYTES)
