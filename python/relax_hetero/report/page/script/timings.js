// Times of benchmarks and of the tokens of a chat.
(function () {
  "use strict";
  const sorted = (values) => [...values].sort((a, b) => a - b);
  // The value below which a share of sorted values lies, between neighbours in proportion.
  function quantile(values, share) {
    const at = (values.length - 1) * share;
    const below = Math.floor(at);
    return values[below] + (at - below) * (values[Math.min(below + 1, values.length - 1)] - values[below]);
  }
  const tip = () => ({ confine: true, backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 } });
  const named = (columns) => columns.map(([name, kind]) => ({ name, kind }));

  report.drawBench = function () {
    const { bench } = report.data;
    const hint = `Each call from arrays to arrays, with ${bench.threads} thread${bench.threads === 1 ? "" : "s"}, in rounds of all programs. A box holds half of the calls, its line is the median; a point is a call.`;
    report.section("bench", "Benchmark", hint, async (body) => {
      const rows = bench.rows.map((row) => ({ ...row, calls: sorted(row.seconds) }));
      const ran = rows.filter((row) => row.calls.length);
      const median = (row) => quantile(row.calls, 0.5);
      if (ran.length && report.hasCharts()) {
        const words = `Times of calls: ${ran.map((row) => `${row.name} ${report.seconds(median(row))}`).join(", ")}.`;
        await report.chart(body, 80 + 60 * ran.length, words, () => ({
          grid: { left: 12, right: 24, top: 8, bottom: 8, containLabel: true },
          tooltip: { ...tip(), formatter: ({ seriesType, data, name }) => seriesType === "boxplot" ? `<b>${report.safe(name)}</b><br>median ${report.seconds(data.value[3])}, half of the calls ${report.seconds(data.value[2])} to ${report.seconds(data.value[4])}, all ${report.seconds(data.value[1])} to ${report.seconds(data.value[5])}` : `<b>${report.safe(ran[data.value[1]].name)}</b>, call ${data.call}: ${report.seconds(data.value[0])}` },
          xAxis: report.axis("", { type: "value", min: 0, axisLabel: { color: report.style("--quiet"), formatter: report.seconds, hideOverlap: true } }),
          yAxis: report.axis("", { type: "category", inverse: true, data: ran.map((row) => row.name), axisLabel: { color: report.style("--ink") } }),
          series: [
            { type: "boxplot", boxWidth: [10, 26], itemStyle: { color: report.style("--back"), borderColor: report.style("--accent"), borderWidth: 1.5 }, encode: { x: [1, 2, 3, 4, 5], y: 0 }, data: ran.map((row, index) => ({ name: row.name, value: [index, ...[0, 0.25, 0.5, 0.75, 1].map((share) => quantile(row.calls, share))] })) },
            { type: "scatter", symbolSize: 6, itemStyle: { color: report.style("--accent"), opacity: 0.45 }, data: ran.flatMap((row, index) => row.seconds.map((value, call) => ({ value: [value, index], call: call + 1 }))) },
          ],
        }));
      }
      const ours = ran.find((row) => row.name === rows[0].name);
      const columns = [["program", "text"], ["median", "seconds"], ["of ours", "number"], ["fastest", "seconds"], ["slowest", "seconds"], ["calls", "number"], ["fails", "text"]];
      const cells = rows.map((row) => row.calls.length
        ? [row.name, median(row), ours ? median(row) / median(ours) : null, row.calls[0], row.calls[row.calls.length - 1], row.calls.length, row.fails || ""]
        : [row.name, null, null, null, null, 0, row.fails || ""]);
      const shown = rows.some((row) => row.fails) ? columns.length : columns.length - 1;
      return report.table(body, "bench", named(columns.slice(0, shown)), cells.map((row) => row.slice(0, shown)));
    });
  };

  report.drawChat = function () {
    const { make, data: { chat: { answers } } } = report;
    // The first piece of an answer waits for the prompt; time for a token is that of the others.
    const later = answers.flatMap((answer, index) => answer.pieces.slice(1).filter((piece) => piece.tokens > 0).map((piece) => ({ ...piece, answer: index })));
    report.section("chat", "Answers", "The speed of the prompt counts tokens that were not in the cache, until the first token; that of the answer counts the tokens behind the first.", (body) => {
      const total = (of) => answers.reduce((sum, answer) => sum + of(answer), 0);
      const seconds = later.reduce((sum, piece) => sum + piece.seconds, 0);
      const cards = [["answers", report.number(answers.length)], ["tokens of prompts", report.number(total((answer) => answer.new_tokens))], ["tokens written", report.number(total((answer) => answer.tokens))],
        ["tokens per second", seconds ? report.number(Number((later.reduce((sum, piece) => sum + piece.tokens, 0) / seconds).toPrecision(3))) : "–"]];
      body.append(make("ul", { class: "cards small" }, cards.map(([name, value]) => make("li", {}, make("b", {}, value), name))));
      const round = (value) => (report.known(value) ? Number(value.toPrecision(3)) : null);
      const columns = [["answer", "number"], ["prompt tokens", "number"], ["of them new", "number"], ["to the first token", "seconds"], ["prompt, tokens/s", "number"], ["tokens", "number"], ["answer, tokens/s", "number"]];
      return report.table(body, "chat", named(columns), answers.map((answer, index) => [index + 1, answer.prompt_tokens, answer.new_tokens, answer.first_token_seconds, round(answer.prompt_tokens_per_second), answer.tokens, round(answer.tokens_per_second)]));
    });
    if (answers.length) bars("chat-speed", "Speed of each answer", answers);
    if (later.length) drawTokens(later, answers);
  };

  function bars(id, title, answers) {
    report.section(id, title, "Tokens per second of the prompt and of the answer, and the time until the first token.", (body) => {
      const round = (value) => (report.known(value) ? report.number(Number(value.toPrecision(3))) : "–");
      const words = answers.map((answer, index) => `Answer ${index + 1}: first token after ${report.seconds(answer.first_token_seconds)}, ${round(answer.tokens_per_second)} tokens per second`).join(". ");
      const axis = (name, more) => report.axis(name, { type: "value", nameLocation: "end", nameTextStyle: { color: report.style("--quiet"), align: "left" }, ...more });
      return report.chart(body, 280, words, () => ({
        grid: { left: 12, right: 24, top: 54, bottom: 8, containLabel: true }, legend: { top: 0, textStyle: { color: report.style("--ink") } },
        tooltip: { ...tip(), trigger: "axis", formatter: (items) => { const answer = answers[items[0].dataIndex]; return `<b>Answer ${items[0].dataIndex + 1}</b><br>prompt ${round(answer.prompt_tokens_per_second)} tokens/s<br>answer ${round(answer.tokens_per_second)} tokens/s<br>first token after ${report.seconds(answer.first_token_seconds)}`; } },
        xAxis: report.axis("", { type: "category", data: answers.map((answer, index) => `${index + 1}`) }),
        yAxis: [axis("tokens/s", { type: "log" }), axis("", { splitLine: { show: false }, axisLabel: { color: report.style("--quiet"), formatter: report.seconds } })],
        series: [
          { type: "bar", name: "prompt", barMaxWidth: 34, data: answers.map((answer) => answer.prompt_tokens_per_second), itemStyle: { color: report.shades[0] } },
          { type: "bar", name: "answer", barMaxWidth: 34, data: answers.map((answer) => answer.tokens_per_second), itemStyle: { color: report.shades[1] } },
          { type: "line", name: "to the first token", yAxisIndex: 1, symbolSize: 9, data: answers.map((answer) => answer.first_token_seconds), itemStyle: { color: report.shades[2] }, lineStyle: { type: "dashed" } },
        ],
      }));
    });
  }

  function drawTokens(later, answers) {
    report.section("chat-tokens", "Time of each token", "Behind the first of each answer, in the order of the conversation; dashed lines are where an answer begins.", (body) => {
      const begins = later.map((piece, index) => (index && piece.answer !== later[index - 1].answer ? index : -1)).filter((index) => index >= 0);
      const times = sorted(later.map((piece) => piece.seconds / piece.tokens));
      return report.chart(body, 300, `Times of ${later.length} pieces of ${answers.length} answers; the median is ${report.seconds(quantile(times, 0.5))} for a token.`, () => ({
        grid: { left: 12, right: 24, top: 14, bottom: 66, containLabel: true }, dataZoom: report.zoomOf({ xAxisIndex: 0 }),
        tooltip: { ...tip(), formatter: ({ dataIndex }) => { const piece = later[dataIndex]; return `<b>${report.safe(report.shorter(piece.text, 60))}</b><br>answer ${piece.answer + 1}, ${report.seconds(piece.seconds)}${piece.tokens > 1 ? ` for ${piece.tokens} tokens` : ""}`; } },
        xAxis: report.axis("", { type: "category", data: later.map((piece, index) => index + 1) }),
        yAxis: report.axis("", { type: "value", axisLabel: { color: report.style("--quiet"), formatter: report.seconds } }),
        series: [{ type: "scatter", symbolSize: 6, large: later.length > 5000, itemStyle: { color: report.style("--accent"), opacity: 0.7 }, data: later.map((piece, index) => [index, piece.seconds / piece.tokens]),
          markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { type: "dashed", color: report.style("--line-strong") }, data: begins.map((index) => ({ xAxis: index })) } }],
      }));
    });
  }
})();
