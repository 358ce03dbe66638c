// The first section: what the report is about, its totals, its devices; and the last: what is not in it.
(function () {
  "use strict";

  // A target as one types it, of the JSON that TVM writes.
  function briefly(target) {
    try {
      const parts = JSON.parse(target);
      const shown = ["mcpu", "arch", "mtriple", "num-cores"].filter((name) => parts[name] !== undefined && parts[name] !== "");
      return [parts.kind, ...shown.map((name) => `-${name}=${parts[name]}`)].join(" ");
    } catch (error) {
      return target;
    }
  }

  const LONGEST = 5;

  // The rows of the profile that take most, and the others together.
  function whereTimeGoes() {
    const { data: { profile }, make } = report;
    if (!profile) return null;
    const rows = [...profile.rows].sort((a, b) => b.share - a.share);
    const rest = rows.slice(LONGEST).reduce((sum, row) => sum + row.share, 0);
    const lines = [...rows.slice(0, LONGEST), ...(rest > 0 ? [{ symbol: `${rows.length - LONGEST} others`, share: rest }] : [])];
    const bar = ({ device, share }) => make("span", { class: "track" }, make("span", { style: `width:${100 * share}%;background:${device ? report.colour(device) : "var(--line-strong)"}` }));
    return make("div", {}, make("h3", {}, "Where the time goes"),
      make("ul", { class: "shares" }, lines.map((row) => make("li", {}, bar(row), make("b", {}, report.share(row.share)), make("span", { title: row.symbol }, row.device ? make("span", { class: "quiet" }, `${row.device} `) : null, row.symbol === "to_device" ? "transfers to it" : row.symbol)))));
  }

  function whatToChange() {
    const { data: { suggestions }, make } = report;
    if (!(suggestions || []).length) return null;
    return make("div", {}, make("h3", {}, "What to change"), make("ul", { class: "notes" }, suggestions.map((text) => make("li", {}, text))));
  }

  report.drawOverview = function () {
    report.section("overview", "Overview", null, (body) => {
      const { make, data } = report;
      const ops = (data.nodes || []).filter((node) => node.kind === "op").length;
      const transfers = (data.nodes || []).filter((node) => node.kind === "transfer").length;
      const devices = data.devices || [];
      const moved = devices.reduce((sum, device) => sum + (device.transfer_bytes || 0), 0);
      // Of a module, weights may still be parameters; those of an executable are its inputs.
      const weightsOf = (device) => (device.constant_bytes || 0) + (data.kind === "executable" ? 0 : device.param_bytes || 0);
      const weights = devices.reduce((sum, device) => sum + weightsOf(device), 0);
      const cards = [
        ["ops", (data.nodes || []).length ? report.number(ops) : null], ["kernels", (data.groups || []).length ? report.number(data.groups.length) : null],
        ["devices", devices.length ? report.number(devices.length) : null], ["transfers", (data.nodes || []).length ? report.number(transfers) : null],
        ["moved by transfers", moved ? report.bytes(moved) : null], ["weights and constants", weights ? report.bytes(weights) : null],
        ["a call", data.profile ? report.seconds(data.profile.seconds) : null],
      ];
      const known = cards.filter(([, value]) => value !== null);
      if (known.length) body.append(make("ul", { class: "cards" }, known.map(([name, value]) => make("li", {}, make("b", {}, value), report.word(name)))));
      if (data.profile || (data.suggestions || []).length) body.append(make("div", { class: "pair" }, whereTimeGoes(), whatToChange()));
      if (devices.some((device) => report.known(device.ops))) {
        const most = Math.max(1, ...devices.map((device) => device.ops || 0));
        const head = ["Device", "Target", "Ops", "Weights", "Transfers in", "Memory speed"];
        const rows = devices.map((device) => [make("span", { class: "named" }, report.dot(device.name), device.name), make("code", { class: "target", title: device.target }, briefly(device.target || "")),
          make("span", { class: "barred" }, make("i", { style: `width:${(60 * (device.ops || 0)) / most}px;background:${report.colour(device.name)}` }), report.number(device.ops)), report.bytes(weightsOf(device)),
          `${report.number(device.transfers_in)} (${report.bytes(device.transfer_bytes)})`, device.peak && report.known(device.peak.bytes_per_second) ? report.rate(device.peak.bytes_per_second, "B/s") : "–"]);
        body.append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Devices" }, make("table", { class: "plain" }, make("thead", {}, make("tr", {}, head.map((name) => make("th", { scope: "col" }, report.word(name))))),
          make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell))))))));
      }
      if ((data.notes || []).length) body.append(make("ul", { class: "notes" }, data.notes.map((note) => make("li", {}, note))));
      const about = [data.machine && `${data.machine.cpu || ""}${data.machine.cores ? `, ${data.machine.cores} cores` : ""}${(data.machine.gpus || []).length ? `, ${data.machine.gpus.join(", ")}` : ""}`,
        data.made && `made ${data.made.replace("T", " ").replace(/\..*|Z$/, "")} UTC`, ...Object.entries(data.versions || {}).map(([name, version]) => `${name} ${version}`)];
      body.append(make("p", { class: "quiet" }, about.filter(Boolean).join(" · ")));
    }, true);
  };

  report.drawMissing = function () {
    const { data, make } = report;
    if (data.kind === "module" || (!data.nodes && !data.functions)) return;
    const absent = (part) => !data[part] || (Array.isArray(data[part]) && data[part].length === 0);
    const wanting = [["profile", "times of kernels and the roofline", "relax-hetero explain, run with --profile"], ...(data.token ? [] : [["timeline", "the timeline of queues", "relax-hetero explain, run with --profile"]]), ["memory", "memory over time", "compile with this version, whose executables carry their memory plan"]];
    const lines = wanting.filter(([part]) => absent(part));
    if (lines.length === 0) return;
    report.section("missing", "Not in this report", null, (body) => body.append(make("ul", { class: "notes" }, lines.map(([, what, how]) => make("li", {}, `${what[0].toUpperCase()}${what.slice(1)}: ${how}.`)))), true);
  };
})();
