// What all parts of the page use: elements, numbers as text, colours of devices, sections, libraries.
const report = { sections: [], onTheme: [], beforePrint: [], onPrint: [], data: null, previous: null };

(function () {
  "use strict";

  // An element; text is never read as HTML.
  report.make = function (tag, attributes, ...children) {
    const svg = ["svg", "rect", "line", "text", "title", "g"].includes(tag) && attributes && attributes.svg;
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "svg" || value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
    return element;
  };

  const known = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));
  const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

  function scaled(value, step, units) {
    let index = 0;
    let size = Math.abs(value);
    while (size >= step && index < units.length - 1) {
      size /= step;
      index += 1;
    }
    const sign = value < 0 ? "−" : "";
    return sign + (index === 0 && Number.isInteger(size) ? String(size) : digits(size)) + " " + units[index];
  }

  report.known = known;
  report.bytes = (value) => (known(value) ? scaled(Number(value), 1024, ["B", "KiB", "MiB", "GiB", "TiB"]) : "–");
  report.number = (value) => (known(value) ? Number(value).toLocaleString("en-US", { maximumFractionDigits: 3 }) : "–");
  report.rate = (value, unit) => (known(value) ? scaled(Number(value), 1000, ["", "K", "M", "G", "T", "P"]) + unit : "–");
  report.share = (value) => (known(value) ? (100 * value).toFixed(1) + " %" : "–");
  report.seconds = function (value) {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    const sign = value < 0 ? "−" : "";
    if (size === 0) return "0 s";
    if (size < 1e-3) return sign + digits(size * 1e6) + " µs";
    return sign + (size < 1 ? digits(size * 1e3) + " ms" : digits(size) + " s");
  };
  report.as = function (kind, value) {
    const text = { operations: (count) => (count ? report.rate(count, "op") : "–"), bytes: report.bytes, seconds: report.seconds, share: report.share, number: report.number }[kind];
    return value === null || value === undefined ? "–" : text && typeof value === "number" ? text(value) : String(value);
  };
  report.shape = (value) => (value.shape ? value.shape.join(" × ") || "scalar" : "?") + " " + (value.dtype || "");
  report.shorter = (text, most) => (text.length > most ? text.slice(0, most - 9) + "…" + text.slice(-8) : text);
  // The end of a path says more than its beginning.
  report.tail = (text, most) => (text.length > most ? "…" + text.slice(1 - most) : text);
  report.say = (text) => (document.getElementById("said").textContent = text);

  // Colours that stay apart for the colour-blind (Okabe and Ito), by the order of devices.
  const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c8c8c"];
  report.colour = function (device) {
    const index = (report.data.devices || []).findIndex((one) => one.name === device);
    return PALETTE[index < 0 ? PALETTE.length - 1 : index % PALETTE.length];
  };
  report.inkOn = function (colour) {
    const part = (from) => (parseInt(colour.slice(from, from + 2), 16) / 255) ** 2.2;
    const light = 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
    return light > 0.18 ? "#10141a" : "#ffffff";
  };
  report.dot = (device) => report.make("span", { class: "dot", style: `background:${report.colour(device)}`, "aria-hidden": "true" });
  report.style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  report.isDark = () => report.style("--dark") === "1";

  // A section with a heading; `draw(body)` runs when it comes near to the view.
  report.section = function (id, title, hint, draw, now) {
    const body = report.make("div", { class: "body" });
    const section = report.make("section", { id, "aria-labelledby": `${id}-title` }, report.make("h2", { id: `${id}-title` }, title));
    if (hint) section.append(report.make("p", { class: "hint" }, hint));
    section.append(body);
    document.getElementById("content").append(section);
    report.sections.push({ id, title });
    if (now) return draw(body);
    let drawn = null;
    const drawOnce = () => (drawn = drawn || Promise.resolve(draw(body)).then(() => section.setAttribute("data-drawn", "")));
    const seen = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        seen.disconnect();
        drawOnce();
      },
      { rootMargin: "300px" },
    );
    report.beforePrint.push(drawOnce);
    seen.observe(section);
    return undefined;
  };

  report.unpacked = async function (element) {
    const text = element.textContent;
    if (element.type === "application/json") return text;
    const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };

  const loads = new Map();
  // A library, once; styles go before our own, so that ours win.
  report.library = function (...names) {
    for (const name of names) {
      if (loads.has(name)) continue;
      const element = document.querySelector(`script[data-library="${name}"]`);
      const load = report.unpacked(element).then((text) => {
        const style = name.endsWith(".css");
        const made = document.createElement(style ? "style" : "script");
        made.textContent = text;
        if (style) document.head.insertBefore(made, document.getElementById("own-style"));
        else document.head.append(made);
        element.remove();
      });
      loads.set(name, load);
    }
    return Promise.all(names.map((name) => loads.get(name)));
  };

  // Paper holds what nobody scrolled to. Browsers do not wait for more than what is ready: libraries are, some time after
  // the page is drawn.
  report.startPrinting = function () {
    (window.requestIdleCallback || setTimeout)(() => report.library(...[...document.querySelectorAll("script[data-library]")].map((one) => one.dataset.library)));
    addEventListener("beforeprint", async () => {
      // What is drawn may hold more to draw.
      for (let at = 0; at < report.beforePrint.length; at += 1) await report.beforePrint[at]();
      report.onPrint.forEach((change) => change());
    });
  };

  // Light, dark, or as the system; kept for the next page where the browser lets us.
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;
  function stored(value) {
    try {
      if (value !== undefined) localStorage.setItem("relax-hetero-theme", value);
      return localStorage.getItem("relax-hetero-theme");
    } catch (error) {
      return null;
    }
  }
  function show(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
    button.setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
    report.onTheme.forEach((change) => change());
  }
  report.startTheme = function () {
    show(THEMES.includes(stored()) ? stored() : "auto");
    document.getElementById("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
      stored(next);
      show(next);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => report.onTheme.forEach((change) => change()));
  };
})();
