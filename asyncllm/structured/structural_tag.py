"""Structural tags as Lark: text in which a trigger begins a tag, and a tag holds JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from asyncllm.structured.grammar import MAX_WHITESPACE, WHITESPACE, GrammarError
from asyncllm.structured.json_schema import LLGUIDANCE, refuse_unenforced

MAX_TAGS = 512


def to_lark(tag: dict[str, Any]) -> str:
    """A structural tag of "structures" (``begin``, ``schema``, ``end`` each) and "triggers" as a
    grammar in llguidance's Lark. Text is free up to a trigger; there one of the structures whose
    beginning starts with it follows.

    Raises:
        GrammarError: for a tag of another form.
    """
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GrammarError('a structural tag with "format" needs the xgrammar backend')
    if not 0 < len(structures) <= MAX_TAGS or not 0 < len(triggers) <= MAX_TAGS:
        raise GrammarError(f'"structures" and "triggers": expected 1 to {MAX_TAGS} of each')
    rules = []
    for number, structure in enumerate(structures):
        begin, schema, end = (structure.get(key) for key in ("begin", "schema", "end"))
        if not (isinstance(begin, str) and isinstance(end, str) and isinstance(schema, dict)):
            raise GrammarError('a structure has "begin" and "end", strings, and a "schema"')
        trigger = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), "")
        if not trigger:
            raise GrammarError(f"no trigger begins {begin!r}")
        refuse_unenforced(schema, LLGUIDANCE)
        options = {"whitespace_pattern": f"{WHITESPACE}{{0,{MAX_WHITESPACE}}}"}
        body = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
        rest = f"{_quoted(begin[len(trigger) :])} %json {body} {_quoted(end)}"
        rules.append(
            f"head_{number}[lazy]: TEXT {_quoted(trigger)}\ntag_{number}: head_{number} {rest}"
        )
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return f"start: ({tags})* tail\ntail: TEXT\nTEXT: /(.|\\n)*/\n" + "\n".join(rules) + "\n"


def with_format(tag: dict[str, Any]) -> dict[str, Any]:
    """A structural tag of "structures" and "triggers" in the form with "format"."""
    if "format" in tag:
        return tag
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end"),
        }
        for one in tag["structures"]
    ]
    form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": form}


def schemas_in_tag(tag: Any) -> Iterator[Any]:
    """The JSON schemas of a structural tag of either form."""
    pending = [tag]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            for key, value in item.items():
                if key in ("schema", "json_schema"):
                    yield value
                else:
                    pending.append(value)
        elif isinstance(item, list):
            pending += item


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
