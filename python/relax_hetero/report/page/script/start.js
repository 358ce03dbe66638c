// Reads the data, draws the sections that have some, and says how to get the others.
(async function () {
  "use strict";
  const read = async (id) => {
    const element = document.getElementById(id);
    if (!element) return null;
    // Marks in names that would turn the text around them are written out. JSON has them as escapes already.
    const text = await report.unpacked(element);
    return JSON.parse(text.replace(/\\(?:\\|u(061c|200[ef]|202[a-e]|206[6-9]))/g, (found, mark) => (mark ? `\\\\u${mark}` : found)));
  };
  report.data = await read("report-data");
  report.previous = await read("report-previous");
  report.startTheme();
  const has = (part) => report.data[part] && (!Array.isArray(report.data[part]) || report.data[part].length > 0);
  const libraries = has("nodes") ? report.library("cytoscape.min.js", "d3-dag.min.js") : null;
  report.drawOverview();
  if (report.previous) report.drawCompare();
  if (has("nodes")) {
    await libraries;
    report.drawGraph();
  }
  const charts = document.querySelector('script[data-library="echarts.min.js"]') !== null;
  if (has("timeline") && charts) report.drawTimeline();
  if (has("memory") && charts) report.drawMemory();
  if (charts) report.drawRoofline();
  if (has("profile")) report.drawProfile();
  if (has("token") && charts) report.drawToken();
  if (has("plan") && charts) report.drawPlan();
  if (has("bench")) report.drawBench();
  if (has("chat") && charts) report.drawChat();
  if (has("passes")) report.drawPasses();
  if (has("tables")) report.drawTables();
  report.drawMissing();
  for (const { id, title } of report.sections) {
    document.getElementById("sections").append(report.make("a", { href: `#${id}` }, title));
  }
  report.startPrinting();
  document.documentElement.setAttribute("data-ready", "");
})();
