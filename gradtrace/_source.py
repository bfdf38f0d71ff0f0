"""Code object and instruction -> whose code it is, its line, and the text that stands there.

Recording keeps a code object and the offset of an instruction (`frame.f_lasti`), nothing else. Text
is made here, when somebody reads the trace, and remembered by place: a million ops come from a few
hundred places.
"""

# NOTE [ Is this text what ran? ]
# A file may have been edited since its code was compiled, and Python keeps no copy. So text is
# given out only where it agrees with the code object: an expression must stand exactly at the
# position that the compiler noted, and the code must know each name in it. Where the text that was
# read first does not agree, the file is looked at once more (a module that was edited and
# reloaded); where that does not agree either, there is no text. Line numbers come from the code
# object and stay right.

from __future__ import annotations

import ast
import dis
import importlib.util
import linecache
import os
import site
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache, cached_property, lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType

from gradtrace._records import Location
from gradtrace._syntax import (
    Position,
    SourceText,
    called_name,
    names_in,
    operands,
    target_names,
)


class Category(Enum):
    """Whose code a code object is.

    Attributes:
        TORCH: Torch's, gradtrace's or Python's own: skipped in the search for the line to blame.
        LIBRARY: An installed package's.
        USER: Anybody else's, also a notebook's cell and a string that was executed.
    """

    TORCH = "torch"
    LIBRARY = "library"
    USER = "user"


def category(code: CodeType) -> Category:
    """Return whose code this is; one look-up for a file that was met before."""
    try:
        return _categories[code.co_filename]
    except KeyError:
        if len(_categories) >= _MOST_FILES:  # each cell of a notebook is one
            _categories.clear()
        return _categories.setdefault(code.co_filename, _classify(code.co_filename))


def position(code: CodeType, lasti: int) -> Position:
    """Return where the expression of the instruction at offset `lasti` stands."""
    noted = next(islice(code.co_positions(), max(lasti, 0) // 2, None), None)
    line, end_line, column, end_column = noted or (None, None, None, None)
    if line is None or end_line is None or column is None or end_column is None:
        return Position(line or _line_of(code, lasti), None, None, None)
    return Position(line, end_line, column, end_column)


def location(code: CodeType, lasti: int) -> Location:
    """Return file, line and function of the instruction at offset `lasti`."""
    return _place(code, lasti).location


def expression(code: CodeType, lasti: int) -> str | None:
    """Return the expression's text on one line, at most 200 characters.

    Of an assignment to an attribute, to an item or to several names it is the whole statement,
    since `x.data` alone would look like a reading. None where the text can't be read or has
    changed.
    """
    return _place(code, lasti).expression


def statement(code: CodeType, lasti: int) -> str | None:
    """Return the statement's source lines as one line; None as for `expression`."""
    return _place(code, lasti).statement


def assigned_name(code: CodeType, lasti: int, output: int = 0) -> str | None:
    """Return the variable that takes one output of the expression.

    Args:
        code: The code object that was running.
        lasti: The offset of its instruction.
        output: Which output is asked for: of `a, b = f(x)` output 1 is "b". A single name, as in
            `K = f(x)`, takes output 0.

    Returns:
        A name such as "K" or "self.h"; None where the expression is not the whole right-hand side
        of an assignment, or where the target is no name (`d["k"]`, a loop's variable).
    """
    names = _place(code, lasti).assigned
    return names[output] if output < len(names) else None


def argument_names(code: CodeType, lasti: int) -> tuple[str | None, ...]:
    """Return the names of the expression's operands, in order; None for one that is no name.

    `K.mul(w[0], 2)` gives ("K", None): the receiver first, unless it is a module (`torch.mul`), and
    no literals. Keyword arguments follow the others. The elements of a list or tuple are operands
    themselves. After a starred argument the order is not known, and the names end.
    """
    return _place(code, lasti).arguments


def dropped_call(code: CodeType, lasti: int) -> str | None:
    """Return the name of what is called at offset `lasti` where nothing takes its result.

    `x.detach()` on a line of its own gives "detach", an operator "". None where something takes the
    result, where what is called has no name, and where the text can't be read.
    """
    return _place(code, lasti).dropped_call


def known_lines(file: str) -> tuple[str, ...]:
    """Return the lines of a file as they were last read for code that ran in this process.

    Nothing where they were not: a trace that was loaded names files of another machine, or whatever
    its author liked, and none of these is opened.
    """
    texts = _texts(file)
    return texts[0].lines if texts else ()


_MOST_FILES = 10_000

# Keyed by file name: it alone decides, and unlike a code object a string keeps its hash.
_categories: dict[str, Category] = {}

_TORCH_FILES = ("<frozen ", "<eval_with_key>")  # Python's import system; code that torch.fx writes
_TORCH_PACKAGES = ("torch", "functorch", "torchgen")  # the folders that torch's wheel brings
_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})


def _classify(file: str) -> Category:
    if file.startswith("<"):
        return Category.TORCH if file.startswith(_TORCH_FILES) else Category.USER
    path = os.path.normcase(os.path.abspath(file))
    if path.startswith(_torch_folders()):
        return Category.TORCH
    # Before the standard library, since site-packages lies inside its folder.
    if path.startswith(_library_folders()) or not _LIBRARY_FOLDERS.isdisjoint(Path(path).parts):
        return Category.LIBRARY
    return Category.TORCH if path.startswith(_standard_folders()) else Category.USER


