"""Backends: which library compiles which grammar."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable
from typing import Literal

from asyncllm.errors import InvalidRequestError
from asyncllm.structured.grammar import Grammar, GrammarBackend, GrammarError, Vocabulary
from asyncllm.structured.json_schema import refuse_ignored_by_xgrammar
from asyncllm.structured.spec import StructuredOutputs

StructuredOutputsBackend = Literal["auto", "llguidance", "xgrammar"]

_EXTRAS = {"llguidance": "structured", "xgrammar": "xgrammar"}


class Backends:
    """The backends of one engine, each made at its first use.

    With "auto", llguidance compiles what it enforces, and xgrammar, where it is installed, what
    only that does.

    Args:
        choice: ``EngineConfig.structured_outputs_backend``.
        vocabulary: makes the model's, once.
    """

    def __init__(
        self, choice: StructuredOutputsBackend, vocabulary: Callable[[], Vocabulary]
    ) -> None:
        self._choice = choice
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._made: dict[str, GrammarBackend] = {}
        self._installed: tuple[str, ...] | None = None

    def check_installed(self) -> None:
        """Raises InvalidRequestError, which names the extra, if no backend is there."""
        if not self._names():
            wanted = "llguidance" if self._choice == "auto" else self._choice
            raise InvalidRequestError(
                f"structured_outputs: {wanted} is not installed, expected "
                f"`pip install asyncllm[{_EXTRAS[wanted]}]`",
                param="structured_outputs",
            )

    def prepare(self) -> None:
        """Imports the first backend and gives it the vocabulary, which takes a second or so
        where that is large."""
        self._backend(self._names()[0])

    def compile(self, spec: StructuredOutputs, begin: Callable[[], None]) -> Grammar:
        """A grammar that admits something.

        Args:
            begin: called as a backend, which may have to be imported first, begins.

        Raises:
            GrammarError: what each backend has against it.
        """
        refusals = []
        for name in self._names():
            try:
                if refusals:
                    check_second(spec)
                backend = self._backend(name)
                begin()
                grammar = backend.compile(spec)
                break
            except GrammarError as error:
                if str(error):
                    refusals.append(f"{error} (by {name})")
        else:
            raise GrammarError("; ".join(refusals))
        check_first_mask(grammar)
        return grammar

    def _names(self) -> tuple[str, ...]:
        if self._installed is None:
            names = ("llguidance", "xgrammar") if self._choice == "auto" else (self._choice,)
            found = tuple(name for name in names if importlib.util.find_spec(name) is not None)
            if not found:
                return ()  # looked for again: it may be installed into a process that runs
            self._installed = found
        return self._installed

    def _backend(self, name: str) -> GrammarBackend:
        with self._lock:
            backend = self._made.get(name)
            if backend is None:
                if self._vocabulary is None:
                    self._vocabulary = self._make_vocabulary()
                backend = self._made[name] = make_backend(name, self._vocabulary)
            return backend


def check_second(spec: StructuredOutputs) -> None:
    """Raises GrammarError for what xgrammar is not asked for where llguidance has refused it:
    what it would ignore, and what it has no more of than the other. Its import takes seconds."""
    if spec.kind == "json":
        refuse_ignored_by_xgrammar(json.loads(spec.text))
    elif spec.kind != "structural_tag":
        raise GrammarError


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    if name == "llguidance":
        from asyncllm.structured.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)


def check_first_mask(grammar: Grammar) -> None:
    """Raises GrammarError for a grammar that ends before it begins, or has nothing to begin with.
    The first mask is also the longest to make, and is made here and not while a batch waits."""
    matcher = grammar.new_matcher()
    mask = matcher.bitmask()
    if mask == bytes(len(mask)):
        raise GrammarError(
            "admits nothing, or nothing that the tokenizer can spell"
            if not matcher.may_end()
            else "admits no output but the empty one"
        )
