// What cytoscape holds of a picture: all of a small one; of a large one what lies near the view, exchanged as it moves.
(function () {
  "use strict";

  report.View = class {
    constructor(cy, picture) {
      this.cy = cy;
      this.picture = picture;
      this.pinned = null;
      this.held = null;
      this.covered = () => 0; // pixels of the view's lower end that something lies over
      cy.on("viewport resize", () => this.update());
    }

    update() {
      const { x1, x2, y1, y2, w, h } = this.cy.extent();
      const rows = this.picture.rowsOfBar(h);
      const held = this.held;
      if (held && held.rows === rows && x1 >= held.x1 && x2 <= held.x2 && y1 >= held.y1 && y2 <= held.y2) return;
      const [wide, high] = this.picture.small ? [Infinity, Infinity] : [w / 2, h / 2];
      this.held = { rows, x1: x1 - wide, x2: x2 + wide, y1: y1 - high, y2: y2 + high };
      this.exchange();
    }

    // The chosen node stays, and with it its neighbours, wherever the view goes.
    pin(id) {
      this.pinned = id;
      this.exchange();
    }

    exchange() {
      const { cy, picture, held } = this;
      const wanted = held.rows ? picture.bars(held.rows, held) : picture.within(held, this.pinned);
      cy.batch(() => {
        cy.elements().filter((element) => !wanted.has(element.id())).remove();
        cy.add([...wanted.values()].filter((element) => cy.getElementById(element.data.id).empty()));
      });
      if (this.pinned && !held.rows) cy.getElementById(this.pinned).select();
    }

    // As much of the picture as a box has.
    show({ x1, x2, y1, y2 }, margin, most) {
      const { cy } = this;
      const zoom = Math.min((cy.width() - 2 * margin) / (x2 - x1), (cy.height() - 2 * margin) / (y2 - y1), most);
      cy.viewport({ zoom, pan: { x: cy.width() / 2 - ((x1 + x2) / 2) * zoom, y: cy.height() / 2 - ((y1 + y2) / 2) * zoom } });
    }

    centre(id, least) {
      const { cy } = this;
      const { x, y } = this.picture.at.get(id);
      const zoom = Math.max(cy.zoom(), least);
      cy.viewport({ zoom, pan: { x: cy.width() / 2 - x * zoom, y: (cy.height() - this.covered()) / 2 - y * zoom } });
    }

    // Whether a node has a margin around it in the view.
    sees(id, margin) {
      const { x, y } = this.place(id);
      return x >= margin && y >= margin && x <= this.cy.width() - margin && y <= this.cy.height() - this.covered() - margin;
    }

    // Where a node of the picture is on the canvas.
    place(id) {
      const [{ x, y }, zoom, pan] = [this.picture.at.get(id), this.cy.zoom(), this.cy.pan()];
      return { x: x * zoom + pan.x, y: y * zoom + pan.y };
    }
  };
})();
