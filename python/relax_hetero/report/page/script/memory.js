// Memory of a call on each device: how much after each kernel, and which values live when.
(function () {
  "use strict";
  const MOST = 40;
  const KINDS = { arena: 0.95, storage: 0.95, result: 0.6, transfer: 0.35 };

  report.drawMemory = function () {
    report.section("memory", "Memory", "Bytes alive after each kernel of a call, and below them the values that use most, each from its first kernel to its last.", async (body) => {
      const { make } = report;
      const entries = report.data.memory.filter((entry) => (entry.steps || []).length || entry.weights || entry.transient);
      const name = (entry) => `${entry.function} on ${entry.device}${Object.keys(entry.sizes || {}).length ? `, ${Object.entries(entry.sizes).map(([size, value]) => `${size} = ${value}`).join(", ")}` : ""}`;
      const place = make("div", {});
      const select = make("select", { id: "memory-of", onchange: () => show(entries[select.selectedIndex]) }, entries.map((entry) => make("option", {}, name(entry))));
      body.append(make("div", { class: "tools" }, make("label", {}, "Shown ", select)), place);
      if (entries.length) await show(entries[0]);

      async function show(entry) {
        const parts = ["weights", "transient", "arenas", "transfers", "results", "lower_bound"].filter((part) => report.known(entry[part]));
        place.replaceChildren(make("ul", { class: "cards small" }, parts.map((part) => make("li", {}, make("b", {}, report.bytes(entry[part])), part))));
        const steps = entry.steps || [];
        const colour = report.colour(entry.device);
        const step = (more) => report.axis("kernel, in the order of a call", { type: "value", min: 0, max: steps.length, minInterval: 1, nameGap: 26, ...more });
        if ((entry.over_time || []).length) {
          const most = Math.max(...entry.over_time);
          await report.chart(place, 240, `Memory over time of ${name(entry)}: at most ${report.bytes(most)}.`, () => ({
            grid: { left: 12, right: 16, top: 14, bottom: 40, containLabel: true }, xAxis: step(),
            tooltip: { trigger: "axis", confine: true, backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 },
              formatter: ([point]) => `<b>${report.bytes(point.value[1])}</b> after<br>${report.safe(report.shorter(steps[point.value[0]] || "the last kernel", 60))}` },
            yAxis: report.axis("", { type: "value", axisLabel: { color: report.style("--quiet"), formatter: report.bytes } }),
            series: [{ type: "line", step: "end", symbol: "none", areaStyle: { color: colour, opacity: 0.3 }, lineStyle: { color: colour, width: 2 }, itemStyle: { color: colour }, data: [...entry.over_time, entry.over_time.at(-1)].map((bytes, index) => [index, bytes]) }],
          }));
        }
        else place.append(make("p", { class: "hint" }, "What is alive after each kernel is not known of this function on this device."));
        const values = [...(entry.values || [])].sort((a, b) => b.bytes - a.bytes).slice(0, MOST).sort((a, b) => a.first - b.first || a.last - b.last);
        if (values.length) {
          const left = (entry.values.length > MOST ? `The ${MOST} largest of ${entry.values.length} values` : "Values") + ": solid bars share memory, paler ones are results and transfers.";
          place.append(make("p", { class: "hint" }, left));
          await report.chart(place, 70 + 18 * values.length, `Lifetimes of ${values.length} values.`, () => ({
            grid: { left: 12, right: 16, top: 6, bottom: 40, containLabel: true }, xAxis: step(),
            tooltip: { confine: true, backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 }, formatter: ({ dataIndex }) => {
              const value = values[dataIndex];
              return `<b>${report.safe(value.name)}</b> ${report.bytes(value.bytes)}, ${report.safe(value.kind)}${report.known(value.offset) ? `, at ${report.bytes(value.offset)}` : ""}<br>from ${report.safe(report.shorter(steps[value.first] || "the start", 50))}<br>to ${report.safe(report.shorter(steps[value.last] || "the end", 50))}`;
            } },
            yAxis: report.axis("", { type: "category", inverse: true, data: values.map((value) => report.shorter(value.name, 22)), axisLabel: { color: report.style("--quiet"), fontSize: 11 }, axisTick: { show: false } }),
            series: [{ type: "custom", encode: { x: [0, 1], y: 2 }, data: values.map((value, row) => [value.first, value.last + 1, row, value.bytes]), renderItem: (params, api) => {
              const [begin, end] = [api.coord([api.value(0), api.value(2)]), api.coord([api.value(1), api.value(2)])];
              const width = Math.max(2, end[0] - begin[0]);
              const text = report.bytes(api.value(3));
              return { type: "rect", shape: { x: begin[0], y: begin[1] - 6.5, width, height: 13, r: 2 }, style: { fill: colour, opacity: KINDS[values[params.dataIndex].kind] ?? 1 },
                textContent: width > 60 ? { style: { text, fontSize: 10, fill: KINDS[values[params.dataIndex].kind] < 0.9 ? report.style("--ink") : report.inkOn(colour) } } : undefined, textConfig: { position: "inside" } };
            } }],
          }));
        }
      }
    });
  };
})();