@cache
def _torch_folders() -> tuple[str, ...]:
    own = Path(__file__).parent
    torch_file = _torch_file()
    if torch_file is None:
        return _prefixes([own])
    beside = Path(torch_file).parents[1]
    return _prefixes([own, *(beside / package for package in _TORCH_PACKAGES)])


def _torch_file() -> str | None:
    """Return the path of torch's `__init__.py`, found without importing it; None without torch."""
    module = sys.modules.get("torch")
    if module is not None:
        return module.__file__
    spec = importlib.util.find_spec("torch")
    return spec.origin if spec else None


@cache
def _library_folders() -> tuple[str, ...]:
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return _prefixes([*installed, *site.getsitepackages(), site.getusersitepackages()])


@cache
def _standard_folders() -> tuple[str, ...]:
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return _prefixes([*standard, Path(os.__file__).parent])


def _prefixes(folders: Sequence[str | Path]) -> tuple[str, ...]:
    """Return what the paths of files in these folders start with, links followed and not."""
    found = {real(folder) for folder in folders for real in (os.path.abspath, os.path.realpath)}
    return tuple(os.path.join(os.path.normcase(folder), "") for folder in sorted(found))


def _line_of(code: CodeType, lasti: int) -> int:
    """Return the line of an instruction, or of the nearest one before it that has a line."""
    found = code.co_firstlineno
    for start, _, line in code.co_lines():
        if start > max(lasti, 0):
            break
        found = line or found
    return found


class _Place:
    """One instruction of one code object; what its text says is worked out when asked for."""

    def __init__(self, code: CodeType, lasti: int) -> None:
        self._code = weakref.ref(code)
        self.lasti = max(lasti, 0)  # -1: a frame that has not started
        self.position = position(code, lasti)

    @property
    def code(self) -> CodeType:
        code = self._code()
        assert code is not None  # whoever asks for the place of an instruction has the code
        return code

    @cached_property
    def location(self) -> Location:
        return Location(self.code.co_filename, self.position.line, self.code.co_qualname)

    @cached_property
    def expression(self) -> str | None:
        if self._found is None:
            return None
        text, node = self._found
        return text.statement_of(node) if node in text.value_of else text.source_of(node)

    @cached_property
    def statement(self) -> str | None:
        if self._found is not None:
            text, node = self._found
            return text.statement_of(node)
        if self.position.column is not None:
            return None
        return next(_versions(self.code.co_filename)).line_at(self.position.line)

    @cached_property
    def assigned(self) -> tuple[str | None, ...]:
        """The variables by output."""
        if self._found is None:
            return ()
        text, node = self._found
        return target_names(text.target_of.get(node))

    @cached_property
    def arguments(self) -> tuple[str | None, ...]:
        if self._found is None:
            return ()
        text, node = self._found
        attribute = dis.opname[self.code.co_code[self.lasti]].endswith(("_ATTR", "_METHOD"))
        return operands(text, node, attribute)

    @cached_property
    def dropped_call(self) -> str | None:
        following = (dis.opname[step] for step in self.code.co_code[self.lasti + 2 :: 2])
        if next((step for step in following if step != "CACHE"), "") != "POP_TOP":
            return None
        return None if self._found is None else called_name(self._found[1])

    @cached_property
    def _found(self) -> tuple[SourceText, ast.AST] | None:
        """The text that ran and the expression in it, see NOTE [ Is this text what ran? ]."""
        for text in _versions(self.code.co_filename):
            node = text.node_at(self.position)
            if node is not None and _knows(self.code, names_in(node)):
                return text, node
        return None


# By the id of a code object, until it is freed. It would not do as the key itself: two with
# the same text in two files are equal, and hashing one is slow.
_places: dict[int, tuple[weakref.ref[CodeType], dict[int, _Place]]] = {}


def _place(code: CodeType, lasti: int) -> _Place:
    key = id(code)
    known = _places.get(key)
    if known is None or known[0]() is not code:
        known = _places[key] = weakref.ref(code, lambda _: _places.pop(key, None)), {}
    places = known[1]
    found = places.get(lasti)
    return found if found is not None else places.setdefault(lasti, _Place(code, lasti))


def _knows(code: CodeType, names: set[str]) -> bool:
    """Return whether a code object, or a function inside it, uses all of these names."""
    unknown = names - _names_of(code)
    # In a class, `self.__x` is compiled to `self._Class__x`.
    private = {name for name in unknown if name.startswith("__")}
    return unknown == private and all(
        any(known.endswith(name) for known in _names_of(code)) for name in private
    )


def _names_of(code: CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    inner = (_names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*inner)


_MOST_VERSIONS = 10


@lru_cache(maxsize=1_000)
def _texts(file: str) -> list[SourceText]:  # noqa: ARG001  # the key of the cache
    """Return the list of a file's texts; several where it was edited and reloaded."""
    return []


def _versions(file: str) -> Iterator[SourceText]:
    """Yield the texts of a file that were read before, the newest first, then what it holds now."""
    known = _texts(file)
    yield from tuple(known)
    for edited in (False, True):
        if edited:
            linecache.checkcache(file)  # forgets a text that is no longer the one on the disk
        lines = tuple(linecache.getlines(file))
        if all(lines != text.lines for text in known):
            known.insert(0, SourceText(lines))
            del known[_MOST_VERSIONS:]
            yield known[0]
