r"""Graph <-> JSON document, GraphML, and atomic writes for every format.

The `.json` document, version 1
-------------------------------
One object, in plain ASCII; it holds values only, and reading it runs nothing.

    {
      "format": "gradtrace",
      "version": 1,
      "graph": {"torch": "2.13.0", "passes": [{"index": 0, ...}], "gradients": [...], ...},
      "nodes": [{"id": 0, "kind": "leaf", "name": "encoder.weight", ...}, ...],
      "edges": [{"source": 0, "target": 3, "key": 0, "tensor": "encoder.weight", ...}, ...]
    }

- `version` counts changes that an older reader could not understand; such a file is refused by it.
  Attributes may be added within a version: a reader keeps what it does not know, and takes the
  default of the tables below for what an older writer did not know.
- `graph` holds the graph's own attributes, except for `version`, which stands above. A backward
  pass, a gradient and an overwrite, tuples of pairs in the graph, are objects here.
- `nodes` come in the graph's order, with an `id` each; `edges` come by the node that they lead to.
  `source` and `target` are ids, `key` tells parallel edges apart. Everything beside these is an
  attribute. `_NODE`, `_EDGE`, `_PASS`, `_GRADIENT`, `_OVERWRITE` and `_GRAPH` below name each with
  what fits.
- A tuple is a list. A float that JSON has no number for is one of the strings "NaN", "Infinity" and
  "-Infinity". A string that reads so, after any number of backslashes, is written with one
  backslash more: a variable named `NaN` is "\\NaN" in the file.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import networkx as nx

from gradtrace._errors import ExportError, FileFormatError
from gradtrace._records import CutKind

_FORMAT: Final = "gradtrace"
_VERSION: Final = 1

Attributes = dict[str, Any]


_SAVE_AGAIN: Final = "trace.save(path) writes files that can be read; save the trace again."


class _MisfitError(Exception):
    """What does not fit in a document and what would; `load_graph` adds the file's name."""

    def __init__(self, problem: str, remedy: str = _SAVE_AGAIN) -> None:
        super().__init__(f"{problem} {remedy}")


# -- what fits -------------------------------------------------------------------------------------

_REQUIRED: Final = object()


class _Form(NamedTuple):
    """What fits at one place of a document.

    Attributes:
        words: For the message, such as "an integer".
        fits: Takes a decoded value.
        default: The value where the place is missing; `_REQUIRED` where that is an error.
    """

    words: str
    fits: Callable[[Any], bool]
    default: object = _REQUIRED


def _maybe(form: _Form) -> _Form:
    return _Form(f"{form.words} or null", lambda value: value is None or form.fits(value))


def _each(form: _Form) -> _Form:
    return _Form(
        f"a list, each item {form.words}",
        lambda value: type(value) is tuple and all(map(form.fits, value)),
    )


def _pair(first: _Form, second: _Form) -> _Form:
    return _Form(
        f"a pair of {first.words} and {second.words}",
        lambda value: (
            type(value) is tuple
            and len(value) == 2
            and first.fits(value[0])
            and second.fits(value[1])
        ),
    )


def _one_of(words: Iterable[str]) -> _Form:
    known = tuple(map(str, words))
    return _Form(f"one of {', '.join(map(repr, known))}", lambda value: value in known)


_TEXT = _Form("a string", lambda value: type(value) is str)
_FLAG = _Form("true or false", lambda value: type(value) is bool)
_COUNT = _Form("an integer from 0", lambda value: type(value) is int and value >= 0)
_NUMBER = _Form("a number", lambda value: type(value) in (int, float))
_PASSES = _each(_COUNT)  # that the passes and nodes exist is checked when all are read
_SHAPE = _each(_COUNT)

_PLACE = {
    "file": _maybe(_TEXT),
    "line": _maybe(_COUNT),
    "function": _maybe(_TEXT),
    "source": _maybe(_TEXT),
    "called_from_file": _maybe(_TEXT)._replace(default=None),
    "called_from_line": _maybe(_COUNT)._replace(default=None),
    "called_from_function": _maybe(_TEXT)._replace(default=None),
}

_NODE = {
    "kind": _one_of(["leaf", "input", "op", "escape"]),
    "name": _maybe(_TEXT),
    "op": _maybe(_TEXT),
    "grad_fn": _maybe(_TEXT),
    "module": _TEXT,
    **_PLACE,
    "requires_grad": _FLAG,
    "shape": _maybe(_SHAPE),
    "dtype": _maybe(_TEXT),
    "device": _maybe(_TEXT),
    "cut": _maybe(_one_of(CutKind)),
    "reached": _PASSES,
    "root_of": _PASSES,
    "shares_storage_with": _maybe(_COUNT),
    "grad_mode": _one_of(["grad", "no_grad", "inference_mode"]),
    "flavour": _TEXT._replace(default=""),
    "writes_to": _each(_COUNT)._replace(default=()),
    "filled_unseen": _FLAG._replace(default=False),
    "dropped": _FLAG._replace(default=False),
    "result_names": _each(_maybe(_TEXT))._replace(default=()),
    "result_shapes": _each(_SHAPE)._replace(default=()),
    "result_requires_grad": _each(_FLAG)._replace(default=()),
}

