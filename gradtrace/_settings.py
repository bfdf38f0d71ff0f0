"""What the pytest plugin tells the rest of the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What `Trace.reached` answered last, so that a plain `assert` on it can be explained."""

    file: str
    line: int
    text: str


update_golden: bool = False  # write golden flows in place of comparing with them
folder: Path = Path()  # what the paths of golden flows start from
started: list[Callable[[Any], None]] = []  # called with each trace that begins
latest_answer: list[Answer] = []  # at most one, and only while a test asks for it
keep_answers: bool = False
