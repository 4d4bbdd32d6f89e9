"""Mutation tests of the engine: mutmut, with the operators and the exceptions that it lacks.

    python -m tools.mutants run --max-children 2     # what was tried before is not tried again
    python -m tools.mutants score                    # by file, and every survivor as a diff
    python -m tools.mutants show NAME                # and the rest of mutmut's commands

mutmut changes operators, numbers, names and arguments. It neither leaves out a statement nor
settles a condition, and those are what an untested guard or an untested call survives. Text for
people (log lines, error messages, ``__repr__``) is left alone: tests say what a message has to
name, and not how it says so.

``tools/equivalent_mutants.toml`` says of each mutant that may survive why no test could tell.
"""

from __future__ import annotations

import fnmatch
import os
import random
import re
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import click
import hypothesis
import libcst as cst
import mutmut.__main__
import pytest
from _pytest.config import _prepareconfig
from mutmut.__main__ import cli
from mutmut.configuration import config
from mutmut.core import MutmutCallStack
from mutmut.mutation import file_mutation, mutators
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import change_cwd, walk_mutatable_files
from mutmut.utils.format_utils import orig_function_and_class_names_from_key
from mutmut.workers.isolation import ForkRunner, run_in_fork

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
TIMEOUT = 36  # mutmut's exit status for it
CAUGHT = {"killed", "timeout", "segfault"}


def left_out(node: cst.Expr | cst.Raise | cst.Del) -> Iterable[cst.Pass]:
    """A statement that only has effects, gone."""
    if not isinstance(node, cst.Expr) or isinstance(node.value, cst.Call | cst.Await):
        yield cst.Pass()


def settled(node: cst.If | cst.While) -> Iterable[cst.If | cst.While]:
    """A condition that always holds, or never: what it guards is not needed then."""
    for value in ("False", "True") if isinstance(node, cst.If) else ("False",):
        yield node.with_changes(test=cst.Name(value))


def is_for_people(node: cst.CSTNode) -> bool:
    """Text that has words in it, and what is said to the log."""
    if isinstance(node, cst.SimpleString):
        return " " in node.value
    if isinstance(node, cst.FormattedString | cst.ConcatenatedString):
        return True
    match node:
        case cst.Expr(value=cst.Call(func=cst.Attribute(value=cst.Name(value="logger")))):
            return True
    return False


def without(operator: Callable, of: Callable[[cst.CSTNode], int]) -> Callable:
    """``operator`` without the mutants that change ``of`` the node."""

    def rest(node: cst.CSTNode) -> Iterable[cst.CSTNode]:
        return (mutant for mutant in operator(node) if of(mutant) == of(node))

    return rest


def num_messages(call: cst.Call) -> int:
    return sum(is_for_people(arg.value) for arg in call.args)


def extend_mutmut() -> None:
    mutators.mutation_operators[:] = [
        (
            kind,
            without(operator, num_messages)
            if operator is mutators.operator_arg_removal
            else operator,
        )
        for kind, operator in mutators.mutation_operators
    ]
    mutators.mutation_operators += [
        (cst.Expr | cst.Raise | cst.Del, left_out),
        (cst.If | cst.While, settled),
    ]
    mutmut.__main__.get_mutant_runner = lambda workers=1: Runner(workers)
    # Who calls whom is not used here, and a context variable that is set while a test traces
    # bytecodes makes CPython 3.11 crash.
    MutmutCallStack.set = MutmutCallStack.reset = classmethod(lambda *_: None)
    file_mutation.NEVER_MUTATE_FUNCTION_NAMES.add("__repr__")
    skips = MutationVisitor._skip_node_and_children
    MutationVisitor._skip_node_and_children = lambda visitor, node: (
        is_for_people(node) or skips(visitor, node)
    )


def limit_time(seconds: float) -> None:
    """Ends this process after ``seconds`` of the processor's time, which is what a loop without an
    end takes, and after ten times as many in which none of its threads had anything to do. On a
    busy machine the threads of a test may wait for the processor much longer than that."""

    def busy() -> float:
        tasks = Path("/proc/self/task").glob("*/schedstat")
        return sum(sum(map(int, task.read_text().split()[:2])) for task in tasks) / 1e9

    def look(*_: object) -> None:
        if time.monotonic() - began - (busy() - busy_before) > 10 * seconds:
            os._exit(TIMEOUT)

    began, busy_before = time.monotonic(), busy()
    signal.signal(signal.SIGPROF, lambda *_: os._exit(TIMEOUT))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds, 2)


