"""Structural tags: converts them to llguidance's Lark grammars."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from asyncllm.structured.grammar import WHITESPACE_PATTERN, GrammarError
from asyncllm.structured.merged_schemas import refuse_many_alternatives
from asyncllm.structured.parser_limits import refuse_unsupported_by_llguidance

MAX_RULES = 4096
_SCHEMA_FIELDS = ("schema", "json_schema")
_EMPTY_LITERAL = '""'
_XGRAMMAR_HINT = "takes the xgrammar backend: `pip install asyncllm[xgrammar]`"


def to_lark(tag: dict[str, Any], special_tokens: Mapping[int, str] = MappingProxyType({})) -> str:
    """Convert a structural tag to a grammar in llguidance's Lark.

    Supported formats are const_string, json_schema, sequence, or, tag and tags_with_separator. The
    root may also be triggered_tags: free text up to a trigger, then a tag that begins with the
    trigger.

    Args:
        special_tokens: names of special tokens by id. A name in a delimiter stands for the token.

    Raises:
        GrammarError: for an unsupported format.
    """
    refuse_unsupported_by_llguidance(*schemas_in_tag(tag))
    lark = _LarkBuilder(special_tokens)
    tag_format = convert_to_format(tag)["format"]
    for schemas in _schemas_by_begin(tag_format).values():
        refuse_many_alternatives(schemas)
    if _require_field(tag_format, "type", str) == "triggered_tags":
        start = lark.triggered_tags(tag_format)
    else:
        start = lark.add_format_rule(tag_format)
    return "\n".join([f"start: {start}", "TEXT: /(.|\\n)*/", *lark.rules, ""])


class _LarkBuilder:
    """Builder of a Lark grammar's rules."""

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        self.rules: list[str] = []
        self._special_token_ids = {name: token_id for token_id, name in special_tokens.items()}
        names = sorted(map(re.escape, filter(None, self._special_token_ids)), key=len, reverse=True)
        self._name_pattern = re.compile(f"({'|'.join(names)})" if names else "(?!)()")

    def add_rule(self, body: str, attributes: str = "") -> str:
        if len(self.rules) >= MAX_RULES:
            raise GrammarError(f"a structural tag has at most {MAX_RULES} parts")
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def add_format_rule(self, tag_format: Any) -> str:
        """Add a rule for a format; returns the rule's name."""
        kind = _require_field(tag_format, "type", str)
        if kind == "const_string":
            text = _require_field(tag_format, "value", str)
            return self.add_rule(self._text_terminals(text) or _EMPTY_LITERAL)
        if kind == "json_schema" and tag_format.get("style", "json") == "json":
            return self.add_rule(_json_rule(tag_format.get("json_schema")))
        if kind in ("sequence", "or"):
            parts = map(self.add_format_rule, _require_field(tag_format, "elements", list))
            return self.add_rule((" | " if kind == "or" else " ").join(parts) or _EMPTY_LITERAL)
        if kind == "tag":
            begin = _require_field(tag_format, "begin", str)
            return self.add_rule(self._tag_body(tag_format, begin))
        if kind == "tags_with_separator":
            return self.add_rule(self._separated_tags(tag_format))
        style = f" in the style {tag_format['style']!r}" if "style" in tag_format else ""
        raise GrammarError(f"the format {kind!r}{style} {_XGRAMMAR_HINT}")

    def _tag_body(self, tag: Any, begin: str) -> str:
        content, end = self.add_format_rule(tag.get("content")), _require_field(tag, "end", str)
        return f"{self._text_terminals(begin)} {content} {self._text_terminals(end)}"

    def _separated_tags(self, tag_format: Any) -> str:
        tags = map(self.add_format_rule, _require_field(tag_format, "tags", list))
        body = self.add_rule(" | ".join(tags) or _EMPTY_LITERAL)
        if not tag_format.get("stop_after_first", False):
            separator = self._text_terminals(_require_field(tag_format, "separator", str))
            body += f" ({separator} {body})*"
        return body if tag_format.get("at_least_one", False) else f"({body})?"

    def _text_terminals(self, text: str) -> str:
        parts = []
        for part in self._name_pattern.split(text):
            if part in self._special_token_ids:
                parts.append(f"<[{self._special_token_ids[part]}]>")
            elif part:
                parts.append(json.dumps(part))
        return " ".join(parts)

    def triggered_tags(self, tag_format: Any) -> str:
        triggers = _require_field(tag_format, "triggers", list)
        if tag_format.get("at_least_one", False) or tag_format.get("excludes"):
            raise GrammarError(f"triggered_tags with conditions {_XGRAMMAR_HINT}")
        places = {t: -i for i, t in enumerate(reversed(triggers)) if isinstance(t, str)}
        lengths = sorted(set(map(len, places)))  # 131,072 characters have at most 512 of them.
        tags = []
        for tag in _require_field(tag_format, "tags", list):
            begin = _require_field(tag, "begin", str)
            heads = (begin[:length] for length in lengths if length <= len(begin))
            trigger = min(filter(places.__contains__, heads), key=places.__getitem__, default="")
            if not trigger:
                raise GrammarError(f"no trigger begins {begin!r}")
            # Free text cannot contain a special token. So only a text trigger needs a lazy match,
            # which ends the free text at the first trigger.
            opens = self._text_terminals(trigger)
            head = self.add_rule(f"TEXT {opens}", "" if opens.startswith("<[") else "[lazy]")
            tags.append(self.add_rule(f"{head} {self._tag_body(tag, begin[len(trigger) :])}"))
        if not tags:
            raise GrammarError("a structural tag without tags")
        if tag_format.get("stop_after_first", False):
            return f"{' | '.join(tags)} | {self.add_rule('TEXT')}"
        return f"({' | '.join(tags)})* {self.add_rule('TEXT')}"


