"""GrammarBackends: chooses the library that compiles a grammar."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from asyncllm.structured.grammar import Grammar, GrammarBackend, GrammarError, Vocabulary
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.validation import argument_error

StructuredOutputsBackend = Literal["auto", "llguidance", "xgrammar"]

_PIP_EXTRAS = {"llguidance": "structured", "xgrammar": "xgrammar"}


class GrammarBackends:
    """Grammar backends of one engine, each made at its first use.

    With "auto", llguidance compiles the grammars that it can enforce. If xgrammar is installed,
    xgrammar compiles the structural tags that llguidance refuses.

    Args:
        backend_choice: ``EngineConfig.structured_outputs_backend``.
        make_vocabulary: function that makes the model's vocabulary; called once.
    """

    def __init__(
        self, backend_choice: StructuredOutputsBackend, make_vocabulary: Callable[[], Vocabulary]
    ) -> None:
        self._backend_choice = backend_choice
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._backends: dict[str, GrammarBackend] = {}

    def check_installed(self) -> None:
        """Raise InvalidRequestError, which names the extra to install, if there is no backend."""
        if not self._backend_names():
            name = "llguidance" if self._backend_choice == "auto" else self._backend_choice
            problem = (
                f"{name} is not installed, expected `pip install asyncllm[{_PIP_EXTRAS[name]}]`"
            )
            raise argument_error("structured_outputs", problem)

    def prepare(self) -> None:
        """Import the first backend, and pass it the vocabulary.

        A large vocabulary takes about a second.
        """
        self._get_backend(self._backend_names()[0])

    def compile(self, spec: StructuredOutputs, before_compile: Callable[[], None]) -> Grammar:
        """Compile a grammar with the first backend that can enforce it.

        Args:
            before_compile: function that is called before each backend compiles, after its import.

        Raises:
            GrammarError: if no backend can enforce the grammar (the message has each backend's
                reason), or if the grammar admits no output but the empty one.
        """
        refusals = []
        names = self._backend_names()
        if spec.kind != "structural_tag":
            # Of these specs, xgrammar would add only those that exceed llguidance's limits.
            names = names[:1]
        for name in names:
            try:
                backend = self._get_backend(name)
                before_compile()
                grammar = backend.compile(spec)
                break
            except GrammarError as error:
                if str(error):
                    refusals.append(f"{error} (by {name})")
        else:
            raise GrammarError("; ".join(refusals))
        return with_first_mask(grammar)

    def _backend_names(self) -> tuple[str, ...]:
        # Do not cache the result: a backend may be installed while the process runs.
        choice = self._backend_choice
        names = ("llguidance", "xgrammar") if choice == "auto" else (choice,)
        return tuple(name for name in names if importlib.util.find_spec(name) is not None)

    def _get_backend(self, name: str) -> GrammarBackend:
        with self._lock:
            backend = self._backends.get(name)
            if backend is None:
                if self._vocabulary is None:
                    self._vocabulary = self._make_vocabulary()
                backend = self._backends[name] = make_backend(name, self._vocabulary)
            return backend


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    if name == "llguidance":
        from asyncllm.structured.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    from asyncllm.structured.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)


def with_first_mask(grammar: Grammar) -> Grammar:
    """Copy a grammar and add its first mask, which is the same for all outputs.

    The first mask of a grammar takes longest to compute. Here no batch waits for it.

    Raises:
        GrammarError: if the grammar admits no output, or only the empty one.
    """
    matcher = grammar.new_matcher()
    mask = bytes(matcher.bitmask())
    if mask == bytes(len(mask)):
        if matcher.may_end():
            raise GrammarError("admits no output but the empty one")
        raise GrammarError("admits nothing, or nothing that the tokenizer can spell")
    grammar.memory.compiled_bytes += len(mask)
    return replace(grammar, first_mask=mask)