_EDGE = {
    "tensor": _maybe(_TEXT),
    "output": _COUNT,
    "input": _COUNT,
    "shape": _SHAPE,
    "dtype": _TEXT,
    "device": _TEXT,
    "requires_grad": _FLAG,
    "reached": _PASSES,
    "undefined": _PASSES,
    "not_requested": _PASSES,
    "missed": _PASSES._replace(default=()),
    "linked": _maybe(_FLAG),
    "captured": _FLAG._replace(default=False),
    "norms": _each(_pair(_COUNT, _NUMBER)),
    "weak": _FLAG,
    "apart": _maybe(_one_of(CutKind))._replace(default=None),
}

_PASS = {
    "index": _COUNT,
    "kind": _one_of(["backward", "grad"]),
    "roots": _each(_COUNT),
    "root_outputs": _each(_COUNT),
    "root_names": _each(_TEXT),
    "transformed": _each(_COUNT)._replace(default=()),
    **_PLACE,
    "inputs": _maybe(_each(_maybe(_TEXT))),
    "create_graph": _FLAG,
    "retain_graph": _FLAG,
    "error": _maybe(_TEXT),
    "inside": _maybe(_COUNT),
    "internal": _FLAG._replace(default=False),
    "observed": _FLAG,
    "captured": _each(_pair(_COUNT, _COUNT))._replace(default=()),
}

_GRADIENT = {
    "node": _COUNT,
    "backward_pass": _COUNT,
    "shape": _SHAPE,
    "dtype": _TEXT,
    "norm": _maybe(_NUMBER),
    "order": _COUNT,
    "cleared_file": _maybe(_TEXT),
    "cleared_line": _maybe(_COUNT),
    "cleared_function": _maybe(_TEXT),
}

_OVERWRITE = {
    "op": _TEXT,
    **_PLACE,
    "module": _TEXT,
    "tensor": _maybe(_TEXT),
    "needed_by": _COUNT,
    "backward_pass": _COUNT,
    "silent": _FLAG,
}

_GRAPH = {
    "torch": _TEXT,
    "when": _TEXT,
    "gradtrace": _TEXT,
    "values": _one_of(["leaves", "edges", "none"]),
    "ops_seen": _COUNT,
    "troubles": _each(_TEXT)._replace(default=()),
}

_DOCUMENT_KEYS = ("graph", "nodes", "edges")
# The graph's attributes that are tuples of records, each a tuple of pairs.
_RECORDS = {"passes": _PASS, "gradients": _GRADIENT, "overwrites": _OVERWRITE}
_LATER_RECORDS = {"overwrites"}  # files of the first writers have none
_NODE_PLACE = {"id": _COUNT}
_EDGE_PLACE = {"source": _COUNT, "target": _COUNT, "key": _COUNT}


# -- writing ---------------------------------------------------------------------------------------


def json_bytes(graph: nx.MultiDiGraph) -> bytes:
    """Return the graph's `.json` document; the same graph gives the same bytes."""
    own = _encoded_items(graph.graph)
    version = own.pop("version")
    for name in _RECORDS:
        own[name] = [_encoded_items(dict(record)) for record in graph.graph[name]]
    nodes = ({"id": node, **_encoded_items(data)} for node, data in graph.nodes(data=True))
    # By target: so a reader adds the edges as the recorder did, and finds them in the same order.
    edges = (
        {"source": source, "target": target, "key": key, **_encoded_items(data)}
        for source, target, key, data in graph.in_edges(keys=True, data=True)
    )
    text = (
        f'{{\n"format": {_dumped(_FORMAT)},\n"version": {_dumped(version)},\n'
        f'"graph": {_dumped(own)},\n"nodes": {_one_a_line(nodes)},\n'
        f'"edges": {_one_a_line(edges)}\n}}\n'
    )
    return text.encode("ascii")


