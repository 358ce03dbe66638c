// A layout as a picture: the matrix of the last two dimensions, cut into its tiles, numbered in the order of memory.
(function () {
  "use strict";
  const WIDTH = 200;
  const MOST = 8;

  report.tiles = function (layout) {
    const shape = (layout.shape || []).map((extent) => (typeof extent === "number" ? extent : 64));
    if (shape.length === 0 || !(layout.tiles || []).length) return null;
    const sizes = shape.map(() => 1);
    for (const tile of layout.tiles || []) if (tile.dim < sizes.length) sizes[tile.dim] *= Math.max(1, tile.size);
    const rowDim = shape.length > 1 ? shape.length - 2 : -1;
    const colDim = shape.length - 1;
    const tiled = (layout.tiles || []).map((tile) => tile.dim);
    // Of four dimensions those that are tiled are the ones to see.
    const shown = shape.length > 2 && tiled.length ? [...new Set([...tiled, colDim, rowDim])].slice(0, 2).sort((a, b) => a - b) : [rowDim, colDim];
    const count = (dim) => (dim < 0 ? 1 : Math.ceil(shape[dim] / sizes[dim]));
    const rows = Math.min(count(shown[0]), MOST);
    const columns = Math.min(count(shown[1]), MOST);
    const order = layout.order || [];
    const across = order.indexOf(shown[0]) < order.indexOf(shown[1]) || order.length === 0;
    const cell = { width: (WIDTH - 44) / columns, height: Math.max(13, 96 / rows) };
    const height = rows * cell.height + 40;
    const make = (tag, attributes, ...rest) => report.make(tag, { svg: true, ...attributes }, ...rest);
    const words = `${shape.join(" by ")}, in tiles of ${sizes.join(" by ")}`;
    const picture = make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "tiles", role: "img", "aria-label": `Layout: ${words}` });
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const number = across ? row * count(shown[1]) + column : column * count(shown[0]) + row;
        const [x, y] = [40 + column * cell.width, 20 + row * cell.height];
        const nearer = 0.12 + 0.5 * (1 - (across ? row * columns + column : column * rows + row) / (rows * columns));
        picture.append(
          make("rect", { x: x + 0.5, y: y + 0.5, width: cell.width - 1, height: cell.height - 1, rx: 2, class: "tile", "fill-opacity": nearer }),
        );
        if (cell.width > 16) picture.append(make("text", { x: x + cell.width / 2, y: y + cell.height / 2 + 3, class: "mid" }, String(number)));
      }
    }
    const label = (dim) => (dim < 0 ? "" : `d${dim}: ${layout.shape[dim]}`);
    const more = (dim, drawn) => (count(dim) > drawn ? ` (${count(dim)} tiles)` : "");
    picture.append(
      make("text", { x: 40 + (WIDTH - 44) / 2, y: 12, class: "mid" }, label(shown[1]) + more(shown[1], columns)),
      make("text", { x: 2, y: 20 + (rows * cell.height) / 2, class: "small" }, label(shown[0])),
      make("text", { x: 40 + (WIDTH - 44) / 2, y: height - 6, class: "mid" }, `tile ${shown.map((dim) => (dim < 0 ? 1 : sizes[dim])).join(" × ")}${more(shown[0], rows)}`),
    );
    return picture;
  };
})();
