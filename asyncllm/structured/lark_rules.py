"""LarkRules: a Lark grammar's rules as llguidance reads them, for checks before it compiles."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from asyncllm.structured.grammar import GrammarError

MAX_ALTERNATIVES = 2048
"""Maximum number of alternatives and nullable symbols in a grammar's rules. After one
token the parser may hold all of them at once, and llguidance checks its limit of items only then.
This many take up to 20 ms."""

MAX_COMPLETIONS = 16_384
"""Maximum sum, over the rules of a grammar, of the alternatives that may end at the same place
times the parts that may wait for the rule there. llguidance looks up an item for each of them after
one token. This many take up to 40 ms."""

_WRITTEN_REPETITIONS = 11
"""Maximum number of repetitions that llguidance writes as one alternative each; it factors more."""

_MAX_DEPTH = 32
"""Maximum nesting depth of groups, which are read recursively; llguidance takes 30."""

_TOKEN_PATTERN = re.compile(
    r"""
    (?P<skip>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<newline>(?:\r?\n)+)
    |(?P<string>"(?:\\["\\/bfnrt]|\\u[a-fA-F0-9]{4}|\\x[a-fA-F0-9]{2}|[^"\\\x00-\x1f\x7f])*+"i?)
    |(?P<regex>/(?:\\.|[^/\\])++/[imslux]*+)
    |(?P<json>%(?:json|regex|llguidance))
    |(?P<keyword>%(?:ignore|import|override|declare|lark|if))
    |(?P<special><[^<>\s]++>|@[a-zA-Z0-9_-]++)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9-]*+)
    |(?P<terminal>_?[A-Z][_A-Z0-9-]*+)
    |(?P<number>0[xX][0-9a-fA-F]++|[+-]?[0-9]++(?:\.[0-9]*+)?(?:[eE][+-]?[0-9]++)?)
    |(?P<sign>->|\.\.|::|[+*?:,.(){}\[\]~|&=_])
    """,
    re.VERBOSE,
)
_NOT_EMPTY_PATTERN = re.compile(
    r"/(?:\\[^a-zA-Z]|\\[dDwWsSnrtf]|\[\^?(?:\\.|[^\[\]\\^])(?:\\.|[^\[\]\\])*+\]"
    r"|[^\\\[(){}*?+|^$])(?![*?{])[^|]*/[imslu]*"
)
"""Regular expression that matches no empty text. Others may match one."""

_BLANKS_PATTERN = re.compile(r"[ \t\r\n]*+")
_END = ("end", "")
_Token = tuple[str, str]

MAYBE_EMPTY = "/"
"""Symbol of a terminal that may match an empty text."""

NOT_EMPTY = "."
"""Symbol of a terminal that matches no empty text."""


class UnreadableGrammarError(GrammarError):
    """Error for a grammar that is not in llguidance's variant of Lark."""


