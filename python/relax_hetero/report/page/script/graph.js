// The graph: cytoscape draws it, `layers.js` places it, `view.js` says how much of it, the panel tells about what is chosen.
(function () {
  "use strict";

  function look() {
    const [ink, line, ground] = [report.style("--ink"), report.style("--line-strong"), report.style("--ground")];
    return [
      { selector: "core", style: { "active-bg-opacity": 0 } }, // no disc beneath the pointer that drags
      { selector: "node", style: {
        shape: "round-rectangle", width: 186, height: 42, label: "data(label)", "text-wrap": "wrap", "line-height": 1.25, "font-size": 11.5, "font-family": "system-ui, sans-serif",
        "text-valign": "center", "text-halign": "center", "background-color": "data(colour)", color: "data(ink)", "min-zoomed-font-size": 6 } },
      { selector: "node[kind = 'input'], node[kind = 'output']", style: {
        shape: "round-tag", "background-color": ground, color: ink, "border-width": 2, "border-color": "data(colour)" } },
      { selector: "node[kind = 'constant']", style: {
        "background-color": ground, color: ink, "border-width": 1.5, "border-style": "dotted", "border-color": "data(colour)", height: 26, "font-size": 11 } },
      { selector: "node[kind = 'transfer']", style: { shape: "hexagon", "border-width": 3, "border-color": ink, "border-style": "solid" } },
      { selector: "node[kind = 'group']", style: { "border-width": 3, "border-style": "double", "border-color": ink } },
      { selector: ":parent", style: {
        shape: "round-rectangle", "background-opacity": 0.14, "border-width": 1.5, "border-style": "dashed", "border-color": "data(colour)", color: ink,
        padding: 14, "text-valign": "top", "font-size": 11 } },
      { selector: "node[kind = 'bar']", style: { shape: "rectangle", width: "data(width)", height: "data(height)", "font-size": "data(text)" } },
      { selector: "edge", style: {
        width: 1.5, "line-color": line, "target-arrow-color": line, "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "straight" } },
      { selector: "edge[?bent]", style: {
        "curve-style": "round-segments", "segment-distances": "data(distances)", "segment-weights": "data(weights)", "segment-radii": 18,
        "edge-distances": "node-position" } },
      { selector: "edge[?transfer]", style: {
        width: 3.5, "line-style": "dashed", "line-color": ink, "target-arrow-color": ink, label: "data(label)", "font-size": 11.5, color: ink,
        "text-background-color": ground, "text-background-opacity": 1, "text-background-padding": 3, "text-background-shape": "round-rectangle" } },
      // Not dotted: the dots of a long line cost more than the rest of a frame.
      { selector: "edge[?far]", style: { width: 1, "line-style": "solid", "line-color": line, "target-arrow-color": line, label: "", opacity: 0.35 } },
      { selector: "node:selected", style: { "underlay-color": report.style("--accent"), "underlay-opacity": 0.45, "underlay-padding": 8, "underlay-shape": "round-rectangle" } },
      { selector: "edge.near", style: { "line-color": report.style("--accent"), "target-arrow-color": report.style("--accent"), width: 3, opacity: 1 } },
    ];
  }

  report.drawGraph = function () {
    const hint = "Colours are devices. A box has the name of the model's file first, then its op or kernel. Double borders are kernels of several ops: press one twice, or Enter, to open it. Arrow keys walk along values.";
    const far = report.data.nodes.length > 600 ? " Where a graph is too large for the view, bars stand for rows of its nodes: press one to go there." : "";
    report.section("graph", "Graph", hint + far, draw, true);
  };

  function draw(body) {
    const { make } = report;
    const names = [...new Set(report.data.nodes.map((node) => node.function))];
    const first = names.includes("main") ? "main" : names[0];
    let model = new report.GraphModel(report.data, first);
    let cy = null;
    let [picture, view] = [null, null];
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
      make("span", { class: "buttons" }, button("+", "Zoom in", () => zoom(1.4)), button("−", "Zoom out", () => zoom(1 / 1.4)), button("Fit", "Show the whole graph", () => picture.items.size && view.show(picture.box, 24, 3)),
        button("Start", "Show the inputs", () => home()), button("Open all", "Open or close all kernels", () => toggleAll())));
    const frame = make("div", { class: "frame" }, canvas, panel);
    const list = report.graphList(() => model, (node) => choose(node));
    body.append(tools, legend, frame, list);

    function redraw(keep) {
      const before = keep && cy ? { at: view.place(keep.id), zoom: cy.zoom() } : null;
      if (cy) cy.destroy();
      picture = new report.Picture(model);
      cy = report.cy = cytoscape({
        container: canvas, style: look(), minZoom: 0.0002, maxZoom: 3, boxSelectionEnabled: false, autoungrabify: true,
      });
      view = new report.View(cy, picture);
      view.covered = () => (getComputedStyle(panel).position === "absolute" ? panel.offsetHeight : 0); // on phones
      cy.on("select", "node", (event) => chosen(event.target));
      cy.on("tap", (event) => {
        canvas.focus({ preventScroll: true });
        if (event.target === cy) close();
      });
      cy.on("tap", "node[kind = 'bar']", (event) => view.show(event.target.data("box"), 24, 0.9));
      cy.on("dbltap", "node", (event) => toggle(event.target.data("item")));
      if (before) {
        const { x, y } = picture.at.get(keep.next);
        cy.viewport({ zoom: before.zoom, pan: { x: before.at.x - x * before.zoom, y: before.at.y - y * before.zoom } });
      } else home();
      view.update();
      canvas.dataset.items = picture.items.size;
      list.refresh();
    }

    // A small graph whole; of a large one its beginning, at a size that can be read.
    function home() {
      const { box } = picture;
      if (picture.items.size === 0) return undefined; // constants alone, which are hidden
      const [width, height] = [canvas.clientWidth, canvas.clientHeight];
      const whole = Math.min((width - 40) / (box.x2 - box.x1), (height - 40) / (box.y2 - box.y1));
      if (whole >= 0.55) return view.show(box, 20, 1.1);
      const top = [...picture.at].filter(([, { y }]) => y < box.y1 + height / 0.6);
      const wide = (places) => places.map(([, { x }]) => x).reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
      const [left, right] = wide(top);
      const zoom = Math.max(0.42, Math.min(0.9, (width - 30) / (right - left + 186)));
      const inputs = top.filter(([id]) => picture.items.get(id).kind === "input");
      const [a, b] = wide(inputs.length ? inputs : top);
      return cy.viewport({ zoom, pan: { x: width / 2 - ((a + b) / 2) * zoom, y: 20 - box.y1 * zoom } });
    }

    function chosen(element) {
      const item = element.data("item");
      view.pin(picture.items.has(element.id()) ? element.id() : null);
      cy.edges().removeClass("near");
      element.connectedEdges().addClass("near");
      report.fillPanel(panel, item, model, { close, toggle: () => toggle(item), choose, opened: item.group && model.opened.has(item.group.id) });
      panel.hidden = false;
      report.say(`${item.label}, ${item.kind}, on ${item.device}`);
    }

    function close() {
      panel.hidden = true;
      view.pinned = null;
      cy.elements().unselect();
      cy.edges().removeClass("near");
    }

    function select(id, centre) {
      cy.elements().unselect();
      view.pin(id);
      cy.resize(); // the panel takes room
      if (centre || view.held.rows) view.centre(id, 0.7);
      else if (!view.sees(id, 60)) view.centre(id, 0);
    }

    function choose(node) {
      if (node.kind === "constant" && !model.constants) {
        model.constants = box.checked = true;
        redraw(null);
      }
      select(model.shown(node), true);
    }

    function toggle(item) {
      const group = item && item.group;
      const members = group && model.members.get(group.id);
      if (!members || members.length < 2) return;
      const open = !model.opened.has(group.id);
      const shown = open ? `g${group.id}` : `n${(item.node || members[0]).id}`;
      if (open) model.opened.add(group.id);
      else model.opened.delete(group.id);
      const next = open ? `n${members[0].id}` : `g${group.id}`;
      redraw({ id: shown, next });
      select(next, false);
      report.say(open ? `Opened into ${members.length} ops` : "Closed");
    }

    function toggleAll() {
      const all = [...model.members].filter(([, members]) => members.length > 1).map(([id]) => id);
      model.opened = model.opened.size === 0 ? new Set(all) : new Set();
      redraw(null);
    }

    canvas.addEventListener("keydown", (event) => {
      const done = () => event.preventDefault();
      if (event.key === "Escape") return done(), close();
      if (!["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "Enter"].includes(event.key)) return undefined;
      done();
      const [at, id] = [cy.nodes(":selected").first(), view.pinned];
      if (event.key === "Enter" && at.nonempty()) return toggle(at.data("item"));
      const next = id ? picture.beside(id, event.key.slice(5).toLowerCase()) : picture.rows.flat()[0];
      return next && select(next, false);
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