def _require_field(value: Any, name: str, expected_type: type) -> Any:
    field = value.get(name) if isinstance(value, dict) else None
    if not isinstance(field, expected_type):
        raise GrammarError(f"{name!r} of a format: expected a {expected_type.__name__}")
    return field


def _json_rule(schema: Any) -> str:
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    options = {"whitespace_pattern": WHITESPACE_PATTERN}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def convert_to_format(tag: dict[str, Any]) -> dict[str, Any]:
    """Convert a structural tag with "structures" and "triggers" to one with "format"."""
    if "format" in tag:
        return tag
    tags = []
    for structure in _require_field(tag, "structures", list):
        content = {"type": "json_schema", "json_schema": _require_field(structure, "schema", dict)}
        tags.append({"type": "tag", **structure, "content": content})
    tag_format = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": tag_format}


def _schemas_by_begin(tag_format: Any) -> dict[str, list[Any]]:
    """Group the schemas whose values may begin at the same place of an output.

    Where there is one list of tags, those are the schemas of its tags with equal ``begin``. Else
    two tags with different ``begin`` may follow texts that make up for the difference.
    """
    by_begin = defaultdict[str, list[Any]](list)
    tag_lists: list[list[Any]] = []
    pending = [tag_format]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            tag_lists += [item["tags"]] if isinstance(item.get("tags"), list) else []
            pending += [item[key] for key in item if key not in _SCHEMA_FIELDS]
        elif isinstance(item, list):
            pending += item
    for tag in tag_lists[0] if len(tag_lists) == 1 else ():
        begin, content = (tag.get("begin"), tag.get("content")) if isinstance(tag, dict) else (0, 0)
        if isinstance(begin, str) and isinstance(content, dict) and "json_schema" in content:
            by_begin[begin].append(content["json_schema"])
    seen_ids = {id(schema) for schemas in by_begin.values() for schema in schemas}
    others = [schema for schema in schemas_in_tag(tag_format) if id(schema) not in seen_ids]
    return by_begin | {"": by_begin[""] + others}


def schemas_in_tag(tag: Any) -> Iterator[Any]:
    """Iterate over the JSON schemas of a structural tag with "format" or "structures"."""
    pending = [tag]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            for key, value in item.items():
                if key in _SCHEMA_FIELDS:
                    yield value
                else:
                    pending.append(value)
        elif isinstance(item, list):
            pending += item
