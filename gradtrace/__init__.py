"""gradtrace: why did this parameter get no gradient?

    with gradtrace.record() as trace:
        loss = step(model, batch); loss.backward()
    print(trace.explain("encoder.weight"))
    trace.export("step.png")

Each public name is loaded on first use, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradtrace._version import __version__

if TYPE_CHECKING:
    from gradtrace._diff import LeafDiff, OpDiff, TraceDiff
    from gradtrace._errors import (
        ExportError,
        FileFormatError,
        ForeignTensorError,
        GradtraceError,
        LayoutError,
        LongWorkWarning,
        NoMatchError,
        NotATensorError,
        NotATraceError,
        RecordingError,
        UnknownNameError,
    )
    from gradtrace._explain import Explanation
    from gradtrace._record import last_trace, record
    from gradtrace._records import (
        BackwardPass,
        Cut,
        CutKind,
        Gradient,
        Hazard,
        HazardKind,
        Leaf,
        Location,
        Need,
        Op,
        Status,
        Term,
    )
    from gradtrace._trace import Trace, load

_HOMES = {
    "_errors": (
        "ExportError FileFormatError ForeignTensorError GradtraceError LayoutError"
        " LongWorkWarning NoMatchError NotATensorError NotATraceError"
        " RecordingError UnknownNameError"
    ),
    "_diff": "LeafDiff OpDiff TraceDiff",
    "_explain": "Explanation",
    "_record": "last_trace record",
    "_records": (
        "BackwardPass Cut CutKind Gradient Hazard HazardKind Leaf Location Need Op Status Term"
    ),
    "_trace": "Trace load",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "BackwardPass",
    "Cut",
    "CutKind",
    "Explanation",
    "ExportError",
    "FileFormatError",
    "ForeignTensorError",
    "Gradient",
    "GradtraceError",
    "Hazard",
    "HazardKind",
    "LayoutError",
    "Leaf",
    "LeafDiff",
    "Location",
    "LongWorkWarning",
    "Need",
    "NoMatchError",
    "NotATensorError",
    "NotATraceError",
    "Op",
    "OpDiff",
    "RecordingError",
    "Status",
    "Term",
    "Trace",
    "TraceDiff",
    "UnknownNameError",
    "__version__",
    "last_trace",
    "load",
    "record",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gradtrace' has no attribute {name!r}")
    value = getattr(import_module(f"gradtrace.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
