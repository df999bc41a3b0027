package main

import (
	"fmt"
	"slices"
	"strings"
)

type object map[string]any

// Size of a panel on Grafana's grid of 24 columns.
const (
	columns    = 24
	panelWidth = 8
	panelHigh  = 7
)

// rows are the subsystems in the order of the dashboard, with their titles. A subsystem that is not
// here is an error, so that a new metric gets its place.
var rows = []struct{ subsystem, title string }{
	{"transfer", "Transfers"}, {"rail", "Rails"}, {"lane", "Lanes"}, {"lease", "Leases and fences"},
	{"engine", "Engines"}, {"control", "Peers"}, {"store", "Page store"}, {"gpu", "GPUs"},
	{"copy", "Copies within an engine"}, {"sidecar", "Sidecar"}, {"proxy", "Router"},
	{"build", "Versions"},
}

const selector = `{instance=~"$instance"}`

func dashboard(all []metric) ([]byte, error) {
	var panels []object
	id, y, placed := 0, 0, 0
	for _, row := range rows {
		id++
		panels = append(panels, object{"id": id, "type": "row", "title": row.title, "collapsed": false,
			"panels": []object{}, "gridPos": object{"x": 0, "y": y, "w": columns, "h": 1}})
		y++
		x := 0
		for _, m := range all {
			if m.subsystem() != row.subsystem {
				continue
			}
			placed++
			id++
			if x+panelWidth > columns {
				x, y = 0, y+panelHigh
			}
			p, err := panel(all, m)
			if err != nil {
				return nil, err
			}
			p["id"] = id
			p["gridPos"] = object{"x": x, "y": y, "w": panelWidth, "h": panelHigh}
			panels = append(panels, p)
			x += panelWidth
		}
		y += panelHigh
	}
	if placed != len(all) {
		return nil, fmt.Errorf("%d of %d metrics are of a subsystem without a row: add it to rows",
			len(all)-placed, len(all))
	}
	return marshal(object{
		"title": "kvspray", "uid": "kvspray", "tags": []string{"kvspray"}, "schemaVersion": 39,
		"version": 1, "editable": true, "graphTooltip": 1, "refresh": "30s", "timezone": "browser",
		"time":        object{"from": "now-1h", "to": "now"},
		"description": "Sidecars and routers of kvspray. Generated from the metrics' definitions.",
		"templating": object{"list": []object{
			{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
			{"name": "instance", "label": "Instance", "type": "query", "multi": true, "includeAll": true,
				"refresh": 2, "datasource": source(), "current": object{"text": "All", "value": "$__all"},
				"query": object{"query": `label_values({__name__=~"kvspray_.+"}, instance)`,
					"refId": "instance"}},
		}},
		"panels": panels,
	})
}

func source() object { return object{"type": "prometheus", "uid": "${datasource}"} }

func panel(all []metric, m metric) (object, error) {
	var targets []object
	add := func(expr, legend string) {
		targets = append(targets, object{"refId": string(rune('A' + len(targets))), "expr": expr,
			"legendFormat": legend, "datasource": source()})
	}
	by, legend := grouping(m.labels)
	unit := unitOf(m.name)
	switch m.kind {
	case counter:
		add(fmt.Sprintf("sum%s (rate(%s%s[$__rate_interval]))", by, m.name, selector), legend)
		if unit == "bytes" {
			unit = "Bps"
		} else {
			unit = "ops"
		}
	case gauge:
		expr := fmt.Sprintf("sum%s (%s%s)", by, m.name, selector)
		if strings.HasSuffix(m.name, "_timestamp_seconds") { // a time, not a duration
			expr = fmt.Sprintf("%s%s - time()", m.name, selector)
		}
		add(expr, legend)
	case histogram:
		for _, q := range []string{"0.5", "0.99"} {
			add(fmt.Sprintf("histogram_quantile(%s, sum by (le) (rate(%s_bucket%s[$__rate_interval])))",
				q, m.name, selector), "p"+strings.TrimPrefix(q, "0."))
		}
	}
	for _, t := range targets {
		if err := check(all, t["expr"].(string)); err != nil {
			return nil, err
		}
	}
	return object{"type": "timeseries", "title": title(m), "description": m.help,
		"datasource": source(), "targets": targets,
		"fieldConfig": object{"defaults": object{"unit": unit, "custom": object{"fillOpacity": 10}},
			"overrides": []object{}},
		"options": object{"legend": object{"displayMode": "list", "placement": "bottom"},
			"tooltip": object{"mode": "multi", "sort": "desc"}}}, nil
}

func grouping(labels []string) (by, legend string) {
	if len(labels) == 0 {
		return " by (instance)", "{{instance}}"
	}
	var parts []string
	for _, l := range labels {
		parts = append(parts, "{{"+l+"}}")
	}
	return " by (" + strings.Join(labels, ", ") + ")", strings.Join(parts, " ")
}

// title is a name without what the row and the unit have.
func title(m metric) string {
	words := strings.Split(m.name, "_")[1:]
	if words[0] == m.subsystem() {
		words = words[1:]
	}
	words = slices.DeleteFunc(words, func(w string) bool { return w == "total" })
	if m.kind == counter {
		words = append(words, "per", "second")
	}
	text := strings.Join(words, " ")
	return strings.ToUpper(text[:1]) + text[1:]
}

// unitOf is Grafana's name of a metric's base unit.
func unitOf(name string) string {
	name = strings.TrimSuffix(name, "_total")
	switch {
	case strings.HasSuffix(name, "_bytes_per_second"):
		return "Bps"
	case strings.HasSuffix(name, "_bytes"):
		return "bytes"
	case strings.HasSuffix(name, "_seconds"):
		return "s"
	}
	return "short"
}
