// Times of benchmarks and of the tokens of a chat.
(function () {
  "use strict";

  report.drawBench = function () {
    report.section("bench", "Benchmark", "Medians; the ratio is the time of the other divided by ours where it says so.", (body) => {
      const columns = [["model", "text"], ["peer", "text"], ["threads", "number"], ["median", "seconds"], ["ratio", "number"], ["fastest", "seconds"], ["slowest", "seconds"], ["runs", "number"]];
      const rows = report.data.bench.rows.map((row) => {
        const runs = row.runs && row.runs.length ? row.runs : [];
        return [row.model, row.peer, row.threads, row.median_seconds, row.ratio, runs.length ? Math.min(...runs) : null, runs.length ? Math.max(...runs) : null, runs.length];
      });
      return report.table(body, "bench", columns.map(([name, kind]) => ({ name, kind })), rows);
    });
  };

  report.drawChat = function () {
    report.section("chat", "Chat", "A bar is a token that the model wrote.", (body) => {
      const { make, data: { chat } } = report;
      const total = chat.tokens.reduce((sum, token) => sum + token.seconds, 0);
      const cards = [["prompt tokens", report.number(chat.prompt_tokens)], ["prefill", report.seconds(chat.prefill_seconds)], ["tokens written", report.number(chat.tokens.length)], ["tokens per second", total ? report.number(chat.tokens.length / total) : "–"],
        ...Object.entries(chat.devices || {}).map(([name, seconds]) => [`on ${name}`, report.seconds(seconds)])];
      body.append(make("ul", { class: "cards small" }, cards.map(([name, value]) => make("li", {}, make("b", {}, value), name))), make("blockquote", {}, chat.tokens.map((token) => token.text).join("")));
      return report.chart(body, 240, `Seconds of ${chat.tokens.length} tokens.`, () => ({
        grid: { left: 12, right: 16, top: 12, bottom: 66, containLabel: true }, dataZoom: report.zoomOf({ xAxisIndex: 0 }),
        xAxis: report.axis("", { type: "category", data: chat.tokens.map((token) => token.text) }), yAxis: report.axis("", { type: "value", axisLabel: { color: report.style("--quiet"), formatter: report.seconds } }),
        tooltip: { confine: true, formatter: ({ dataIndex }) => `<b>${report.safe(chat.tokens[dataIndex].text)}</b> ${report.seconds(chat.tokens[dataIndex].seconds)}` },
        series: [{ type: "bar", data: chat.tokens.map((token) => token.seconds), itemStyle: { color: report.style("--accent") } }],
      }));
    });
  };
})();
