// Tables by tabulator: sorted by a heading, searched by a box, with the keyboard too.
(function () {
  "use strict";

  const PRINTED = 60;

  // Columns: {name, kind}; rows: lists; widths: the most that the first column and others take. Numbers keep their value for sorting and are shown with their unit.
  report.table = async function (body, id, columns, rows, sort, widths = [460, 280]) {
    await report.library("tabulator.min.css", "tabulator.min.js");
    const { make } = report;
    const place = make("div", { id: `table-${id}` });
    const box = make("input", { type: "search", placeholder: "Search the table", "aria-label": "Search the table" });
    const count = make("span", { class: "quiet", role: "status" });
    body.append(make("div", { class: "tools" }, box, count), place);
    const texts = rows.map((row) => row.map((value, index) => report.as(columns[index].kind, value)).join(" ").toLowerCase());
    const table = new Tabulator(place, {
      data: rows.map((row, index) => Object.assign({ row: index }, ...row.map((value, column) => ({ [`c${column}`]: value })))),
      index: "row", layout: "fitDataFill", maxHeight: 460, placeholder: "No row has these words", headerSortTristate: false, columnDefaults: { headerWordWrap: false },
      initialSort: sort === undefined ? [] : [{ column: `c${sort}`, dir: "desc" }],
      columns: columns.map(({ name, kind }, index) => ({
        title: name, field: `c${index}`, sorter: kind === "text" ? "alphanum" : "number", headerTooltip: report.about(name) || false, hozAlign: kind === "text" ? "left" : "right", headerHozAlign: kind === "text" ? "left" : "right", maxWidth: index === 0 ? widths[0] : widths[1],
        headerSortStartingDir: kind === "text" ? "asc" : "desc", tooltip: kind === "text",
        formatter: (cell) => document.createTextNode(report.as(kind, cell.getValue())),
      })),
    });
    let isBuilt = false;
    const tell = (active) => (count.textContent = `${active} of ${rows.length} rows`);
    table.on("dataFiltered", (filters, active) => tell(active.length));
    table.on("tableBuilt", () => {
      tell(rows.length);
      isBuilt = true;
      for (const heading of place.querySelectorAll(".tabulator-col")) {
        heading.setAttribute("tabindex", "0");
        heading.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          heading.click();
        });
      }
    });
    report.onPrint.push(() => {
      // What the screen scrolls through does not print: the first rows, as they are sorted and searched, do.
      place.nextElementSibling?.remove();
      const cells = (cell, values) => make("tr", {}, values.map((value) => make(cell, {}, value)));
      const active = isBuilt ? table.getData("active").map(({ row }) => rows[row]) : sort === undefined ? rows : [...rows].sort((a, b) => b[sort] - a[sort]);
      const shown = active.slice(0, PRINTED).map((row) => cells("td", row.map((value, index) => report.as(columns[index].kind, value))));
      const caption = active.length > shown.length ? make("caption", {}, `The first ${shown.length} of ${active.length} rows`) : null;
      place.after(make("table", { class: "plain printed" }, caption, make("thead", {}, cells("th", columns.map(({ name }) => name))), make("tbody", {}, shown)));
    });
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      table.setFilter((row) => words.every((word) => texts[row.row].includes(word)));
    });
    return table;
  };

  report.drawProfile = function () {
    const { make } = report;
    report.section("profile", "Time of kernels", null, async (body) => {
      const profiles = [report.data.profile, ...(report.data.more_profiles || [])];
      const columns = [["kernel", "text"], ["device", "text"], ["ops", "text"], ["calls", "number"], ["time", "seconds"], ["share", "share"], ["work", "operations"], ["bytes", "bytes"], ["precision", "text"], ["of peak", "share"], ["bound by", "text"]];
      for (const [index, { function: name, rows, seconds }] of profiles.entries()) {
        body.append(make("p", { class: "hint" }, `${report.seconds(seconds)} in all, of function ${name}.`));
        await report.table(body, index ? `profile-${index}` : "profile", columns.map(([title, kind]) => ({ name: title, kind })),
          rows.map((row) => [row.symbol, row.device, (row.ops || []).join(", "), row.calls, row.seconds, row.share, row.operations, row.bytes, row.precision, row.share_of_peak, row.bound]), 4, [255, 175]);
      }
    });
  };

  report.drawTables = function () {
    report.section("tables", "Tables", null, async (body) => {
      for (const one of report.data.tables) {
        const details = report.make("details", {}, report.make("summary", {}, `${one.title} `, report.make("span", { class: "quiet" }, `${one.rows.length}`)));
        body.append(details);
        const draw = async () => {
          if (details.open && !details.dataset.drawn) {
            details.dataset.drawn = "1";
            await report.table(details, one.id, one.columns, one.rows);
          }
        };
        details.addEventListener("toggle", draw);
        report.beforePrint.push(() => ((details.open = true), draw()));
        if (one === report.data.tables[0]) details.open = true;
      }
    });
  };
})();