class LarkRules:
    """Rules of a Lark grammar, with groups and repetitions written as rules.

    A symbol is the name of a rule or terminal, the number of a group or repetition, MAYBE_EMPTY,
    NOT_EMPTY, or a quote and a text without its case.

    Attributes:
        bodies: lists of symbols, by the symbol that each list may stand for.
        maybe_empty: symbols that may stand for an empty text.

    Raises:
        UnreadableGrammarError: if the syntax is unknown.
        GrammarError: if rules have parameters, which may make any number of items, or if there are
            more than MAX_ALTERNATIVES alternatives.
    """

    def __init__(self, text: str) -> None:
        self.bodies: dict[str, list[list[str]]] = {}
        self._terminals: set[str] = set()
        self._in_terminal = False
        self._num_alternatives = self._depth = self._position = 0
        self._tokens: list[_Token] = []  # Those read so far: a long grammar is refused early.
        self._unread_tokens = _tokens_of(text)
        self._read_items("")
        if self._next() != _END:
            raise self._unreadable()
        self.maybe_empty = self._find_maybe_empty()
        self._texts = {
            name: bodies[0][0]
            for name, bodies in self.bodies.items()
            if name in self._terminals and len(bodies) == len(bodies[0]) == 1
        }
        for head, bodies in self.bodies.items():
            if head not in self._terminals:
                self._count(sum(symbol in self.maybe_empty for body in bodies for symbol in body))

    def count_right_recursive_parts(self) -> int:
        """Maximum number of right-recursive symbols that one row of the Earley parser may wait for.
        One token may complete those of all rows."""
        parts = [
            (head, symbol, i, self._texts.get(body[i - 1], body[i - 1]) if i else "")
            for head, bodies in self.bodies.items()
            if head not in self._terminals
            for body in bodies
            for i, symbol in self._last_parts(body)
        ]
        cycle_of = _find_cycles([part[:2] for part in parts])
        parts = [part for part in parts if cycle_of[part[0]] == cycle_of[part[1]]]
        # A cycle of first symbols alone is left recursion, which completes no item of another row.
        growing = {cycle_of[head] for head, _, i, _ in parts if i}
        return _count_after(text for head, _, _, text in parts if cycle_of[head] in growing)

    def count_completions(self) -> int:
        """Count the completions that MAX_COMPLETIONS bounds."""
        texts_before = defaultdict[str, list[str]](list)
        for head, bodies in self.bodies.items():
            if head not in self._terminals:
                for body in bodies:
                    for before, symbol in zip(["", *body], body, strict=False):
                        texts_before[symbol].append(self._texts.get(before, before))
        total = 0
        for symbol, before in texts_before.items():
            if symbol in self.bodies and symbol not in self._terminals:
                # Alternatives that begin with different texts do not end at the same place.
                first = Counter(
                    self._texts.get(body[0], body[0]) if body else NOT_EMPTY
                    for body in self.bodies[symbol]
                )
                num_texts = max((n for text, n in first.items() if text[0] == '"'), default=0)
                num_others = sum(n for text, n in first.items() if text[0] != '"')
                total += (num_texts + num_others) * _count_after(before)
        return total

    def _last_parts(self, body: list[str]) -> Iterator[tuple[int, str]]:
        """Iterate over the symbols of a body that only nullable symbols follow."""
        for i in range(len(body) - 1, -1, -1):
            if body[i] in self.bodies:
                yield i, body[i]
            if body[i] not in self.maybe_empty:
                return

    def _find_maybe_empty(self) -> set[str]:
        users: dict[str, list[list[int | str]]] = defaultdict(list)
        found, pending = set[str](), [MAYBE_EMPTY]
        for head, bodies in self.bodies.items():
            for body in bodies:
                clause: list[int | str] = [len(body), head]
                for symbol in body:
                    users[symbol].append(clause)
                if not body:
                    pending.append(head)
        while pending:
            symbol = pending.pop()
            if symbol in found:
                continue
            found.add(symbol)
            for clause in users[symbol]:
                clause[0] -= 1  # type: ignore[operator]
                if not clause[0]:
                    pending.append(clause[1])  # type: ignore[arg-type]
        return found

    def _count(self, number: int) -> None:
        self._num_alternatives += 0 if self._in_terminal else number
        if self._num_alternatives > MAX_ALTERNATIVES:
            raise GrammarError(
                f"more than {MAX_ALTERNATIVES} alternatives and parts that may be empty in a "
                "grammar, expected fewer, or an upper-case rule for them"
            )

    def _next(self, offset: int = 0) -> _Token:
        while len(self._tokens) <= self._position + offset:
            self._tokens.append(next(self._unread_tokens, _END))
        return self._tokens[self._position + offset]

    def _take(self) -> str:
        text = self._next()[1]
        self._position += 1
        return text

    def _skip(self, text: str) -> bool:
        """Take the next token if it is ``text``; returns whether it was."""
        found = self._next() == ("sign", text)
        self._position += found
        return found

    def _unreadable(self) -> GrammarError:
        return UnreadableGrammarError(f"unexpected {self._next()[1][:40]!r} in a grammar")

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise self._unreadable()

    def _take_kind(self, *kinds: str) -> str:
        if self._next()[0] not in kinds:
            raise self._unreadable()
        return self._take()

    def _skip_newlines(self) -> None:
        while self._next()[0] == "newline":
            self._take()

    def _add(self, *bodies: list[str]) -> str:
        symbol = str(len(self.bodies))
        self.bodies[symbol] = list(bodies)
        if self._in_terminal:
            self._terminals.add(symbol)
        return symbol

    def _read_items(self, scope: str) -> None:
        """Read rules and statements to the end, or to the brace that ends a nested grammar."""
        while True:
            self._skip_newlines()
            kind, text = self._next()
            if kind in ("rule", "terminal"):
                self._read_rule(scope)
            elif kind == "json" and text == "%llguidance":
                self._take()
            elif kind == "keyword" and text in ("%ignore", "%import", "%override", "%declare"):
                self._take()
                self._read_statement(scope, text)
            else:
                return
            if self._next()[0] not in ("newline", "end") and self._next()[1] != "}":
                raise self._unreadable()

    def _read_statement(self, scope: str, keyword: str) -> None:
        if keyword == "%ignore":
            self._in_terminal = True
            self._read_bodies(scope)
            self._in_terminal = False
        elif keyword == "%override":
            self._read_rule(scope)
        else:
            while self._next()[0] not in ("newline", "end") and self._next()[1] != "}":
                self._take_kind("rule", "terminal", "sign")

    def _read_rule(self, scope: str) -> None:
        kind = self._next()[0]
        name = scope + self._take_kind("rule", "terminal").removeprefix("!").removeprefix("?")
        was_in_terminal, self._in_terminal = self._in_terminal, kind == "terminal"
        self._refuse_parameters()
        may_be_cut = False
        if self._skip("["):
            names = self._read_attributes(scope)
            self._in_terminal |= not names <= {"capture", "stop_capture"}
            may_be_cut = "max_tokens" in names
        self._expect(":")
        bodies = self._read_bodies(scope)
        if self._in_terminal:
            self._terminals.add(name)
            bodies += [[MAYBE_EMPTY]] if may_be_cut else []
        self._in_terminal = was_in_terminal
        self.bodies.setdefault(name, []).extend(bodies)

    def _read_attributes(self, scope: str) -> set[str]:
        """Read the attributes of a rule; returns their names."""
        names = set[str]()
        while not self._skip("]"):
            names.add(self._take_kind("rule"))
            if self._skip("="):
                if self._next()[0] == "number":
                    self._take()
                else:
                    self._read_value(scope)
            if not self._skip(",") and self._next() != ("sign", "]"):
                raise self._unreadable()
        return names

    def _refuse_parameters(self) -> None:
        if self._next() in (("sign", "::"), ("keyword", "%if")):
            raise GrammarError(
                "rules with parameters ('::' and %if) are not supported: nothing bounds their items"
            )

    def _read_bodies(self, scope: str) -> list[list[str]]:
        """Read the alternatives of a rule or group."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._unreadable()
        bodies = [self._read_body(scope)]
        while self._skip_bar():
            bodies.append(self._read_body(scope))
            self._count(1)
        self._depth -= 1
        return bodies

    def _skip_bar(self) -> bool:
        position = self._position
        self._skip_newlines()
        if self._skip("|"):
            return True
        self._position = position
        return False

    def _read_body(self, scope: str) -> list[str]:
        body: list[str] = []
        is_intersection = False
        while True:
            kind, text = self._next()
            if self._skip("&"):
                is_intersection = True
            elif kind in ("newline", "end") or (kind == "sign" and text in ("|", ")", "]", "}")):
                return [MAYBE_EMPTY] if is_intersection else body
            elif self._skip("->"):
                self._take_kind("rule")
            else:
                self._refuse_parameters()
                body.append(self._read_part(scope))

    def _read_part(self, scope: str) -> str:
        if self._skip("~"):
            self._read_atom(scope)
            return MAYBE_EMPTY
        atom = self._read_atom(scope)
        kind, text = self._next()
        has_counts = text == "{" or (text == "~" and self._next(1)[0] == "number")
        if kind != "sign" or not (has_counts or text in ("?", "*", "+")):
            return atom
        self._take()
        self._count(2)
        if text == "?":
            return self._add([], [atom])
        if text in ("*", "+"):
            symbol = self._add([] if text == "*" else [atom])
            self.bodies[symbol].append([symbol, atom])
            return symbol
        least, most = self._read_counts(text)
        self._count(_WRITTEN_REPETITIONS + 4 * most.bit_length())
        written = min(most, _WRITTEN_REPETITIONS) if not self._in_terminal else 1
        symbol = self._add(*([atom] * count for count in range(1, written + 1)))
        if not least:
            self.bodies[symbol].append([])
        if most > written:
            self.bodies[symbol].append([symbol, atom])
        return symbol

    def _read_counts(self, sign: str) -> tuple[int, int]:
        least = 0 if self._next() == ("sign", ",") else self._read_number()
        most = least
        if sign == "~":
            if self._skip(".."):
                most = self._read_number()
            return least, most
        if self._skip(","):
            most = 2**31 if self._next() == ("sign", "}") else self._read_number()
        self._expect("}")
        return least, most

    def _read_number(self) -> int:
        text = self._take_kind("number")
        if not text.isdecimal() or len(text) > 10:
            raise self._unreadable()
        return int(text)

    def _read_atom(self, scope: str) -> str:
        if self._skip("("):
            symbol = self._add(*self._read_bodies(scope))
            self._expect(")")
            return symbol
        if self._skip("["):
            symbol = self._add([], *self._read_bodies(scope))
            self._expect("]")
            self._count(2)
            return symbol
        return self._read_value(scope)

    def _read_value(self, scope: str) -> str:
        kind, text = self._next()
        if kind not in ("string", "regex", "json", "special", "rule", "terminal"):
            if (kind, text) != ("keyword", "%lark"):
                raise self._unreadable()
        self._take()
        if kind == "string":
            if self._skip(".."):
                self._take_kind("string")
                return NOT_EMPTY
            if text in ('""', '""i'):
                return MAYBE_EMPTY
            return NOT_EMPTY if "\\" in text else text.removesuffix("i")[:-1].casefold()
        if kind == "regex":
            return NOT_EMPTY if _NOT_EMPTY_PATTERN.fullmatch(text) else MAYBE_EMPTY
        if kind == "json":
            return MAYBE_EMPTY if text == "%regex" else NOT_EMPTY
        if kind == "keyword":
            self._expect("{")
            inner = f"{self._position}:"
            self._read_items(inner)
            self._expect("}")
            return inner + "start"
        if kind in ("rule", "terminal"):
            self._refuse_parameters()
            return scope + text.removeprefix("!").removeprefix("?")
        return MAYBE_EMPTY if text[0] == "@" else NOT_EMPTY


def _tokens_of(text: str) -> Iterator[_Token]:
    position, decoder = 0, json.JSONDecoder()
    while position < len(text):
        match = _TOKEN_PATTERN.match(text, position)
        if match is None:
            raise UnreadableGrammarError(f"no token of Lark at character {position} of a grammar")
        position, kind = match.end(), str(match.lastgroup)
        if kind == "json":
            start = _BLANKS_PATTERN.match(text, position)
            try:
                position = decoder.raw_decode(text, start.end() if start else position)[1]
            except (ValueError, RecursionError):
                raise UnreadableGrammarError(f"no JSON behind {match.group()}") from None
        if kind != "skip":
            yield kind, match.group()


def _count_after(texts: Iterable[str]) -> int:
    """Maximum number of symbols that may follow at one place of an output, from the symbols before
    them. Two texts can end at the same place only if they have the same last character."""
    counts = Counter(text[-1] if text[:1] == '"' else "" for text in texts)
    return counts.pop("", 0) + max(counts.values(), default=0)


def _find_cycles(edges: list[tuple[str, str]]) -> dict[str, int]:
    """Number the nodes of a graph so that two nodes have the same number if each leads to the other
    (Kosaraju's algorithm)."""
    following, preceding = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for start, end in edges:
        following[start].append(end)
        preceding[end].append(start)
    seen, ordered = set[str](), list[str]()
    for root in list(following):
        pending = [(root, False)]
        while pending:
            node, is_done = pending.pop()
            if is_done:
                ordered.append(node)
            elif node not in seen:
                seen.add(node)
                pending.append((node, True))
                pending += [(end, False) for end in following.get(node, ())]
    cycle_of: dict[str, int] = {}
    for number, root in enumerate(reversed(ordered)):
        unnumbered = [root]
        while unnumbered:
            node = unnumbered.pop()
            if node not in cycle_of:
                cycle_of[node] = number
                unnumbered += preceding.get(node, ())
    return cycle_of
