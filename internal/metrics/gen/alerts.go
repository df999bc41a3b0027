package main

func alert(name, expr, wait, severity, summary, description string) rule {
	return rule{name, expr, wait, map[string]string{"severity": severity},
		map[string]string{"summary": summary, "description": description}}
}

// Critical: data or blocks of an engine are at stake. Warning: requests get slower.
var alerts = []rule{
	alert("KvsprayBlocksQuarantined", `kvspray_lease_quarantined > 0`, "1m", "critical",
		"Blocks of an engine are withheld on {{ $labels.instance }}",
		"A fence fails and is retried: a process is stopped, or a device does not answer. The "+
			"sidecar's log names the worker; docs/design.md, Leases and fences."),
	alert("KvsprayDataDamaged",
		`increase(kvspray_lane_frames_refused_total{reason="checksum"}[5m]) > 0`, "", "critical",
		"Data is damaged on the way to {{ $labels.instance }}",
		"Frames fail their checksum and are sent again. Check memory, NICs and cables of the path."),
	alert("KvsprayLanesAttacked",
		`increase(kvspray_lane_frames_refused_total{reason=~"forged|replayed|reordered"}[5m]) > 0`,
		"", "critical", "Encrypted lanes of {{ $labels.instance }} get frames that no peer sent",
		"docs/security.md names who can do this."),
	alert("KvsprayPagesDamaged", `increase(kvspray_store_pages_damaged_total[5m]) > 0`, "", "critical",
		"Pages of the store on {{ $labels.instance }} differ from what was put",
		"They are not served. Check the memory or the disk of the tier."),
	alert("KvsprayStoreSegmentsFailed", `increase(kvspray_store_segments_failed_total[15m]) > 0`, "",
		"warning", "A disk of the store on {{ $labels.instance }} fails",
		"GET /v1/store has the problem of each tier."),
	alert("KvsprayCertificateEnds", `kvspray_control_certificate_expiry_timestamp_seconds > 0 and `+
		`kvspray_control_certificate_expiry_timestamp_seconds - time() < 7 * 86400`, "", "warning",
		"The certificate of {{ $labels.instance }} ends within seven days",
		"Replace its files: the sidecar reads them without a restart (docs/keys.md)."),
	alert("KvsprayTransfersFail", `sum by (instance) (rate(kvspray_transfers_total`+
		`{outcome=~"failed|expired|lost"}[5m])) > 0.05 * sum by (instance) `+
		`(rate(kvspray_transfers_total[5m]))`, "5m", "warning",
		"More than 5% of the transfers of {{ $labels.instance }} fail",
		"The engines compute these prompts themselves. docs/operations.md, Is KV transferred at all?"),
	alert("KvsprayRailsExcluded", `kvspray_rail_pairs{state="excluded"} > 0`, "5m", "warning",
		"A rail of {{ $labels.instance }} is out of use",
		"'kvspray status' has the reason. The other rails carry its share."),
	alert("KvsprayNoEngine", `sum by (instance) (kvspray_engine_sessions) == 0`, "10m", "warning",
		"No engine is connected to {{ $labels.instance }}",
		"Compare the socket's paths; 'kvspray doctor' checks the sidecar's."),
	alert("KvsprayReleasesIncompatible", `increase(kvspray_control_hellos_refused_total[15m]) > 0`, "",
		"warning", "{{ $labels.instance }} refuses sidecars of another release",
		"Its log names the sidecar to upgrade."),
	alert("KvsprayGPUFault", `kvspray_gpu_fault > 0`, "", "warning",
		"GPU {{ $labels.pci }} of {{ $labels.instance }} has a fault: {{ $labels.kind }}",
		"'kvspray status' has the remedy. Its engine gets no requests, or fewer; docs/health.md."),
	alert("KvsprayRailFault", `kvspray_rail_fault > 0`, "", "warning",
		"Interface {{ $labels.interface }} of {{ $labels.instance }} has a fault: {{ $labels.kind }}",
		"Check cable, transceiver and switch port. Other rails carry its share; docs/health.md."),
	alert("KvsprayGPULinkDead", `kvspray_gpu_link_state{state="dead"} > 0`, "", "warning",
		"A PCIe link of a GPU of {{ $labels.instance }} is out of use",
		"It stays unused until the sidecar restarts. The sidecar's log has the error."),
	alert("KvsprayEngineDown", `kvspray_proxy_engine_up == 0`, "2m", "warning",
		"Router {{ $labels.instance }} gets no answer from {{ $labels.role }} {{ $labels.url }}",
		"Requests go to the others, or are computed by the decode engine."),
	alert("KvsprayPrefillsAreLocal", `sum by (instance) (rate(kvspray_proxy_local_prefills_total`+
		`{reason=~"no_prefill|prefill_failed|prefill_params"}[5m])) > 0.1 * sum by (instance) `+
		`(rate(kvspray_proxy_requests_total[5m]))`, "10m", "warning",
		"More than a tenth of the prompts of router {{ $labels.instance }} are computed by decode",
		"docs/operations.md has the reasons."),
}
