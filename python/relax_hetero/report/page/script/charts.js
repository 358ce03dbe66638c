// Charts by echarts, in our colours, redrawn with the theme and the width.
(function () {
  "use strict";

  // Text within a chart's tooltip, which is HTML.
  report.safe = (text) => String(text).replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

  report.hasCharts = () => document.querySelector('script[data-library="echarts.min.js"]') !== null || typeof echarts !== "undefined";

  // For what is no device: colours that stay apart for the colour-blind, on light and dark grounds.
  report.shades = ["#0072b2", "#e69f00", "#009e73"];

  report.axis = (name, more) => ({
    name, nameLocation: "middle", nameTextStyle: { color: report.style("--quiet") }, axisLabel: { color: report.style("--quiet"), hideOverlap: true },
    axisLine: { lineStyle: { color: report.style("--line-strong") } }, splitLine: { lineStyle: { color: report.style("--line") } }, ...more,
  });

  report.zoomOf = (axes) => [{ type: "inside", ...axes, filterMode: "none", zoomOnMouseWheel: "ctrl" }, { type: "slider", ...axes, filterMode: "none", bottom: 6, height: 20, brushSelect: false, showDetail: false }];

  // `option()` is asked again when colours change. The chart is an image with words for screen readers.
  report.chart = async function (body, height, words, option) {
    await report.library("echarts.min.js");
    const box = report.make("div", { class: "chart", style: `height:${height}px`, role: "img", "aria-label": words });
    body.append(box);
    const chart = echarts.init(box, null, { renderer: "canvas" });
    const draw = () => chart.setOption({
      animation: false, textStyle: { fontFamily: "system-ui, sans-serif", color: report.style("--ink") },
      tooltip: { backgroundColor: report.style("--ground"), borderColor: report.style("--line-strong"), textStyle: { color: report.style("--ink"), fontSize: 12 }, confine: true },
      ...option(chart) }, true);
    draw();
    report.onTheme.push(draw);
    new ResizeObserver(() => chart.resize()).observe(box);
    return { chart, draw };
  };
})();
