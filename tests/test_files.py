"""Files: what is written is read back equal, and what is no trace is refused with reasons."""

from __future__ import annotations

import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace import _files
from gradtrace._errors import ExportError, FileFormatError
from gradtrace._records import CutKind

PLACE = {
    "file": "train.py",
    "line": 3,
    "function": "step",
    "source": "K.detach()",
    "called_from_file": None,
    "called_from_line": None,
    "called_from_function": None,
}

NODE = {
    "kind": "op",
    "name": None,
    "op": "mul",
    "grad_fn": "MulBackward0",
    "module": "",
    **PLACE,
    "requires_grad": True,
    "shape": (2, 3),
    "dtype": "float32",
    "device": "cpu",
    "cut": None,
    "reached": (),
    "root_of": (),
    "shares_storage_with": None,
    "grad_mode": "grad",
    "flavour": "",
    "writes_to": (),
    "filled_unseen": False,
    "dropped": False,
    "result_names": (),
    "result_shapes": (),
    "result_requires_grad": (),
}

EDGE = {
    "tensor": "w",
    "output": 0,
    "input": 0,
    "shape": (),
    "dtype": "float32",
    "device": "cpu",
    "requires_grad": True,
    "reached": (0,),
    "undefined": (),
    "not_requested": (),
    "missed": (),
    "linked": None,
    "captured": False,
    "norms": ((0, 1.5), (0, math.inf)),
    "weak": False,
    "apart": None,
}

PASS = {
    "index": 0,
    "kind": "backward",
    "roots": (1,),
    "root_outputs": (0,),
    "root_names": ("loss",),
    "transformed": (),
    **PLACE,
    "inputs": None,
    "create_graph": False,
    "retain_graph": False,
    "error": None,
    "inside": None,
    "internal": False,
    "observed": True,
    "captured": ((0, 0),),
}

GRADIENT = {
    "node": 0,
    "backward_pass": 0,
    "shape": (2, 3),
    "dtype": "float32",
    "norm": math.nan,
    "order": 0,
    "cleared_file": None,
    "cleared_line": None,
    "cleared_function": None,
}


OVERWRITE = {
    "op": "add_",
    **PLACE,
    "module": "",
    "tensor": "w",
    "needed_by": 1,
    "backward_pass": 0,
    "silent": True,
}


def small_graph() -> nx.MultiDiGraph:
    """`loss = w * w`, with one pass that brought a NaN."""
    graph = nx.MultiDiGraph()
    graph.graph.update(
        version=1,
        gradtrace="0.1.0",
        torch="2.13.0",
        when="2026-01-02T03:04:05+00:00",
        values="edges",
        ops_seen=1,
        troubles=(),
        passes=(tuple(PASS.items()),),
        gradients=(tuple(GRADIENT.items()),),
        overwrites=(tuple(OVERWRITE.items()),),
    )
    graph.add_node(0, **NODE | {"kind": "leaf", "name": "w", "op": None, "reached": (0,)})
    graph.add_node(1, **NODE | {"name": "loss", "shape": (), "root_of": (0,)})
    graph.add_edge(0, 1, **EDGE)
    graph.add_edge(0, 1, **EDGE | {"input": 1})
    return graph


def contents(graph: nx.MultiDiGraph) -> str:
    """All that a graph holds, in order, as text: so NaN equals itself and True is not 1."""
    nodes = list(graph.nodes(data=True))
    edges = sorted(graph.edges(keys=True, data=True), key=lambda edge: edge[:3])
    return repr([sorted(graph.graph.items()), nodes, edges])


def written(graph: nx.MultiDiGraph, folder: Path) -> Path:
    """Write a graph and return where."""
    path = folder / "trace.json"
    _files.write_atomically(path, _files.json_bytes(graph))
    return path


def test_a_loaded_graph_equals_the_written_one(tmp_path: Path) -> None:
    """Ids, attributes with their types, parallel edges and the graph's own attributes come back."""
    graph = small_graph()
    loaded = _files.load_graph(written(graph, tmp_path))
    assert type(loaded) is nx.MultiDiGraph
    assert contents(loaded) == contents(graph)
    assert _files.json_bytes(loaded) == _files.json_bytes(graph)


def test_the_document_is_strict_json() -> None:
    """Any JSON reader can read it: plain ASCII, and no bare NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = _files.json_bytes(small_graph()).decode("ascii")
    document = json.loads(text, parse_constant=refuse)
    assert document["format"] == "gradtrace"
    assert document["version"] == 1
    assert document["graph"]["gradients"][0]["norm"] == "NaN"
    assert document["edges"][0]["norms"] == [[0, 1.5], [0, "Infinity"]]
    assert document["graph"]["passes"][0]["root_names"] == ["loss"]


def test_order_of_edges_into_a_node_comes_back(tmp_path: Path) -> None:
    """Who walks a loaded graph backwards meets an op's inputs in the same order as live."""
    graph = small_graph()
    graph.add_node(2, **NODE)
    graph.add_edge(1, 2, **EDGE)
    graph.add_edge(0, 2, **EDGE)
    loaded = _files.load_graph(written(graph, tmp_path))
    assert list(loaded.in_edges(2)) == list(graph.in_edges(2)) == [(1, 2), (0, 2)]


texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["NaN", "-Infinity", "\\NaN", "\\\\Infinity", "\udc80.py", '"</script>', "\x00", "a::b"]
)
counts = st.integers(0, 2**40)
shapes = st.lists(counts, max_size=4).map(tuple)
numbers = st.floats(allow_nan=True, allow_infinity=True)
nodes = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["leaf", "input", "op", "escape"]),
        "name": st.none() | texts,
        "module": texts,
        "source": st.none() | texts,
        "requires_grad": st.booleans(),
        "shape": st.none() | shapes,
        "cut": st.none() | st.sampled_from([str(kind) for kind in CutKind]),
        "line": st.none() | counts,
        "from_the_future": st.recursive(
            st.none() | st.booleans() | st.integers() | numbers | texts,
            lambda items: st.lists(items, max_size=3).map(tuple),
        ),
    }
)
edges = st.tuples(
    st.integers(0, 4),
    st.integers(0, 4),
    st.fixed_dictionaries(
        {
            "tensor": st.none() | texts,
            "linked": st.none() | st.booleans(),
            "norms": st.lists(st.tuples(st.just(0), numbers), max_size=2).map(tuple),
        }
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(nodes, min_size=5, max_size=5), st.lists(edges, max_size=8), numbers)
def test_any_graph_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    drawn_nodes: list[dict[str, Any]],
    drawn_edges: list[tuple[int, int, dict[str, Any]]],
    norm: float,
) -> None:
    """Odd characters, lone surrogates, NaN as number and as name, nested tuples: all survive."""
    graph = nx.MultiDiGraph()
    graph.graph.update(small_graph().graph)
    graph.graph["gradients"] = (tuple((GRADIENT | {"norm": norm}).items()),)
    for number, attributes in enumerate(drawn_nodes):
        graph.add_node(number, **NODE | attributes)
    for source, target, attributes in drawn_edges:
        graph.add_edge(source, target, **EDGE | attributes)
    loaded = _files.load_graph(written(graph, tmp_path_factory.mktemp("round_trip")))
    assert contents(loaded) == contents(graph)
    assert _files.json_bytes(loaded) == _files.json_bytes(graph)


def test_an_older_document_gets_defaults(tmp_path: Path) -> None:
    """What an older writer did not know is filled in."""
    document = json.loads(_files.json_bytes(small_graph()))
    for node in document["nodes"]:
        del node["flavour"], node["writes_to"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document))
    assert contents(_files.load_graph(path)).count("'flavour': ''") == 2


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "no JSON text (line 1, column 1"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "no JSON text (byte 0 is no UTF-8)"),
        (_files.json_bytes(small_graph())[:-40], "no JSON text (line"),
        (b"[1, 2]", 'no object with "format": "gradtrace"'),
        (b'{"nodes": [], "links": []}', 'no object with "format": "gradtrace"'),
        (b"[" * 100_000, "lists in lists"),
        (b'{"format": ' + b"9" * 5_000 + b"}", "no JSON text"),
        (b'{"format": NaN}', "the bare word NaN"),
        (b"null", "no object"),
    ],
)
def test_what_is_no_trace_is_refused(data: bytes, part: str, tmp_path: Path) -> None:
    """Any other file gives an error that names it, says what it is not, and what to do."""
    path = tmp_path / "other.json"
    path.write_bytes(data)
    with pytest.raises(FileFormatError) as caught:
        _files.load_graph(path)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)
    assert "save the trace again" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (["version"], 2, "version 2 of the format. One up to 1 would have fitted. Upgrade"),
        (["version"], "1", "version is '1'. An integer from 1 would have fitted."),
        (["version"], True, "version is True."),
        (["graph"], [], "graph is []. An object would have fitted."),
        (["nodes"], None, "nodes is None. A list would have fitted."),
        (["nodes", 1], 3, "nodes[1] is 3. An object"),
        (["nodes", 1, "id"], 0, "nodes[1].id is 0. An id that no other node has"),
        (["nodes", 1, "id"], "0", "nodes[1].id is '0'. An integer from 0"),
        (["nodes", 1, "id"], True, "nodes[1].id is True."),
        (["nodes", 0, "kind"], "node", "nodes[0].kind is 'node'. One of 'leaf', 'input', 'op'"),
        (["nodes", 0, "shape"], [1, -1], "nodes[0].shape is [1, -1]. A list, each item an integer"),
        (["nodes", 0, "cut"], "cut", "nodes[0].cut is 'cut'. One of 'detach',"),
        (["nodes", 0, "requires_grad"], 1, "nodes[0].requires_grad is 1. True or false would"),
        (["nodes", 0, "reached"], [1], "reached of node 0 is 1. The index of one of the 1 passes"),
        (["nodes", 0, "module"], {"a": 1}, "nodes[0].module is {'a': 1}. A string"),
        (["nodes", 0, "name"], "NaN", "nodes[0].name is 'NaN'. A string or null"),
        (["nodes", 0, "shares_storage_with"], 9, "shares_storage_with of node 0 is 9. The id"),
        (["edges", 0, "target"], 7, "edges[0].target is 7. The id of a node"),
        (["edges", 1, "key"], 0, "edges[1].key is 0. A key that no parallel edge has"),
        (["edges", 0, "norms"], [[0]], "edges[0].norms is [[0]]. A list, each item a pair of"),
        (["edges", 0, "norms"], [[4, 0]], "norms of the edge from 0 to 1 is 4."),
        (["graph", "passes"], {}, "graph.passes is {}. A list"),
        (["graph", "passes", 0], [], "graph.passes[0] is []. An object"),
        (["graph", "passes", 0, "index"], 4, "graph.passes[0].index is 4. 0 would have fitted."),
        (["graph", "passes", 0, "roots"], [7], "graph.passes[0].roots is 7. The id of a node"),
        (["graph", "passes", 0, "inside"], 1, "graph.passes[0].inside is 1."),
        (["graph", "gradients", 0, "norm"], "big", "gradients[0].norm is 'big'. A number or null"),
        (["graph", "gradients", 0, "backward_pass"], 1, "gradients[0].backward_pass is 1."),
        (["graph", "overwrites", 0, "backward_pass"], 1, "overwrites[0].backward_pass is 1."),
        (["graph", "overwrites", 0, "needed_by"], 9, "overwrites[0].needed_by is 9."),
        (["graph", "values"], "all", "graph.values is 'all'. One of 'leaves', 'edges', 'none'"),
        (["graph", "torch"], "x" * 500, None),
        (["graph", "torch"], ["x" * 500], "..."),
    ],
)
def test_what_does_not_fit_is_named(
    place: list[str | int], value: Any, part: str | None, tmp_path: Path
) -> None:
    """One wrong value is refused with its place, what was given, and what would have fitted."""
    document = json.loads(_files.json_bytes(small_graph()))
    holder = document
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    if part is None:
        _files.load_graph(path)
        return
    with pytest.raises(FileFormatError) as caught:
        _files.load_graph(path)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["kind", "reached", "file"])
