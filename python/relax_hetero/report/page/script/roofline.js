// Each kernel by its work for a byte and the speed it reached, under what its device could reach.
(function () {
  "use strict";
  const HIGH = 440;
  const LINE = 15;

  // Names of roofs, one for those that lie on each other, each moved up until it is clear of the one below.
  function labelled(roofs, decade) {
    const found = new Map();
    const heights = [...new Set(roofs.map((roof) => roof.top))].sort((a, b) => a - b);
    let taken = -Infinity;
    for (const height of heights) {
      const same = roofs.filter((roof) => roof.top === height);
      const at = decade * Math.log10(height);
      const clear = Math.max(at, taken + LINE);
      taken = clear;
      found.set(same[0], { text: same.map((roof) => `${roof.device.name} ${roof.precision}`).join(", "), up: clear - at });
    }
    return found;
  }

  // Why points lie above their roofs.
  const ABOVE = {
    memory: "tensors lie in a cache, which is faster than the memory that was measured",
    arithmetic: "fewer operations are needed than are counted, or the peak was measured too low, while other work ran (relax-hetero devices --again measures anew)",
  };
  const isAbove = (group) => group.share_of_peak > 1.05;
  report.whyAbove = (group) => (isAbove(group) ? `Above its roof: ${ABOVE[group.bound]}.` : "");
  function aboveRoofs(points) {
    const above = points.map((point) => point.group).filter(isAbove);
    return Object.entries(ABOVE).flatMap(([bound, why]) => {
      const here = above.filter((group) => group.bound === bound);
      const most = Math.max(...here.map((group) => group.share_of_peak));
      return here.length ? [`${here.length} of ${points.length} kernels lie above the roof of ${bound === "memory" ? "memory" : "arithmetic"}, at up to ${most.toFixed(1)} times of it: ${why}.`] : [];
    });
  }

  // What a kernel's share is of.
  report.peakOf = (group) => (group.bound === "memory" ? "the memory rate" : "the peak");

  report.drawRoofline = function () {
    const { data } = report;
    const points = (data.groups || []).filter((group) => group.operations > 0 && group.bytes > 0 && group.seconds > 0).map((group) => {
      const speed = (group.operations * (group.calls || 1)) / group.seconds;
      return { value: [group.operations / group.bytes, speed], group, symbolSize: 7 + 26 * Math.sqrt(group.share || 0) };
    });
    if (points.length === 0) return;
    const hint = "To the right: more operations for each byte. Up: faster. A kernel near a slope is bound by memory, near a flat line by arithmetic. Larger points take more time.";
    report.section("roofline", "Roofline", [hint, ...aboveRoofs(points)].join(" "), (body) => report.chart(body, HIGH, `Roofline of ${points.length} kernels.`, () => {
      const peaks = (data.devices || []).filter((device) => device.peak && device.peak.bytes_per_second && points.some((point) => point.group.device === device.name)).map((device) => [device.peak.bytes_per_second, device.peak.operations_per_second || {}]);
      // Also where the slope of a roof ends, so that both parts of it are seen.
      const ridges = peaks.flatMap(([speed, rates]) => Object.values(rates).map((most) => most / speed));
      const xs = [...points.map((point) => point.value[0]), ...ridges.map((ridge) => ridge / 2)];
      const [low, high] = [10 ** Math.floor(Math.log10(Math.min(...xs))), 10 ** Math.ceil(Math.log10(Math.max(...xs) * 1.5))];
      const used = new Set(points.map((point) => point.group.device));
      const roofs = (data.devices || []).filter((device) => used.has(device.name) && device.peak).flatMap((device) => {
        const speed = device.peak.bytes_per_second;
        const precisions = points.filter((point) => point.group.device === device.name).map((point) => point.group.precision || "");
        const isUsed = (precision) => precisions.some((text) => text === precision || text.startsWith(`${precision}*${precision}`));
        const flat = Object.entries(device.peak.operations_per_second || {}).filter(([precision, most]) => most > 0 && isUsed(precision));
        // Of types that were not measured there is the slope alone.
        if (flat.length === 0) return speed ? [{ device, precision: "memory", index: 0, data: [[low, low * speed], [high, high * speed]], top: high * speed }] : [];
        return flat.map(([precision, most], index) => {
          const top = speed ? Math.min(most, high * speed) : most;
          const data = speed ? [[low, Math.min(most, low * speed)], [Math.min(Math.max(most / speed, low), high), top], [high, top]] : [[low, most], [high, most]];
          return { device, precision, index, data, top };
        });
      });
      const heights = [...points.map((point) => point.value[1]), ...roofs.flatMap((roof) => roof.data.map(([, value]) => value))];
      const [least, most] = [10 ** Math.floor(Math.log10(Math.min(...heights))), 10 ** Math.ceil(Math.log10(Math.max(...heights) * 1.3))];
      const labels = labelled(roofs, (HIGH - 90) / Math.log10(most / least));
      const lines = roofs.map((roof) => ({
        type: "line", name: roof.device.name, symbol: "none", silent: true, data: roof.data, z: 1, lineStyle: { color: report.colour(roof.device.name), width: 2, type: ["solid", "dashed", "dotted"][roof.index % 3] },
        endLabel: { show: labels.has(roof), formatter: (labels.get(roof) || {}).text || "", color: report.style("--ink"), fontSize: 11, backgroundColor: report.style("--ground"), padding: [1, 4], align: "right", verticalAlign: "bottom", offset: [-8, -3 - (labels.get(roof) || { up: 0 }).up] },
      }));
      return {
        grid: { left: 14, right: 20, top: 24, bottom: 42, containLabel: true }, legend: { show: false },
        tooltip: { confine: true, backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 },
          formatter: ({ data: { group, value } }) => `<b>${report.safe(report.shorter(group.kernel || "kernel", 60))}</b><br>${report.safe(group.device)} ${report.safe(group.precision || "")}<br>${report.rate(value[1], "op/s")} at ${report.number(value[0])} op/B<br>${report.seconds(group.seconds)}, ${report.share(group.share)} of the run${report.known(group.share_of_peak) ? `, ${report.share(group.share_of_peak)} of ${report.peakOf(group)}` : ""}<br>${report.safe(report.whyAbove(group))}` },
        xAxis: report.axis("operations per byte", { type: "log", min: low, max: high, nameGap: 26, axisLabel: { color: report.style("--quiet"), formatter: (value) => String(Number(value.toPrecision(3))) } }),
        yAxis: report.axis("", { type: "log", min: least, max: most, axisLabel: { color: report.style("--quiet"), formatter: (value) => report.rate(value, "op/s") } }),
        series: [...[...used].map((device) => ({ type: "scatter", name: device, data: points.filter((point) => point.group.device === device), itemStyle: { color: report.colour(device), opacity: 0.8, borderColor: report.style("--ground"), borderWidth: 1 } })), ...lines],
      };
    }));
  };
})();
