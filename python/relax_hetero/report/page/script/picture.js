// Everything that the picture of a function holds, with places: what of it lies in a region, as elements for cytoscape.
// From far away rows of nodes become bars, so that there is never more to draw than a screen can show.
(function () {
  "use strict";
  const HALF = { x: 93, y: 21 };
  // Up to so many elements the whole picture is drawn at any zoom.
  const FEW = 1200;
  // With more nodes than this in view there are bars, and so many of them at most.
  const NODES = 500;
  const BARS = 40;
  // Edges over many rows, such as those of a mask that each block reads: the nearest of them.
  const LONG = 60;

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

  const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const listAt = (map, key) => map.get(key) || map.set(key, []).get(key);

  report.Picture = class {
    constructor(model) {
      const { items, edges } = model.visible();
      this.items = items;
      const placed = report.layered([...items.keys()], edges);
      this.at = placed.positions;
      this.rank = placed.rank;
      this.rows = [];
      this.parents = new Map();
      this.members = new Map();
      for (const item of items.values()) {
        const row = this.rank.get(item.id);
        (this.rows[row] = this.rows[row] || []).push(item.id);
        if (!item.parent) continue;
        this.parents.set(item.parent, item);
        listAt(this.members, item.parent).push(item.id);
      }
      this.starts = new Map();
      this.long = new Map();
      this.touching = new Map();
      this.edges = edges.map((edge) => this.placedEdge(edge, placed.points.get(`${edge.from}>${edge.to}`)));
      this.size = items.size + edges.length;
      const [xs, ys] = ["x", "y"].map((axis) => [...this.at.values()].map((point) => point[axis]));
      this.box = { x1: smallest(xs) - HALF.x, x2: largest(xs) + HALF.x, y1: smallest(ys) - HALF.y, y2: largest(ys) + HALF.y };
      this.barsOf = new Map();
    }

    get small() {
      return this.size <= FEW;
    }

    placedEdge(edge, points) {
      const [from, to] = [this.at.get(edge.from), this.at.get(edge.to)];
      const bends = bent(from, to, points);
      const ranks = [this.rank.get(edge.from), this.rank.get(edge.to)];
      const rows = Math.abs(ranks[0] - ranks[1]);
      const far = rows > report.FAR || (!bends.bent && this.items.get(edge.to).kind !== "transfer" && rows > 2) ? 1 : 0;
      const data = { id: `${edge.from}>${edge.to}`, source: edge.from, target: edge.to, transfer: edge.transfer ? 1 : 0, far };
      const made = { ...edge, rows, data: { ...data, label: report.known(edge.bytes) ? report.bytes(edge.bytes) : "", ...bends } };
      const xs = [from.x, to.x, ...(points || []).map(([x]) => x)];
      made.box = { x1: Math.min(...xs), x2: Math.max(...xs), y1: Math.min(from.y, to.y), y2: Math.max(from.y, to.y) };
      if (rows > report.FAR) ranks.forEach((rank) => listAt(this.long, rank).push(made));
      else listAt(this.starts, Math.min(...ranks)).push(made);
      listAt(this.touching, edge.from).push(made);
      if (edge.to !== edge.from) listAt(this.touching, edge.to).push(made);
      return made;
    }

    // The rows of one bar at a zoom that shows so much height: 0 where nodes are drawn.
    rowsOfBar(height) {
      if (this.small) return 0;
      const span = Math.ceil(height / report.ROW) + 1;
      let [held, most] = [0, 0];
      for (let row = 0; row < this.rows.length; row += 1) {
        held += (this.rows[row] || []).length - (this.rows[row - span] || []).length;
        most = Math.max(most, held);
      }
      return most <= NODES ? 0 : 2 ** Math.max(1, Math.ceil(Math.log2(span / BARS)));
    }

    // What lies in a region, as elements by their ids, nodes first; and what touches the pinned node, wherever it lies.
    within(region, pinned) {
      const nodes = new Map();
      const edges = new Map();
      const add = (id) => {
        if (nodes.has(id)) return;
        const { parent } = this.items.get(id);
        if (parent) nodes.set(parent, this.parentElement(parent));
        for (const one of parent ? this.members.get(parent) : [id]) nodes.set(one, this.element(one));
      };
      const join = (edge) => {
        add(edge.from);
        add(edge.to);
        edges.set(edge.data.id, { group: "edges", data: edge.data });
      };
      const meets = (box) => box.x1 <= region.x2 && box.x2 >= region.x1 && box.y1 <= region.y2 && box.y2 >= region.y1;
      const around = ({ x, y }) => ({ x1: x - HALF.x, x2: x + HALF.x, y1: y - HALF.y, y2: y + HALF.y });
      const first = Math.max(0, Math.floor(region.y1 / report.ROW));
      const last = Math.min(this.rows.length - 1, Math.ceil(region.y2 / report.ROW));
      const passing = new Set();
      for (let row = Math.max(0, first - report.FAR); row <= last; row += 1) {
        if (row >= first) {
          for (const id of this.rows[row] || []) if (meets(around(this.at.get(id)))) add(id);
          for (const edge of this.long.get(row) || []) passing.add(edge);
        }
        for (const edge of this.starts.get(row) || []) if (meets(edge.box)) join(edge);
      }
      [...passing].sort((a, b) => a.rows - b.rows).slice(0, this.small ? Infinity : LONG).forEach(join);
      if (pinned) {
        add(pinned);
        (this.touching.get(pinned) || []).forEach(join);
      }
      return new Map([...nodes, ...edges]);
    }

    // The nearest node that reads this one (down), that it reads (up), or in its row.
    beside(id, side) {
      const { x, y } = this.at.get(id);
      const edges = this.touching.get(id) || [];
      const ids = {
        down: () => edges.filter((edge) => edge.from === id).map((edge) => edge.to),
        up: () => edges.filter((edge) => edge.to === id).map((edge) => edge.from),
        left: () => this.rows[this.rank.get(id)].filter((one) => this.at.get(one).x < x - 1),
        right: () => this.rows[this.rank.get(id)].filter((one) => this.at.get(one).x > x + 1),
      }[side]();
      const distance = (one) => Math.hypot(this.at.get(one).x - x, (this.at.get(one).y - y) * 2);
      return ids.sort((a, b) => distance(a) - distance(b))[0];
    }

    element(id) {
      const item = this.items.get(id);
      const colour = report.colour(item.device);
      const data = { id, label: item.label, kind: item.kind, colour, ink: report.inkOn(colour), item };
      if (item.parent) data.parent = item.parent;
      return { group: "nodes", data, position: { ...this.at.get(id) } };
    }

    parentElement(id) {
      const item = this.parents.get(id);
      return { group: "nodes", data: { id, label: report.shorter(item.group.kernel || "group", 60), colour: report.colour(item.device), kind: "opened", item } };
    }

    // Bars of so many rows each in a region, cut by the share that each device has of their nodes.
    bars(rows, region) {
      if (!this.barsOf.has(rows)) this.barsOf.set(rows, this.allBars(rows));
      const height = rows * report.ROW;
      const [first, last] = [Math.max(0, Math.floor(region.y1 / height)), Math.ceil(region.y2 / height)];
      return new Map(this.barsOf.get(rows).slice(first, last + 1).flat().map((bar) => [bar.data.id, bar]));
    }

    allBars(rows) {
      const height = rows * report.ROW;
      const bars = [];
      for (let begin = 0; begin < this.rows.length; begin += rows) {
        const ids = this.rows.slice(begin, begin + rows).flatMap((row) => row || []);
        if (!ids.length) {
          bars.push([]);
          continue;
        }
        const xs = ids.map((id) => this.at.get(id).x);
        const [least, most] = [smallest(xs), largest(xs)];
        const width = Math.max(most - least + 2 * HALF.x, 7 * height);
        const counts = new Map();
        for (const id of ids) counts.set(this.items.get(id).device, (counts.get(this.items.get(id).device) || 0) + 1);
        const box = { x1: least - HALF.x, x2: most + HALF.x, y1: begin * report.ROW - HALF.y, y2: (begin + rows - 1) * report.ROW + HALF.y };
        let left = (least + most) / 2 - width / 2;
        bars.push([...counts].sort(([a], [b]) => (a < b ? -1 : 1)).map(([device, count]) => {
          const part = (width * count) / ids.length;
          const colour = report.colour(device);
          left += part;
          return { group: "nodes", selectable: false,
            data: { id: `b${rows}:${begin}:${device}`, kind: "bar", count, box, label: part < 5 * height ? "" : `${count} nodes`, colour, ink: report.inkOn(colour), width: part, height: height * 0.86, text: height * 0.6 },
            position: { x: left - part / 2, y: (begin + rows / 2 - 0.5) * report.ROW } };
        }));
      }
      return bars;
    }
  };
})();
