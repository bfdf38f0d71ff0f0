"""Traces whose pages are looked at, and what a page says of itself once it is parsed."""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradtrace

# Each of these sets `hacked`, or breaks what stands around it, wherever a page lets it.
HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "'-(window.hacked=1)-'",
    "<svg onload=window.hacked=1>",
    "</title></style><iframe src='javascript:parent.hacked=1'></iframe>",
    "javascript:window.hacked=1",
    "<!--<script>",
    "]]>",
    "&lt;b&gt;",
    "\u2028window.hacked=1\u2029",
    "\u202egnp.exe\x00\x1b[31m",
    "__proto__",
    "{title} %s $& \\u003cscript\\u003e",
    "\ud800",
)


class Net(nn.Module):
    """An encoder that a detach keeps from learning, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each row."""
        scores: Tensor = self.head(self.encoder(x).detach())
        return scores


def net_trace() -> gradtrace.Trace:
    """Return a step with two passes, two terms, one cut, one hazard and unused leaves."""
    net = Net()
    x = torch.randn(3, 4)
    with gradtrace.record(net) as trace:
        fit = net(x).square().mean()
        penalty = 0.1 * net.head.weight.abs().sum()
        loss = fit + penalty
        loss.backward()
        direct = net.encoder(x).sum()
        direct.detach()
        direct.backward()
    return trace


def deep_trace(layers: int = 12) -> gradtrace.Trace:
    """Return a step of an encoder of transformer layers, as large as BERT's base model is deep."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, layers)
    with gradtrace.record(model) as trace:
        model(torch.randn(2, 5, 16)).square().mean().backward()
    return trace


def empty_trace() -> gradtrace.Trace:
    """Return a recording of nothing."""
    with gradtrace.record() as trace:
        pass
    return trace


def forward_trace() -> gradtrace.Trace:
    """Return a recording without a backward pass."""
    with gradtrace.record(nn.Linear(2, 2)) as trace:
        w = torch.ones(2, requires_grad=True)
        (w * 2).detach()
    return trace


def hostile_trace() -> gradtrace.Trace:
    """Return a trace every name, path and line of source of which tries to get out of its place."""
    function = type(HOSTILE[0], (torch.autograd.Function,), {"forward": _same, "backward": _same})
    modules = nn.ModuleDict({key.replace(".", "_"): nn.Linear(2, 2) for key in HOSTILE[:6]})
    source = "".join(
        f"y = y + modules[{number % 6}](x).sum().detach()  # {line.encode('ascii', 'replace')!r}\n"
        for number, line in enumerate(HOSTILE)
    )
    source += f"z = function.apply(y.sum() + leaf.sum() + leaf.detach().sum())  # {HOSTILE[0]}\n"
    file = f"/tmp/{HOSTILE[3]}{HOSTILE[1]}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    leaves = {name: torch.ones(2, requires_grad=True) for name in HOSTILE}
    names: dict[str, Any] = {
        "function": function,
        "modules": list(modules.values()),
        "x": torch.ones(2),
        "y": torch.stack(list(leaves.values())),
        "leaf": torch.ones(2, requires_grad=True),
    }
    with gradtrace.record({HOSTILE[0]: modules}, names=leaves) as trace:
        names["y"] = torch.stack(list(leaves.values()))
        exec(compile(source, file, "exec"), names)
        names["z"].backward()
    return trace


def _same(_: Any, x: Tensor) -> Tensor:
    return x * 1


class Page(HTMLParser):
    """A page as a reader of HTML takes it.

    Attributes:
        elements: Every start tag with its attributes.
        texts: The text inside each element of a kind, by tag.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.setdefault(tag, []).append("")
        self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that is empty."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        """Leave an element, and those in it that have no end."""
        while tag in self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Note text where it stands."""
        if self._inside:
            self.texts[self._inside[-1]][-1] += data

    def of(self, tag: str) -> Iterator[dict[str, str]]:
        """Yield the attributes of each element of a kind."""
        return (attributes for found, attributes in self.elements if found == tag)

    @property
    def facts(self) -> dict[str, Any]:
        """What the page's script reads."""
        data, _ = self.texts["script"]
        loaded: dict[str, Any] = json.loads(data)
        return loaded

    @property
    def policy(self) -> dict[str, list[str]]:
        """The content security policy, by directive."""
        (content,) = (meta["content"] for meta in self.of("meta") if "http-equiv" in meta)
        parts = (part.split() for part in content.split(";"))
        return {name: values for name, *values in parts}


def parsed(trace: gradtrace.Trace, folder: Path, **options: Any) -> Page:
    """Return a trace's page, parsed."""
    return Page(trace.export(folder / "page.html", **options).read_text(encoding="utf-8"))
