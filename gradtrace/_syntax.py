"""Text of one file -> the expression at a position, its variable and its operands' names."""

from __future__ import annotations

import ast
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import takewhile
from typing import NamedTuple

_LONGEST = 200  # characters of one expression
_Span = tuple[int, int, int, int]  # line, column, end line, end column


class Position(NamedTuple):
    """Where the expression of an instruction stands.

    Attributes:
        line: Counted from 1.
        end_line: Likewise; None where Python runs without positions (`-X no_debug_ranges`).
        column: Bytes of UTF-8 before the expression in its first line, or None.
        end_column: Bytes of UTF-8 before its end in its last line, or None.
    """

    line: int
    end_line: int | None
    column: int | None
    end_column: int | None


class SourceText:
    """One version of one file, with its expressions by position.

    Attributes:
        lines: The lines with their ends.
        modules: Names that the file imports, and usual ones: in `torch.mul(x)` no receiver.
        target_of: For what acts in an assignment, the target: for the right-hand side, for the
            whole of `x += 1`, and in `a, b = x` for `a, b`, which unpacks.
        value_of: For the target of an assignment, what it is given.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        self.modules = {"torch", "nn", "F"}  # a notebook imports in one cell and uses in another
        self.target_of: dict[ast.AST, ast.expr] = {}
        self.value_of: dict[ast.AST, ast.AST] = {}
        self._nodes: dict[_Span, ast.AST] = {}
        self._statements: dict[int, ast.stmt] = {}  # those without a body, by each of their lines
        self._tree = _parsed("".join(lines))
        for node in ast.walk(self._tree) if self._tree else ():
            self._index(node)

    def node_at(self, where: Position) -> ast.AST | None:
        """Return the expression (or augmented assignment) that stands exactly there, or None."""
        if where.end_line is None or where.column is None or where.end_column is None:
            return None
        span = where.line, where.column, where.end_line, where.end_column
        if self._tree is None and span not in self._nodes:
            self._index_alone(span)
        return self._nodes.get(span)

    def source_of(self, node: ast.AST) -> str:
        """Return an expression's text as one line, at most 200 characters."""
        text = self._between(_span(node))
        if _dump(_parsed_piece(text)) == _dump(node):
            return _as_one_line(_without_comments(text).splitlines())
        # Python 3.11 misplaces what stands in an f-string of several lines.
        return _as_one_line([ast.unparse(node)])

    def statement_of(self, node: ast.AST) -> str:
        """Return the lines of the statement that an expression is part of, as one line.

        In the head of an `if` or of a loop, these are the lines of the expression.
        """
        first, _, last, _ = _span(self._statements.get(_span(node)[0], node))
        return _as_one_line(self.lines[first - 1 : last])

    def line_at(self, line: int) -> str | None:
        """Return one line, stripped; None where the text has no such line."""
        return _as_one_line(self.lines[line - 1 : line]) or None

    def _index(self, node: ast.AST) -> None:
        for span, acting in _acting(node):
            self._nodes.setdefault(span, acting)
        for target, value in _bindings(node):
            self.value_of[target] = value
            for outcome in _outcomes(value):
                self.target_of.setdefault(outcome, target)
            if isinstance(target, ast.Tuple | ast.List):
                self.target_of[target] = target
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            first, _, last, _ = _span(node)
            self._statements.update(dict.fromkeys(range(first, last + 1), node))
        self.modules.update(_imported(node))

    def _index_alone(self, span: _Span) -> None:
        """Parse one piece of a text that does not parse: a notebook's magic, half an edit."""
        piece = _parsed_piece(self._between(span))
        if isinstance(piece, ast.expr):
            piece.lineno, piece.col_offset, piece.end_lineno, piece.end_col_offset = span
            self._nodes[span] = piece

    def _between(self, span: _Span) -> str:
        first, column, last, end_column = span
        lines = [line.encode() for line in self.lines[first - 1 : last]]
        if not lines:
            return ""
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        return b"".join(lines).decode(errors="replace")


def called_name(node: ast.AST) -> str | None:
    """Return the name of the function or method that an expression calls, "" for an operator.

    None where what is called has no name, as in `nn.ReLU()(x)`.
    """
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    return None if isinstance(node, ast.Call) else ""


def names_in(node: ast.AST) -> set[str]:
    """Return the variables and attributes that an expression names."""
    parts = list(ast.walk(node))
    variables = {part.id for part in parts if isinstance(part, ast.Name)}
    return variables | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def target_names(target: ast.expr | None) -> tuple[str | None, ...]:
    """Return the names that an assignment gives, by output; None for a target that is no name."""
    if isinstance(target, ast.Tuple | ast.List):
        return tuple(map(_dotted, _before_star(target.elts)))
    return (_dotted(target),)


