"""Text from code objects: whose code, which line, which expression, which names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import networkx
import pytest
import torch
from torch.overrides import TorchFunctionMode

from gradtrace import _source as source
from gradtrace._records import Location
from gradtrace._source import Category

Place = tuple[CodeType, int]

PRELUDE = """\
import torch
import torch.nn.functional as F
from types import SimpleNamespace
x, y, w = torch.ones(2), torch.ones(2), torch.ones(2, 2)
self, d, é = SimpleNamespace(x=x, w=w), {}, torch.ones(2)
"""


class Places(TorchFunctionMode):
    """Notes where each call to torch comes from, as the observer does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Place] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and source.category(frame.f_code) is not Category.USER:
            frame = frame.f_back
        assert frame is not None
        self.seen.append((frame.f_code, frame.f_lasti))
        return func(*args, **(kwargs or {}))


def places(code: CodeType) -> list[Place]:
    """Run a program and return the places in it that called torch, in order."""
    names: dict[str, Any] = {}
    with Places() as mode:
        exec(code, names)
    first = PRELUDE.count("\n") + 1
    return [place for place in mode.seen if source.position(*place).line >= first]


@pytest.fixture
def last_place(tmp_path: Path) -> Callable[[str], Place]:
    """A function that runs a program from a file and returns its last place that called torch."""

    def run(text: str, name: str = "program.py") -> Place:
        path = tmp_path / name
        path.write_text(PRELUDE + text, encoding="utf-8")
        return places(compile(PRELUDE + text, str(path), "exec"))[-1]

    return run


def code_of(file: str) -> CodeType:
    """Return some code that says it comes from this file."""
    return compile("", file, "exec")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (torch.nn.functional.__file__, Category.TORCH),
        (source.__file__, Category.TORCH),
        (ast.__file__, Category.TORCH),
        ("<frozen importlib._bootstrap>", Category.TORCH),
        ("<eval_with_key>.3", Category.TORCH),
        (networkx.__file__, Category.LIBRARY),
        (os.path.join(os.sep, "usr", "lib", "python3", "dist-packages", "a.py"), Category.LIBRARY),
        (__file__, Category.USER),
        ("<stdin>", Category.USER),
        ("<ipython-input-1-0123456789ab>", Category.USER),
        ("<doctest README.md[0]>", Category.USER),
        ("train.py", Category.USER),
        (os.path.join(os.sep, "home", "ada", "torch", "train.py"), Category.USER),
        (os.path.join(sys.prefix, "..", "train.py"), Category.USER),
        (os.path.join(os.path.dirname(torch.__file__) + "_mine", "a.py"), Category.LIBRARY),
    ],
)
def test_category_tells_whose_code_it_is(file: str, expected: Category) -> None:
    """Code belongs to torch, to a library or to the user by where its file lies."""
    assert source.category(code_of(file)) is expected
    assert source.category(code_of(file)) is expected  # as remembered


