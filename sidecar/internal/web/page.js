// The page of a sidecar: draws each snapshot of /v1/live.

import { $, count, el, kept, keys, rate, size, state, sum, table, tile, time } from "/page/common.js";

const shownPairs = 8; // of a peer
const remedies = {
  expired: "The other side did not come in time: compare its address and key (kvspray ping), and its engine's load.",
  refused: "The reason names what differs or is full. kvspray layout check compares two engines.",
  lost: "The other sidecar went away: its log, and kvspray status there.",
  failed: "The reason names the fault. kvspray doctor checks this host.",
  cancelled: "An engine gave the request up.",
};

// ---- what the snapshots add up to

const history = { sent: [], received: [], open: [] };
let before = null;

const pairKey = (p) => [p.peer, p.path.transport, p.path.local, p.path.remote].join(" ");

// measure turns counters into rates since the last snapshot.
function measure(s) {
  const pairs = s.leases.rails.pairs ?? [];
  const now = {
    at: Date.parse(s.at), boot: s.boot, received: sum(Object.values(s.totals.Bytes ?? {})),
    pairs: new Map(pairs.map((p) => [pairKey(p), p.counters.bytes])),
  };
  const seconds = before && before.boot === now.boot ? (now.at - before.at) / 1000 : 0;
  const per = (a, b) => (seconds > 0 && b !== undefined && a >= b ? (a - b) / seconds : 0);
  for (const p of pairs) p.rate = per(p.counters.bytes, before?.pairs.get(pairKey(p)));
  s.received = per(now.received, before?.received);
  s.sent = sum(pairs.map((p) => p.rate));
  before = now;
  for (const [curve, value] of [[history.sent, s.sent], [history.received, s.received], [history.open, sum(s.leases.open)]]) {
    curve.push(value);
    if (curve.length > kept) curve.shift();
  }
}

// troubles is what an operator should look at.
function troubles(s) {
  const out = [];
  if (s.draining) out.push(["warn", "The sidecar drains: it takes no new transfers."]);
  else if (!s.ready) out.push(["warn", "The sidecar starts: it is not ready yet."]);
  if (s.leaving_seconds > 0) out.push(["warn", `The engines leave: routers send them no new requests for ${count(s.leaving_seconds)} s. kvspray drain --undo ends this at once.`]);
  if (!s.workers.length) out.push(["warn", "No engine is connected. Check the socket in the engine's configuration; kvspray doctor."]);
  for (const r of s.rails ?? []) if (r.down) out.push(["bad", `Rail ${r.rail} (${r.transport}) has no link. Others carry its bytes.`]);
  for (const p of s.leases.rails.pairs ?? []) {
    if (p.state === "excluded" || p.state === "suspect") {
      out.push(["bad", `${p.path.transport} ${p.path.local} to ${p.path.remote} is ${p.state}: ${p.reason || p.last_reason || "no progress"}`]);
    }
  }
  for (const t of s.store?.tiers ?? []) if (t.problem) out.push(["bad", `Store, ${t.name}: ${t.problem}`]);
  if (s.store?.drained) out.push(["warn", "The store is drained: it takes no pages."]);
  return out;
}

// ---- the sections

function tiles(s) {
  const ended = Object.entries(s.totals.Transfers ?? {});
  const of = (good) => sum(ended.filter(([k]) => k.endsWith("_ok") === good).map(([, n]) => n));
  $("tiles").replaceChildren(
    tile(rate(s.sent), "sent", history.sent),
    tile(rate(s.received), "received", history.received),
    tile(count(sum(s.leases.open)), "transfers open", history.open),
    tile(`${count(of(true))} / ${count(of(false))}`, "transfers ended well / otherwise"),
    tile(count(s.all_peers), "peers"),
    tile(count(s.workers.length), "engine workers"),
  );
}

function health(s) {
  const found = troubles(s);
  state(found.length ? found : [["good", "All is well."]]);
}

const stateClass = { healthy: "good", readmitted: "warn", probing: "warn" };

function rails(s) {
  const rows = (s.rails ?? []).map((r) => {
    const pairs = (s.leases.rails.pairs ?? []).filter((p) => p.path.transport === r.transport && p.path.local === r.rail);
    const worst = pairs.find((p) => p.state === "excluded" || p.state === "suspect") ?? pairs.find((p) => p.state !== "healthy") ?? pairs[0];
    const now = r.down ? "no link" : (worst?.state ?? "idle");
    const learned = Math.max(0, ...pairs.filter((p) => p.samples).map((p) => p.learned_bytes_per_second));
    return [
      `${r.transport} ${r.rail}`, r.address, el(r.down ? "td.bad" : `td.${stateClass[now] ?? (worst ? "bad" : "none")}`, now),
      rate(sum(pairs.map((p) => p.rate))), learned ? rate(learned) : "", r.gbps ? `${r.gbps} Gbit/s` : "",
      size(sum(pairs.map((p) => p.bytes_in_flight))), count(sum(pairs.map((p) => p.slices_in_flight))), count(sum(pairs.map((p) => p.counters.exclusions))),
    ];
  });
  table($("rails-table"), "Rails of this host", ["rail", "address", "state", "#sent now", "#learned, fastest pair", "#nominal", "#in flight", "#slices", "#exclusions"], rows, "No rail is configured.");
}

function cells(percent) {
  const e = el("span.cells", ...percent.map((p) => el(`i.q${Math.floor(p / 25)}`)));
  e.setAttribute("role", "img");
  e.setAttribute("aria-label", `${Math.round(sum(percent) / percent.length)} percent have arrived`);
  return e;
}

