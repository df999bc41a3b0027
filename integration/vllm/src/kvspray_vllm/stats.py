"""Transfer statistics, in vLLM's form: collected per step, aggregated over workers, shown on vLLM's
own /metrics."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

# A stats object lives for one engine step, but a logger that is not polled could let one grow.
MAX_LATENCIES = 4096
COUNTS = ("transfers", "bytes", "local", "store_pages", "store_lookups", "store_pins")
LATENCY_BUCKETS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
TRANSFER_BUCKETS = [2**i for i in range(11, 35, 2)]  # bytes; those of vLLM's NIXL metrics
FAILURES = ("failed", "expired", "refused", "lost")  # outcomes, without "cancelled"


class KVSprayStats(KVConnectorStats):
    """data: transfers {"received/ok": n}, bytes {"received/tcp": n}, latency_s [s] and sizes
    [bytes] of received transfers, recompute_tokens n, local {reason: n}, store_pages
    {"get/memory": n}, store_lookups and store_pins {outcome: n}."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.data: dict[str, Any] = data or {}
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {
            "transfers": {},
            "bytes": {},
            "latency_s": [],
            "sizes": [],
            "recompute_tokens": 0,
            "local": {},
            "store_pages": {},
            "store_lookups": {},
            "store_pins": {},
        }

    def ended(
        self, received: bool, outcome: str, nbytes: int, us: int, transport: str, recompute: int
    ) -> None:
        side = "received" if received else "sent"
        _add(self.data["transfers"], f"{side}/{outcome}", 1)
        if nbytes:
            _add(self.data["bytes"], f"{side}/{transport or 'unknown'}", nbytes)
        if received and outcome == "ok" and len(self.data["latency_s"]) < MAX_LATENCIES:
            self.data["latency_s"].append(us / 1e6)
            self.data["sizes"].append(nbytes)
        self.data["recompute_tokens"] += recompute

    def local(self, reason: str) -> None:
        _add(self.data["local"], reason, 1)

    def recomputed(self, tokens: int) -> None:
        self.data["recompute_tokens"] += tokens

    def pages(self, op: str, outcome: str, n: int) -> None:
        _add(self.data["store_pages"], f"{op}/{outcome}", n)

    def lookup(self, outcome: str) -> None:
        _add(self.data["store_lookups"], outcome, 1)

    def pin(self, outcome: str) -> None:
        _add(self.data["store_pins"], outcome, 1)

    def is_empty(self) -> bool:
        return not any(self.data[key] for key in COUNTS)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key in COUNTS:
            for label, n in other.data[key].items():
                _add(self.data[key], label, n)
        room = MAX_LATENCIES - len(self.data["latency_s"])
        for key in ("latency_s", "sizes"):
            self.data[key].extend(other.data[key][:room])
        self.data["recompute_tokens"] += other.data["recompute_tokens"]
        return self

    def reduce(self) -> dict[str, int | float]:
        d = self.data
        out: dict[str, int | float] = {f"kvspray {k}": n for k, n in sorted(d["transfers"].items())}
        out["kvspray MB"] = round(sum(d["bytes"].values()) / 2**20, 3)
        if d["latency_s"]:
            xs = sorted(d["latency_s"])
            out["kvspray p50 ms"] = round(xs[len(xs) // 2] * 1e3, 3)
            out["kvspray max ms"] = round(xs[-1] * 1e3, 3)
        if d["recompute_tokens"]:
            out["kvspray recomputed tokens"] = d["recompute_tokens"]
        if d["local"]:
            out["kvspray local prefills"] = sum(d["local"].values())
        out |= {f"kvspray store {k}": n for k, n in sorted(d["store_pages"].items())}
        return out


def _add(counts: dict[str, int], label: str, n: int) -> None:
    counts[label] = counts.get(label, 0) + n


class KVSprayPromMetrics(KVConnectorPromMetrics):
    """vllm:kvspray_* on vLLM's /metrics. A metric with the same meaning as one of vLLM's NIXL
    connector has its suffix and type, so that dashboards for NIXL need only another prefix."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._transfers = self._counter_cls(
            name="vllm:kvspray_transfers",
            documentation="KV transfers that ended, by side (received, sent) and outcome.",
            labelnames=[*labelnames, "side", "outcome"],
        )
        self._bytes = self._counter_cls(
            name="vllm:kvspray_bytes",
            documentation="Bytes of KV cache moved, by side and transport.",
            labelnames=[*labelnames, "side", "transport"],
        )
        self._latency = self._histogram_cls(
            name="vllm:kvspray_xfer_time_seconds",
            documentation="From the blocks being offered to the commit, for transfers received.",
            labelnames=labelnames,
            buckets=LATENCY_BUCKETS_S,
        )
        self._sizes = self._histogram_cls(
            name="vllm:kvspray_bytes_transferred",
            documentation="Bytes of each transfer received.",
            labelnames=labelnames,
            buckets=TRANSFER_BUCKETS,
        )
        self._failed = self._counter_cls(
            name="vllm:kvspray_num_failed_transfers",
            documentation="Transfers that this engine should have received and did not, without "
            "those of cancelled requests.",
            labelnames=labelnames,
        )
        self._expired = self._counter_cls(
            name="vllm:kvspray_num_kv_expired_reqs",
            documentation="Prompts of this prefill engine, on each rank, that no decode engine "
            "fetched in time.",
            labelnames=labelnames,
        )
        self._recompute = self._counter_cls(
            name="vllm:kvspray_recompute_tokens",
            documentation="Tokens recomputed because their transfer failed.",
            labelnames=labelnames,
        )
        self._local = self._counter_cls(
            name="vllm:kvspray_local_prefills",
            documentation="Requests that named a transfer and were prefilled locally, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._pages = self._counter_cls(
            name="vllm:kvspray_store_pages",
            documentation="Pages loaded from the node's store or saved to it, on each rank, by "
            "operation (get, put) and by tier or outcome.",
            labelnames=[*labelnames, "op", "outcome"],
        )
        self._lookups = self._counter_cls(
            name="vllm:kvspray_store_lookups",
            documentation="Requests that asked the store for their prompt, by outcome (found, "
            "none, late).",
            labelnames=[*labelnames, "outcome"],
        )
        self._pins = self._counter_cls(
            name="vllm:kvspray_store_pins",
            documentation="Requests whose pages the store was asked to pin, by outcome (held, "
            "part, none, refused, full).",
            labelnames=[*labelnames, "outcome"],
        )
        for values in per_engine_labelvalues.values():  # increase() misses a series' first value
            self._failed.labels(*values)
            self._expired.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for label, n in transfer_stats_data["transfers"].items():
            side, outcome = label.split("/", 1)
            self._transfers.labels(*labels, side, outcome).inc(n)
            if side == "received" and outcome in FAILURES:
                self._failed.labels(*labels).inc(n)
            if side == "sent" and outcome == "expired":
                self._expired.labels(*labels).inc(n)
        for label, n in transfer_stats_data["bytes"].items():
            self._bytes.labels(*labels, *label.split("/", 1)).inc(n)
        for seconds in transfer_stats_data["latency_s"]:
            self._latency.labels(*labels).observe(seconds)
        for size in transfer_stats_data["sizes"]:
            self._sizes.labels(*labels).observe(size)
        self._recompute.labels(*labels).inc(transfer_stats_data["recompute_tokens"])
        for reason, n in transfer_stats_data["local"].items():
            self._local.labels(*labels, reason).inc(n)
        for label, n in transfer_stats_data["store_pages"].items():
            self._pages.labels(*labels, *label.split("/", 1)).inc(n)
        for outcome, n in transfer_stats_data["store_lookups"].items():
            self._lookups.labels(*labels, outcome).inc(n)
        for outcome, n in transfer_stats_data["store_pins"].items():
            self._pins.labels(*labels, outcome).inc(n)
