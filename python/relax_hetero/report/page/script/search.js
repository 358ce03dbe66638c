// Finding nodes: a box with suggestions, and the graph as a list for screen readers and for reading.
(function () {
  "use strict";
  const MOST = 12;
  const PART = 200;

  report.searchBox = function (model, choose) {
    const { make } = report;
    let found = [];
    let active = -1;
    const list = make("ul", { id: "found", role: "listbox", "aria-label": "Nodes found", hidden: true });
    const input = make("input", { id: "search", type: "search", placeholder: "Search ops, kernels, ONNX names", role: "combobox", "aria-label": "Search nodes", "aria-controls": "found", "aria-expanded": "false", "aria-autocomplete": "list", autocomplete: "off" });

    function show() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const matches = words.length === 0 ? [] : model().nodes.filter((node) => {
        const text = report.GraphModel.words(node, model().groups.get(node.group)).toLowerCase();
        return words.every((word) => text.includes(word));
      });
      found = matches.slice(0, MOST);
      active = found.length ? 0 : -1;
      list.replaceChildren(...found.map((node, index) => make("li", { role: "option", id: `found-${index}`, onmousedown: (event) => (event.preventDefault(), take(index)) },
        report.dot(node.device), make("span", {}, (node.op || node.kind).replace(/^relax\./, "")), make("small", {}, (node.onnx || [])[0] || node.name))));
      if (matches.length > MOST) list.append(make("li", { class: "more", "aria-disabled": "true" }, `${matches.length - MOST} more: type more of the name`));
      if (words.length && !matches.length) list.append(make("li", { class: "more", "aria-disabled": "true" }, "No node has this in its name"));
      list.hidden = words.length === 0;
      input.setAttribute("aria-expanded", String(!list.hidden));
      mark();
    }

    function mark() {
      found.forEach((_, index) => list.children[index].setAttribute("aria-selected", String(index === active)));
      if (active >= 0) input.setAttribute("aria-activedescendant", `found-${active}`);
      else input.removeAttribute("aria-activedescendant");
    }

    function take(index) {
      if (!found[index]) return;
      choose(found[index]);
      hide();
    }

    function hide() {
      list.hidden = true;
      input.setAttribute("aria-expanded", "false");
    }

    input.addEventListener("input", show);
    input.addEventListener("focus", show);
    input.addEventListener("blur", hide);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") take(active);
      else if (event.key === "Escape") hide();
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        active = (active + (event.key === "ArrowDown" ? 1 : found.length - 1)) % Math.max(1, found.length);
        mark();
      } else return;
      event.preventDefault();
    });
    return make("div", { class: "search" }, input, list);
  };

  report.graphList = function (model, choose) {
    const { make } = report;
    const items = make("ol", {});
    const more = make("button", { type: "button", hidden: true, onclick: () => fill() }, "Show more");
    const details = make("details", { class: "as-list" }, make("summary", {}, "The graph as a list"), items, more);
    let drawn = 0;

    function fill() {
      const nodes = model().nodes;
      const reads = new Map();
      for (const edge of model().edges) {
        if (!reads.has(edge.to)) reads.set(edge.to, []);
        reads.get(edge.to).push((model().byId.get(edge.from) || {}).name || "?");
      }
      for (const node of nodes.slice(drawn, drawn + PART)) {
        const from = (reads.get(node.id) || []).slice(0, 6).join(", ");
        items.append(make("li", {}, make("button", { type: "button", class: "link", onclick: () => choose(node) }, node.name),
          ` ${node.op || node.kind} on ${node.device}: ${(node.values || []).map(report.shape).join(", ")}${from ? `, reads ${from}` : ""}`));
      }
      drawn = Math.min(nodes.length, drawn + PART);
      more.hidden = drawn >= nodes.length;
    }

    details.addEventListener("toggle", () => details.open && drawn === 0 && fill());
    let of = null;
    details.refresh = () => {
      if (of === model()) return;
      of = model();
      drawn = 0;
      items.replaceChildren();
      if (details.open) fill();
    };
    return details;
  };
})();