function transfers(s) {
  const seconds = (ns) => time(Math.max(0, ns / 1e9));
  table($("receiving"), "Transfers that this node receives", ["request", "state", "first to last layer", "#age", "#time left", "trouble"],
    (s.leases.destinations ?? []).slice(0, 32).map((d) => [
      d.req || d.lease, d.state, d.arrived_percent ? cells(d.arrived_percent) : "", seconds(d.age_ns), seconds(d.left_ns), el("td.why", d.trouble ?? ""),
    ]), "None is open.");
  table($("sending"), "Transfers that this node sends", ["request", "state", "#layers computed", "#proved by receivers", "#receivers", "#age", "#time left"],
    (s.leases.sources ?? []).slice(0, 32).map((x) => [
      x.req || x.lease, x.state, `${x.layers_computed} of ${x.layers}`, size(x.bytes), `${x.serving} now, ${x.served} served`, seconds(x.age_ns), seconds(x.left_ns),
    ]), "None is open.");
}

function peers(s) {
  const rows = [];
  for (const p of s.peers) {
    const lanes = sum(p.pairs.map((x) => x.lanes));
    const used = p.pairs.filter((x) => x.lanes).slice(0, shownPairs).map((x) => `${x.transport} ${x.local}`);
    const missing = p.pairs.filter((x) => x.why && !x.idle).slice(0, shownPairs).map((x) => `${x.transport} ${x.local}: ${x.why}`);
    rows.push([p.node || p.boot.slice(0, 8), p.endpoint || p.claimed, count(lanes), used.join(", ") || (p.pairs.some((x) => x.idle) ? "idle" : ""), el("td.why", missing.join("; "))]);
  }
  if (s.all_peers > s.peers.length) rows.push([`and ${count(s.all_peers - s.peers.length)} more: /v1/reach`, "", "", "", ""]);
  table($("peers-table"), "Other sidecars", ["node", "endpoint", "#lanes", "routes", "without a lane"], rows, "No other sidecar is known. They meet by gossip, or by the first request.");
}

function recent(s) {
  const names = new Map(s.peers.map((p) => [p.boot, p.node]));
  const at = (e) => new Date(e.at).toLocaleTimeString("en-GB");
  const what = (e) => [at(e), e.side, e.req ?? "", names.get(e.peer) ?? e.peer?.slice(0, 8) ?? "", e.route ?? "", size(e.bytes), time(e.took_us / 1e6)];
  const heads = ["time", "side", "request", "peer", "route", "#bytes", "#took"];
  const good = (s.recent ?? []).filter((e) => e.outcome === "ok");
  const rest = (s.recent ?? []).filter((e) => e.outcome !== "ok");
  table($("failures"), "Last requests that failed", [...heads, "outcome", "reason", "what to do"],
    rest.slice(0, 16).map((e) => [...what(e), el(e.outcome === "cancelled" ? "td.warn" : "td.bad", e.outcome), el("td.why", e.reason ?? ""), el("td.why", remedies[e.outcome] ?? "")]), "None since the start.");
  table($("successes"), "Last requests that ended well", heads, good.slice(0, 16).map(what), "None yet.");
}

function store(s) {
  const rows = (s.store?.tiers ?? []).map((t) => {
    const full = el("meter");
    full.max = Math.max(t.capacity_bytes, 1);
    full.value = t.bytes;
    full.setAttribute("aria-label", `${t.name}: ${size(t.bytes)} of ${size(t.capacity_bytes)}`);
    return [t.name, t.capacity_bytes ? full : "", size(t.bytes), t.capacity_bytes ? size(t.capacity_bytes) : "", count(t.pages), count(t.hits), count(t.evicted),
      t.gets ? time(t.get_seconds / t.gets) : "", el(t.problem ? "td.bad" : "td", t.problem ?? "")];
  });
  table($("store-table"), "Tiers of the page store", ["tier", "full", "#bytes", "#capacity", "#pages", "#hits", "#evicted", "#mean get", "problem"], rows,
    "The page store is off: store.memory turns it on.");
}

function gpus(s) {
  const kinds = { yields: "warn", silent: "bad", dead: "bad" };
  const rows = (s.gpu_links ?? []).flatMap((g) => (g.links ?? []).map((l) => [
    `GPU ${g.gpu}`, l.gpu === g.gpu ? "its own" : `of GPU ${l.gpu}`, el(`td.${kinds[l.state] ?? "good"}`, l.state), size(l.bytes), size(l.in_flight_bytes),
    l.learned_bytes_per_second ? rate(l.learned_bytes_per_second) : "", count(l.chunks_given_back),
  ]));
  table($("gpus-table"), "Links between host memory and GPUs", ["copies of", "PCIe link", "state", "#moved", "#in flight", "#learned", "#chunks given back"], rows, "No large copy has used a GPU link yet.");
}

function draw(s) {
  $("node").textContent = s.node;
  $("about").textContent = `${s.version} at ${s.endpoint} over ${s.transports.join(", ")}`;
  document.title = `${troubles(s).length ? "(!) " : ""}${s.node} - kvspray`;
  for (const section of [health, tiles, rails, transfers, peers, recent, store, gpus]) section(s);
  document.body.dataset.drawn = s.at;
}

// ---- events and keys

const paused = keys();
const events = new EventSource("/v1/live");
events.onmessage = (e) => {
  const s = JSON.parse(e.data);
  measure(s);
  if (!paused()) draw(s);
};
events.onerror = () => {
  before = null;
  state([["bad", "The sidecar does not answer. The page tries again."]]);
};
