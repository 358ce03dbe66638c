// Places for the nodes of a graph, in layers from inputs to outputs. The library lays out the pieces between values
// that everything goes through, one piece after another: its time grows with the cube of a piece, not of the model.
(function () {
  "use strict";
  const ROW = (report.ROW = 74);
  const COLUMN = 214;
  // Edges over more layers than this (a mask that each block reads) bend nothing: they are drawn, not laid out.
  const FAR = (report.FAR = 24);
  // Pieces larger than this get the library's quick answers.
  const SMALL = 90;

  // Ranks as late as possible; an edge that closes a circle (groups need not be convex) counts as turned round.
  function ranked(ids, edges) {
    const next = new Map(ids.map((id) => [id, []]));
    const open = new Map(ids.map((id) => [id, 0]));
    for (const { from, to } of edges) {
      next.get(from).push(to);
      open.set(to, open.get(to) + 1);
    }
    const place = new Map();
    const ready = ids.filter((id) => open.get(id) === 0);
    let cursor = 0;
    let waiting = 0;
    while (place.size < ids.length) {
      if (cursor === ready.length) {
        while (place.has(ids[waiting]) || ready.includes(ids[waiting], cursor)) waiting += 1;
        ready.push(ids[waiting]);
      }
      const id = ready[cursor++];
      if (place.has(id)) continue;
      place.set(id, place.size);
      for (const to of next.get(id)) {
        open.set(to, open.get(to) - 1);
        if (open.get(to) === 0 && !place.has(to)) ready.push(to);
      }
    }
    const ordered = [...ids].sort((a, b) => place.get(a) - place.get(b));
    const rank = new Map(ids.map((id) => [id, 0]));
    const forward = (id, act) => next.get(id).forEach((to) => place.get(to) > place.get(id) && act(to));
    for (const id of ordered) forward(id, (to) => rank.set(to, Math.max(rank.get(to), rank.get(id) + 1)));
    // Values with no operands stand just above their first use, and with them what is made of such values alone: weights
    // that are unpacked and turned stand beside the product that reads them, not all in the first layer.
    const before = new Map(ids.map((id) => [id, []]));
    for (const id of ids) forward(id, (to) => before.get(to).push(id));
    const floating = new Set();
    for (const id of ordered) {
      const reads = before.get(id);
      const alone = (from) => floating.has(from) && before.get(from).length === 0 && next.get(from).length === 1;
      if (reads.length === 0 || (reads.length === 1 && floating.has(reads[0])) || reads.every(alone)) floating.add(id);
    }
    for (const id of [...ordered].reverse()) {
      if (!floating.has(id)) continue;
      let least = Infinity;
      forward(id, (to) => (least = Math.min(least, rank.get(to))));
      if (least < Infinity) rank.set(id, least - 1);
    }
    return { rank, place };
  }

  // Ranks that one node has for itself and that no near edge passes.
  function cuts(ids, rank, near) {
    const last = Math.max(0, ...rank.values());
    const held = new Array(last + 2).fill(0);
    const passing = new Array(last + 3).fill(0);
    for (const id of ids) held[rank.get(id)] += 1;
    for (const [a, b] of near) {
      const [from, to] = [rank.get(a), rank.get(b)];
      if (to - from < 2) continue;
      passing[from + 1] += 1;
      passing[to] -= 1;
    }
    const found = [];
    let over = 0;
    for (let index = 0; index <= last; index += 1) {
      over += passing[index];
      if (held[index] === 1 && over === 0) found.push(index);
    }
    return { found, last };
  }

  function piece(nodes, edges, rank) {
    const least = nodes.reduce((value, id) => Math.min(value, rank.get(id)), Infinity);
    if (nodes.length === 1) return new Map([[nodes[0], { x: 0, y: 0 }]]).set("points", []);
    const dag = d3.graphConnect().single(true)(edges.length ? edges.map(([a, b]) => [a, b]) : []);
    const size = edges.length;
    const coordinates = size <= SMALL ? d3.coordSimplex() : d3.coordCenter();
    const decross = d3.decrossTwoLayer().order(d3.twolayerAgg()).passes(size > 2000 ? 4 : 12);
    const missing = nodes.filter((id) => !edges.some(([a, b]) => a === id || b === id));
    const positions = new Map();
    const points = [];
    if (size) {
      d3.sugiyama().layering((graph) => {
        let most = 0;
        for (const node of graph.nodes()) most = Math.max(most, (node.y = rank.get(node.data) - least));
        return most;
      }).decross(decross).coord(coordinates).nodeSize(() => [COLUMN, ROW]).gap([1, 1])(dag);
      for (const node of dag.nodes()) positions.set(node.data, { x: node.x, y: (rank.get(node.data) - least) * ROW });
      for (const link of dag.links()) {
        if (link.points.length > 2) points.push([link.source.data, link.target.data, link.points.slice(1, -1)]);
      }
    }
    missing.forEach((id, index) => {
      const widest = Math.max(0, ...[...positions.values()].map((at) => at.x));
      positions.set(id, { x: (positions.size ? widest + COLUMN : 0) + index * 0, y: (rank.get(id) - least) * ROW });
    });
    return positions.set("points", points);
  }

  // The inner points of an edge, without those on a line with their neighbours.
  function bends(points) {
    return points.filter((at, index) => {
      const [before, after] = [points[index - 1], points[index + 1]];
      return !before || !after || Math.abs((at[0] - before[0]) * (after[1] - at[1]) - (after[0] - at[0]) * (at[1] - before[1])) > 40;
    });
  }

  // Positions of nodes by id, and the points between the ends of edges by "from>to".
  report.layered = function (ids, edges) {
    const { rank, place } = ranked(ids, edges);
    const seen = new Set();
    const near = [];
    for (const { from, to } of edges) {
      const [a, b] = place.get(from) < place.get(to) ? [from, to] : [to, from];
      if (a === b || seen.has(`${a}>${b}`) || rank.get(b) - rank.get(a) > FAR || rank.get(a) >= rank.get(b)) continue;
      seen.add(`${a}>${b}`);
      near.push([a, b]);
    }
    const { found, last } = cuts(ids, rank, near);
    const borders = [...new Set([0, ...found, last])].sort((a, b) => a - b);
    const at = (value) => {
      let [low, high] = [0, borders.length - 1];
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (borders[middle] <= value) low = middle;
        else high = middle - 1;
      }
      return low;
    };
    const isCut = new Set(found);
    const nodes = borders.map(() => []);
    const lines = borders.map(() => []);
    for (const id of ids) nodes[at(rank.get(id))].push(id);
    for (const [a, b] of near) lines[at(rank.get(a))].push([a, b]);
    const positions = new Map();
    const points = new Map();
    borders.forEach((border, index) => {
      const inside = new Set([...nodes[index], ...lines[index].flat()]);
      if (inside.size === 0) return;
      const placed = piece([...inside], lines[index], rank);
      const head = isCut.has(border) ? nodes[index].find((id) => rank.get(id) === border) : undefined;
      // Nodes that everything goes through stand below each other, so that pieces that lean do not make the model drift.
      const post = head ?? (index === 0 ? [...inside].find((id) => rank.get(id) === found[0]) : undefined);
      const known = [...inside].find((id) => positions.has(id));
      const centre = [...inside].reduce((sum, id) => sum + placed.get(id).x, 0) / inside.size;
      const anchor = post ?? known;
      const shift = anchor === undefined ? -centre : (post === undefined ? positions.get(known).x : 0) - placed.get(anchor).x;
      const top = [...inside].reduce((value, id) => Math.min(value, rank.get(id)), Infinity) * ROW;
      for (const id of inside) {
        if (!positions.has(id) || id === head) positions.set(id, { x: placed.get(id).x + shift, y: placed.get(id).y + top });
      }
      for (const [from, to, inner] of placed.get("points")) {
        const turned = bends([[0, 0], ...inner, [0, 0]]).slice(1, -1);
        points.set(`${from}>${to}`, turned.map(([x, y]) => [x + shift, y - ROW / 2 + top]));
      }
    });
    return { positions, points, rank };
  };
})();
