// What the pages of sidecar and router share. All text goes in as text, never as HTML.

export const kept = 60; // snapshots in a curve

export const $ = (id) => document.getElementById(id);

// el makes an element of text and other elements; a class may follow the name: "td.n".
export function el(what, ...children) {
  const [name, ...classes] = what.split(".");
  const e = document.createElement(name);
  if (classes.length) e.className = classes.join(" ");
  e.append(...children.filter((c) => c !== null && c !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return e;
}

const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export function size(bytes) {
  let u = 0;
  while (bytes >= 1024 && u < units.length - 1) { bytes /= 1024; u++; }
  return `${u && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[u]}`;
}
export const rate = (bytesPerSecond) => (bytesPerSecond >= 1e9 ? `${(bytesPerSecond / 1e9).toFixed(1)} GB/s` : `${(bytesPerSecond / 1e6).toFixed(1)} MB/s`);
export function time(seconds) {
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} us`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  return seconds < 120 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds / 60)} min`;
}
export const count = (n) => n.toLocaleString("en");

// table fills a place with rows; heads that begin with # are of numbers.
export function table(place, caption, heads, rows, none) {
  if (!rows.length) { place.replaceChildren(el("p.none", none)); return; }
  const isNumber = heads.map((h) => h.startsWith("#"));
  const head = el("tr", ...heads.map((h, i) => {
    const th = el(isNumber[i] ? "th.n" : "th", h.replace(/^#/, ""));
    th.scope = "col";
    return th;
  }));
  const body = rows.map((row) => el("tr", ...row.map((cell, i) => (cell instanceof HTMLTableCellElement ? cell : el(isNumber[i] ? "td.n" : "td", cell)))));
  const t = el("table", el("thead", head), el("tbody", ...body));
  t.setAttribute("aria-label", caption);
  place.replaceChildren(t);
}

export const sum = (list) => list.reduce((a, b) => a + b, 0);

// curve draws the last values of a figure.
export function curve(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const most = Math.max(...values, 1e-9);
  svg.setAttribute("viewBox", `0 0 ${kept - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("points", values.map((v, i) => `${kept - values.length + i},${19 - (18 * v) / most}`).join(" "));
  svg.append(line);
  return svg;
}

// tile is a figure, with its curve if it has one.
export function tile(value, what, values) {
  const t = el("div.tile", el("b", value), el("span", what));
  if (values) t.append(curve(values));
  return t;
}

// state replaces the items of the state list, if they differ: screen readers read a change once.
export function state(items) {
  const text = JSON.stringify(items);
  if ($("health").dataset.text === text) return;
  $("health").dataset.text = text;
  $("health").replaceChildren(...items.slice(0, 12).map(([kind, what]) => el(`li.${kind}`, what)));
}

export function theme(next) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement;
  root.dataset.theme = next ?? ((root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark");
  localStorage.setItem("kvspray-theme", root.dataset.theme);
}
const stored = localStorage.getItem("kvspray-theme");
if (stored) theme(stored);

// keys sets the buttons and keys: t, p and the numbers of the sections. It returns whether the page is paused.
export function keys() {
  let paused = false;
  const pause = () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
  };
  $("pause").onclick = pause;
  $("theme").onclick = () => theme();
  const sections = [...document.querySelectorAll("nav a")].map((a) => a.hash.slice(1));
  document.onkeydown = (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key === "p") pause();
    else if (e.key === "t") theme();
    else if (sections[e.key - 1]) {
      location.hash = sections[e.key - 1];
      $(sections[e.key - 1]).focus();
    }
  };
  return () => paused;
}
