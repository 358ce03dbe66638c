// What each queue did when.
(function () {
  "use strict";
  const PATTERN = { wait: 0.25, transfer: 1, step: 0.9, kernel: 1 };

  report.drawTimeline = function () {
    const hint = "A row is a queue; drag the bar below to zoom, or turn the wheel with Ctrl. Pale bars wait, framed bars are transfers.";
    report.section("timeline", "Timeline", hint, (body) => {
      const queues = report.data.timeline.queues || [];
      const first = queues.reduce((least, queue) => queue.events.reduce((value, event) => Math.min(value, event.begin), least), Infinity);
      const events = queues.flatMap((queue, row) => queue.events.map((event) => ({ value: [event.begin - first, event.end - first, row], event, queue })));
      const words = `Timeline of ${queues.length} queues and ${events.length} events.`;
      return report.chart(body, 120 + 46 * queues.length, words, () => ({
        grid: { left: 12, right: 40, top: 10, bottom: 66, containLabel: true },
        tooltip: { backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 }, confine: true,
          formatter: ({ data }) => `<b>${report.safe(report.shorter(data.event.name, 70))}</b><br>${report.safe(data.event.kind)} on ${report.safe(data.queue.name)}, call ${data.event.call}<br>${report.seconds(data.event.end - data.event.begin)}, from ${report.seconds(data.value[0])}` },
        xAxis: report.axis("time since the first event", { type: "value", min: 0, nameGap: 26, axisLabel: { color: report.style("--quiet"), formatter: report.seconds, hideOverlap: true } }),
        yAxis: report.axis("", { type: "category", inverse: true, data: queues.map((queue) => queue.name), axisLabel: { color: report.style("--ink") } }),
        dataZoom: report.zoomOf({ xAxisIndex: 0 }),
        series: [{ type: "custom", encode: { x: [0, 1], y: 2 }, data: events, progressive: 2000, clip: true, renderItem: (params, api) => {
          const { event, queue } = events[params.dataIndex];
          const [begin, end] = [api.coord([api.value(0), api.value(2)]), api.coord([api.value(1), api.value(2)])];
          const high = event.kind === "step" ? 30 : 22;
          const area = params.coordSys;
          const shape = echarts.graphic.clipRectByRect({ x: begin[0], y: begin[1] - high / 2, width: Math.max(1, end[0] - begin[0]), height: high }, { x: area.x, y: area.y, width: area.width, height: area.height });
          if (!shape) return null;
          const fill = report.colour(queue.device);
          const bar = { type: "rect", shape, style: { fill, opacity: PATTERN[event.kind] ?? 1, stroke: event.kind === "transfer" ? report.style("--ink") : report.style("--ground"), lineWidth: shape.width > 3 ? 1 : 0 } };
          if (shape.width > 46 && event.kind !== "wait") {
            bar.textContent = { style: { text: event.name, fill: report.inkOn(fill), fontSize: 11, width: shape.width - 8, overflow: "truncate" } };
            bar.textConfig = { position: "inside" };
          }
          return bar;
        } }],
      }));
    });
  };
})();
