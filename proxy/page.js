// The page of the router: its engines from /health and its counts from /metrics, every two seconds.

import { $, count, el, kept, keys, state, sum, table, tile } from "/page/common.js";

const every = 2000; // ms
const paused = keys();
const curves = { rate: [], open: [] };
let before = null;

// counters reads the samples of a metric: [labels as text, value].
function counters(text, name) {
  return text.split("\n").filter((l) => l.startsWith(`${name}{`) || l.startsWith(`${name} `))
    .map((l) => [l.slice(name.length, l.lastIndexOf(" ")), Number(l.slice(l.lastIndexOf(" ") + 1))]);
}
const total = (samples, part = "") => sum(samples.filter(([labels]) => labels.includes(part)).map(([, v]) => v));

function push(curve, value) {
  curve.push(value);
  if (curve.length > kept) curve.shift();
}

function troubles(health) {
  const out = health.status === "ok" ? [] : [["bad", health.status]];
  for (const b of health.backends) {
    if (!b.up) out.push(["bad", `${b.role} ${b.url} is down: ${b.reason || "it was not checked yet"}`]);
    if (b.warning) out.push(["warn", `${b.role} ${b.url}: ${b.warning}`]);
  }
  return out;
}

function engines(place, caption, list, none) {
  table(place, caption, ["engine", "state", "#requests in flight", "its sidecar", "trouble"], list.map((b) => [
    b.url, el(b.up ? "td.good" : "td.bad", b.leaving ? "leaving" : b.up ? "up" : "down"), count(b.in_flight), b.peer ?? "", el("td.why", b.reason || b.warning || ""),
  ]), none);
}

function draw(health, metrics) {
  const requests = counters(metrics, "kvspray_proxy_requests_total");
  const now = { at: performance.now(), done: total(requests) };
  const rate = before && now.done >= before.done ? (1000 * (now.done - before.done)) / (now.at - before.at) : 0;
  before = now;
  const open = sum(health.backends.filter((b) => b.role === "decode").map((b) => b.in_flight));
  push(curves.rate, rate);
  push(curves.open, open);
  if (paused()) return;
  const found = troubles(health);
  state(found.length ? found : [["good", "All is well."]]);
  $("about").textContent = `dispatch: ${health.mode}`;
  document.title = `${found.length ? "(!) " : ""}kvspray router`;
  $("tiles").replaceChildren(
    tile(rate.toFixed(1), "requests per second", curves.rate),
    tile(count(open), "at decode engines", curves.open),
    tile(count(total(requests, '"2xx"')), "answered"),
    tile(count(now.done - total(requests, '"2xx"')), "ended with an error"),
    tile(count(total(counters(metrics, "kvspray_proxy_local_prefills_total"))), "computed at decode alone"),
    tile(count(total(counters(metrics, "kvspray_proxy_decode_retries_total"))), "tried at another decode engine"),
  );
  const of = (role) => health.backends.filter((b) => b.role === role);
  engines($("prefill-table"), "Prefill engines", of("prefill"), "None is configured: decode engines compute prompts themselves.");
  engines($("decode-table"), "Decode engines", of("decode"), "None is configured.");
  document.body.dataset.drawn = String(now.at);
}

async function look() {
  try {
    const [health, metrics] = await Promise.all([fetch("/health").then((r) => r.json()), fetch("/metrics").then((r) => r.text())]);
    draw(health, metrics);
  } catch {
    before = null;
    state([["bad", "The router does not answer. The page tries again."]]);
  }
  setTimeout(look, every);
}
look();
