"""OwnerLines: turns of owners."""

from __future__ import annotations

from asyncllm.owner_lines import OwnerLines


def lines_of(items: str) -> OwnerLines[str]:
    """Lines of items such as "a0 b0", whose first letter is the owner."""
    lines: OwnerLines[str] = OwnerLines()
    for item in items.split():
        lines.push(item[0], item)
    return lines


def begin_next(lines: OwnerLines[str]) -> str:
    item = lines.peek()
    assert item is not None
    lines.begin(item[0], item)
    return item


def test_the_owner_with_the_fewest_running_items_is_next() -> None:
    lines = lines_of("a0 a1 a2 a3 b0 b1 b2")
    assert [begin_next(lines) for _ in range(3)] == ["a0", "b0", "a1"]
    assert lines.peek() == "b1"  # Two items of a run, and one of b.
    lines.end("a")
    lines.end("a")
    assert [begin_next(lines) for _ in range(2)] == ["a2", "b1"]
    lines.end("b")
    assert [begin_next(lines) for _ in range(2)] == ["a3", "b2"]
    assert lines.peek() is None


def test_owners_without_running_items_take_turns() -> None:
    lines, begun = lines_of("a0 a1 b0 c0 a2 c1"), []
    while lines:
        begun.append(begin_next(lines))
        lines.end(begun[-1][0])
        if begun[-1] == "b0":
            lines.push("b", "b1")  # An owner whose line has ended comes last.
    assert begun == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]
    assert not lines._num_running  # Owners without items are forgotten.


def test_the_fewest_running_items_come_before_the_longest_wait() -> None:
    lines = lines_of("b0 b1 b2 a0 a1")
    for item in ("b0", "b1", "a0"):
        lines.begin(item[0], item)
    assert lines.peek() == "a1"


def test_a_line_is_ordered_by_rank_and_then_by_arrival() -> None:
    lines: OwnerLines[str] = OwnerLines()
    for item, rank in (("a0", 2.0), ("a1", 1.0), ("b0", 9.0), ("a2", 2.0), ("a3", 1.5)):
        lines.push(item[0], item, rank)
    lines.discard("a", "a3")
    order = []
    while lines:
        order.append(begin_next(lines))
        lines.end(order[-1][0])
    assert order == ["a1", "b0", "a0", "a2"]


def test_a_discarded_item_takes_no_turn() -> None:
    lines = lines_of("a0 a1 b0")
    lines.discard("a", "a0")
    lines.discard("a", "a0")
    lines.discard("c", "c0")
    assert (len(lines), list(lines), lines.peek()) == (2, ["a1", "b0"], "a1")
    lines.discard("b", "b0")
    lines.discard("a", "a1")
    assert (len(lines), bool(lines), lines.peek()) == (0, False, None)
