"use strict";
// Shows what html.py put into the page. Texts become text nodes and attributes, never markup; there
// is no request, no storage and no `eval` here.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const ROWS = 250;
  const FOUND = 40;
  const by = (id) => document.getElementById(id);
  const facts = JSON.parse(by("facts").textContent);
  const looks = facts.looks;
  const state = { picture: 0, pass: null, chosen: null, cameFrom: null };

  // -- small things ---------------------------------------------------------------------------

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }
  const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const many = (number, one, more) => `${number.toLocaleString("en")} ${number === 1 ? one : more || `${one}s`}`;
  const say = (text) => { by("said").textContent = text; };
  // A dotted name may break behind its dots.
  const dotted = (text) => text.split(/(?<=[._])/).flatMap((part, at) => (at ? [make("wbr"), part] : [part]));
  const badge = (status) => make("span", { class: `badge ${status}` }, `${looks.signs[status]} ${looks.words[status]}`);
  const baseName = (path) => path.split(/[/\\]/).pop();

  const leafOf = new Map(facts.leaves.map((leaf, number) => [leaf.node, number]));
  const cutsAt = new Map();
  facts.cuts.forEach((cut, number) => cutsAt.set(cut.node, [...(cutsAt.get(cut.node) || []), number]));
  const outOf = new Map();
  const into = new Map();
  facts.edges.forEach(([tail, head], number) => {
    outOf.set(tail, [...(outOf.get(tail) || []), number]);
    into.set(head, [...(into.get(head) || []), number]);
  });
  const node = (number) => facts.nodes[number];

  function place(number) {
    if (number === undefined) return "";
    const [file, line] = facts.places[number];
    return `${baseName(facts.files[file])}:${line}`;
  }
  function titleOf(number) {
    const it = node(number);
    if (!it) return `node ${number}`;
    if (it.kind === "leaf" || it.kind === "input") return it.label || "data";
    return it.name ? `${it.name} = ${it.op}` : it.op || it.label;
  }
  const passName = (index) => {
    const done = facts.passes[index];
    return `pass ${index}${done && done.roots ? ` from ${done.roots.slice(0, 3).join(", ")}` : ""}`;
  };
  const passesText = (indices) => {
    if (!indices || !indices.length) return "none";
    return indices.length === facts.passes.length && indices.length > 1 ? `all ${indices.length} passes` : indices.map((index) => passName(index)).join(", ");
  };

  // -- pictures -------------------------------------------------------------------------------

  const stage = by("stage");
  const pictures = facts.pictures.map((facts_, number) => {
    const svg = stage.querySelector(`svg[data-picture="${CSS.escape(facts_.key)}"]`);
    const [x, y, width, height] = svg.getAttribute("viewBox").split(/[ ,]+/).map(Number);
    const boxes = new Map();
    const arrows = new Map();
    svg.querySelectorAll("[data-box]").forEach((element) => boxes.set(Number(element.dataset.box), element));
    svg.querySelectorAll("[data-arrow]").forEach((element) => {
      arrows.set(Number(element.dataset.arrow), element);
      const line = element.querySelector("path");
      if (line) {
        const hit = line.cloneNode();
        hit.setAttribute("class", "hit");
        element.append(hit);
      }
    });
    const owner = new Map();
    for (const [id, box] of Object.entries(facts_.boxes)) for (const inside of box.nodes || []) owner.set(inside, Number(id));
    svg.toggleAttribute("hidden", number !== 0);
    svg.setAttribute("preserveAspectRatio", "xMidYMid meet");
    return { ...facts_, svg, boxes: facts_.boxes, elements: boxes, arrowElements: arrows, owner, size: { x, y, width, height }, view: null };
  });
  const picture = () => pictures[state.picture];
  const stageSize = () => ({ width: Math.max(stage.clientWidth, 1), height: Math.max(stage.clientHeight, 1) });

  function fitScale({ size }) {
    const room = stageSize();
    return Math.min(room.width / size.width, room.height / size.height);
  }
  function show() {
    const { svg, view } = picture();
    const room = stageSize();
    const width = room.width / view.scale;
    const height = room.height / view.scale;
    svg.setAttribute("viewBox", `${view.x - width / 2} ${view.y - height / 2} ${width} ${height}`);
  }
  function fit() {
    const here = picture();
    const { size } = here;
    here.view = { x: size.x + size.width / 2, y: size.y + size.height / 2, scale: Math.min(fitScale(here), 1.6) };
    show();
  }
  // A tall picture begins at its top, one that goes to the right at its left, both legible.
  function begin() {
    const here = picture();
    fit();
    if (here.view.scale >= 0.62) return;
    const room = stageSize();
    const scale = Math.min(Math.max(room.width / here.size.width, 0.62), 1);
    here.view.scale = scale;
    const half = room.height / scale / 2;
    if (here.size.height > 2 * half) here.view.y = here.size.y + half;
    const across = room.width / scale / 2;
    if (looks.direction === "LR" && here.size.width > 2 * across) here.view.x = here.size.x + across;
    show();
  }
  function pan(dx, dy) {
    const { view, size } = picture();
    view.x = Math.min(Math.max(view.x + dx / view.scale, size.x), size.x + size.width);
    view.y = Math.min(Math.max(view.y + dy / view.scale, size.y), size.y + size.height);
    show();
  }
  function zoom(factor, at) {
    const here = picture();
    const { view } = here;
    const room = stageSize();
    const scale = Math.min(Math.max(view.scale * factor, Math.min(fitScale(here), 1) / 2), 8);
    const dx = at ? at.x - room.width / 2 : 0;
    const dy = at ? at.y - room.height / 2 : 0;
    view.x += dx / view.scale - dx / scale;
    view.y += dy / view.scale - dy / scale;
    view.scale = scale;
    pan(0, 0);
  }
  // Where an element stands, in the units of its picture.
  function boundsOf(element) {
    const { x, y, width, height } = element.getBBox();
    const { e, f } = element.parentNode.parentNode.transform.baseVal.consolidate().matrix;
    return { x: x + e, y: y + f, width, height };
  }
  function reveal(element, always) {
    const { view } = picture();
    const room = stageSize();
    const { x, y, width, height } = boundsOf(element);
    const far = (at, middle, half, size) => Math.abs(at + size / 2 - middle) + Math.min(size / 2, half / 2) > half;
    const outside = far(x, view.x, room.width / view.scale / 2, width) || far(y, view.y, room.height / view.scale / 2, height);
    if (always && view.scale < 0.62) view.scale = 0.9;
    else if (!outside) return;
    view.x = x + width / 2;
    view.y = y + height / 2;
    show();
  }

  const touching = new Map();
  let moved = false;
  const spot = (event) => {
    const { left, top } = stage.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  };
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    if (!touching.size) moved = false;
    touching.set(event.pointerId, spot(event));
  });
  stage.addEventListener("pointermove", (event) => {
    const before = touching.get(event.pointerId);
    if (!before || !pictures.length) return;
    const now = spot(event);
    if (!moved && Math.hypot(now.x - before.x, now.y - before.y) < 4) return;
    if (!moved) {
      moved = true;
      stage.classList.add("dragging");
      stage.setPointerCapture(event.pointerId);
    }
    if (touching.size === 1) pan(before.x - now.x, before.y - now.y);
    else {
      const other = [...touching].find(([id]) => id !== event.pointerId)[1];
      const gap = (point) => Math.max(Math.hypot(point.x - other.x, point.y - other.y), 1);
      zoom(gap(now) / gap(before), { x: (now.x + other.x) / 2, y: (now.y + other.y) / 2 });
      pan((before.x - now.x) / 2, (before.y - now.y) / 2);
    }
    touching.set(event.pointerId, now);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    addEventListener(end, (event) => {
      touching.delete(event.pointerId);
      if (touching.size) return;
      stage.classList.remove("dragging");
      // The click that ends a drag comes right behind; a later one, of a screen reader say, counts.
      setTimeout(() => { moved = false; });
    });
  }
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    zoom(Math.exp(-Math.max(-240, Math.min(240, event.deltaY * lines)) / 420), spot(event));
  }, { passive: false });
  stage.addEventListener("click", (event) => {
    if (moved) return;
    const found = event.target.closest("[data-box], [data-arrow]");
    if (found) chooseElement(found);
    else choose(null);
  });
  stage.addEventListener("focusin", (event) => {
    if (event.target.dataset.box && event.target.matches(":focus-visible")) reveal(event.target, false);
  });
  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !pictures.length) return;
    const target = event.target.closest("[data-box], [data-arrow]");
    if (STEPS[event.key]) {
      const step = event.shiftKey ? 240 : 60;
      pan(STEPS[event.key][0] * step, STEPS[event.key][1] * step);
    } else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0" || event.key === "Home") fit();
    else if (target && (event.key === "Enter" || event.key === " ")) chooseElement(target, true);
    else return;
    event.preventDefault();
  });
  by("in").addEventListener("click", () => zoom(1.25));
  by("out").addEventListener("click", () => zoom(0.8));
  by("fit").addEventListener("click", fit);
  new ResizeObserver(() => picture().view && show()).observe(stage);

  function showPicture(number) {
    state.picture = number;
    pictures.forEach(({ svg }, at) => svg.toggleAttribute("hidden", at !== number));
    by("depth").value = String(number);
    showLegend();
    if (picture().view) show();
    else begin();
    showPass();
    light();
    const element = chosenElement();
    if (element) reveal(element, true);
  }
  function showLegend() {
    const { legend, notes } = picture();
    by("legend").replaceChildren(...legend.map((sample) => make("li", {}, swatch(sample), looks.legend[sample])));
    by("notes").replaceChildren(...notes.map((note) => make("li", {}, note)));
    by("key").hidden = !legend.length;
  }
  function swatch(sample) {
    const name = sample.replace(" ", "-");
    if (["reached", "not-reached", "plain"].includes(name)) {
      return draw("svg", { class: `swatch arrow ${name}`, viewBox: "0 0 30 15", "aria-hidden": "true" }, draw("path", { d: "M0 7.5H30" }));
    }
    const text = { input: "x", cut: looks.cut, escape: looks.escape, passes: "0, 1" }[sample] || "";
    return make("span", { class: `swatch ${sample}`, "aria-hidden": "true" }, text);
  }

  // -- passes ---------------------------------------------------------------------------------

  // What flows into nodes, along data; with `stop`, only through what `stop` lets through.
  function closure(starts, edgesOf, end, lets = () => true) {
    const found = new Set(starts);
    const edges = new Set();
    const waiting = [...starts];
    while (waiting.length) {
      for (const number of edgesOf.get(waiting.pop()) || []) {
        const edge = facts.edges[number];
        const next = edge[end];
        if (edge[2].weak || !lets(next)) continue;
        edges.add(number);
        if (!found.has(next)) {
          found.add(next);
          waiting.push(next);
        }
      }
    }
    return { nodes: found, edges };
  }
  function showPass() {
    const { arrows, arrowElements, boxes, elements, copies } = picture();
    const pass = state.pass;
    const roots = pass === null ? [] : facts.passes[pass].nodes || [];
    const part = closure(roots, into, 0).nodes;
    const alive = new Set();
    arrows.forEach(([tail, head, reached, sample], number) => {
      const element = arrowElements.get(number);
      const solid = pass === null ? sample === "reached" : reached.includes(pass);
      if (solid && pass !== null) alive.add(tail).add(head);
      if (!element) return;
      element.classList.remove("reached", "not-reached", "plain");
      element.classList.add(solid ? "reached" : sample === "plain" ? "plain" : "not-reached");
    });
    const isPart = (id) => alive.has(id) || (boxes[id].nodes || []).some((inside) => part.has(inside) || (node(inside).reached || []).includes(pass));
    const off = new Set();
    for (const [id, element] of elements) {
      const out = pass !== null && !isPart(copies[id] !== undefined && boxes[copies[id]] ? copies[id] : id);
      if (out) off.add(id);
      element.classList.toggle("off", out);
    }
    arrows.forEach(([tail, head], number) => arrowElements.get(number)?.classList.toggle("off", off.has(tail) || off.has(head)));
  }
  function setPass(value) {
    state.pass = value;
    by("pass").value = value === null ? "all" : String(value);
    showPass();
    light();
    leafTable.render();
    markPass();
    if (value === null) say("All backward passes are shown.");
    else {
      const solid = picture().arrows.filter((arrow) => arrow[2].includes(value)).length;
      say(`Only ${passName(value)} is shown: ${many(solid, "arrow")} of ${picture().arrows.length} solid.`);
    }
  }

  // -- choosing -------------------------------------------------------------------------------

  function chooseElement(element, byKey = false) {
    state.cameFrom = element;
    if (element.dataset.arrow !== undefined) choose({ arrow: Number(element.dataset.arrow), picture: state.picture }, { byKey, still: true });
    else {
      const id = Number(element.dataset.box);
      const { boxes, copies } = picture();
      const box = boxes[copies[id] === undefined ? id : copies[id]] || boxes[id];
      const single = box.count === 1 && (box.nodes || []).length === 1;
      choose(single ? { node: box.nodes[0], box: id } : { box: copies[id] === undefined ? id : copies[id], picture: state.picture }, { byKey, still: true });
    }
  }
  function choose(what, { byKey = false, still = false } = {}) {
    const before = state.chosen;
    state.chosen = what;
    light();
    showDetails();
    leafTable.mark();
    markCards();
    if (!what) {
      if (before) say("Nothing is selected.");
      return;
    }
    const element = chosenElement();
    if (element && !still) reveal(element, true);
    const title = by("details-title");
    say(`${title.textContent}${element ? "" : ", not drawn in this picture"}. Details are shown.`);
    if (byKey) title.focus();
    else if (matchMedia("(max-width: 860px)").matches) by("details").scrollIntoView({ block: "nearest" });
    if (!matchMedia("(max-width: 860px)").matches) by("side").scrollTop = 0;
  }
  function chosenBox() {
    const { chosen } = state;
    if (!chosen) return undefined;
    if (chosen.node !== undefined) {
      const own = picture().owner.get(chosen.node);
      const copied = chosen.box !== undefined && picture().copies[chosen.box] === own && own !== undefined;
      return copied ? chosen.box : own;
    }
    return chosen.picture === state.picture ? chosen.box : undefined;
  }
  function chosenElement() {
    const { chosen } = state;
    if (chosen && chosen.arrow !== undefined) return chosen.picture === state.picture ? picture().arrowElements.get(chosen.arrow) : undefined;
    return picture().elements.get(chosenBox());
  }
  // All ways through nodes: what flows into them, and where they lead, to a root if they do.
  function story(starts) {
    const leads = starts.some((start) => node(start).leads);
    const after = closure(starts, outOf, 1, leads ? (next) => node(next).leads : undefined);
    const before = closure(starts, into, 0);
    return { nodes: new Set([...after.nodes, ...before.nodes]), edges: new Set([...after.edges, ...before.edges]) };
  }
  function roughStory(id) {
    const { arrows } = picture();
    const boxes = new Set([id]);
    const lit = new Set();
    for (const [from, to] of [[0, 1], [1, 0]]) {
      const waiting = [id];
      const seen = new Set(waiting);
      while (waiting.length) {
        const at = waiting.pop();
        arrows.forEach((arrow, number) => {
          if (arrow[from] !== at) return;
          lit.add(number);
          boxes.add(arrow[to]);
          if (!seen.has(arrow[to])) waiting.push(arrow[to]);
          seen.add(arrow[to]);
        });
      }
    }
    return { boxes, lit };
  }
  function litParts() {
    const { chosen } = state;
    const here = picture();
    if (chosen.arrow !== undefined) {
      if (chosen.picture !== state.picture) return null;
      return { boxes: new Set(here.arrows[chosen.arrow].slice(0, 2)), lit: new Set([chosen.arrow]) };
    }
    const id = chosenBox();
    if (id === undefined) return null;
    if (!facts.complete) return roughStory(id);
    const { nodes, edges } = story(chosen.node !== undefined ? [chosen.node] : here.boxes[id].nodes || []);
    const boxes = new Set([id]);
    const lit = new Set();
    for (const [box, inside] of Object.entries(here.boxes)) if ((inside.nodes || []).some((each) => nodes.has(each))) boxes.add(Number(box));
    here.arrows.forEach((arrow, number) => {
      if (!arrow[4].some((edge) => edges.has(edge))) return;
      lit.add(number);
      boxes.add(arrow[0]).add(arrow[1]);
    });
    return { boxes, lit };
  }
  function light() {
    const here = picture();
    here.svg.querySelectorAll(".ring").forEach((ring) => ring.remove());
    const parts = state.chosen && litParts();
    here.svg.classList.toggle("lit-up", Boolean(parts));
    for (const [id, element] of here.elements) element.classList.toggle("lit", Boolean(parts && parts.boxes.has(id)));
    const chosen = chosenElement();
    for (const [number, element] of here.arrowElements) {
      element.classList.toggle("lit", Boolean(parts && parts.lit.has(number)));
      element.classList.toggle("chosen", element === chosen);
    }
    here.svg.querySelectorAll("[aria-current]").forEach((element) => element.removeAttribute("aria-current"));
    if (!chosen) return;
    chosen.setAttribute("aria-current", "true");
    if (chosen.dataset.box) {
      const { x, y, width, height } = chosen.getBBox();
      chosen.append(draw("rect", { class: "ring", x: x - 5, y: y - 5, width: width + 10, height: height + 10, rx: 6 }));
    }
  }

  // -- details --------------------------------------------------------------------------------

  function factList(rows) {
    const shown = rows.filter(([, value]) => value !== undefined && value !== null && value !== "");
    if (!shown.length) return null;
    return make("dl", { class: "facts" }, shown.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }
  function sourceFigure(number, { stop = false } = {}) {
    if (number === undefined) return null;
    const [file, line, functionName, expression, seen] = facts.places[number];
    const inside = functionName && functionName !== "<module>" ? ` in ${functionName}` : "";
    const caption = make("figcaption", {}, `${facts.files[file]}:${line}${inside}`);
    const lines = facts.lines[file];
    const code = make("code");
    if (seen) {
      const shown = Array.from({ length: 9 }, (_, at) => line - 4 + at).filter((at) => lines[at] !== undefined);
      const indents = shown.filter((at) => lines[at].trim()).map((at) => lines[at].search(/\S/));
      const indent = Math.min(...indents, 60);
      for (const at of shown) {
        const here = at === line;
        code.append(make("span", { class: here ? `line here${stop ? " stop" : ""}` : "line", "data-line": at, "aria-current": here ? "true" : null }, lines[at].slice(indent) || " "));
      }
    } else if (expression) code.append(make("span", { class: `line here${stop ? " stop" : ""}`, "data-line": line }, expression));
    const block = code.childNodes.length ? make("pre", { tabindex: "0", "aria-label": `Source of ${baseName(facts.files[file])} around line ${line}` }, code) : null;
    return make("figure", { class: "source" }, caption, block);
  }
  const link = (text, act, ...more) => make("button", { type: "button", class: "link", click: act }, text, ...more);
  function nodeLink(number, sign = "", more = "") {
    const it = node(number);
    const status = leafOf.has(number) ? [" ", badge(facts.leaves[leafOf.get(number)].status)] : [];
    const sub = [more, it && it.module, it && place(it.place)].filter(Boolean).join(" · ");
    const text = [sign ? make("span", { class: "arrowhead", "aria-hidden": "true" }, `${sign} `) : "", titleOf(number)];
    return link(text, (event) => choose({ node: number }, { byKey: event.detail === 0 }), ...status, sub ? make("span", { class: "sub" }, sub) : "");
  }
  const section = (title, ...content) => content.flat().some(Boolean) ? [make("h3", {}, title), ...content] : [];
  function heading(title, ...badges) {
    return make("div", { class: "top" },
      make("div", {}, make("h2", { id: "details-title", tabindex: "-1" }, title), make("div", {}, badges)),
      make("button", { type: "button", id: "close", title: "Close ( Escape )", "aria-label": "Close the details", click: () => { choose(null); backToPicture(); } }, "×"));
  }
  function listed(links, limit = 60) {
    const list = make("div", { class: "links" }, links.slice(0, limit).map((build) => build()));
    if (links.length > limit) {
      const more = make("button", { type: "button", class: "more", click: () => { more.remove(); list.append(...links.slice(limit).map((build) => build())); } }, `Show ${links.length - limit} more`);
      list.append(more);
    }
    return list;
  }
  function edgeLine(number, other, sign) {
    const more = facts.edges[number][2];
    const norm = (more.norms || []).filter(([index]) => state.pass === null || index === state.pass).map(([, text]) => text);
    const text = [more.tensor, more.size, more.weak ? "written, no data" : more.reached ? "reached" : "not reached", norm.length ? `norm ${norm.join(", ")}` : ""];
    return () => nodeLink(other, sign, text.filter(Boolean).join(" · "));
  }
  function nodeDetails(number) {
    const it = node(number);
    const leaf = leafOf.has(number) ? facts.leaves[leafOf.get(number)] : null;
    const cuts = (cutsAt.get(number) || []).map((at) => facts.cuts[at]);
    const kinds = cuts.map((cut) => make("span", { class: "badge stop" }, `${looks.cut} cut: ${looks.kinds[cut.kind]}`));
    const parts = [heading(titleOf(number), leaf ? badge(leaf.status) : make("span", { class: "badge op" }, it.kind), " ", kinds)];
    parts.push(absent(number));
    if (leaf && leaf.text) parts.push(explanation(leaf.text));
    else if (leaf) parts.push(make("p", {}, facts.statuses[leaf.status]), make("p", { class: "quiet" }, "Its explanation is left out to keep the page small: trace.explain(...) gives it."));
    for (const cut of cuts) parts.push(cutDetails(cut));
    if (leaf && leaf.cuts) parts.push(...section(`Cut at ${many(leaf.cuts.length, "place")}`, leafCuts(leaf)));
    parts.push(factList([
      ["tensor", it.tensor],
      ["device", it.device],
      ["grad_fn", it.grad_fn],
      ["module", it.module],
      ["requires grad", it.wants ? "yes" : "no"],
      ["grad mode", it.mode],
      ["reached in", facts.passes.length ? passesText(it.reached) : "no backward pass was recorded"],
      ["starts", it.root ? passesText(it.root) : ""],
      ["shares memory", it.shares === undefined ? "" : `with ${titleOf(it.shares)}`],
    ]));
    if (leaf && leaf.arrived && (leaf.arrived.length > 1 || leaf.arrived[0][2])) parts.push(...section("Gradients that arrived", arrivals(leaf)));
    if (!cuts.length || cuts.every((cut) => cut.place !== it.place)) {
      parts.push(...section("Source", sourceFigure(it.place, { stop: cuts.length > 0 }), it.caller !== it.place ? sourceFigure(it.caller) : null));
    }
    const taken = (into.get(number) || []).map((at) => edgeLine(at, facts.edges[at][0], "←"));
    const given = (outOf.get(number) || []).map((at) => edgeLine(at, facts.edges[at][1], "→"));
    parts.push(...section(`Takes ${taken.length}`, taken.length ? listed(taken) : null));
    parts.push(...section(`Taken by ${given.length}`, given.length ? listed(given) : null));
    return parts;
  }
  // The text as `trace.explain` gives it, with its lines as long as there is room.
  function explanation(text) {
    const rows = [];
    for (const line of text.split("\n")) {
      const indent = line.search(/\S/);
      const last = rows[rows.length - 1];
      const goes = last && ((indent === 0 && last.indent === 0) || (indent === 4 && last.hint) || indent === 12);
      if (goes) last.text += ` ${line.trim().replaceAll(" -> ", " → ")}`;
      else rows.push({ indent, hint: line.startsWith("  - "), text: line.trim().replace(/^- /, "").replaceAll(" -> ", " → ") });
    }
    const kind = ({ indent, hint }) => (hint ? "hint" : indent === 0 ? "verdict" : indent > 4 ? "more" : "fact");
    return make("div", { class: "explanation" }, rows.map((row) => make("p", { class: kind(row) }, row.text)));
  }
  function leafCuts(leaf) {
    const few = leaf.cuts.slice(0, 3).map((at) => facts.cuts[at]);
    const rest = leaf.cuts.slice(3).map((at) => () => nodeLink(facts.cuts[at].node, looks.cut));
    return [
      ...few.map((cut) => [nodeLink(cut.node, looks.cut, looks.kinds[cut.kind]), sourceFigure(cut.place, { stop: true })]),
      rest.length ? listed(rest) : null,
    ];
  }
  function absent(number) {
    const box = picture().owner.get(number);
    if (box === undefined) return make("p", { class: "quiet" }, "Not drawn in this picture; another level of detail may show it.");
    const { count, title } = picture().boxes[box];
    return count > 1 ? make("p", { class: "quiet" }, `Drawn inside the box “${title}”.`) : null;
  }
  function arrivals(leaf) {
    const rows = leaf.arrived.map(([index, norm, cleared]) => make("tr", {}, make("td", {}, passName(index)), make("td", { class: "number" }, norm || "not looked at"), make("td", {}, cleared && `cleared at ${cleared}`)));
    return make("table", {}, make("thead", {}, make("tr", {}, ["Pass", "Norm", ""].map((text, at) => make("th", { scope: "col", class: at === 1 ? "number" : null }, text)))), make("tbody", {}, rows));
  }
  function cutDetails(cut) {
    const names = (cut.blocked || []).map((at) => () => nodeLink(facts.leaves[at].node));
    const hidden = cut.count - names.length;
    return make("div", {},
      make("p", { class: "warn" }, cut.happened),
      sourceFigure(cut.place, { stop: true }),
      cut.caller === undefined ? null : [make("p", { class: "sub" }, "called from"), sourceFigure(cut.caller, { stop: true })],
      make("p", {}, cut.remedy),
      cut.passes ? make("p", { class: "quiet" }, `Seen in ${passesText(cut.passes)}.`) : null,
      section(`Blocks ${many(cut.count || 0, "leaf", "leaves")}`, names.length ? listed(names, 12) : null, hidden > 0 ? make("p", { class: "quiet" }, `and ${hidden} more`) : null));
  }
  function boxDetails(id) {
    const box = picture().boxes[id];
    const inside = (box.nodes || []).map((number) => () => nodeLink(number));
    return [
      heading(box.title, make("span", { class: "badge op" }, many(box.count, "node"))),
      box.lines ? make("p", {}, box.lines.join(" · ")) : null,
      (box.cuts || []).map((line) => make("p", { class: "warn" }, `${looks.cut} ${line}`)),
      box.hint && box.hint !== box.title ? make("p", { class: "sub" }, box.hint) : null,
      box.times ? make("p", { class: "quiet" }, `Drawn once for ${box.times.toLocaleString("en")} modules that are alike.`) : null,
      ...section("Inside", listed(inside), box.count > inside.length ? make("p", { class: "quiet" }, `and ${box.count - inside.length} that the page leaves out`) : null),
    ].flat();
  }
  function arrowDetails(number) {
    const [tail, head, reached, , edges] = picture().arrows[number];
    const { boxes } = picture();
    const tensors = edges.map((at) => () => edgeFacts(at));
    return [
      heading(`${boxes[tail].title} → ${boxes[head].title}`, make("span", { class: `badge ${reached.length ? "reached" : "unused"}` }, reached.length ? "reached by backward" : "not reached by backward")),
      factList([["from", boxLink(tail)], ["to", boxLink(head)], ["reached in", facts.passes.length ? passesText(reached) : "no backward pass was recorded"]]),
      ...section(many(edges.length, "tensor"), listed(tensors, 30)),
    ];
  }
  const boxLink = (id) => make("button", { type: "button", class: "link", click: (event) => chooseElement(picture().elements.get(id), event.detail === 0) }, picture().boxes[id].title);
  function edgeFacts(at) {
    const [tail, head, more] = facts.edges[at];
    const norms = (more.norms || []).map(([index, norm]) => `${norm} in pass ${index}`).join(", ");
    return make("div", {},
      factList([
        ["tensor", [more.tensor, more.size].filter(Boolean).join("  ")],
        ["requires grad", more.wants ? "yes" : "no"],
        ["reached in", more.reached ? passesText(more.reached) : "none"],
        ["gradient's norm", norms],
        ["no gradient in", more.undefined ? passesText(more.undefined) : ""],
        ["not asked for in", more.not_requested ? passesText(more.not_requested) : ""],
      ]),
      nodeLink(tail, "made by"), nodeLink(head, "taken by"), sourceFigure(node(head).place));
  }
  function showDetails() {
    const { chosen } = state;
    const details = by("details");
    details.hidden = !chosen;
    if (!chosen) return details.replaceChildren();
    let parts;
    if (chosen.node !== undefined) parts = nodeDetails(chosen.node);
    else if (chosen.arrow !== undefined) parts = arrowDetails(chosen.arrow);
    else parts = boxDetails(chosen.box);
    return details.replaceChildren(...parts.flat(Infinity).filter(Boolean));
  }
  function backToPicture() {
    const target = state.cameFrom && state.cameFrom.isConnected && state.cameFrom.closest("[hidden]") === null ? state.cameFrom : stage;
    target.focus({ preventScroll: true });
  }

  // -- leaves ---------------------------------------------------------------------------------

  const leafTable = (() => {
    const statuses = Object.keys(facts.statuses).filter((status) => facts.leaves.some((leaf) => leaf.status === status));
    const urgency = ["cut", "unused", "nonfinite", "zero", "unknown", "no_backward", "reached", "frozen"];
    const shown = new Set(statuses);
    const sort = { key: "status", down: false };
    let words = "";
    let all = false;
    const number = (text) => ({ "": -1, nan: Infinity, inf: Infinity })[text] ?? Number(text);
    const norm = (leaf) => {
      const found = (leaf.arrived || []).filter(([index]) => state.pass === null || index === state.pass);
      return found.length ? found[found.length - 1][1] : "";
    };
    const columns = [
      { key: "status", title: "Status", of: (leaf) => urgency.indexOf(leaf.status) },
      { key: "name", title: "Name", of: (leaf) => leaf.name },
      { key: "norm", title: "Norm", of: (leaf) => number(norm(leaf)), number: true },
      { key: "cuts", title: "Cuts", of: (leaf) => (leaf.cuts || []).length, number: true },
    ];
    const body = make("tbody");
    const caption = make("caption");
    const heads = columns.map((column) => make("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": column.key === "status" ? "ascending" : "none" }, make("button", { type: "button", click: () => sortBy(column.key) }, column.title)));
    const more = make("button", { type: "button", class: "more", click: () => { all = true; render(); } });
    const field = make("input", { type: "search", "aria-label": "Filter leaves by name", placeholder: "Filter by name", input: (event) => { words = event.target.value.toLowerCase(); render(); } });
    const chips = statuses.map((status) => {
      const count = facts.leaves.filter((leaf) => leaf.status === status).length;
      const chip = make("button", { type: "button", class: `chip ${status}`, "aria-pressed": "true", click: () => toggle(status, chip) }, `${looks.signs[status]} ${looks.words[status]} ${count}`);
      return chip;
    });
    const collator = new Intl.Collator("en", { numeric: true });
    function toggle(status, chip) {
      if (shown.has(status)) shown.delete(status);
      else shown.add(status);
      chip.setAttribute("aria-pressed", String(shown.has(status)));
      render();
    }
    function sortBy(key) {
      sort.down = sort.key === key ? !sort.down : key === "norm" || key === "cuts";
      sort.key = key;
      heads.forEach((head, at) => head.setAttribute("aria-sort", columns[at].key === key ? (sort.down ? "descending" : "ascending") : "none"));
      render();
    }
    function chosenRows() {
      const rows = facts.leaves.filter((leaf) => shown.has(leaf.status) && leaf.name.toLowerCase().includes(words));
      const column = columns.find(({ key }) => key === sort.key);
      if (!column) return rows;
      const compare = (one, other) => {
        const [a, b] = [column.of(one), column.of(other)];
        return typeof a === "string" ? collator.compare(a, b) : a - b;
      };
      return rows.sort((one, other) => (sort.down ? compare(other, one) : compare(one, other)));
    }
    function row(leaf) {
      const name = make("button", { type: "button", class: "name", click: (event) => choose({ node: leaf.node }, { byKey: event.detail === 0 }) }, dotted(leaf.name));
      return make("tr", { "data-node": leaf.node },
        make("td", {}, badge(leaf.status)), make("th", { scope: "row", class: "grow" }, name, make("div", { class: "sub" }, node(leaf.node)?.tensor)),
        make("td", { class: "number" }, norm(leaf)),
        make("td", { class: "number" }, leaf.cuts ? String(leaf.cuts.length) : ""));
    }
    function render() {
      const rows = chosenRows();
      const visible = all ? rows : rows.slice(0, ROWS);
      body.replaceChildren(...visible.map(row));
      more.hidden = visible.length === rows.length;
      more.textContent = `Show all ${rows.length.toLocaleString("en")}`;
      heads[2].firstChild.textContent = state.pass === null ? "Norm" : `Norm, pass ${state.pass}`;
      const left = facts.about.leaves - facts.leaves.length;
      caption.textContent = `${many(rows.length, "leaf", "leaves")} of ${facts.about.leaves.toLocaleString("en")}${left ? `; the page leaves out ${left.toLocaleString("en")}` : ""}`;
      mark();
    }
    function mark() {
      body.querySelectorAll("tr").forEach((each) => each.classList.toggle("chosen", Boolean(state.chosen) && Number(each.dataset.node) === state.chosen.node));
    }
    const table = make("table", {}, caption, make("thead", {}, make("tr", {}, heads)), body);
    const content = facts.leaves.length ? [make("div", { class: "filters" }, field, chips), make("div", { class: "scroll" }, table), more] : [make("p", { class: "quiet" }, "No leaf was met while recording.")];
    return { render, mark, content };
  })();

  // -- the other lists ------------------------------------------------------------------------

  const cards = facts.cuts.map((cut) => make("button", { type: "button", class: "card", click: (event) => choose({ node: cut.node }, { byKey: event.detail === 0 }) },
    make("span", { class: "badge stop" }, `${looks.cut} ${looks.kinds[cut.kind]}`), " ", make("span", { class: "sub" }, place(cut.place)),
    make("code", {}, (cut.place !== undefined && facts.places[cut.place][3]) || cut.call),
    make("span", { class: "sub" }, `blocks ${blockedText(cut)}${cut.module ? ` · in ${cut.module}` : ""}`)));
  function blockedText(cut) {
    const names = (cut.blocked || []).slice(0, 3).map((at) => facts.leaves[at].name);
    const rest = cut.count - names.length;
    return [...names, ...(rest > 0 ? [`${rest} more`] : [])].join(", ");
  }
  const markCards = () => cards.forEach((card, at) => card.classList.toggle("chosen", Boolean(state.chosen) && state.chosen.node === facts.cuts[at].node));
  function cutList() {
    const left = facts.about.cuts - facts.cuts.length;
    if (!cards.length) return [make("p", { class: "quiet" }, facts.passes.length ? "No gradient was stopped on a way from a leaf to a root." : "Without a backward pass there is nothing to be cut.")];
    return [make("ul", {}, cards.map((card) => make("li", {}, card))), left ? make("p", { class: "quiet" }, `The page leaves out ${left} more.`) : null];
  }
  const HAZARDS = { silent_write: "silent write", write: "write", dropped: "dropped result" };
  function hazardList() {
    return facts.hazards.map((hazard) => make("article", { class: "card" },
      make("span", { class: "badge stop" }, HAZARDS[hazard.kind] || hazard.kind),
      make("p", {}, hazard.text),
      sourceFigure(hazard.place, { stop: true }),
      hazard.caller === undefined ? null : sourceFigure(hazard.caller),
      hazard.need === undefined ? null : nodeLink(hazard.need, "needed by")));
  }
  function termTable({ pass, terms }) {
    const has = terms.map((term) => new Set(term.leaves || []));
    const rows = facts.leaves.map((leaf, number) => [leaf, number]).filter(([, number]) => has.some((set) => set.has(number)));
    const head = terms.map((term) => make("th", { scope: "col" }, make("button", { type: "button", class: "name", click: (event) => choose({ node: term.node }, { byKey: event.detail === 0 }) }, term.name)));
    const cell = (set, number) => make("td", { class: set.has(number) ? "yes" : "no" }, set.has(number) ? `${looks.signs.reached} yes` : "–");
    const line = ([leaf, number]) => make("tr", {}, make("th", { scope: "row" }, make("button", { type: "button", class: "name", click: (event) => choose({ node: leaf.node }, { byKey: event.detail === 0 }) }, leaf.name)), has.map((set) => cell(set, number)));
    const body = make("tbody", {}, rows.slice(0, ROWS).map(line));
    const table = make("table", { class: "terms" }, make("caption", {}, `Which term of ${passName(pass)} reached which leaf`), make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Leaf"), head)), body);
    const more = make("button", { type: "button", class: "more", click: () => { body.append(...rows.slice(ROWS).map(line)); more.remove(); } }, `Show all ${rows.length}`);
    return [make("div", { class: "scroll" }, table), rows.length > ROWS ? more : null];
  }
  let passRows = [];
  const markPass = () => passRows.forEach((row, index) => row.classList.toggle("chosen", index === state.pass));
  function passTable() {
    if (!facts.passes.length) return [make("p", { class: "quiet" }, "No backward pass was recorded.")];
    const counts = facts.passes.map(() => new Set());
    facts.leaves.forEach((leaf, number) => (leaf.arrived || []).forEach(([index]) => counts[index]?.add(number)));
    passRows = facts.passes.map((done, index) => make("tr", {},
      make("th", { scope: "row" }, make("button", { type: "button", class: "name", click: () => setPass(state.pass === index ? null : index) }, String(index))),
      make("td", {}, done.kind),
      make("td", {}, (done.roots || []).join(", "), passRemarks(done).map((text) => make("div", { class: "sub" }, text))),
      make("td", { class: "shape" }, place(done.place)),
      make("td", { class: "number" }, String(counts[index].size))));
    const heads = ["Pass", "Kind", "From", "Line", "Leaves"].map((text) => make("th", { scope: "col", class: text === "Leaves" ? "number" : null }, text));
    return [make("div", { class: "scroll" }, make("table", {}, make("caption", {}, "A number shows the picture of that pass alone."), make("thead", {}, make("tr", {}, heads)), make("tbody", {}, passRows)))];
  }
  function passRemarks(done) {
    return [
      done.error && `raised ${done.error}`,
      done.inside !== undefined && `inside pass ${done.inside}`,
      done.inputs && `asked for ${done.inputs}`,
      done.create_graph && "create_graph=True",
      done.unseen && "started outside torch's Python API: its arrows were not seen",
    ].filter(Boolean);
  }

  // -- tabs -----------------------------------------------------------------------------------

  const tabs = [
    ["leaves", "Leaves", facts.about.leaves, () => leafTable.content],
    ["cuts", "Cuts", facts.about.cuts, cutList],
    ["terms", "Terms", facts.terms.length ? facts.terms.reduce((sum, each) => sum + each.terms.length, 0) : null, () => facts.terms.flatMap(termTable)],
    ["hazards", "Hazards", facts.hazards.length || null, hazardList],
    ["runs", "Passes", facts.about.passes, passTable],
  ].filter(([, , count]) => count !== null).map(([id, title, count, build]) => {
    const tab = make("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, click: () => openTab(id) }, title, " ", make("span", { class: "count" }, count.toLocaleString("en")));
    const panel = make("section", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, tabindex: "0" }, make("h2", { hidden: true }, title), build());
    return { id, tab, panel };
  });
  function openTab(id) {
    for (const each of tabs) {
      const open = each.id === id;
      each.tab.setAttribute("aria-selected", String(open));
      each.tab.tabIndex = open ? 0 : -1;
      each.panel.hidden = !open;
    }
  }
  by("tabs").addEventListener("keydown", (event) => {
    const at = tabs.findIndex(({ tab }) => tab === document.activeElement);
    const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 };
    if (at < 0 || !(event.key in steps)) return;
    const next = tabs[(steps[event.key] + tabs.length) % tabs.length];
    openTab(next.id);
    next.tab.focus();
    event.preventDefault();
  });

  // -- search ---------------------------------------------------------------------------------

  const entries = Object.keys(facts.nodes).map(Number).map((number) => {
    const it = node(number);
    const source = it.place === undefined ? "" : facts.places[it.place][3];
    const sub = [it.kind, it.module, place(it.place), source].filter(Boolean).join(" · ");
    const title = titleOf(number);
    return { number, title, sub, small: title.toLowerCase(), text: `${title} ${it.op || ""} ${it.grad_fn || ""} ${sub}`.toLowerCase() };
  });
  const search = by("search");
  const found = by("found");
  let results = [];
  let active = -1;
  function look() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    results = words.length ? entries.filter((entry) => words.every((word) => entry.text.includes(word))) : [];
    const rank = (entry) => (entry.small.startsWith(words[0]) ? 0 : entry.small.includes(words[0]) ? 1 : 2) + (leafOf.has(entry.number) ? 0 : 0.5);
    const total = results.length;
    results = results.map((entry) => [rank(entry), entry]).sort((one, other) => one[0] - other[0]).slice(0, FOUND).map(([, entry]) => entry);
    active = results.length ? 0 : -1;
    const items = results.map((entry, at) => make("li", { role: "option", id: `found-${at}`, "aria-selected": String(at === active), pointerdown: (event) => event.preventDefault(), click: () => take(at) }, entry.title, make("span", { class: "sub" }, entry.sub)));
    if (words.length && !items.length) items.push(make("li", { class: "none", role: "option", "aria-disabled": "true" }, "Nothing has this in its name, module or source."));
    found.replaceChildren(...items);
    setOpen(words.length > 0);
    if (words.length) say(total > FOUND ? `${total} found, the first ${FOUND} are listed.` : `${total} found.`);
  }
  function setOpen(open) {
    found.hidden = !open;
    search.setAttribute("aria-expanded", String(open));
    if (open && active >= 0) search.setAttribute("aria-activedescendant", `found-${active}`);
    else search.removeAttribute("aria-activedescendant");
  }
  function move(step) {
    if (!results.length) return;
    if (found.hidden) setOpen(true);
    active = (active + step + results.length) % results.length;
    [...found.children].forEach((item, at) => item.setAttribute("aria-selected", String(at === active)));
    found.children[active].scrollIntoView({ block: "nearest" });
    search.setAttribute("aria-activedescendant", `found-${active}`);
  }
  function take(at) {
    const { number } = results[at];
    setOpen(false);
    state.cameFrom = null;
    choose({ node: number });
  }
  search.addEventListener("input", look);
  search.addEventListener("focus", () => { if (search.value) setOpen(true); });
  search.addEventListener("blur", () => setOpen(false));
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") move(1);
    else if (event.key === "ArrowUp") move(-1);
    else if (event.key === "Enter" && active >= 0) take(active);
    else if (event.key === "Escape") {
      if (found.hidden) { search.value = ""; look(); search.blur(); } else setOpen(false);
      event.stopPropagation();
    } else return;
    event.preventDefault();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
    if (event.key === "/" && !typing) {
      event.preventDefault();
      search.focus();
      search.select();
    } else if (event.key === "Escape" && state.chosen) {
      const inside = by("details").contains(document.activeElement);
      choose(null);
      if (inside || document.activeElement === document.body) backToPicture();
    }
  });

  // -- the frame of the page ------------------------------------------------------------------

  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (darkness.matches ? "dark" : "light")) === "dark";
  const showTheme = () => by("theme").setAttribute("aria-pressed", String(isDark()));
  by("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  darkness.addEventListener("change", showTheme);
  showTheme();

  pictures.forEach(({ label }, at) => by("depth").append(make("option", { value: String(at) }, label)));
  by("depths").hidden = pictures.length < 2;
  by("depth").addEventListener("change", (event) => {
    showPicture(Number(event.target.value));
    if (state.chosen && state.chosen.node === undefined) choose(null);
    else showDetails();
    const { label, boxes, arrows } = picture();
    say(`Picture: ${label}, ${many(Object.keys(boxes).length, "box", "boxes")}, ${many(arrows.length, "arrow")}.`);
  });
  by("pass").append(make("option", { value: "all" }, "all passes"), ...facts.passes.map((done, index) => make("option", { value: String(index) }, passName(index))));
  by("passes").hidden = facts.passes.length < 2;
  by("pass").addEventListener("change", (event) => setPass(event.target.value === "all" ? null : Number(event.target.value)));

  const counted = Object.keys(facts.statuses).map((status) => [status, facts.leaves.filter((leaf) => leaf.status === status).length]).filter(([, count]) => count);
  const about = facts.about;
  const words = [many(about.cuts, "cut"), many(about.passes, "backward pass", "backward passes"), about.hazards && many(about.hazards, "hazard")].filter(Boolean);
  by("counts").append(many(about.leaves, "leaf", "leaves"), ...counted.map(([status, count]) => make("span", { class: `badge ${status}` }, `${looks.signs[status]} ${count.toLocaleString("en")} ${looks.words[status]}`)), make("span", {}, `· ${words.join(" · ")}`));
  const when = about.when.replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$/, "$1 $2 UTC");
  by("about").append(make("p", {}, [`${many(about.ops, "op")} recorded`, about.torch && `torch ${about.torch}`, about.gradtrace && `gradtrace ${about.gradtrace}`, when].filter(Boolean).join(" · ")));
  if (about.troubles.length) by("about").append(make("p", {}, "Not observed: ", about.troubles.join("; ")));
  if (!Object.keys(pictures[0].boxes).length) stage.append(make("p", { class: "empty" }, "Nothing was recorded that could be drawn."));

  by("tabs").append(...tabs.map(({ tab }) => tab));
  by("panels").append(...tabs.map(({ panel }) => panel));
  openTab("leaves");
  if (matchMedia("(max-width: 860px)").matches) by("key").removeAttribute("open");
  leafTable.render();
  showPicture(0);
  document.documentElement.dataset.ready = "true";
})();
