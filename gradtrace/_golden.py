r"""Golden flows: a stored, reviewable description of which gradient goes where.

The file
--------
A JSON object with one fact a line, sorted, so that a pull request shows what changed:

    {
    "format": "gradtrace flow",
    "version": 1,
    "facts": [
    "leaf encoder.weight: cut",
    "leaf encoder.weight: cut by no_grad at linear in encoder",
    "leaf head.weight: reached in pass 0",
    "pass 0: backward from loss",
    "way head -> the top level"
    ]
    }

A fact is one of: a leaf's status, with the passes, and the terms of the loss, that reached it; a
cut on its ways; a backward pass; a step from module to module, with `//` where no gradient comes
along. There are no lines, no norms and no counts in it, so that code may move and seeds change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gradtrace import _explain, _files
from gradtrace._errors import FileFormatError
from gradtrace._flow import Flow, Spot
from gradtrace._outline import Outline
from gradtrace._records import Status

_FORMAT: Final = "gradtrace flow"
_VERSION: Final = 1
_EXPLAINED: Final = 2
_HOW: Final = (
    "To accept what was recorded now, run `python -m pytest --gradtrace-update`, or call"
    " trace.assert_matches(path, update=True) once, and review the file's difference."
)


def facts_of(flow: Flow) -> list[str]:
    """Return the facts about a flow of gradients, sorted."""
    return sorted(set(_facts(Outline(flow))))


def _facts(outline: Outline) -> Iterator[str]:
    for number, text in enumerate(outline.passes()):
        yield f"pass {number}: {text}"
    for name, leaf in outline.leaves.items():
        arrivals = ", ".join(outline.arrivals(leaf))
        yield f"leaf {name}: {leaf.status}{f' in {arrivals}' if arrivals else ''}"
        yield from (f"leaf {name}: cut by {key}" for key in outline.cuts(leaf))
    yield from (f"way {step}" for step in outline.steps())


def assert_matches(flow: Flow, path: Path, *, update: bool) -> None:
    """Fail, and say what changed, unless a flow is the stored one; or store it."""
    found = facts_of(flow)
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write_atomically(path, _document(found))
        return
    if not path.exists():
        raise AssertionError(f"there is no golden flow at {path} yet. {_HOW}")
    stored = _read(path)
    lost, gained = sorted(set(stored) - set(found)), sorted(set(found) - set(stored))
    if lost or gained:
        lines = [f"the flow of gradients is not the one in {path}:"]
        lines += _changes(lost, gained)
        lines += [f"(-: stored, +: recorded now) {_HOW}", *_explanations(flow, gained)]
        raise AssertionError("\n".join(lines))


def _document(facts: list[str]) -> bytes:
    lines = ",\n".join(map(json.dumps, facts))
    head = f'{{\n"format": {json.dumps(_FORMAT)},\n"version": {_VERSION},\n"facts": ['
    return f"{head}\n{lines}\n]\n}}\n".encode()


def _read(path: Path) -> list[str]:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileFormatError(f"{str(path)!r} is no golden flow: no JSON text. {_HOW}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FileFormatError(
            f'{str(path)!r} is no golden flow: it is no object with "format": "{_FORMAT}". {_HOW}'
        )
    if document.get("version") != _VERSION:
        raise FileFormatError(
            f"{str(path)!r} has version {document.get('version')!r} of the format, and"
            f" {_VERSION} would have fitted. Upgrade gradtrace, or write the file again. {_HOW}"
        )
    facts = document.get("facts")
    if not isinstance(facts, list) or not all(isinstance(fact, str) for fact in facts):
        raise FileFormatError(f"{str(path)!r}: its facts are no list of strings. {_HOW}")
    return facts


def _changes(lost: list[str], gained: list[str]) -> Iterator[str]:
    """Yield the lost and the gained facts, those about one thing beside each other."""
    marked = [(fact, "-") for fact in lost] + [(fact, "+") for fact in gained]
    for fact, sign in sorted(marked, key=lambda each: (each[0].partition(": ")[0], each[1] == "+")):
        yield f"  {sign} {fact}"


def _explanations(flow: Flow, gained: list[str]) -> Iterator[str]:
    """Yield explanations of leaves that no gradient arrives at any more."""
    news = {fact.partition(": ")[0].removeprefix("leaf ") for fact in gained}
    missed = (Status.CUT, Status.UNUSED, Status.UNKNOWN, Status.NONFINITE, Status.ZERO)
    leaves = [leaf for leaf in flow.leaves if leaf.name in news and leaf.status in missed]
    for leaf in leaves[:_EXPLAINED]:
        yield f"\n{_explain.explain(flow, Spot(leaf.node))}"
