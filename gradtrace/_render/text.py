"""Graph -> summary for the terminal: one screen of plain text, at most 100 columns wide."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import networkx as nx

from gradtrace._records import BackwardPass, Cut, Hazard, Leaf, Location, Need, Status, Term
from gradtrace._render.selection import Analysis
from gradtrace._render.wording import (
    columns,
    many,
    name_text,
    pad,
    passes_phrase,
    place,
    shape_text,
    shorten,
)

WIDTH = 100
_ROWS = 30
_CUTS = 15
_NAMES = 3
_NAMES_WIDTH = 56
_PASSES = 8
_TERMS = 9
_TABLES = 4
_NAME_WIDTH = 44
_FILE_WIDTH = 40
_URGENCY: Sequence[Status] = (
    Status.CUT,
    Status.UNUSED,
    Status.NONFINITE,
    Status.ZERO,
    Status.UNKNOWN,
    Status.REACHED,
    Status.NO_BACKWARD,
    Status.FROZEN,
)

Row = tuple[str, ...]


def summary(
    graph: nx.MultiDiGraph,
    analysis: Analysis,
    hazards: Sequence[Hazard] = (),
    terms: Mapping[int, Sequence[Term]] | None = None,
) -> str:
    """Return counts, passes, a row for each leaf, cuts and hazards with their lines.

    Args:
        graph: The whole recording.
        analysis: What is known of it.
        hazards: Those to list.
        terms: The terms of the roots of passes, by pass, where the roots add several up.
    """
    sections = (
        [_counts(graph, analysis)],
        _section("Backward passes", _aligned(list(_pass_rows(analysis.passes)))),
        _section("Leaves", _aligned(list(_leaf_rows(analysis)))),
        _section("Cuts", _cut_lines(analysis.cuts)),
        *_term_sections(analysis.passes, terms or {}),
        _section("Hazards", _hazard_lines(hazards)),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _counts(graph: nx.MultiDiGraph, analysis: Analysis) -> str:
    counts = (
        many(len(analysis.leaves), "leaf", "leaves"),
        _count_ops(graph, analysis),
        many(len(analysis.passes), "backward pass", "backward passes"),
        many(len(analysis.cuts), "cut"),
    )
    return ", ".join(counts)


def _count_ops(graph: nx.MultiDiGraph, analysis: Analysis) -> str:
    """Tell the ops that a backward pass may go through from an optimizer's and a metric's."""
    ops = [node for node, kind in graph.nodes(data="kind") if kind == "op"]
    others = sum(node not in analysis.leads_to_root for node in ops)
    if not others or not analysis.leads_to_root:
        return many(len(ops), "op")
    on_ways = many(len(ops) - others, "op")
    return f"{on_ways} on ways to a root, {many(others, 'other')}"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    body = [_fit(f"  {line}") for line in lines]
    return [title, *body] if body else []


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(map(pad, row, widths)) for row in rows)


def _fit(line: str) -> str:
    """Return a line without what lies beyond the width; spaces inside it stay."""
    line = line.rstrip()
    if columns(line) <= WIDTH:
        return line
    while columns(line) > WIDTH - 1:
        line = line[:-1]
    return line + "…"


def _pass_rows(passes: Sequence[BackwardPass]) -> Iterator[Row]:
    """Yield a row for each run of passes that were started alike."""
    runs = [list(run) for _, run in groupby(passes, _pass_facts)]
    for run in runs[:_PASSES]:
        first, last = run[0].index, run[-1].index
        yield str(first) if first == last else f"{first}–{last}", *_pass_facts(run[0])
    if rest := runs[_PASSES:]:
        yield f"… {many(sum(map(len, rest)), 'more pass', 'more passes')}", "", ""


def _pass_facts(backward_pass: BackwardPass) -> tuple[str, str]:
    roots = shorten(", ".join(backward_pass.roots) or "an unseen root")
    inside = "" if backward_pass.inside is None else f", inside pass {backward_pass.inside}"
    error = f", raised {shorten(backward_pass.error)}" if backward_pass.error else ""
    unseen = "" if backward_pass.observed else ", seen at leaves only"
    return (
        f"{backward_pass.kind} from {roots}{inside}{unseen}{error}",
        _location_text(backward_pass.location),
    )


def _location_text(location: Location | None) -> str:
    return place(location.file, location.line, _FILE_WIDTH) if location else ""


def _leaf_rows(analysis: Analysis) -> Iterator[Row]:
    """Yield column heads and a row for each leaf, or for each module's leaves of one status."""
    if analysis.leaves:
        yield "status", "name", "shape", "last norm", "cuts"
    cuts = Counter(name for cut in analysis.cuts for name in cut.blocked)
    norms = {gradient.node: _norm_text(gradient.norm) for gradient in analysis.gradients}
    for leaves in _leaf_groups(analysis.leaves):
        blocked = sum(cuts[leaf.name] for leaf in leaves)
        facts = _one(leaves[0], norms) if len(leaves) == 1 else _several(leaves)
        yield leaves[0].status, *facts, f"{blocked:,}" if blocked else ""


def _one(leaf: Leaf, norms: Mapping[int, str]) -> Row:
    name = name_text(leaf.name, width=_NAME_WIDTH)
    return name, shorten(shape_text(leaf.shape), 24), norms.get(leaf.node, "")


def _several(leaves: Sequence[Leaf]) -> Row:
    """Return "encoder.*" for leaves below one module, "*" for any, and their number."""
    name = name_text(_common([leaf.name for leaf in leaves]), width=_NAME_WIDTH)
    return name, many(len(leaves), "leaf", "leaves"), ""


