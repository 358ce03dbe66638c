// What is known of a chosen node or kernel.
(function () {
  "use strict";

  function facts(pairs) {
    const { make } = report;
    const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–");
    return make("dl", {}, shown.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  function valueList(node) {
    const { make } = report;
    const layouts = new Map((report.data.layouts || []).map((layout) => [layout.id, layout]));
    return (node.values || []).map((value) => {
      const layout = layouts.get(value.layout);
      const known = [make("code", {}, report.shape(value)), report.known(value.bytes) ? ` ${report.bytes(value.bytes)}` : null];
      if (!layout) return make("div", {}, known);
      const lines = [(layout.encoding || "").split("<")[0], layout.text, layout.stored && `stored as ${layout.stored.join(" × ")}`, layout.cost];
      return make("div", { class: "layout", title: layout.encoding }, known, lines.filter(Boolean).map((line) => make("div", { class: "quiet" }, line)), report.tiles(layout));
    });
  }

  function measure(group) {
    if (!report.known(group.seconds)) return null;
    const { make } = report;
    const bar = (name, share) => report.known(share)
      ? make("div", { class: "meter" }, make("span", {}, name), make("span", { class: "track", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share * 100) },
          make("span", { style: `width:${Math.min(100, Math.max(1, share * 100))}%` })), make("b", {}, report.share(share)))
      : null;
    return make("div", { class: "measure" }, make("div", { class: "large" }, report.seconds(group.seconds)),
      make("div", { class: "quiet" }, group.calls ? `${group.calls} call${group.calls > 1 ? "s" : ""}${group.bound ? `, bound by ${group.bound}` : ""}` : null),
      bar("of the run", group.share), bar(`of ${report.peakOf(group)}`, group.share_of_peak), make("div", { class: "quiet" }, report.whyAbove(group)));
  }

  report.fillPanel = function (panel, item, model, act) {
    const { make } = report;
    const { node, group } = item;
    const members = group ? model.members.get(group.id) || [] : [];
    const title = node ? (node.op || node.kind).replace(/^relax\./, "") : "Kernel";
    const link = (other) => make("button", { type: "button", class: "link", onclick: () => act.choose(other) }, other.name);
    const head = make("div", { class: "panel-head" }, report.dot(item.device), make("h3", {}, title), make("button", { type: "button", class: "close", "aria-label": "Close the panel", onclick: act.close }, "×"));
    const of = (ends, end) => node ? model.edges.filter((edge) => edge[ends] === node.id).map((edge) => model.byId.get(edge[end])) : [];
    const names = (nodes) => (nodes.length ? nodes.slice(0, 12).flatMap((other, index) => (index ? [", ", link(other)] : [link(other)])) : null);
    const content = [head, measure(group || {})];
    if (node) {
      content.push(facts([["Name", make("code", {}, node.name)], ["ONNX", (node.onnx || []).length ? make("span", {}, node.onnx.map((name) => make("code", {}, name))) : null],
        ["Device", node.device], ["Why here", node.reason], ["Reads", wrap(names(of("to", "from")))], ["Read by", wrap(names(of("from", "to")))]]));
      content.push(make("h4", {}, "Values"), ...valueList(node));
    }
    if (group) {
      if (members.length > 1) content.push(make("button", { type: "button", class: "wide", onclick: act.toggle }, act.opened ? "Close the kernel" : `Open: ${members.length} ops`));
      content.push(make("h4", {}, "Kernel"), facts([["Name", group.kernel ? make("code", {}, group.kernel) : null], ["Device", node ? null : group.device], ["Precision", group.precision], ["Region", group.region], ["Step", group.step],
        ["Operations", report.known(group.operations) ? report.rate(group.operations, "op") : null], ["Bytes", report.known(group.bytes) ? report.bytes(group.bytes) : null]]));
      if ((group.notes || []).length) content.push(make("ul", { class: "notes" }, group.notes.map((note) => make("li", {}, note))));
      if (!node) {
        content.push(make("h4", {}, `Ops (${members.length})`), make("ol", {}, members.map((one) => make("li", {}, make("code", {}, (one.op || one.name).replace(/^relax\./, "")), one.onnx && one.onnx.length ? make("div", { class: "quiet" }, one.onnx.join(", ")) : null,
          make("div", {}, valueList(one)), one.reason ? make("div", { class: "quiet" }, one.reason) : null))));
      }
    }
    panel.replaceChildren(...content.filter(Boolean));
    panel.scrollTop = 0;

    function wrap(parts) {
      return parts ? make("span", {}, parts) : null;
    }
  };
})();