def graphml_bytes(graph: nx.MultiDiGraph) -> bytes:
    """Return the graph as GraphML, which has neither tuples nor None.

    A tuple is its JSON text, None is left out, and a character that XML cannot hold is U+FFFD.
    """
    plain = nx.MultiDiGraph(**_graphml_items(graph.graph))
    plain.add_nodes_from((node, _graphml_items(data)) for node, data in graph.nodes(data=True))
    plain.add_edges_from(
        (source, target, key, _graphml_items(data))
        for source, target, key, data in graph.edges(keys=True, data=True)
    )
    file = io.BytesIO()
    nx.write_graphml_xml(plain, file)
    return file.getvalue()


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that at any moment the old one or the new one is there, whole.

    A link is followed, an existing file's permissions are kept, and a device is written to.

    Raises:
        ExportError: The folder does not exist, or the path is a folder.
        OSError: The system refuses to write there.
    """
    given = Path(path)
    target = given.resolve()
    if given.is_dir():
        raise ExportError(
            f"can't write {str(given)!r}: it is a folder. "
            "A path of a file would have fitted; add a file name with a suffix."
        )
    if given.exists() and not given.is_file():
        given.write_bytes(data)  # replacing /dev/null or a pipe would destroy it
        return
    if not target.parent.is_dir():
        raise ExportError(
            f"can't write {str(given)!r}: there is no folder {str(target.parent)!r}. "
            "A path in an existing folder would have fitted; create the folder first."
        )
    _replace(target, data)


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{_FORMAT}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except BaseException:  # also KeyboardInterrupt: nothing half written stays behind
        temporary.unlink(missing_ok=True)
        raise


def _dumped(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _one_a_line(items: Iterable[Attributes]) -> str:
    lines = ",\n".join(map(_dumped, items))
    return f"[\n{lines}\n]" if lines else "[]"


_UNFINISHED_NUMBERS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _encoded_items(attributes: Mapping[str, Any]) -> Attributes:
    return {name: _encoded(value) for name, value in attributes.items()}


def _encoded(value: Any) -> Any:
    """Return a value as JSON has it, see the module's docstring."""
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, str):
        return f"\\{value}" if value.lstrip("\\") in _UNFINISHED_NUMBERS else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# What XML 1.0 allows, section 2.2.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _graphml_items(attributes: Mapping[str, Any]) -> Attributes:
    return {
        _NOT_XML.sub("\ufffd", name): _graphml_value(value)
        for name, value in attributes.items()
        if value is not None
    }


def _graphml_value(value: Any) -> Any:
    text = _dumped(_encoded(value)) if isinstance(value, tuple) else value
    return _NOT_XML.sub("\ufffd", text) if isinstance(text, str) else text


# -- reading ---------------------------------------------------------------------------------------


def load_graph(path: str | os.PathLike[str]) -> nx.MultiDiGraph:
    """Return the graph that a `.json` document holds, equal to the one that was written.

    Raises:
        FileFormatError: The file is no such document, or something in it does not fit.
        OSError: The file can't be opened.
    """
    data = Path(path).read_bytes()
    try:
        return _graph_from(_parsed(data))
    except _MisfitError as misfit:
        raise FileFormatError(f"can't read {os.fspath(path)!r} as a trace: {misfit}") from None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is no UTF-8"
    except json.JSONDecodeError as error:
        found = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except ValueError as error:  # an integer of more digits than Python converts
        found = str(error)
    except RecursionError:
        found = "lists in lists without end"
    raise _MisfitError(f"it is no JSON text ({found}). A whole document would have fitted.")


def _refuse_constant(word: str) -> None:
    raise _MisfitError(f"it has the bare word {word}. The string {word!r} would have fitted.")


def _graph_from(document: Any) -> nx.MultiDiGraph:
    _check_head(document)
    graph = nx.MultiDiGraph()
    graph.graph.update(_graph_attributes(document["graph"]), version=document["version"])
    for where, node, attributes in _items(document, "nodes", _NODE_PLACE, _NODE):
        if node["id"] in graph:
            raise _misfit(f"{where}.id", node["id"], "an id that no other node has")
        graph.add_node(node["id"], **attributes)
    for where, edge, attributes in _items(document, "edges", _EDGE_PLACE, _EDGE):
        _check_edge(graph, where, edge)
        graph.add_edge(edge["source"], edge["target"], edge["key"], **attributes)
    _check_references(graph)
    return graph