def _common(names: Sequence[str]) -> str:
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join([*shared, "*"])


def _norm_text(norm: float | None) -> str:
    return "not seen" if norm is None else f"{norm:.4g}"


def _leaf_groups(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Return leaves that share a row, the statuses that need attention first."""
    deepest = max((leaf.name.count(".") for leaf in leaves), default=0)
    keys: list[Callable[[Leaf], Hashable]] = [lambda leaf: leaf.node]
    keys += [_module_key(levels) for levels in range(deepest, -1, -1)]
    for key in keys:
        groups = _grouped(leaves, key)
        if len(groups) <= _ROWS:
            break
    return sorted(groups, key=lambda group: _URGENCY.index(group[0].status))


def _module_key(levels: int) -> Callable[[Leaf], Hashable]:
    return lambda leaf: (leaf.status, *leaf.name.split(".")[:-1][:levels])


def _grouped(leaves: Iterable[Leaf], key: Callable[[Leaf], Hashable]) -> list[list[Leaf]]:
    groups: defaultdict[Hashable, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        groups[key(leaf)].append(leaf)
    return list(groups.values())


def _cut_lines(cuts: Sequence[Cut]) -> Iterator[str]:
    """Yield a line for each line of source that cuts, and one for the leaves that it blocks."""
    places: defaultdict[Row, list[Cut]] = defaultdict(list)
    for cut in cuts:
        places[_cut_facts(cut)].append(cut)
    shown = list(places.items())[:_CUTS]
    kinds = [kind + (f" × {len(alike):,}" if len(alike) > 1 else "") for (kind, _), alike in shown]
    indent = " " * max(map(columns, kinds), default=0)
    for kind, (facts, alike) in zip(kinds, shown, strict=True):
        yield f"{pad(kind, len(indent))}  {facts[1]}"
        yield f"{indent}  blocks {_names(alike)}"
    if len(places) > _CUTS:
        yield f"… {many(len(places) - _CUTS, 'more place')}"


def _cut_facts(cut: Cut) -> Row:
    return cut.kind, _line_of(cut)


def _line_of(found: Cut | Hazard | Need) -> str:
    """Return the place and the text of what stands there."""
    called_from = None if isinstance(found, Need) else found.called_from
    caller = f" (called from {_location_text(called_from)})" if called_from else ""
    text = shorten(found.source or found.op, 48)
    return "  ".join(filter(None, (_location_text(found.location) + caller, text)))


def _term_sections(
    passes: Sequence[BackwardPass], terms: Mapping[int, Sequence[Term]]
) -> Iterator[list[str]]:
    """Yield for passes alike the terms of their root, and which of them reached which leaves."""
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, several in terms.items():
        facts = tuple((term.name, term.location, term.leaves) for term in several)
        alike[(*_pass_facts(passes[index]), facts)].append(index)
    for indices in list(alike.values())[:_TABLES]:
        root = shorten(", ".join(passes[indices[0]].roots) or "an unseen root")
        which = passes_phrase(indices, len(passes)) if len(passes) > 1 else "pass 0"
        yield _section(f"Terms of {root}, {which}", _aligned(list(_term_rows(terms[indices[0]]))))


def _term_rows(terms: Sequence[Term]) -> Iterator[Row]:
    shown = terms[:_TERMS]
    numbers = tuple(map(str, range(1, len(shown) + 1)))
    blanks = ("",) * len(shown)
    for number, term in zip(numbers, shown, strict=True):
        yield (
            f"{number}  {shorten(term.name, _NAME_WIDTH)}",
            *blanks,
            _location_text(term.location),
        )
    if len(terms) > len(shown):
        yield (f"… {many(len(terms) - len(shown), 'more term')}", *blanks, "")
    yield ("reached", *numbers, "")
    by_terms: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in dict.fromkeys(name for term in shown for name in term.leaves):
        by_terms[tuple("x" if name in term.leaves else "-" for term in shown)].append(name)
    for marks, names in by_terms.items():
        only = shown[marks.index("x")].name if marks.count("x") == 1 else ""
        yield (_shared_name(names), *marks, f"only {shorten(only, 32)}" if only else "")


def _shared_name(names: Sequence[str]) -> str:
    """Return one name, or what several have in common and their number."""
    if len(names) == 1:
        return name_text(names[0], width=_NAME_WIDTH)
    if len(names) <= _NAMES:
        return shorten(", ".join(names), _NAME_WIDTH)
    return f"{name_text(_common(names), width=_NAME_WIDTH)}  ({len(names):,})"


def _hazard_lines(hazards: Sequence[Hazard]) -> Iterator[str]:
    """Yield a line for each hazard, and one for what a write did harm to."""
    width = max((columns(hazard.kind) for hazard in hazards), default=0)
    for hazard in hazards[:_CUTS]:
        yield f"{pad(hazard.kind, width)}  {_line_of(hazard)}"
        if hazard.needed_by is not None:
            target = name_text(hazard.tensor or "what", width=_NAME_WIDTH)
            yield f"{' ' * width}  overwrites {target}, needed by {_line_of(hazard.needed_by)}"
    if len(hazards) > _CUTS:
        yield f"… {many(len(hazards) - _CUTS, 'more')}"


def _names(cuts: Iterable[Cut]) -> str:
    names = list(dict.fromkeys(name for cut in cuts for name in cut.blocked))
    shown = [name_text(name, width=_NAME_WIDTH) for name in names[:_NAMES]]
    while len(shown) > 1 and sum(map(columns, shown)) > _NAMES_WIDTH:
        shown.pop()
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest > 0 else "")
