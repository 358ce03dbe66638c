// What each pass changed, and how long it took.
(function () {
  "use strict";

  function diff(text) {
    const { make } = report;
    const kind = (line) => (/^(\+\+\+|---)/.test(line) ? "file" : line.startsWith("@@") ? "place" : line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : null);
    return make("pre", { class: "diff", tabindex: 0 }, text.split("\n").map((line) => make("span", { class: kind(line) }, line + "\n")));
  }

  report.drawPasses = function () {
    const { passes } = report.data;
    const changed = passes.filter((pass) => pass.changed).length;
    report.section("passes", "Passes", `${passes.length} passes, ${changed} of them changed the module. Open a pass to see its differences.`, (body) => {
      const { make } = report;
      const most = Math.max(1e-9, ...passes.map((pass) => pass.seconds || 0));
      const only = make("input", { type: "checkbox", onchange: () => body.classList.toggle("only-changed", only.checked) });
      body.append(make("div", { class: "tools" }, make("label", {}, only, " only those that changed something")));
      passes.forEach((pass, index) => {
        const bar = make("i", { class: "bar", style: `width:${(70 * (pass.seconds || 0)) / most}px` });
        const summary = make("summary", {}, make("span", { class: "index" }, String(index + 1)), make("b", {}, pass.name), make("span", { class: "quiet" }, pass.changed ? `${Object.keys(pass.functions || {}).length} functions changed` : "no change"), make("span", { class: "barred" }, bar, report.seconds(pass.seconds)));
        const details = make("details", { class: `pass ${pass.changed ? "" : "same"}` }, summary);
        details.addEventListener("toggle", () => {
          if (!details.open || details.children.length > 1) return;
          for (const [name, one] of Object.entries(pass.functions || {})) details.append(make("h4", {}, `${name}: ${one.before_lines} → ${one.after_lines} lines`), diff(one.diff || ""));
          if (details.children.length === 1) details.append(make("p", { class: "quiet" }, "The module is the same after this pass."));
        });
        body.append(details);
      });
    });
  };
})();
