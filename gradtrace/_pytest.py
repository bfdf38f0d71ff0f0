"""The pytest plugin: the fixture, the marker, and what a failed test's report shows.

Pytest imports this in every run, so it loads neither torch nor networkx before a test uses them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import pytest

from gradtrace import _settings
from gradtrace._errors import GradtraceError

if TYPE_CHECKING:
    from gradtrace import Trace

_MARKER: Final = (
    "gradtrace(reached=, not_reached=, cut=, only_cuts=, all_reached=, but=, matches=, values=):"
    " record the test's body, and check afterwards which gradients arrived. See gradtrace.Trace's"
    " assertions of these names."
)
_CHECKS: Final = ("reached", "not_reached", "cut", "only_cuts", "all_reached", "but", "matches")
_OPTIONS: Final = ("values",)
_LINES: Final = 30  # the most that one `assert` statement is taken to span

_traces = pytest.StashKey["list[Trace]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command line's options."""
    group = parser.getgroup("gradtrace")
    group.addoption(
        "--gradtrace-dir",
        metavar="DIR",
        help="where traces of failed tests are written; by default in pytest's cache folder, which"
        " keeps those of the last runs (tmp_path_retention_count)",
    )
    group.addoption(
        "--gradtrace-update",
        action="store_true",
        help="write the files of trace.assert_matches() in place of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hand the options on, and make the marker known."""
    config.addinivalue_line("markers", _MARKER)
    _settings.folder = config.rootpath
    _settings.update_golden = config.getoption("--gradtrace-update")
    _settings.keep_answers = True


def pytest_unconfigure() -> None:
    """Leave nothing set."""
    _settings.folder = Path()
    _settings.update_golden = _settings.keep_answers = False
    _settings.latest_answer.clear()


# -- recording -------------------------------------------------------------------------------------


@pytest.fixture
def gradtrace(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module `gradtrace`. What the test records is written to files if it fails.

    At teardown it is checked that no recording was left open.
    """
    import gradtrace

    with _watched(request.node):
        yield gradtrace


class _watched:  # noqa: N801  # a context manager, read as a verb
    """Keep a test's traces for its report, and check that every recording was ended."""

    def __init__(self, item: pytest.Item) -> None:
        from gradtrace import _record

        self._recordings = _record
        self._before = _record.open_recordings()
        self._traces = item.stash.setdefault(_traces, [])

    def __enter__(self) -> None:
        _settings.started.append(self._traces.append)

    def __exit__(self, *_: object) -> None:
        _settings.started.remove(self._traces.append)
        left = self._recordings.end_recordings(self._before)
        if left:
            pytest.fail(
                f"{left} recording{'s were' if left > 1 else ' was'} not ended by the test, and"
                " would have gone on in the next one. Use `with gradtrace.record():`, or leave what"
                " __enter__ began.",
                pytrace=False,
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Record the body of a test that is marked, and check what the marker asks for."""
    _settings.latest_answer.clear()
    marks = [mark.kwargs for mark in item.iter_markers("gradtrace")]
    if not marks:
        return (yield)
    _check_marks(item)
    import gradtrace

    options = {name: mark[name] for mark in marks for name in _OPTIONS if name in mark}
    with _watched(item):
        with gradtrace.record(**options) as trace:
            result = yield
        if not getattr(item, "_excinfo", None):  # a unittest's failure, which is not raised
            _check(trace, marks)
    return result


def _check_marks(item: pytest.Item) -> None:
    known = (*_CHECKS, *_OPTIONS)
    for mark in item.iter_markers("gradtrace"):
        unknown = [name for name in mark.kwargs if name not in known]
        if unknown or mark.args:
            given = ", ".join([*map(repr, mark.args), *(f"{name}=" for name in unknown)])
            pytest.fail(
                f"the marker gradtrace doesn't take {given}. It takes"
                f" {', '.join(f'{name}=' for name in known)}.",
                pytrace=False,
            )


def _check(trace: Trace, marks: Iterable[Mapping[str, Any]]) -> None:
    """Make the assertions that the markers ask for; the message is all there is to see."""
    try:
        for mark in marks:
            for name in ("reached", "not_reached", "cut"):
                if name in mark:
                    getattr(trace, f"assert_{name}")(*_several(mark[name]))
            if "only_cuts" in mark:
                trace.assert_only_cuts(_several(mark["only_cuts"]))
            if mark.get("all_reached") or "but" in mark:
                trace.assert_all_reached(but=_several(mark.get("but", ())))
            if "matches" in mark:
                trace.assert_matches(mark["matches"])
    except (AssertionError, GradtraceError) as error:
        message = str(error)
    else:
        return
    pytest.fail(message, pytrace=False)


def _several(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) else [*given]


# -- the report ------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Explain a failed `assert trace.reached(...)`, and add what the test recorded."""
    _explain_answer(_error_of(item, call))
    report = yield
    traces = item.stash.get(_traces, [])
    if report.failed and traces:
        report.sections.append(("gradtrace", "\n\n".join(_told(item, traces))))
    if report.when == "teardown":
        item.stash[_traces] = []
    return report


def _error_of(item: pytest.Item, call: pytest.CallInfo[None]) -> BaseException | None:
    """Return what a test raised; a unittest's is not in the call yet."""
    kept = getattr(item, "_excinfo", None)
    info = kept[0] if kept else call.excinfo
    return None if info is None else info.value


def _explain_answer(error: BaseException | None) -> None:
    """Add the reason to an `assert` on what `Trace.reached` answered last."""
    if not isinstance(error, AssertionError) or not _settings.latest_answer:
        return
    answer = _settings.latest_answer.pop()
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_code.co_filename != answer.file:
        return
    if 0 <= answer.line - last.tb_lineno < _LINES:
        error.add_note(answer.text)


def _told(item: pytest.Item, traces: list[Trace]) -> Iterator[str]:
    """Write a test's traces, and yield the summary of each with its files."""
    folder = _folder(item.config) / _file_name(item.nodeid)
    for number, trace in enumerate(traces, 1):
        name = "trace" if number == 1 else f"trace-{number}"
        files = "\n".join(_written(trace, folder / name))
        title = "" if len(traces) == 1 else f"trace {number} of {len(traces)}\n\n"
        yield f"{title}{trace.summary()}\n\n{files}"


def _written(trace: Trace, base: Path) -> Iterator[str]:
    """Write one trace in both forms; a picture that can't be drawn costs no more than itself."""
    base.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".json", ".png"):
        try:
            yield str(trace.export(base.with_suffix(suffix)))
        except Exception as error:
            yield f"not written: {base.with_suffix(suffix)} ({error})"


def _file_name(nodeid: str) -> str:
    """Return a folder's name that is readable, and a test's own."""
    words = re.sub(r"[^\w.-]+", "-", nodeid).strip("-")
    return f"{words[-80:]}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}"


_run: Final = uuid.uuid4().hex


def _folder(config: pytest.Config) -> Path:
    """Return where this run's traces go; by default beside those of a few runs before it."""
    given = config.getoption("--gradtrace-dir")
    if given is not None:
        return Path(config.invocation_params.dir, given)
    cache = getattr(config, "cache", None)
    if cache is None:  # -p no:cacheprovider
        import tempfile

        return Path(tempfile.gettempdir(), "gradtrace", f"run-{_run}")
    runs = Path(cache.mkdir("gradtrace"))
    # All workers of one run of pytest-xdist share a folder.
    run = getattr(config, "workerinput", {}).get("testrunuid", _run)
    folder = runs / f"run-{run}"
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _forget(runs, int(config.getini("tmp_path_retention_count")))
    return folder


def _forget(runs: Path, kept: int) -> None:
    """Remove all but the latest runs' folders."""
    folders = sorted(runs.glob("run-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[max(kept, 1) :]:
        shutil.rmtree(folder, ignore_errors=True)
