"""Where a call comes from: the line to blame, kept as code object and offset."""

from __future__ import annotations

from types import FrameType

from gradtrace._source import Category, category
from gradtrace._tape import Site

Sites = tuple[Site | None, Site | None, str]
NOWHERE: Sites = (None, None, "")


def find(frame: FrameType | None) -> tuple[Site | None, Site | None]:
    """Return the innermost place outside torch and, where that is a library's, the user's own.

    Args:
        frame: Where to begin, outwards. None finds nothing.
    """
    start = frame
    while frame is not None:
        found = category(frame.f_code)
        if found is Category.USER:
            return Site(frame.f_code, frame.f_lasti), None
        if found is Category.LIBRARY:
            return Site(frame.f_code, frame.f_lasti), _users_own(frame.f_back)
        frame = frame.f_back
    return (None if start is None else Site(start.f_code, start.f_lasti)), None


def _users_own(frame: FrameType | None) -> Site | None:
    while frame is not None:
        if category(frame.f_code) is Category.USER:
            return Site(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None
