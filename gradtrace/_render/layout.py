"""DOT -> SVG, PNG and PDF through a `dot` program, which need not be on PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from gradtrace._errors import ExportError, LayoutError

TIMEOUT: Final = 60.0  # seconds
_PURE: Final = "graphviz-pure"
_DPI: Final = 144.0
_LEAST_DPI: Final = 60.0
_GOOD_SIDE: Final = 4_000  # pixels of a PNG that viewers open at once
_LONGEST_SIDE: Final = 16_000  # below the 32,767 at which Graphviz shrinks a picture silently
_POINTS_PER_INCH: Final = 72.0


def lay_out(dot: str, form: str, *, timeout: float = TIMEOUT) -> bytes:
    """Return a picture of a graph.

    Args:
        dot: The graph in the DOT language.
        form: "svg", "png" or "pdf".
        timeout: Seconds that each run of the program may take.

    Raises:
        LayoutError: There is no program, or it failed.
        ExportError: The program does not write this form.
        TimeoutError: It took too long; a coarser picture may still be drawn.
    """
    program = find_program(form)
    if form != "png":
        return _run([program, f"-T{form}"], dot, timeout)
    svg = _run([program, "-Tsvg"], dot, timeout)
    return _run([program, "-Tpng", f"-Gdpi={_dpi(svg):.2f}"], dot, timeout)


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


def _run(command: Sequence[str], dot: str, timeout: float) -> bytes:
    """Return what a program writes to its standard output for a graph on its standard input.

    subprocess.run kills the program on a timeout and on KeyboardInterrupt.
    """
    try:
        done = subprocess.run(
            command, input=dot.encode(), capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        program = os.path.basename(command[0])
        raise TimeoutError(f"{program} took more than {timeout:g} s") from None
    except OSError as error:
        raise LayoutError(f"{command[0]} could not be run: {error}. Reinstall it.") from error
    message = done.stderr.decode(errors="replace").strip()
    if done.returncode or not done.stdout:
        raise LayoutError(
            f"{command[0]} ended with code {done.returncode} and said: {message[-500:]!r}. Export "
            "to .dot to see what it was given, and please report it."
        )
    return done.stdout


def _dpi(svg: bytes) -> float:
    """Return the resolution at which a picture fits the longest sides that viewers like."""
    found = re.search(rb'<svg width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    inches = max(map(float, found.groups())) / _POINTS_PER_INCH if found else 1.0
    good = min(_DPI, max(_LEAST_DPI, _GOOD_SIDE / inches))
    return min(good, _LONGEST_SIDE / inches)
