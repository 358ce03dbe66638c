// What a token of a language model costs: each part of a decode step, by device.
(function () {
  "use strict";

  report.drawToken = function () {
    const { make, data: { token } } = report;
    const isTimed = token.parts.some((part) => report.known(part.seconds));
    const size = (part) => (part.weights || 0) + (part.cache || 0) + (part.transferred || 0);
    const hint = `A decode step of ${token.rows} text${token.rows > 1 ? "s" : ""} behind ${report.number(token.cached)} tokens: ${isTimed ? "the time" : "the bytes that are read"}, part by part.`;
    report.section("token", "A token", hint, (body) => {
      const read = token.parts.reduce((sum, part) => sum + (part.weights || 0) + (part.cache || 0), 0);
      const cards = [["read for a token", report.bytes(read)]];
      if (token.step) cards.unshift(["a step", report.seconds(token.step.seconds)], ["tokens per second", report.number(Number((token.rows / token.step.seconds).toPrecision(3)))], ["outside of kernels", report.share(token.step.outside)]);
      body.append(make("ul", { class: "cards small" }, cards.map(([name, value]) => make("li", {}, make("b", {}, value), name))));
      const names = [...new Set(token.parts.map((part) => part.part))];
      const devices = [...new Set(token.parts.map((part) => part.device))];
      const text = isTimed ? report.seconds : report.bytes;
      const words = `A token by part: ${token.parts.map((part) => `${part.part} on ${part.device} ${text(isTimed ? part.seconds : size(part))}`).join(", ")}.`;
      return report.chart(body, 90 + 36 * names.length, words, () => ({
        grid: { left: 12, right: 24, top: devices.length > 1 ? 34 : 8, bottom: 8, containLabel: true }, legend: { show: devices.length > 1, top: 0, textStyle: { color: report.style("--ink") } },
        tooltip: { confine: true, backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 },
          formatter: ({ data: { part } }) => `<b>${report.safe(part.part)}</b> on ${report.safe(part.device)}<br>${report.number(part.calls)} calls${report.known(part.seconds) ? `, ${report.seconds(part.seconds)}` : ""}<br>weights ${report.bytes(part.weights)}, cache ${report.bytes(part.cache)}, transferred ${report.bytes(part.transferred)}` },
        xAxis: report.axis("", { type: "value", axisLabel: { color: report.style("--quiet"), formatter: text, hideOverlap: true } }),
        yAxis: report.axis("", { type: "category", inverse: true, data: names, axisLabel: { color: report.style("--ink") } }),
        series: devices.map((device) => ({
          type: "bar", name: device, stack: "token", barMaxWidth: 26, itemStyle: { color: report.colour(device) },
          data: token.parts.filter((part) => part.device === device).map((part) => ({ value: [isTimed ? part.seconds || 0 : size(part), part.part], part })),
        })),
      }));
    });
  };
})();