def test_category_knows_torch_without_importing_it() -> None:
    """A trace can be read in a process that never loads torch."""
    program = (
        "import sys; from gradtrace._source import category;"
        f"print(category(compile('', {torch.nn.functional.__file__!r}, 'exec')).value,"
        "'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["torch", "False"]


def test_a_known_file_costs_one_look_up() -> None:
    """The category of a file that was met before costs far less than a microsecond or two."""
    code = code_of("train.py")
    source.category(code)
    start = time.perf_counter()
    for _ in range(100_000):
        source.category(code)
    assert time.perf_counter() - start < 0.5


EXPRESSIONS = [
    # program, expression, variable, operands
    ("K = x + y", "x + y", "K", ("x", "y")),
    ("K: torch.Tensor = x + y", "x + y", "K", ("x", "y")),
    ("self.h = torch.add(self.x, y, alpha=3)", None, "self.h", ("self.x", "y", None)),
    ("K = x.detach() ; pass", "x.detach()", "K", ("x",)),
    ("K = (x * y).detach()", "(x * y).detach()", "K", (None,)),
    ("K = x.detach() * y\nx.sum()", "x.sum()", None, ("x",)),
    ("y = x.add(y, alpha=2).exp().detach()", None, "y", (None,)),
    ("K = F.linear(x, weight=w)", "F.linear(x, weight=w)", "K", ("x", "w")),
    ("K = -self.x", "-self.x", "K", ("self.x",)),
    ("K = x < y", "x < y", "K", ("x", "y")),
    ("K = x[0]", "x[0]", "K", ("x", None)),
    ("K = w[x > 0, :]", "w[x > 0, :]", "K", ("w", None, None)),
    ("K = torch.cat([x, self.x], dim=0)", None, "K", ("x", "self.x", None)),
    ("a = K = x + 1", "x + 1", "a", ("x", None)),
    ("a, b = x.chunk(2)", "x.chunk(2)", "a", ("x",)),
    ("a, b = y, x.exp()", "x.exp()", "b", ("x",)),
    ("d['k'] = x.exp()", "x.exp()", None, ("x",)),
    ("x += y", "x += y", "x", ("x", "y")),
    ("print((z := x.exp()) is None)", "x.exp()", "z", ("x",)),
    ("K = x.data", "x.data", "K", ("x",)),
    ("K = self.x.data", "self.x.data", "K", ("self.x",)),
    ("x.data = y", "x.data = y", None, ("x", "y")),
    ("x[0] = y[0]\nx[1] = 3", "x[1] = 3", None, ("x", None, None)),
    ("a, b = x", "a, b = x", "a", ("x",)),
    ("for row in x:\n    pass", "x", None, ("x",)),
    ("K = [row for row in x]", "x", None, ("x",)),
    ("K = x[0] and y.exp()", "y.exp()", "K", ("y",)),
    ("if x[0]:\n    pass\nelse:\n    pass", "x[0]", None, ("x", None)),
    ("K = é * x", "é * x", "K", ("é", "x")),
    ("with torch.no_grad():\n    K = x.exp()\n    y.sum()\n", None, None, None),
    ("K = float(x.sum())", "float(x.sum())", "K", (None,)),
    ("def f():\n    return x.exp()\nK = f()", "x.exp()", None, ("x",)),
    ("K = [t.exp() for t in (x, y)]", "t.exp()", None, ("t",)),
    ("args = (x, y)\nK = torch.mul(*args, out=None)", None, "K", ()),
    ("K = x.exp() if d is not None else y", "x.exp()", "K", ("x",)),
    ("K = (x\n     .exp()  # first (\n     .mul(y))", "x .exp() .mul(y)", "K", (None, "y")),
    ("K = torch.mul(\n    x,  # one\n\n    y,\n)", "torch.mul( x, y, )", "K", ("x", "y")),
    ("K = f'é {x.sum()}'", "f'é {x.sum()}'", "K", ()),
    ("s = f'''\n  é {1} {x.exp().tolist()}\n'''", "x.exp().tolist()", None, None),
]


@pytest.mark.parametrize(("program", "expression", "name", "operands"), EXPRESSIONS)
def test_expression_variable_and_operands(
    program: str,
    expression: str | None,
    name: str | None,
    operands: tuple[str | None, ...] | None,
    last_place: Callable[[str], Place],
) -> None:
    """The text, the variable and the operands' names are those of the call that happened."""
    place = last_place(program)
    if expression is not None:
        assert source.expression(*place) == expression
    assert source.assigned_name(*place) == name
    if operands is not None:
        assert (source.argument_names(*place) + (None,) * 3)[: len(operands)] == operands
        assert not any(source.argument_names(*place)[len(operands) :])


def test_each_output_has_its_own_variable(last_place: Callable[[str], Place]) -> None:
    """Of several outputs, each is named by its own target, up to a starred one."""
    place = last_place("a, (self.b), *rest = torch.ones(4).unbind()")
    names = [source.assigned_name(*place, output=output) for output in range(4)]
    assert names == ["a", "self.b", None, None]


def test_two_calls_on_one_line_are_told_apart(last_place: Callable[[str], Place]) -> None:
    """The position is the expression's, not the line's."""
    code, _ = last_place("K = x.exp() * y.detach()")
    texts = [source.expression(*place) for place in places(code)]
    assert texts == ["x.exp()", "y.detach()", "x.exp() * y.detach()"]


def test_location_and_statement(last_place: Callable[[str], Place]) -> None:
    """A place has the file as compiled, its own line in a chain, and the whole statement."""
    code, lasti = last_place(
        "class A:\n    def f(self):\n        return (x\n            .exp())\nA().f()"
    )
    line = PRELUDE.count("\n") + 4
    assert source.location(code, lasti) == Location(code.co_filename, line, "A.f")
    assert source.statement(code, lasti) == "return (x .exp())"


def test_private_attributes_are_known_to_the_code(last_place: Callable[[str], Place]) -> None:
    """A name that Python mangles inside a class still agrees with the code object."""
    place = last_place(
        "class A:\n    def f(self):\n        self.__h = x\n        return self.__h.exp()\nA().f()"
    )
    assert source.expression(*place) == "self.__h.exp()"


def test_a_long_expression_is_shortened(last_place: Callable[[str], Place]) -> None:
    """An expression never takes more than 200 characters."""
    text = source.expression(*last_place("K = x + (" + " + ".join(["1"] * 200) + ")"))
    assert text is not None
    assert len(text) == 200
    assert text.endswith("...")


def test_equal_code_in_two_files_keeps_its_file(last_place: Callable[..., Place]) -> None:
    """Two copies of one program are told apart, although their code objects are equal."""
    one, other = last_place("x.exp()", name="one.py"), last_place("x.exp()", name="other.py")
    assert one == other
    assert source.location(*one).file.endswith("one.py")
    assert source.location(*other).file.endswith("other.py")


def test_an_edited_file_gives_no_nonsense(tmp_path: Path) -> None:
    """Where another text stands in the file by now, there is no text; the line stays."""
    path = tmp_path / "edited.py"
    code = compile(PRELUDE + "K = x + y\n", str(path), "exec")
    [place] = places(code)
    path.write_text(PRELUDE + "K = q + q\n")
    assert source.expression(*place) is None
    assert source.statement(*place) is None
    assert source.assigned_name(*place) is None
    assert source.location(*place).line == PRELUDE.count("\n") + 1


def test_a_reloaded_file_is_read_again(last_place: Callable[..., Place]) -> None:
    """Old code keeps the text that was read for it, new code gets the new one."""
    old = last_place("K = x.exp()", name="module.py")
    assert source.expression(*old) == "x.exp()"
    new = last_place("pass\nK = x.detach()", name="module.py")
    assert source.expression(*new) == "x.detach()"
    assert source.expression(*old) == "x.exp()"


def test_half_an_edit_still_gives_the_expression(tmp_path: Path) -> None:
    """In a file that does not parse, the piece at the position may still be read."""
    path = tmp_path / "notebook.py"
    code = compile(PRELUDE + "K = x.add(y)\nL = x.data\n", str(path), "exec")
    path.write_text(PRELUDE + "K = x.add(y)\nL = x.data\n%matplotlib inline\n")
    first, second = places(code)
    assert source.expression(*first) == "x.add(y)"
    assert source.argument_names(*first) == ("x", "y")
    assert source.argument_names(*second) == ("x",)
    assert source.assigned_name(*first) is None
    assert source.statement(*first) == "K = x.add(y)"


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"K = (\n" * 50, b"x" * 10_000])
def test_a_file_that_is_no_python_fails_nowhere(content: bytes, tmp_path: Path) -> None:
    """Any bytes in the place of the source give no text, and no error."""
    path = tmp_path / "odd.py"
    [place] = places(compile(PRELUDE + "K = x + y\n", str(path), "exec"))
    path.write_bytes(content)
    assert source.expression(*place) is None
    assert source.statement(*place) is None
    assert source.argument_names(*place) == ()


