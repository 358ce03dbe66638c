// The graph: cytoscape draws it, `layers.js` places it, the panel tells about what is chosen.
(function () {
  "use strict";
  const BIG = 1200;

  function look() {
    const [ink, line, ground] = [report.style("--ink"), report.style("--line-strong"), report.style("--ground")];
    return [
      { selector: "node", style: {
        shape: "round-rectangle", width: 186, height: 36, label: "data(label)", "font-size": 12.5, "font-family": "system-ui, sans-serif",
        "text-valign": "center", "text-halign": "center", "background-color": "data(colour)", color: "data(ink)", "min-zoomed-font-size": 6 } },
      { selector: "node[kind = 'input'], node[kind = 'output']", style: {
        shape: "round-tag", "background-color": ground, color: ink, "border-width": 2, "border-color": "data(colour)" } },
      { selector: "node[kind = 'constant']", style: {
        "background-color": ground, color: ink, "border-width": 1.5, "border-style": "dotted", "border-color": "data(colour)", height: 26, "font-size": 11 } },
      { selector: "node[kind = 'transfer']", style: { shape: "hexagon", "border-width": 3, "border-color": ink, "border-style": "solid" } },
      { selector: "node[kind = 'group']", style: { "border-width": 3, "border-style": "double", "border-color": "data(ink)" } },
      { selector: ":parent", style: {
        shape: "round-rectangle", "background-opacity": 0.14, "border-width": 1.5, "border-style": "dashed", "border-color": "data(colour)", color: ink,
        padding: 14, "text-valign": "top", "font-size": 11 } },
      { selector: "edge", style: {
        width: 1.5, "line-color": line, "target-arrow-color": line, "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "straight" } },
      { selector: "edge[?bent]", style: {
        "curve-style": "round-segments", "segment-distances": "data(distances)", "segment-weights": "data(weights)", "segment-radii": 18,
        "edge-distances": "node-position" } },
      { selector: "edge[?transfer]", style: {
        width: 3.5, "line-style": "dashed", "line-color": ink, "target-arrow-color": ink, label: "data(label)", "font-size": 11.5, color: ink,
        "text-background-color": ground, "text-background-opacity": 1, "text-background-padding": 3, "text-background-shape": "round-rectangle" } },
      { selector: "edge[?far]", style: { width: 1.5, "line-style": "dotted", "line-color": line, "target-arrow-color": line, label: "", opacity: 0.45 } },
      { selector: "node:selected", style: { "underlay-color": report.style("--accent"), "underlay-opacity": 0.45, "underlay-padding": 8, "underlay-shape": "round-rectangle" } },
      { selector: "edge.near", style: { "line-color": report.style("--accent"), "target-arrow-color": report.style("--accent"), width: 3 } },
    ];
  }

  // Points of the picture as cytoscape wants bends: along and across the line between the ends.
  function bent(from, to, all) {
    // A bend beneath a node would leave its line no end.
    const beneath = (node, [x, y]) => Math.abs(x - node.x) < 100 && Math.abs(y - node.y) < 28;
    const points = (all || []).filter((point) => !beneath(from, point) && !beneath(to, point));
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const length = Math.hypot(dx, dy);
    if (!points.length || length < 1) return {};
    return {
      bent: 1,
      weights: points.map(([x, y]) => ((x - from.x) * dx + (y - from.y) * dy) / length ** 2),
      distances: points.map(([x, y]) => ((y - from.y) * dx - (x - from.x) * dy) / length),
    };
  }

  function elements(model) {
    const { items, edges } = model.visible();
    const placed = report.layered([...items.keys()], edges);
    const made = [];
    const parents = new Set();
    for (const item of items.values()) {
      const colour = report.colour(item.device);
      if (item.parent && !parents.has(item.parent)) {
        parents.add(item.parent);
        made.push({ data: { id: item.parent, label: report.shorter(item.group.kernel || "group", 60), colour, kind: "opened", item } });
      }
      const data = { id: item.id, label: report.shorter(item.label, 24), kind: item.kind, colour, ink: report.inkOn(colour), item };
      if (item.parent) data.parent = item.parent;
      made.push({ data, position: placed.positions.get(item.id) });
    }
    for (const edge of edges) {
      const [from, to] = [placed.positions.get(edge.from), placed.positions.get(edge.to)];
      const bends = bent(from, to, placed.points.get(`${edge.from}>${edge.to}`));
      const far = !bends.bent && items.get(edge.to).kind !== "transfer" && Math.abs(placed.rank.get(edge.to) - placed.rank.get(edge.from)) > 2 ? 1 : 0;
      made.push({ data: {
        id: `${edge.from}>${edge.to}`, source: edge.from, target: edge.to, transfer: edge.transfer ? 1 : 0, far,
        label: report.known(edge.bytes) ? report.bytes(edge.bytes) : "", ...bends } });
    }
    return made;
  }

  report.drawGraph = function () {
    const hint = "Colours are devices. Double borders are kernels of several ops: press one twice, or Enter, to open it. Arrow keys walk along values.";
    report.section("graph", "Graph", hint, draw, true);
  };

  function draw(body) {
    const { make } = report;
    const names = [...new Set(report.data.nodes.map((node) => node.function))];
    const first = names.includes("main") ? "main" : names[0];
    let model = new report.GraphModel(report.data, first);
    let cy = null;
    const canvas = make("div", { class: "canvas", tabindex: 0, role: "application", "aria-label": "Graph of the model. Arrow keys walk from node to node, Enter opens a kernel, Escape closes the panel. The same as a list follows." });
    const panel = make("aside", { class: "panel", hidden: true, "aria-label": "About the chosen node", tabindex: -1 });
    const button = (text, label, act) => make("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    const zoom = (factor) => cy.zoom({ level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
    const box = make("input", { type: "checkbox", id: "constants", onchange: () => ((model.constants = box.checked), redraw(null)) });
    const choice = names.length > 1
      ? make("label", {}, "Function ", make("select", { id: "function", onchange: (event) => ((model = new report.GraphModel(report.data, event.target.value)), (model.constants = box.checked), redraw(null)) },
          names.map((name) => make("option", { value: name, selected: name === first }, name))))
      : null;
    const search = report.searchBox(() => model, (node) => choose(node));
    const legend = make("ul", { class: "legend", "aria-label": "Devices" }, (report.data.devices || []).map((device) => make("li", {}, report.dot(device.name), device.name)));
    const tools = make("div", { class: "tools" }, search, choice, make("label", {}, box, " constants"),
      make("span", { class: "buttons" }, button("+", "Zoom in", () => zoom(1.4)), button("−", "Zoom out", () => zoom(1 / 1.4)), button("Fit", "Show the whole graph", () => cy.fit(undefined, 24)),
        button("Start", "Show the inputs", () => home()), button("Open all", "Open or close all kernels", () => toggleAll())));
    const frame = make("div", { class: "frame" }, canvas, panel);
    const list = report.graphList(() => model, (node) => choose(node));
    body.append(tools, legend, frame, list);

    function redraw(keep) {
      const before = keep && cy ? { at: cy.getElementById(keep.id).renderedPosition(), zoom: cy.zoom() } : null;
      const made = elements(model);
      const big = made.length > BIG;
      if (cy) cy.destroy();
      cy = report.cy = cytoscape({
        container: canvas, elements: made, style: look(), layout: { name: "preset", fit: false }, minZoom: 0.004, maxZoom: 3, boxSelectionEnabled: false,
        autoungrabify: true, textureOnViewport: big, hideLabelsOnViewport: big, pixelRatio: big ? 1 : "auto", motionBlur: false,
      });
      cy.on("select", "node", (event) => chosen(event.target));
      cy.on("tap", (event) => {
        canvas.focus({ preventScroll: true });
        if (event.target === cy) close();
      });
      cy.on("dbltap", "node", (event) => toggle(event.target));
      const target = keep && (cy.getElementById(keep.next).nonempty() ? cy.getElementById(keep.next) : null);
      if (before && target && before.at) {
        cy.zoom(before.zoom);
        const at = target.renderedPosition();
        cy.panBy({ x: before.at.x - at.x, y: before.at.y - at.y });
      } else home();
      canvas.dataset.items = cy.nodes(":childless").length;
      list.refresh();
    }

    // A small graph whole; of a large one its beginning, at a size that can be read.
    function home() {
      const all = cy.nodes().boundingBox();
      const [width, height] = [canvas.clientWidth, canvas.clientHeight];
      const whole = Math.min((width - 40) / all.w, (height - 40) / all.h);
      if (whole >= 0.55) {
        cy.zoom(Math.min(whole, 1.1));
        cy.center();
        return;
      }
      const top = cy.nodes().filter((node) => node.position("y") < all.y1 + height / 0.6);
      const part = top.boundingBox();
      cy.zoom(Math.max(0.42, Math.min(0.9, (width - 30) / part.w)));
      const middle = cy.nodes("[kind = 'input']").nonempty() ? cy.nodes("[kind = 'input']").boundingBox() : part;
      cy.pan({ x: width / 2 - ((middle.x1 + middle.x2) / 2) * cy.zoom(), y: 20 - all.y1 * cy.zoom() });
    }

    function chosen(element) {
      const item = element.data("item");
      cy.edges().removeClass("near");
      element.connectedEdges().addClass("near");
      report.fillPanel(panel, item, model, { close, toggle: () => toggle(element), choose, opened: item.group && model.opened.has(item.group.id) });
      panel.hidden = false;
      report.say(`${item.label}, ${item.kind}, on ${item.device}`);
    }

    function close() {
      panel.hidden = true;
      cy.elements().unselect();
      cy.edges().removeClass("near");
    }

    function select(element, centre) {
      cy.elements().unselect();
      element.select();
      cy.resize(); // the panel takes room
      if (centre) {
        cy.zoom(Math.max(cy.zoom(), 0.7));
        cy.center(element);
      } else {
        const [at, margin] = [element.renderedPosition(), 60];
        if (at.x < margin || at.y < margin || at.x > cy.width() - margin || at.y > cy.height() - margin) cy.center(element);
      }
    }

    function choose(node) {
      if (node.kind === "constant" && !model.constants) {
        model.constants = box.checked = true;
        redraw(null);
      }
      select(cy.getElementById(model.shown(node)), true);
    }

    function toggle(element) {
      const { group } = element.data("item");
      const members = group && model.members.get(group.id);
      if (!members || members.length < 2) return;
      const open = !model.opened.has(group.id);
      if (open) model.opened.add(group.id);
      else model.opened.delete(group.id);
      const next = open ? `n${members[0].id}` : `g${group.id}`;
      redraw({ id: element.id(), next });
      select(cy.getElementById(next), false);
      report.say(open ? `Opened into ${members.length} ops` : "Closed");
    }

    function toggleAll() {
      const all = [...model.members].filter(([, members]) => members.length > 1).map(([id]) => id);
      model.opened = model.opened.size === 0 ? new Set(all) : new Set();
      redraw(null);
    }

    canvas.addEventListener("keydown", (event) => {
      const at = cy.nodes(":selected").first();
      const done = () => event.preventDefault();
      if (event.key === "Escape") return done(), close();
      if (!["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "Enter"].includes(event.key)) return undefined;
      done();
      if (at.empty()) return select(cy.nodes(":childless").min((node) => node.position("y")).ele, false);
      if (event.key === "Enter") return toggle(at);
      const { x, y } = at.position();
      const nearest = (nodes) => nodes.min((node) => Math.hypot(node.position("x") - x, (node.position("y") - y) * 2)).ele;
      let next;
      if (event.key === "ArrowDown") next = nearest(at.outgoers("node"));
      else if (event.key === "ArrowUp") next = nearest(at.incomers("node"));
      else {
        const right = event.key === "ArrowRight";
        next = nearest(cy.nodes(":childless").filter((node) => Math.abs(node.position("y") - y) < 40 && (right ? node.position("x") > x + 1 : node.position("x") < x - 1)));
      }
      if (next) select(next, false);
      return undefined;
    });
    frame.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && panel.contains(event.target)) {
        close();
        canvas.focus();
      }
    });
    report.onTheme.push(() => cy && cy.style(look()));
    redraw(null);
  }
})();
