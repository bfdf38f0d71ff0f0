"""Short texts that several renderers show: places, shapes, counts, names safe to print."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import networkx as nx

_WIDTH = 44
_FILE_WIDTH = 32
_PASSES_WIDTH = 12
# Cc, Cf, Co, Cs: controls, text direction marks, private and surrogate characters. They are
# invisible, or change how their neighbours read, or cannot be encoded.
_UNSAFE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    """Return a text on one line, with what cannot be seen written as escapes."""
    return "".join(map(_printable_character, " ".join(text.split())))


def _printable_character(character: str) -> str:
    unsafe = unicodedata.category(character) in _UNSAFE
    return character.encode("unicode_escape").decode("ascii") if unsafe else character


def shorten(text: str, width: int = _WIDTH) -> str:
    """Return a printable text of at most so many columns, with dots for what was dropped."""
    text = printable(text)
    if columns(text) <= width:
        return text
    while columns(text) > width - 1:
        text = text[:-1]
    return text.rstrip() + "…"


def name_text(name: str, frame: str = "", width: int = _WIDTH) -> str:
    """Return a dotted name, without the path of the frame around it and with dots if it is long.

    What is dropped is the start, since the end tells parameters apart.
    """
    text = printable(name.removeprefix(f"{frame}.") if frame else name)
    if columns(text) <= width:
        return text
    while columns(text) > width - 1:
        text = text[1:]
    return "…" + text


def columns(text: str) -> int:
    """Return how wide a terminal shows a text: East Asian characters count twice."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    marks = sum(unicodedata.combining(character) > 0 for character in text)
    return len(text) + wide - marks


def pad(text: str, width: int) -> str:
    """Return a text filled up with spaces to so many columns."""
    return text + " " * (width - columns(text))


def place(file: str | None, line: int | None, width: int = _FILE_WIDTH) -> str:
    """Return "train.py:42", or "" where no line was seen."""
    if not file or line is None:
        return ""
    name = re.split(r"[/\\]", file)[-1]
    return f"{shorten(name, width)}:{line}"


def node_place(node: Mapping[str, Any]) -> str:
    """Return the place of one node's call."""
    return place(node["file"], node["line"])


def node_hint(node: Mapping[str, Any]) -> str:
    """Return all that is known of one node's place: file, line, function and expression."""
    at = f"{node['file']}:{node['line']} in {node['function']}" if node["file"] else ""
    return printable(": ".join(filter(None, (at, node["source"]))))


def shape_text(shape: Sequence[int]) -> str:
    """Return "[3 × 4]", or "scalar" for no dimensions."""
    return f"[{' × '.join(map(str, shape))}]" if shape else "scalar"


def many(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun, such as "1 leaf", "1,200 leaves"."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def pass_count(graph: nx.MultiDiGraph) -> int:
    """Return how many backward passes were recorded."""
    return len(graph.graph["passes"])


def passes_text(passes: Collection[int], total: int) -> str:
    """Return which of several backward passes are meant: "all", "0", "0–3, 7" or "12 of 100"."""
    if len(passes) == total:
        return "all"
    text = ", ".join(_runs(sorted(passes)))
    return text if len(text) <= _PASSES_WIDTH else f"{len(passes)} of {total}"


def passes_phrase(passes: Collection[int], total: int) -> str:
    """Return the same with its noun: "all passes", "pass 0", "passes 0–3, 7"."""
    text = passes_text(passes, total)
    if len(passes) == total or " of " in text:
        return f"{text} passes"
    return f"pass {text}" if len(passes) == 1 else f"passes {text}"


def _runs(numbers: Iterable[int]) -> Iterator[str]:
    """Yield runs of successive numbers as "4" or "4–6"."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"
