"""Every example runs by itself, and README.md quotes what it says.

After a change of wording, `GRADTRACE_NEW_GOLD=1 python -m pytest tests/test_examples.py` writes the
new lines into README.md; read them before you keep them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from gradtrace import CutKind, Status

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
EXAMPLES = sorted((ROOT / "examples").glob("[!t]*.py"))
TESTS = ROOT / "examples" / "test_stop_gradient.py"

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>output of|from) (?P<example>\S+) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_DECIMAL = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")


class Run(NamedTuple):
    """One run of an example."""

    code: int
    output: str
    errors: str
    pictures: dict[str, bytes]


def run_python(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, with the checked-out package and not an installed one."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


@functools.cache
def run_example(example: Path) -> Run:
    """Run an example once, whatever is asked of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = run_python(example, folder)
        pictures = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
    output = done.stdout.replace(f"{ROOT}{os.sep}", "")
    return Run(done.returncode, output, done.stderr, pictures)


def blocks(mark: str | None, language: str | None = None) -> list[re.Match[str]]:
    """Return README's fenced blocks with a mark before them, or those without."""
    found = _BLOCK.finditer(README.read_text(encoding="utf-8"))
    return [
        block for block in found if block["mark"] == mark and language in (None, block["language"])
    ]


def masked(text: str) -> str:
    """Leave out what differs between processors and versions of torch: digits of decimals."""
    return _DECIMAL.sub("#", text)


def decimals(text: str) -> list[float]:
    """Return the decimal numbers of a text."""
    return [float(number) for number in _DECIMAL.findall(text)]


# What README quotes of each example: paragraphs of its output.
QUOTES = {
    "examples/quickstart.py": slice(0, -1),
    "examples/detach.py": slice(0, 1),
    "examples/detach_and_use.py": slice(1, 2),
    "examples/gan_digits.py": slice(1, 2),
    "examples/vqvae_digits.py": slice(1, 2),
}


def quote_of(example: str) -> str:
    """Return the part of an example's output that README is to quote."""
    paragraphs = run_example(ROOT / example).output.split("\n\n")
    return "\n\n".join(paragraphs[QUOTES[example]]) + "\n"


def write_quotes() -> None:
    """Put what the examples print now into README."""

    def quoted(block: re.Match[str]) -> str:
        if block["mark"] != "output of":
            return block[0]
        head = f"<!-- output of {block['example']} -->\n```{block['language']}\n"
        return f"{head}{quote_of(block['example'])}```"

    text = README.read_text(encoding="utf-8")
    README.write_text(_BLOCK.sub(quoted, text), encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_draws(example: Path) -> None:
    """An example runs without a warning, its assertions hold, and it says where its picture is."""
    run = run_example(example)
    assert run.code == 0, run.errors
    picture = f"examples-output/{example.stem}.png"
    assert list(run.pictures) == [picture]
    assert run.output.replace(os.sep, "/").endswith(f"picture: {picture}\n")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_picture_can_be_seen(example: Path) -> None:
    """The picture is a PNG of a size that a screen shows."""
    for picture in run_example(example).pictures.values():
        check_png(picture)


def check_png(picture: bytes) -> None:
    """Check the parts of a PNG that a viewer needs: signature, header, size and end."""
    assert picture[:16] == b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert 200 < width < 8_000
    assert 200 < height < 8_000
    assert picture[-8:-4] == b"IEND"


@pytest.mark.parametrize("example", QUOTES)
def test_readme_quotes_what_an_example_prints(example: str) -> None:
    """Quoted output is what an example prints; decimals may differ by 5 %."""
    if os.environ.get("GRADTRACE_NEW_GOLD"):
        write_quotes()
    quotes = [block for block in blocks("output of") if block["example"] == example]
    assert len(quotes) == 1
    quoted, printed = quotes[0]["text"], quote_of(example)
    assert masked(quoted) == masked(printed)
    assert decimals(quoted) == pytest.approx(decimals(printed), rel=0.05)


def test_readme_quotes_known_examples() -> None:
    """No quote goes unchecked, and quoted code stands in the example that is named."""
    assert {block["example"] for block in blocks("output of")} == set(QUOTES)
    for block in blocks("from"):
        assert block["text"] in (ROOT / block["example"]).read_text(encoding="utf-8")


def test_readme_code_runs(tmp_path: Path) -> None:
    """README's Python blocks run one after the other, as somebody would paste them."""
    script = tmp_path / "readme.py"
    script.write_text("\n".join(block["text"] for block in blocks(None, "python")), "utf-8")
    done = run_python(script, tmp_path)
    assert done.returncode == 0, done.stderr
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"step.svg", "student.png", "all.dot", "coarse.svg", "step.json"}
    check_png((tmp_path / "student.png").read_bytes())
    assert "\ndropped h.detach() None\n" in done.stdout
    if hasattr(torch._C._autograd.SavedTensor, "data"):
        assert "\nsilent_write h.data.add_(1) h * h\n" in done.stdout
    golden = (tmp_path / "flow" / "student.json").read_text(encoding="utf-8")
    assert golden in [block["text"] for block in blocks(None, "text")]


# A stop-gradient that is lost or comes in, and the test that has to notice.
BROKEN = {
    "    with torch.no_grad():\n": ("    if True:\n", "test_the_target_network_is_not_trained"),
    "dim=1).detach()\n": ("dim=1)\n", "test_byol_does_not_collapse"),
    "self.predictor(self.online(one))": (
        "self.predictor(self.online(one).detach())",
        "test_byol_does_not_collapse",
    ),
    "(code - z).detach()": ("(code - z)", "test_each_term_of_a_vqvae_trains_its_side"),
    "(code, z.detach())": ("(code, z)", "test_each_term_of_a_vqvae_trains_its_side"),
}


def run_tests(file: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file of tests, with the plugin."""
    installed = importlib.metadata.entry_points(group="pytest11", name="gradtrace")
    plugin = () if installed else ("-p", "gradtrace._pytest")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "--rootdir", file.parent, *plugin, file],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def test_tests_to_copy_pass(tmp_path: Path) -> None:
    """The tests in examples/ hold."""
    file = tmp_path / TESTS.name
    file.write_text(TESTS.read_text(encoding="utf-8"), encoding="utf-8")
    done = run_tests(file)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("before", BROKEN)
def test_tests_to_copy_notice(before: str, tmp_path: Path) -> None:
    """Each fails when a stop-gradient that it is for is gone, or one comes in."""
    after, noticed_by = BROKEN[before]
    text = TESTS.read_text(encoding="utf-8")
    assert text.count(before) == 1
    file = tmp_path / TESTS.name
    file.write_text(text.replace(before, after), encoding="utf-8")
    done = run_tests(file)
    assert f"FAILED {TESTS.name}::{noticed_by}" in done.stdout, done.stdout
    assert "1 failed, 2 passed" in done.stdout


def test_readme_explains_every_word() -> None:
    """README's tables have a row for each status and each kind of cut, in their order."""
    rows = re.findall(r"^\| `(\w+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [*Status, *CutKind]


def test_readme_pictures_exist() -> None:
    """README's pictures are in the repository, and small enough to load at once."""
    for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        picture = (ROOT / name).read_bytes()
        check_png(picture)
        assert len(picture) < 150_000