def test_a_missing_attribute_is_named(name: str, tmp_path: Path) -> None:
    """A node without an attribute that every version writes is refused."""
    document = json.loads(_files.json_bytes(small_graph()))
    del document["nodes"][1][name]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=rf"nodes\[1\].{name} is missing"):
        _files.load_graph(path)


def test_a_missing_file_is_python_s_own_error(tmp_path: Path) -> None:
    """A path with no file at it raises what `open` raises."""
    with pytest.raises(FileNotFoundError):
        _files.load_graph(tmp_path / "none.json")


def test_writing_replaces_and_keeps_permissions(tmp_path: Path) -> None:
    """A new file gets the process's permissions, an old one keeps its own; nothing else appears."""
    path, plain = tmp_path / "a.json", tmp_path / "plain"
    plain.touch()
    _files.write_atomically(path, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o640)
    _files.write_atomically(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a.json", "plain"]


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens before the end, the old file is whole and nothing lies beside it."""
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        _files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Writing to a link writes the file that it points to."""
    target = tmp_path / "runs" / "trace.json"
    target.parent.mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to(target)
    _files.write_atomically(link, b"one")
    assert link.is_symlink()
    assert target.read_bytes() == b"one"


def test_a_pipe_is_written_to_and_not_replaced() -> None:
    """What is no regular file, as a shell's process substitution, stays what it is."""
    reader, writer = os.pipe()
    try:
        _files.write_atomically(f"/dev/fd/{writer}", b"text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_missing_folder_and_a_folder_are_named(tmp_path: Path) -> None:
    """Where no file can be written, the message says which folder is missing."""
    with pytest.raises(ExportError, match="there is no folder"):
        _files.write_atomically(tmp_path / "none" / "a.json", b"")
    with pytest.raises(ExportError, match="it is a folder"):
        _files.write_atomically(tmp_path, b"")


def test_graphml_is_read_by_networkx() -> None:
    """GraphML has all nodes and edges; tuples are texts, None is left out, odd characters fit."""
    graph = small_graph()
    graph.nodes[0]["name"] = "w\x00\udc80 <&>"
    loaded = nx.read_graphml(io.BytesIO(_files.graphml_bytes(graph)), node_type=int)
    assert loaded.nodes[0]["name"] == "w\ufffd\ufffd <&>"
    assert loaded.nodes[0]["shape"] == "[2, 3]"
    assert loaded.nodes[0]["requires_grad"] is True
    assert "cut" not in loaded.nodes[0]
    assert loaded.number_of_edges(0, 1) == 2
    assert loaded.graph["torch"] == "2.13.0"
    assert '"NaN"' in loaded.graph["gradients"]
    assert graph.nodes[0]["shape"] == (2, 3)
