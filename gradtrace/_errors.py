"""What can go wrong, one class for each thing that a user can do about it.

Every message has three parts: what was given, what would have fitted, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GradtraceError(Exception):
    """Base of all errors that gradtrace raises itself."""


class UnknownNameError(GradtraceError, LookupError):
    """A name that no tensor, module or variable of this trace has."""


class NoMatchError(UnknownNameError):
    """A pattern that matches no name of this trace."""


class NotATensorError(GradtraceError, TypeError):
    """Something that is neither a tensor nor a name was given where one is needed."""


class NotATraceError(GradtraceError, TypeError):
    """Something that is no trace was given where one is needed."""


class ForeignTensorError(GradtraceError, LookupError):
    """A tensor was given to a trace that knows names only, as one that was loaded from a file."""


class RecordingError(GradtraceError, RuntimeError):
    """`record` was used in a way that it cannot serve."""


class FileFormatError(GradtraceError, ValueError):
    """A file that is no trace, or one that this version cannot understand."""


class ExportError(GradtraceError, ValueError):
    """A picture or file that cannot be written as asked."""


class LayoutError(GradtraceError, RuntimeError):
    """The layout program is missing, failed, or took too long."""


class LongWorkWarning(UserWarning):
    """A picture that was asked for is so large that drawing it takes long."""


for _error in (
    LongWorkWarning,
    GradtraceError,
    UnknownNameError,
    NoMatchError,
    NotATensorError,
    NotATraceError,
    ForeignTensorError,
    RecordingError,
    FileFormatError,
    ExportError,
    LayoutError,
):
    _error.__module__ = "gradtrace"  # what users read in a traceback is where they can import it


def nearest(given: str, known: Iterable[str], limit: int = 3) -> str:
    """Return a sentence with the known names nearest to a given one, or an empty string."""
    plain = {str(name).casefold(): str(name) for name in known}
    found = difflib.get_close_matches(given.casefold(), plain, n=limit, cutoff=0.5)
    return f"Nearest: {', '.join(repr(plain[name]) for name in found)}. " if found else ""