class Runner(ForkRunner):
    """mutmut's, but the tests are collected once and not for each mutant, and those go first that
    run the least code besides the mutant's: they tell its noun's rules, and most mutants die in
    the first of them.

    MUTANTS_SECONDS: how long the tests of one mutant may have taken when they were counted. For
    a first round; the survivors of it are run again with all their tests.
    """

    _items: dict[str, pytest.Item] | None = None

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers, PytestRunner())
        self._failures: list[pytest.TestReport] = []

    def _collect(self) -> dict[str, pytest.Item]:
        if self._items is None:
            selection = config().pytest_add_cli_args_test_selection
            with change_cwd("mutants"):
                settings = _prepareconfig(
                    ["--rootdir=.", "--tb=native", "-q", *selection, *config().pytest_add_cli_args],
                    [self],
                )
                settings._do_configure()
                session = pytest.Session.from_config(settings)
                settings.hook.pytest_sessionstart(session=session)
                settings.hook.pytest_collection(session=session)
            for item in session.items:
                if hasattr(item.cls, "settings"):
                    item.cls.settings = hypothesis.settings(item.cls.settings, max_examples=25)
            self._breadth = Counter(
                test
                for covering in state().tests_by_mangled_function_name.values()
                for test in covering
            )
            self._items = {item.nodeid: item for item in session.items}
        return self._items

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(report)

    def _chosen(self, tests: Iterable[str]) -> list[pytest.Item]:
        items, seconds = self._collect(), state().duration_by_test
        left = float(os.environ.get("MUTANTS_SECONDS", "inf"))
        chosen = []
        # Not all names are those of the stats: pytest escapes a parameter's backslashes twice.
        known = items.keys() & seconds.keys() & set(tests)
        for test in sorted(known, key=lambda test: (self._breadth[test], seconds[test])):
            left -= seconds[test]
            if left < 0:
                break
            chosen.append(items[test])
        return chosen

    def _run(self, tests: Iterable[str]) -> int:
        items = self._chosen(tests)
        os.chdir("mutants")
        for item, after in zip(items, [*items[1:], None], strict=True):
            limit_time(2 + 3 * state().duration_by_test[item.nodeid])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if item.session.testsfailed:
                return 1
        return 0

    def run_clean_tests(self, tests: Iterable[str]) -> int:
        self._collect()
        return run_in_fork(self._run_aloud, tests or self._collect())

    def _run_aloud(self, tests: Iterable[str]) -> int:
        """Of the engine as it is no test fails; one that does has to be read about."""
        result = self._run(tests)
        for report in self._failures:
            sys.__stdout__.write(f"{report.nodeid}\n{report.longreprtext}\n")
        return result

    def submit(
        self, mutant_name: str, tests: list[str], cpu_time_limit: int, estimated_time: float
    ) -> None:
        self.test_runner.run_tests = lambda *, mutant_name, tests: self._run(tests)
        super().submit(mutant_name, tests, cpu_time_limit, estimated_time)


def changes(diff: str) -> tuple[str, str]:
    """What a diff takes out and what it puts in, each on one line."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    was, becomes = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return was, becomes


@cli.command()
@click.argument("patterns", nargs=-1)
@click.option("--status", default="not checked", show_default=True)
@click.option("--sample", type=int, help="at most so many of each file")
@click.option("--seed", default=0, show_default=True)
def pick(patterns: tuple[str, ...], status: str, sample: int | None, seed: int) -> None:
    """The names of mutants of which this is known, for ``run``."""
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        names = [
            name
            for name, exit_code in sorted(data.exit_code_by_key.items())
            if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ]
        if sample is not None:
            names = random.Random(seed).sample(names, min(sample, len(names)))
        for name in names:
            if status_by_exit_code[data.exit_code_by_key[name]] == status:
                click.echo(name)


class Equivalent(NamedTuple):
    """A kind of mutant that may survive. ``*`` stands for anything, but in ``why``."""

    function: str
    was: str
    becomes: tuple[str, ...]
    why: str

    def matches(self, function: str, was: str, becomes: str) -> bool:
        def like(pattern: str, text: str) -> bool:
            return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text) is not None

        return (
            like(self.function, function)
            and like(self.was, was)
            and any(like(pattern, becomes) for pattern in self.becomes)
        )


@cli.command()
def score() -> None:
    """The share of the mutants that are caught, by file, and the survivors."""
    listed = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    unused = {
        Equivalent(**(entry | {"becomes": tuple(entry["becomes"])})): False for entry in listed
    }
    total: Counter[str] = Counter()
    rows = []
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        counts: Counter[str] = Counter()
        for name, exit_code in data.exit_code_by_key.items():
            status = status_by_exit_code[exit_code]
            if status not in CAUGHT and status != "not checked":
                function, class_name = orig_function_and_class_names_from_key(name)
                diff = get_diff_for_mutant(name, path=path)
                mutant = (f"{class_name}.{function}" if class_name else function, *changes(diff))
                accepted = [kind for kind in unused if kind.matches(*mutant)]
                for kind in accepted:
                    unused[kind] = True
                if accepted:
                    status = "equivalent"
                else:
                    click.echo(f"# {name}: {status}\n{diff}\n")
            counts["caught" if status in CAUGHT else status] += 1
        total += counts
        rows.append((str(path), counts))
    for kind in [kind for kind, used in unused.items() if not used]:
        click.echo(f"no such survivor: {kind}")
    for name, counts in [*rows, ("all", total)]:
        tried = sum(counts.values()) - counts["not checked"] - counts["equivalent"]
        if tried:
            click.echo(f"{name:36} {counts['caught'] / tried:6.1%} of {tried:4}  {dict(counts)}")


if __name__ == "__main__":
    os.environ.setdefault("HYPOTHESIS_PROFILE", "mutation")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    extend_mutmut()
    sys.exit(cli())
