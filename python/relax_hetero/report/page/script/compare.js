// This report beside an earlier one: kernels by name, memory and devices.
(function () {
  "use strict";

  report.drawCompare = function () {
    const [now, then] = [report.data, report.previous];
    report.section("compare", "Before and after", `Before: ${then.title || "report"}${then.made ? ` of ${then.made}` : ""}. After: this report.`, async (body) => {
      const { make } = report;
      const kernels = (data) => {
        const found = new Map();
        for (const group of data.groups || []) {
          const known = found.get(group.kernel) || { seconds: null, device: group.device };
          if (report.known(group.seconds)) known.seconds = (known.seconds || 0) + group.seconds;
          found.set(group.kernel, known);
        }
        return found;
      };
      const [before, after] = [kernels(then), kernels(now)];
      const call = (data) => (data.profile ? data.profile.seconds : null);
      const change = (a, b) => (report.known(a) && report.known(b) && a > 0 ? `${b >= a ? "+" : "−"}${Math.abs((100 * (b - a)) / a).toFixed(1)} %` : "");
      const sum = (data, part) => ((data.memory || []).length ? data.memory.reduce((total, entry) => total + (entry[part] || 0), 0) : null);
      const moved = (data) => (data.devices || []).reduce((total, device) => total + (device.transfer_bytes || 0), 0);
      const lines = [["A call", call(then), call(now), report.seconds], ["Kernels", before.size, after.size, report.number], ["Weights", sum(then, "weights"), sum(now, "weights"), report.bytes], ["Transient memory", sum(then, "transient"), sum(now, "transient"), report.bytes], ["Moved by transfers", moved(then), moved(now), report.bytes],
        ["Devices", (then.devices || []).map((device) => device.name).join(", "), (now.devices || []).map((device) => device.name).join(", "), (value) => value || "–"]];
      body.append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Totals before and after" }, make("table", { class: "plain" }, make("thead", {}, make("tr", {}, ["", "Before", "After", "Change"].map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, lines.map(([name, a, b, text]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, text(a)), make("td", {}, text(b)), make("td", {}, change(a, b))))))));
      const columns = [["kernel", "text"], ["device", "text"], ["state", "text"], ["before", "seconds"], ["after", "seconds"], ["difference", "seconds"]];
      const rows = [...new Set([...before.keys(), ...after.keys()])].map((name) => {
        const [a, b] = [before.get(name), after.get(name)];
        const [from, to] = [a ? a.seconds : null, b ? b.seconds : null];
        const both = report.known(from) && report.known(to);
        return [name || "unnamed", (b || a).device, !a ? "new" : !b ? "gone" : a.device === b.device ? "kept" : `moved from ${a.device}`, from, to, both ? to - from : report.known(to) && !a ? to : report.known(from) && !b ? -from : null];
      });
      await report.table(body, "compare", columns.map(([name, kind]) => ({ name, kind })), rows);
    });
  };
})();
