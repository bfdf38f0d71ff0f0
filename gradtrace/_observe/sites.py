"""Where a call comes from: the line to blame, kept as code object and offset."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, Final

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
        if is_stand_in(frame):
            frame = frame.f_back
            continue
        if found is Category.USER:
            return Site(frame.f_code, frame.f_lasti), None
        if found is Category.LIBRARY:
            return Site(frame.f_code, frame.f_lasti), _users_own(frame.f_back)
        frame = frame.f_back
    return (None if start is None else Site(start.f_code, start.f_lasti)), None


# NOTE [ Calling in somebody's place ]
# A warning is attributed to the Python frame that calls into torch or, in torch's Python functions,
# to their caller. Under a mode that would be our handler: filters by module would miss the warning,
# and one that is shown once for each line would be shown once in all. So the call is made by a
# function of one line that has the file, line and globals of the frame it stands in for.

_CALL: Final = (lambda gradtrace_call, args, kwargs: gradtrace_call(*args, **kwargs)).__code__
_STAND_IN: Final = _CALL.co_varnames


def is_stand_in(frame: FrameType) -> bool:
    """Whether a frame stands in for another one, which is further out on the stack."""
    return frame.f_code.co_varnames == _STAND_IN


class StandIns:
    """Functions that call in the place of a frame, made once for each place."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[object, Callable[..., Any]]] = {}

    def of(self, frame: FrameType) -> Callable[..., Any]:
        """Return what makes a call, given as (function, args, kwargs), in a frame's place."""
        code = frame.f_code
        made = self._made.get((id(code), frame.f_lasti))
        if made is None:
            line = frame.f_lineno or code.co_firstlineno
            name = code.co_name
            own = _CALL.replace(co_filename=code.co_filename, co_name=name, co_firstlineno=line)
            made = code, FunctionType(own, frame.f_globals)  # holding the code keeps its id
            self._made[id(code), frame.f_lasti] = made
        return made[1]


def _users_own(frame: FrameType | None) -> Site | None:
    while frame is not None:
        if category(frame.f_code) is Category.USER and not is_stand_in(frame):
            return Site(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None
