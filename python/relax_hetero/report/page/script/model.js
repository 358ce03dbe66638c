// What the picture shows of one function: groups closed or open, constants shown or not.
(function () {
  "use strict";

  // What several names have in common, up to a separator; else the first and the last.
  function shared(names) {
    const [first, last] = [names[0], names[names.length - 1]];
    if (names.every((name) => name === first)) return first;
    let end = 0;
    while (end < first.length && names.every((name) => name[end] === first[end])) end += 1;
    const prefix = first.slice(0, end).replace(/[^/.]*$/, "").replace(/[/.]$/, "");
    return prefix || `${report.tail(first, 12)} … ${report.tail(last, 12)}`;
  }

  // A box: the model's own name first, then the op or the kernel, and of how many ops.
  function titled(names, made, count) {
    const more = count ? `  ⊞${count}` : "";
    const second = report.shorter(made, 25 - more.length) + more;
    return names && names.length ? `${report.tail(shared(names), 25)}\n${second}` : second;
  }

  report.GraphModel = class {
    constructor(data, name) {
      this.data = data;
      this.nodes = data.nodes.filter((node) => node.function === name);
      this.byId = new Map(this.nodes.map((node) => [node.id, node]));
      this.edges = (data.edges || []).filter((edge) => this.byId.has(edge.from) && this.byId.has(edge.to));
      this.groups = new Map((data.groups || []).filter((group) => group.function === name).map((group) => [group.id, group]));
      this.opened = new Set();
      this.constants = false;
      this.members = new Map();
      for (const node of this.nodes) {
        if (!this.groups.has(node.group)) continue;
        if (!this.members.has(node.group)) this.members.set(node.group, []);
        this.members.get(node.group).push(node);
      }
    }

    // The id that a node has in the picture now, or null if it is not shown.
    shown(node) {
      if (node.kind === "constant" && !this.constants) return null;
      const members = this.members.get(node.group);
      return members && members.length > 1 && !this.opened.has(node.group) ? `g${node.group}` : `n${node.id}`;
    }

    // Items (nodes and closed groups) and the edges between them; equal edges are one.
    visible() {
      const items = new Map();
      for (const node of this.nodes) {
        const id = this.shown(node);
        if (id === null || items.has(id)) continue;
        items.set(id, id.startsWith("g") ? this.groupItem(this.groups.get(node.group)) : this.nodeItem(node));
      }
      const edges = new Map();
      for (const edge of this.edges) {
        const [from, to] = [this.shown(this.byId.get(edge.from)), this.shown(this.byId.get(edge.to))];
        if (from === null || to === null || from === to) continue;
        const key = `${from}>${to}`;
        const known = edges.get(key);
        if (!known) edges.set(key, { from, to, values: [edge.value], bytes: edge.bytes, transfer: Boolean(edge.transfer) });
        else {
          known.values.push(edge.value);
          known.bytes = report.known(known.bytes) && report.known(edge.bytes) ? known.bytes + edge.bytes : null;
          known.transfer = known.transfer || Boolean(edge.transfer);
        }
      }
      return { items, edges: [...edges.values()] };
    }

    nodeItem(node) {
      const op = (node.op || "").replace(/^relax\./, "");
      const words = { transfer: `→ ${node.device}`, constant: `const ${node.name}`, input: node.name, output: node.name };
      const label = words[node.kind] ? report.shorter(words[node.kind], 24) : titled(node.onnx, op || node.name);
      const group = this.groups.get(node.group);
      return { id: `n${node.id}`, node, group, kind: node.kind, device: node.device, label, parent: this.opened.has(node.group) ? `p${node.group}` : null };
    }

    groupItem(group) {
      const ops = this.members.get(group.id);
      const name = (group.kernel || ops.map((node) => (node.op || "").split(".").pop()).join("+")).replace(/^fused_/, "");
      return { id: `g${group.id}`, group, kind: "group", device: group.device, label: titled(ops.flatMap((node) => node.onnx || []), name, ops.length), parent: null };
    }

    // The text by which search finds a node.
    static words(node, group) {
      return [node.name, node.op, ...(node.onnx || []), group && group.kernel, node.device].filter(Boolean).join(" ");
    }
  };
})();
