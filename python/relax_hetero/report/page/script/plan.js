// The plan of a language model: which part of which layer is on which device, bytes of the devices, speed by memory.
(function () {
  "use strict";
  const NAMES = { attn: "attention", ffn: "feed-forward", router: "router, norms", experts: "experts" };

  const tip = (formatter) => ({ confine: true, backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 }, formatter });
  const legend = (entries) => ({ show: entries.length > 1, top: 0, data: entries, textStyle: { color: report.style("--ink") } });
  const rate = (value) => (report.known(value) ? report.number(Number(Number(value).toPrecision(3))) : "–");

  // Marks of an axis at whole binary units.
  const byUnits = (most) => ({ interval: 2 ** Math.max(0, Math.round(Math.log2(most / 8))), axisLabel: { color: report.style("--quiet"), formatter: report.bytes, hideOverlap: true } });

  function cards(plan) {
    const { make } = report;
    const name = (speed) => `tokens/s, ${speed.work}${speed.work === "prefill" ? ` of ${report.number(speed.tokens)}` : ` after ${report.number(plan.cached)}`}`;
    return make("ul", { class: "cards small" }, plan.speeds.map((speed) => make("li", {}, make("b", {}, rate(speed.tokens_per_second)), name(speed))));
  }

  // Layers are columns, parts of a layer rows, devices colours.
  function drawLayers(body, plan) {
    const names = Object.keys(NAMES).filter((name) => plan.parts.some((part) => part.name === name));
    const rows = names.map((name) => NAMES[name]);
    const devices = [...new Set([...plan.devices, ...plan.parts].map((each) => each.device || each.name))]; // meshes, too
    const inLayers = plan.parts.filter((part) => names.includes(part.name));
    const ends = plan.parts.filter((part) => !names.includes(part.name));
    const bytes = (parts) => parts.reduce((sum, part) => sum + part.weights + part.cache, 0);
    const share = (part) => {
      const cell = inLayers.filter((other) => other.name === part.name && other.layer === part.layer);
      const before = bytes(cell.slice(0, cell.indexOf(part))), all = Math.max(1, bytes(cell));
      return [before / all, (before + bytes([part])) / all];
    };
    const words = `Devices of ${plan.layers} layers: ${names.map((name, row) => `${rows[row]} ${devices.map((device) => `${inLayers.filter((part) => part.name === name && part.device === device).length} on ${device}`).join(", ")}`).join("; ")}.`;
    body.append(report.make("p", { class: "hint" }, `Each column is a layer. ${ends.map((part) => `${part.name === "embd" ? "Embeddings" : "output"} on ${part.device}`).join(", ")}.`));
    return report.chart(body, 110 + 34 * rows.length, words, () => ({
      grid: { left: 12, right: 16, top: 34, bottom: 40, containLabel: true }, legend: legend(devices),
      tooltip: tip(({ data: { part } }) => `<b>${report.safe(rows[names.indexOf(part.name)])} of layer ${part.layer}</b> on ${report.safe(part.device)}${part.experts.length ? `, ${part.experts.length} of ${plan.experts}` : ""}<br>weights ${report.bytes(part.weights)}${part.cache ? `, cache ${report.bytes(part.cache)}` : ""}, a token ${report.seconds(part.seconds)}<br>${report.safe(part.reason)}`),
      xAxis: report.axis("layer", { type: "value", min: 0, max: plan.layers, minInterval: 1, nameGap: 26, splitLine: { show: false } }),
      yAxis: report.axis("", { type: "category", inverse: true, data: rows, axisLabel: { color: report.style("--ink") }, axisTick: { show: false } }),
      series: devices.map((device) => ({
        type: "custom", name: device, itemStyle: { color: report.colour(device) }, encode: { x: 0, y: 1 },
        data: inLayers.filter((part) => part.device === device).map((part) => ({ value: [part.layer, names.indexOf(part.name), ...share(part)], part })),
        renderItem: (params, api) => {
          const [begin, end] = [api.coord([api.value(0), api.value(1)]), api.coord([api.value(0) + 1, api.value(1)])];
          const height = 26 * (api.value(3) - api.value(2)); // pieces on several devices share a cell
          return { type: "rect", shape: { x: begin[0] + 0.5, y: begin[1] - 13 + 26 * api.value(2), width: Math.max(1, end[0] - begin[0] - 1), height, r: 2 }, style: { fill: report.colour(device) } };
        },
      })),
    }));
  }

  function drawBytes(body, plan) {
    const devices = plan.devices;
    const kinds = [["weights", 1], ["cache", 0.65], ["working", 0.4], ["left", 0.12]];
    const labels = { working: "other" };
    const words = `Bytes: ${devices.map((device) => `${device.name} weights ${report.bytes(device.weights)}, cache ${report.bytes(device.cache)}, other ${report.bytes(device.working)}${report.known(device.left) ? `, left ${report.bytes(device.left)}` : ""}`).join("; ")}.`;
    body.append(report.make("h4", {}, "Memory"));
    return report.chart(body, 80 + 40 * devices.length, words, () => ({
      grid: { left: 12, right: 24, top: 34, bottom: 8, containLabel: true }, legend: legend(kinds.map(([kind]) => labels[kind] || kind)),
      tooltip: tip(({ seriesName, name, value }) => `<b>${report.safe(name)}</b><br>${seriesName} ${report.bytes(value)}`),
      xAxis: report.axis("", { type: "value", ...byUnits(Math.max(...devices.map((device) => device.weights + device.cache + device.working + Math.max(0, device.left || 0)))) }),
      yAxis: report.axis("", { type: "category", inverse: true, data: devices.map((device) => device.name), axisLabel: { color: report.style("--ink") } }),
      series: kinds.map(([kind, opacity]) => ({
        type: "bar", stack: "bytes", name: labels[kind] || kind, barMaxWidth: 26, itemStyle: { color: report.style("--line-strong"), opacity },
        data: devices.map((device) => ({ value: Math.max(0, device[kind] || 0), itemStyle: { color: report.colour(device.name), opacity } })),
      })),
    }));
  }

  function drawCurves(body, plan) {
    const devices = Object.keys(plan.curves);
    const points = (device) => plan.curves[device].filter(([, value]) => report.known(value));
    const limit = (name) => plan.devices.find((device) => device.name === name).limit;
    const most = Math.max(...devices.map((device) => plan.curves[device].at(-1)[0]));
    const words = `Tokens per second of decoding by memory limit: ${devices.map((device) => `${device} ${points(device).map(([size, value]) => `${report.bytes(size)} ${rate(value)}`).join(", ")}`).join("; ")}.`;
    body.append(report.make("h4", {}, "Decoding by memory limit"));
    return report.chart(body, 280, words, () => ({
      grid: { left: 14, right: 30, top: 34, bottom: 42, containLabel: true }, legend: legend(devices),
      tooltip: tip(({ seriesName, value }) => `<b>${report.bytes(value[0])}</b> of ${report.safe(seriesName)}<br>${rate(value[1])} tokens/s`),
      xAxis: report.axis("memory limit", { type: "value", nameGap: 26, max: Math.ceil(most), ...byUnits(most) }),
      yAxis: report.axis("tokens/s", { type: "value", min: 0, nameGap: 42 }),
      series: devices.map((device) => ({
        type: "line", name: device, symbolSize: 5, itemStyle: { color: report.colour(device) }, lineStyle: { color: report.colour(device), width: 2 }, data: points(device),
        markLine: { silent: true, symbol: "none", lineStyle: { color: report.colour(device), type: "dashed" }, label: { formatter: "limit", color: report.style("--ink") }, data: [{ xAxis: limit(device) }] },
      })),
    }));
  }

  report.drawPlan = function () {
    const { data: { plan } } = report;
    const hint = `Where ${plan.is_auto ? "the cost model places" : "the rules place"} each part, and what is expected of it. Nothing was compiled.`;
    report.section("plan", "Plan", hint, async (body) => {
      body.append(cards(plan));
      await drawLayers(body, plan);
      await drawBytes(body, plan);
      if (Object.keys(plan.curves).length) await drawCurves(body, plan);
    });
  };
})();