def _check_head(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise _MisfitError(f'it is no object with "format": "{_FORMAT}", as trace.save writes it.')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise _misfit("version", version, "an integer from 1")
    if version > _VERSION:
        raise _MisfitError(
            f"it has version {version} of the format. One up to {_VERSION} would have fitted.",
            "Upgrade gradtrace: python -m pip install --upgrade gradtrace",
        )
    for key, kind in zip(_DOCUMENT_KEYS, (dict, list, list), strict=True):
        if not isinstance(document.get(key), kind):
            words = "an object" if kind is dict else "a list"
            raise _misfit(key, document.get(key), words)


def _graph_attributes(own: Attributes) -> Attributes:
    plain = {name: value for name, value in own.items() if name not in _RECORDS}
    attributes = _checked(plain, _GRAPH, "graph")
    for name, forms in _RECORDS.items():
        records = own.get(name, [] if name in _LATER_RECORDS else None)
        if not isinstance(records, list):
            raise _misfit(f"graph.{name}", records, "a list")
        attributes[name] = tuple(
            tuple(_checked(record, forms, f"graph.{name}[{index}]").items())
            for index, record in enumerate(records)
        )
    return attributes


def _items(
    document: Attributes, key: str, place: dict[str, _Form], forms: dict[str, _Form]
) -> Iterator[tuple[str, Attributes, Attributes]]:
    """Yield for each node or edge where it stands, what identifies it, and its attributes."""
    all_forms = place | forms
    for index, item in enumerate(document[key]):
        where = f"{key}[{index}]"
        attributes = _checked(item, all_forms, where)
        yield where, {name: attributes.pop(name) for name in place}, attributes


def _checked(item: Any, forms: dict[str, _Form], where: str) -> Attributes:
    """Return an object's values, decoded, each as it fits, in the order of the file."""
    if not isinstance(item, dict):
        raise _misfit(where, item, "an object")
    found = {name: _decoded(value) for name, value in item.items()}
    for name, form in forms.items():
        if found.setdefault(name, form.default) is _REQUIRED:
            raise _MisfitError(f"{where}.{name} is missing. {_sentence(form.words)}")
        if not form.fits(found[name]):
            raise _misfit(f"{where}.{name}", item[name], form.words)
    return found


def _decoded(value: Any) -> Any:
    """Return a value from JSON as the graph has it, see the module's docstring."""
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if isinstance(value, dict):  # only in an attribute of a later version
        return tuple((name, _decoded(item)) for name, item in value.items())
    if isinstance(value, str):
        if value in _UNFINISHED_NUMBERS:
            return _UNFINISHED_NUMBERS[value]
        return value[1:] if value.lstrip("\\") in _UNFINISHED_NUMBERS else value
    return value


def _check_edge(graph: nx.MultiDiGraph, where: str, edge: Attributes) -> None:
    for end in ("source", "target"):
        if edge[end] not in graph:
            raise _misfit(f"{where}.{end}", edge[end], "the id of a node")
    if graph.has_edge(edge["source"], edge["target"], edge["key"]):
        raise _misfit(f"{where}.key", edge["key"], "a key that no parallel edge has")


def _check_references(graph: nx.MultiDiGraph) -> None:
    """Check that each node and each pass that is spoken of exists."""
    count = len(graph.graph["passes"])
    for number, record in enumerate(graph.graph["passes"]):
        if dict(record)["index"] != number:
            raise _misfit(f"graph.passes[{number}].index", dict(record)["index"], str(number))
    for where, index in _passes_named(graph):
        if index >= count:
            raise _misfit(where, index, f"the index of one of the {count} passes")
    for where, node in _nodes_named(graph):
        if node not in graph:
            raise _misfit(where, node, "the id of a node")


def _passes_named(graph: nx.MultiDiGraph) -> Iterator[tuple[str, int]]:
    for node, data in graph.nodes(data=True):
        for name in ("reached", "root_of"):
            yield from ((f"{name} of node {node}", index) for index in data[name])
    for source, target, data in graph.edges(data=True):
        edge = f"of the edge from {source} to {target}"
        for name in ("reached", "undefined", "not_requested", "missed"):
            yield from ((f"{name} {edge}", index) for index in data[name])
        yield from ((f"norms {edge}", index) for index, _ in data["norms"])
    for number, record in enumerate(map(dict, graph.graph["passes"])):
        if record["inside"] is not None:
            yield f"graph.passes[{number}].inside", record["inside"]
    for number, record in enumerate(map(dict, graph.graph["gradients"])):
        yield f"graph.gradients[{number}].backward_pass", record["backward_pass"]
    for number, record in enumerate(map(dict, graph.graph["overwrites"])):
        yield f"graph.overwrites[{number}].backward_pass", record["backward_pass"]


def _nodes_named(graph: nx.MultiDiGraph) -> Iterator[tuple[str, int]]:
    for node, data in graph.nodes(data=True):
        if data["shares_storage_with"] is not None:
            yield f"shares_storage_with of node {node}", data["shares_storage_with"]
        yield from ((f"writes_to of node {node}", leaf) for leaf in data["writes_to"])
    for number, record in enumerate(map(dict, graph.graph["passes"])):
        for part in ("roots", "transformed"):
            yield from ((f"graph.passes[{number}].{part}", root) for root in record[part])
    for number, record in enumerate(map(dict, graph.graph["gradients"])):
        yield f"graph.gradients[{number}].node", record["node"]
    for number, record in enumerate(map(dict, graph.graph["overwrites"])):
        yield f"graph.overwrites[{number}].needed_by", record["needed_by"]


def _misfit(where: str, given: object, words: str) -> _MisfitError:
    text = repr(given)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return _MisfitError(f"{where} is {shown}. {_sentence(words)}")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]} would have fitted."