def test_an_executed_string_has_a_line_and_no_text() -> None:
    """Code without a file has its place, and None for everything else."""
    [place] = places(compile(PRELUDE + "K = x + y", "<string>", "exec"))
    assert source.location(*place) == Location("<string>", PRELUDE.count("\n") + 1, "<module>")
    assert source.expression(*place) is None
    assert source.assigned_name(*place) is None


def test_without_positions_the_line_remains(tmp_path: Path) -> None:
    """Under `-X no_debug_ranges` there is a line and its statement, and nothing finer."""
    path = tmp_path / "bare.py"
    path.write_text("import sys\ndef f():\n    return sys._getframe(0)\nframe = f()\n")
    program = (
        "import runpy; from gradtrace import _source as source;"
        f"frame = runpy.run_path({str(path)!r})['frame'];"
        "place = frame.f_code, frame.f_lasti;"
        "print(source.position(*place)[:2], source.expression(*place), source.statement(*place))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "(3, None) None return sys._getframe(0)"


def test_a_frame_that_has_not_started_has_the_first_line() -> None:
    """An offset of -1 is taken for the beginning."""

    def generator() -> Any:
        yield

    code = generator.__code__
    assert source.location(code, -1).line == code.co_firstlineno
    assert source.expression(code, -1) is None
    assert source.argument_names(code, -1) == ()


def test_a_place_that_was_read_is_not_read_again(last_place: Callable[[str], Place]) -> None:
    """A million ops from one place cost about a million look-ups."""
    code, lasti = last_place("K = x + y")
    start = time.perf_counter()
    for _ in range(20_000):
        source.location(code, lasti)
        source.expression(code, lasti)
        source.assigned_name(code, lasti)
        source.argument_names(code, lasti)
    assert time.perf_counter() - start < 1.0


def test_reading_warns_nobody(last_place: Callable[[str], Place]) -> None:
    """A file with an outdated escape sequence is read in silence (warnings are errors here)."""
    with pytest.warns((DeprecationWarning, SyntaxWarning)):
        place = last_place("K = '\\d', x.exp()")
    assert source.expression(*place) == "x.exp()"
