"""DOT -> SVG, PNG and PDF through a `dot` program, which need not be on PATH."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from gradtrace._errors import ExportError, LayoutError, LongWorkWarning
from gradtrace._render.wording import many

TIMEOUT: Final = 60.0  # seconds
_LONG: Final = 10.0  # seconds that need a warning
_PURE: Final = "graphviz-pure"
_DPI: Final = 144.0
_LEAST_DPI: Final = 60.0
_GOOD_SIDE: Final = 4_000  # pixels of a PNG that viewers open at once
_LONGEST_SIDE: Final = 16_000  # below the 32,767 at which Graphviz shrinks a picture silently
_POINTS_PER_INCH: Final = 72.0
_PER_SECOND: Final = 1_400.0  # boxes and arrows in the first second


def lay_out(
    dot: str,
    form: str,
    *,
    boxes: int | None = None,
    any_size: bool = True,
    timeout: float | None = TIMEOUT,
) -> bytes:
    """Return a picture of a graph.

    Args:
        dot: The graph in the DOT language.
        form: "svg", "png" or "pdf".
        boxes: How many the graph has, to say so while a person waits at a terminal.
        any_size: Whether to write it even if it can't be read in 4,000 pixels.
        timeout: Seconds that each run of the program may take; None for any time.

    Raises:
        LayoutError: There is no program, or it failed.
        ExportError: The program does not write this form.
        TimeoutError: It took too long; a coarser picture may still be drawn.
        OverflowError: It is too large to be read.
    """
    program = find_program(form)
    with _Progress(boxes) as progress:
        svg = b""
        if form != "pdf" or not any_size:
            svg = _run([program, "-Tsvg"], dot, timeout, progress)
        if not any_size and _inches(svg) * _LEAST_DPI > _GOOD_SIDE:
            raise OverflowError
        if form == "svg":
            return svg
        if form != "png":
            return _run([program, f"-T{form}"], dot, timeout, progress)
        return _run([program, "-Tpng", f"-Gdpi={_dpi(svg):.2f}"], dot, timeout, progress)


def seconds_for(boxes: int, arrows: int) -> float:
    """Return about how long a layout takes: time grows with the square of what is drawn.

    Source: chains of modules of 100 to 4,000 ops, laid out by graphviz-pure 0.2.2 on one core.
    """
    return ((boxes + arrows) / _PER_SECOND) ** 2


def warn_of_long_work(boxes: int, arrows: int) -> None:
    """Warn at the user's line if a layout of so much takes long."""
    seconds = seconds_for(boxes, arrows)
    if seconds < _LONG:
        return
    drawn = f"{many(boxes, 'box', 'boxes')} and {many(arrows, 'arrow')}"
    minutes = max(1, round(seconds / 60))
    warnings.warn(
        f"a picture of {drawn} was asked for, and to lay it out may take {many(minutes, 'minute')} "
        "or more. Without full=True, depth= and limit= a picture is ready in seconds; only='name' "
        "draws one tensor's ways, timeout=60 falls back to a coarser picture, and .dot needs no "
        "layout. Ctrl-C stops it and leaves no file.",
        LongWorkWarning,
        stacklevel=_frames_of_ours(),
    )


def _frames_of_ours() -> int:
    """Return the level of the user's line for `warnings.warn`, which counts from 1."""
    ours = str(Path(__file__).parents[1])
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


class _Progress:
    """Tells a person at a terminal that something still goes on; says nothing elsewhere."""

    def __init__(self, boxes: int | None) -> None:
        self._what = "a picture" if boxes is None else many(boxes, "box", "boxes")
        self._start = time.monotonic()
        self._width = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def tell(self) -> None:
        """Write over the last line how long it has taken up to now."""
        seconds = time.monotonic() - self._start
        self._show(f"gradtrace: laying out {self._what}, {seconds:.0f} s (Ctrl-C stops it)")

    def _show(self, text: str) -> None:
        if (text or self._width) and sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\r{text.ljust(self._width)}" + ("" if text else "\r"))
            sys.stderr.flush()
            self._width = len(text)


def find_program(form: str = "svg") -> str:
    """Return the path of the system's `dot`, or else of graphviz-pure.

    Raises:
        LayoutError: There is neither.
        ExportError: There is graphviz-pure only, which writes no PDF.
    """
    if dot := shutil.which("dot"):
        return dot
    if form == "pdf":
        raise ExportError(
            "a PDF was asked for, and this machine has no Graphviz: graphviz-pure writes .svg and "
            ".png only. Install Graphviz (https://graphviz.org/download), or export to .svg."
        )
    for candidate in _candidates():
        if found := shutil.which(candidate):
            return found
    raise LayoutError(
        "no layout program: neither Graphviz's dot on PATH nor graphviz-pure beside "
        f"{sys.executable}. `pip install graphviz-pure` gives one; .dot, .json and .graphml "
        "need none."
    )


def _candidates() -> Iterator[str]:
    """Yield where pip may have put the script of graphviz-pure, whether or not on PATH."""
    yield _PURE
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    folders.append(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    yield from (os.path.join(folder, _PURE) for folder in folders if folder)
    yield from _installed_files()


def _installed_files() -> Iterator[str]:
    """Yield the scripts that the package's own metadata lists (pip install --target and others)."""
    try:
        files = metadata.files(_PURE) or []
    except metadata.PackageNotFoundError:
        return
    yield from (str(file.locate()) for file in files if Path(file.name).stem == _PURE)


def _run(command: Sequence[str], dot: str, timeout: float | None, progress: _Progress) -> bytes:
    """Return what a program writes to its standard output for a graph on its standard input."""
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise LayoutError(f"{command[0]} could not be run: {error}. Reinstall it.") from error
    with child:
        try:
            output, errors = _talk(child, dot.encode(), timeout, progress)
        except subprocess.TimeoutExpired:
            child.kill()
            program = os.path.basename(command[0])
            raise TimeoutError(f"{program} took more than {timeout:g} s") from None
        except BaseException:  # Ctrl-C above all, after which leaving the block waits for nothing
            child.kill()
            child.wait()
            raise
    message = errors.decode(errors="replace").strip()
    if child.returncode or not output:
        raise LayoutError(
            f"{command[0]} ended with code {child.returncode} and said: {message[-500:]!r}. Export "
            "to .dot to see what it was given, and please report it."
        )
    return output


def _talk(
    child: subprocess.Popen[bytes], given: bytes, timeout: float | None, progress: _Progress
) -> tuple[bytes, bytes]:
    """Return what a program writes, and tell every second that it still works."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    sent: bytes | None = given
    while True:
        left = end - time.monotonic()
        try:
            return child.communicate(sent, timeout=min(1.0, max(left, 0.0)))
        except subprocess.TimeoutExpired:
            if left <= 1.0:
                raise
        sent = None  # what is not sent yet, the next call goes on with
        progress.tell()


def _inches(svg: bytes) -> float:
    """Return the longer side of a picture."""
    found = re.search(rb'<svg width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    return max(map(float, found.groups())) / _POINTS_PER_INCH if found else 1.0


def _dpi(svg: bytes) -> float:
    """Return the resolution at which a picture fits the longest sides that viewers like."""
    inches = _inches(svg)
    good = min(_DPI, max(_LEAST_DPI, _GOOD_SIDE / inches))
    return math.floor(min(good, _LONGEST_SIDE / inches) * 50) / 50  # the program rounds sides up
