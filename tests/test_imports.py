"""Imports: cheap for whoever only loads the package, and never upwards."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradtrace

PACKAGE = Path(gradtrace.__file__).parent

# A module imports only from parts to the left of its own; a folder is one part.
ORDER = (
    "_version _settings _errors _records _syntax _source _tape _cuts _graph _flow _hazards _terms"
    " _outline _advice _explain _diff _files _golden _assertions _render _trace _observe _record"
    " __init__ _cli __main__ _pytest"
).split()
# The observers are kept apart from all that judges what they saw; of `_cuts` they take the lists of
# calls that carry no data.
OBSERVERS_KNOW = {"_errors", "_records", "_source", "_tape", "_cuts", "_observe"}
KNOW_TORCH = {"_observe", "_record"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """Return the part of the package that a file belongs to."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(file: Path) -> Iterator[str]:
    """Yield the dotted names of all that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: a relative import hides where it points"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_imported(file: Path) -> set[str]:
    """Return the parts of the package that a file imports from."""
    names = (name.split(".") for name in imported(file))
    return {name[1] for name in names if name[0] == "gradtrace" and name[1:2] and name[1] in ORDER}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_module_imports_upwards(file: Path) -> None:
    """A module imports only from parts that stand before its own."""
    part = part_of(file)
    assert part in ORDER, f"{file.name} has no place in ORDER yet"
    before = set(ORDER[: ORDER.index(part) + 1])
    if part == "_observe":
        before &= OBSERVERS_KNOW
    assert parts_imported(file) <= before


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_observers_import_torch(file: Path) -> None:
    """Everything but the recording works in a process without torch."""
    names = {name.partition(".")[0] for name in imported(file)}
    assert "torch" not in names or part_of(file) in KNOW_TORCH


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import gradtrace", {"torch", "networkx", "pydot", "numpy"}),
        ("import gradtrace; gradtrace.CutKind.DETACH", {"torch", "networkx", "pydot", "numpy"}),
        ("import gradtrace; gradtrace.load", {"torch"}),
    ],
)
def test_importing_stays_cheap(statement: str, absent: set[str]) -> None:
    """A fresh interpreter loads neither torch nor networkx for the package's name alone."""
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not absent.intersection(done.stdout.split())


def test_every_public_name_is_there() -> None:
    """`__all__` is sorted, and each name in it can be had."""
    assert sorted(gradtrace.__all__) == list(gradtrace.__all__) == dir(gradtrace)
    for name in gradtrace.__all__:
        assert getattr(gradtrace, name) is not None


def test_an_unknown_public_name_is_python_s_own_error() -> None:
    """A misspelt name raises AttributeError, as it does for every module."""
    with pytest.raises(AttributeError, match="has no attribute 'recrod'"):
        gradtrace.recrod  # noqa: B018  # misspelt on purpose