def operands(text: SourceText, node: ast.AST, attribute: bool) -> tuple[str | None, ...]:
    """Return the names of what an expression works on.

    Args:
        text: The text that it stands in.
        node: The expression.
        attribute: The instruction reads or writes an attribute: of `x.data` it works on `x`.
    """
    found = _operand_nodes(node, attribute, text.modules)
    if node in text.value_of:
        found = [*found, text.value_of[node]]
    return tuple(_dotted(node) for node in _before_star(_flat(found)) if not _is_literal(node))


def _is_literal(node: ast.AST) -> bool:
    """Whether a node is a plain number or text, such as 2 or -1."""
    if isinstance(node, ast.UnaryOp):
        return _is_literal(node.operand)
    return isinstance(node, ast.Constant)


def _operand_nodes(node: ast.AST, attribute: bool, modules: set[str]) -> list[ast.AST]:
    match node:
        case ast.Call():
            keywords = [keyword.value for keyword in node.keywords]
            return [*_receiver(node.func, modules), *node.args, *keywords]
        case ast.BinOp():
            return [node.left, node.right]
        case ast.AugAssign():
            return [node.target, node.value]
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.UnaryOp():
            return [node.operand]
        case ast.Subscript():
            return [node.value, node.slice]
        case ast.Attribute() if attribute:
            return [node.value]
        case ast.Name() | ast.Attribute():
            return [node]
    return []


def _receiver(function: ast.expr, modules: set[str]) -> list[ast.AST]:
    """Return what a method is called on; nothing for a function, also for one in a module."""
    if not isinstance(function, ast.Attribute):
        return []
    name = _dotted(function.value)
    return [] if name and name.partition(".")[0] in modules else [function.value]


def _flat(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.Tuple | ast.List):
            yield from _flat(node.elts)
        else:
            yield node


def _before_star(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return takewhile(lambda node: not isinstance(node, ast.Starred), nodes)


def _dotted(node: ast.AST | None) -> str | None:
    """Return "x" or "self.w"; None for anything but a variable and its attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else None
    return None


def _acting(node: ast.AST) -> Iterator[tuple[_Span, ast.AST]]:
    """Yield the positions that the compiler notes for what a node does, and what acts there."""
    if isinstance(node, ast.If | ast.While | ast.Assert):
        yield _span(node), node.test  # Python 3.11: bool(x) of `if x:` has the whole statement
    elif isinstance(node, ast.For):
        yield _span(node), node.iter
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield _span(node), node.generators[0].iter
    elif isinstance(node, ast.expr | ast.AugAssign):
        yield _span(node), node
        link = node.func if isinstance(node, ast.Call) else node
        if isinstance(link, ast.Attribute) and link.lineno != link.end_lineno:
            # In a chain over several lines, each link begins at its own attribute.
            _, _, line, end = _span(link)
            yield (line, end - len(link.attr), *_span(node)[2:]), node


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield the targets and values of an assignment."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AugAssign):
        yield node.target, node
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


def _outcomes(value: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions whose result a value may be: both sides of `f(x) if c else g(x)`."""
    if isinstance(value, ast.IfExp):
        yield from _outcomes(value.body)
        yield from _outcomes(value.orelse)
    elif isinstance(value, ast.BoolOp):
        for part in value.values:
            yield from _outcomes(part)
    else:
        yield value


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield a target with its value, for `a, b = f(x), g(x)` also each with its own."""
    yield target, value
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        stars = any(isinstance(part, ast.Starred) for part in [*target.elts, *value.elts])
        if len(target.elts) == len(value.elts) and not stars:
            for pair in zip(target.elts, value.elts, strict=True):
                yield from _pairs(*pair)


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the names that an import gives, but for those from another module than torch's."""
    match node:
        case ast.ImportFrom(module=str(module)) if not module.startswith("torch"):
            return
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]


def _parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of a text, or None where it is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the program's compiler has said what there was to say
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _parsed_piece(text: str) -> ast.AST | None:
    """Return the one expression or augmented assignment that a piece of text is, or None."""
    tree = _parsed(f"({text}\n)") or _parsed(text)
    if tree is None or len(tree.body) != 1:
        return None
    only = tree.body[0]
    return only.value if isinstance(only, ast.Expr) else only


def _dump(node: ast.AST | None) -> str:
    return ast.dump(node) if node else ""


def _span(node: ast.AST) -> _Span:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _without_comments(text: str) -> str:
    """Return a piece of text of several lines without its comments, which one line can't hold."""
    if "#" not in text:
        return text
    lines = text.splitlines(keepends=True)
    # In parentheses, since a piece of several lines stood in some; they take a line of their own.
    for token in tokenize.generate_tokens(StringIO(f"(\n{text}\n)").readline):
        if token.type == tokenize.COMMENT:
            line = lines[token.start[0] - 2]
            lines[token.start[0] - 2] = line[: token.start[1]] + line[token.end[1] :]
    return "".join(lines)


def _as_one_line(lines: Iterable[str]) -> str:
    text = " ".join(filter(None, map(str.strip, lines)))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
