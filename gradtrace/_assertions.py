"""Assertions on traces: nothing where they hold, an AssertionError that explains where not."""

from __future__ import annotations

from collections.abc import Sequence

from gradtrace._explain import Explanation
from gradtrace._records import Cut, Status

_ARRIVED = (Status.REACHED, Status.ZERO, Status.NONFINITE)


def arrived(explanation: Explanation) -> bool:
    """Whether a gradient arrived, whatever its value."""
    return explanation.status in _ARRIVED


def assert_reached(explanations: Sequence[Explanation]) -> None:
    """Fail unless a gradient arrived at every tensor."""
    _fail("no gradient reached", [each for each in explanations if not arrived(each)])


def assert_not_reached(explanations: Sequence[Explanation]) -> None:
    """Fail if a gradient arrived at any of the tensors."""
    _fail("a gradient reached", [each for each in explanations if arrived(each)])


def assert_cut(explanations: Sequence[Explanation], by: str | None, at: str | None) -> None:
    """Fail unless every tensor is cut, and has a cut of this kind and at this place."""
    wrong = [
        each
        for each in explanations
        if each.status is not Status.CUT or not any(_fits(cut, by, at) for cut in each.cuts)
    ]
    kind = f" by {by}" if by is not None else ""
    place = f" at {at}" if at is not None else ""
    _fail(f"not cut{kind}{place}:", wrong)


def _fits(cut: Cut, by: str | None, at: str | None) -> bool:
    if by is not None and cut.kind != by:
        return False
    if at is None:
        return True
    places = [str(place) for place in (cut.location, cut.called_from) if place is not None]
    return at in (cut.source or "") or any(_is_place(place, at) for place in places)


def _is_place(place: str, at: str) -> bool:
    """Whether `at`, as "file.py:42", "file.py" or with folders, names this place."""
    where = place if ":" in at else place.rpartition(":")[0]
    where, at = where.replace("\\", "/"), at.replace("\\", "/")
    return where == at or where.endswith("/" + at)


def _fail(what: str, wrong: Sequence[Explanation]) -> None:
    if wrong:
        names = ", ".join(each.name for each in wrong)
        stories = "\n\n".join(str(each) for each in wrong)
        raise AssertionError(f"{what} {names}\n\n{stories}")
