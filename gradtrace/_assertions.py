"""Assertions on traces: nothing where they hold, an AssertionError that explains where not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gradtrace._explain import Explanation, call_of
from gradtrace._records import Cut, CutKind, Gradient, Status

_ARRIVED: Final = (Status.REACHED, Status.ZERO, Status.NONFINITE)
_EXPLAINED: Final = 3  # the others get a line or two each
_TOLERANCE: Final = 1e-5  # of a norm, relative: float32 sums in another order differ by less

Allowed = str | tuple[str, ...]


def arrived(explanation: Explanation) -> bool:
    """Whether a gradient arrived, whatever its value."""
    return explanation.status in _ARRIVED


def assert_reached(explanations: Sequence[Explanation]) -> None:
    """Fail unless a gradient arrived at every tensor."""
    _fail("no gradient reached", explanations, lambda each: not arrived(each))


def assert_not_reached(explanations: Sequence[Explanation]) -> None:
    """Fail if a gradient arrived at any of the tensors."""
    _fail("a gradient reached", explanations, arrived)


def assert_cut(explanations: Sequence[Explanation], by: str | None, at: str | None) -> None:
    """Fail unless every tensor is cut, and has a cut of this kind and at this place."""
    kind = f" by {by}" if by is not None else ""
    place = f" at {at}" if at is not None else ""

    def is_wrong(each: Explanation) -> bool:
        return each.status is not Status.CUT or not any(_fits(cut, by, at) for cut in each.cuts)

    _fail(f"not cut{kind}{place}:", explanations, is_wrong)


def assert_only_cuts(cuts: Sequence[Cut], allowed: Sequence[Allowed]) -> None:
    """Fail if there is any cut that nothing in the list allows, or anything that allows none."""
    others = [cut for cut in cuts if not any(_is_allowed(cut, each) for each in allowed)]
    needless = [each for each in allowed if not any(_is_allowed(cut, each) for cut in cuts)]
    lines = []
    if others:
        lines.append(f"{len(others)} of {len(cuts)} cuts are not allowed:")
        lines += map(_cut_text, others)
    if needless:
        lines.append(f"no cut fits {', '.join(map(repr, needless))}; the cuts are:")
        lines += map(_cut_text, cuts) if cuts else ["  none"]
    if lines:
        raise AssertionError("\n".join(lines))


def _is_allowed(cut: Cut, allowed: Allowed) -> bool:
    words = (allowed,) if isinstance(allowed, str) else allowed
    return all(
        cut.kind == word if word in set(CutKind) else _fits(cut, None, word) for word in words
    )


def _cut_text(cut: Cut) -> str:
    where = "" if cut.location is None else f" at {cut.location}"
    called = "" if cut.called_from is None else f" (called from {cut.called_from})"
    source = f"\n    {cut.source}" if cut.source else ""
    return f"  {call_of(cut)}{where}{called}{source}\n    blocks {', '.join(cut.blocked)}"


def assert_gradient(
    explanations: Sequence[Explanation], norm: object, backward_pass: int | None
) -> None:
    """Fail unless every tensor got a finite gradient that is not zero, with a norm that fits."""

    def is_wrong(each: Explanation) -> bool:
        gradients = [g for g in each.gradients if backward_pass in (None, g.backward_pass)]
        if norm is None:
            return not any(map(_is_useful, gradients))
        return not gradients or not all(_has_norm(gradient, norm) for gradient in gradients)

    wanted = "no finite gradient other than zero" if norm is None else f"no gradient of norm {norm}"
    when = "" if backward_pass is None else f" in pass {backward_pass}"
    _fail(f"{wanted}{when} reached", explanations, is_wrong)


def _is_useful(gradient: Gradient) -> bool:
    return gradient.norm is not None and 0 < gradient.norm < math.inf


def _has_norm(gradient: Gradient, norm: Any) -> bool:
    if gradient.norm is None:
        return False
    if isinstance(norm, tuple):
        low, high = norm
        return (low is None or low <= gradient.norm) and (high is None or gradient.norm <= high)
    if isinstance(norm, (int, float)):
        return math.isclose(gradient.norm, norm, rel_tol=_TOLERANCE)
    return bool(gradient.norm == norm)


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


def answer_text(explanations: Sequence[Explanation]) -> str:
    """Return what `Trace.reached` found, for a plain `assert` that fails."""
    missing = [each for each in explanations if not arrived(each)]
    if missing:
        return _story("no gradient reached", missing, len(explanations))
    return f"a gradient reached {_names(explanations)}"


def _fail(
    what: str, explanations: Sequence[Explanation], is_wrong: Callable[[Explanation], bool]
) -> None:
    wrong = [each for each in explanations if is_wrong(each)]
    if wrong:
        raise AssertionError(_story(what, wrong, len(explanations)))


def _story(what: str, wrong: Sequence[Explanation], total: int) -> str:
    """Return all the names, the first explanations whole, and of the others what matters."""
    count = f" ({len(wrong)} of {total})" if total > 1 else ""
    whole = [str(each) for each in wrong[:_EXPLAINED]]
    rest = ["\n".join(_short(each)) for each in wrong[_EXPLAINED:]]
    parts = [f"{what} {_names(wrong)}{count}", *whole]
    return "\n\n".join([*parts, "\n".join(rest)] if rest else parts)


def _names(explanations: Iterable[Explanation]) -> str:
    return ", ".join(each.name for each in explanations)


def _short(explanation: Explanation) -> Iterable[str]:
    """Yield the verdict, and where the tensor is cut."""
    lines = str(explanation).splitlines()
    yield lines[0]
    yield from (line for line in lines[1:] if line.startswith("  cut: "))
