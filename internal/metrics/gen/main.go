// Command gen writes the Grafana dashboard and the Prometheus alert rules of deploy/monitoring from
// the definitions of the metrics, so that neither names a metric that does not exist, and each
// metric has a panel. Run by go generate in internal/metrics.
package main

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"

	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/proxy"
)

func main() {
	log.SetFlags(0)
	out := flag.String("out", "../../deploy/monitoring", "directory to write to")
	flag.Parse()
	all, err := definitions()
	if err != nil {
		log.Fatalf("gen: %v", err)
	}
	rules, err := alertRules(all)
	if err != nil {
		log.Fatalf("gen: %v", err)
	}
	board, err := dashboard(all)
	if err != nil {
		log.Fatalf("gen: %v", err)
	}
	for name, content := range map[string][]byte{"alerts.yaml": rules, "dashboard.json": board} {
		if err := os.WriteFile(filepath.Join(*out, name), content, 0o644); err != nil {
			log.Fatalf("gen: %v", err)
		}
	}
}

type kind int

const (
	gauge kind = iota
	counter
	histogram
)

// metric is the definition of one.
type metric struct {
	name, help string
	labels     []string
	kind       kind
}

// plurals has the names that count the subsystem itself, such as kvspray_copies_total.
var plurals = map[string]string{"transfers": "transfer", "copies": "copy"}

// subsystem is the second word of a name, in the singular, and the row of the dashboard.
func (m metric) subsystem() string {
	s := strings.SplitN(m.name, "_", 3)[1]
	return cmp.Or(plurals[s], s)
}

// recorder keeps the types of collectors, which descriptions lack.
type recorder struct {
	prometheus.Registerer
	all []metric
}

func (r *recorder) Register(c prometheus.Collector) error {
	k, custom := gauge, false
	switch c.(type) {
	case *prometheus.CounterVec:
		k = counter
	case *prometheus.HistogramVec:
		k = histogram
	case *prometheus.GaugeVec, prometheus.Gauge: // before Counter, whose methods a Gauge has, too
	case prometheus.Counter:
		k = counter
	case prometheus.Histogram:
		k = histogram
	default:
		custom = true
	}
	descs := make(chan *prometheus.Desc)
	go func() { c.Describe(descs); close(descs) }()
	for d := range descs {
		m, err := parse(d)
		if err != nil {
			return err
		}
		m.kind = k
		if custom && strings.HasSuffix(m.name, "_total") {
			m.kind = counter
		}
		r.all = append(r.all, m)
	}
	return nil
}

func (r *recorder) MustRegister(all ...prometheus.Collector) {
	for _, c := range all {
		if err := r.Register(c); err != nil {
			log.Fatalf("gen: %v", err)
		}
	}
}

var description = regexp.MustCompile(
	`^Desc\{fqName: ("[^"]+"), help: ("(?:[^"\\]|\\.)*"), (?:unit: "[^"]*", )?` +
		`constLabels: \{\}, variableLabels: \{(.*)\}\}$`)

func parse(d *prometheus.Desc) (m metric, err error) {
	p := description.FindStringSubmatch(d.String())
	if p == nil {
		return m, fmt.Errorf("%s: a description of another form: adapt parse to this client_golang", d)
	}
	if m.name, err = strconv.Unquote(p[1]); err != nil {
		return m, err
	}
	if m.help, err = strconv.Unquote(p[2]); err != nil {
		return m, err
	}
	if p[3] != "" {
		m.labels = strings.Split(p[3], ",")
	}
	return m, nil
}

// definitions are all metrics of sidecar and router, by name.
func definitions() ([]metric, error) {
	r := &recorder{Registerer: prometheus.NewRegistry()}
	set := metrics.New(r)
	r.MustRegister(metrics.Build(""))
	routers := prometheus.NewRegistry()
	_, perr := proxy.New(proxy.Config{Decode: []proxy.Engine{{URL: "http://decode:8000"}},
		Registry: routers})
	_, serr := metrics.NewStore(r, nil)
	for _, err := range []error{perr, serr, set.Rails(r, nil), set.Memory(r, nil),
		set.Links(r, nil, nil), set.Faults(r, nil), set.Violations(r, nil), set.Refusals(r, nil)} {
		if err != nil {
			return nil, err
		}
	}
	descs := make(chan *prometheus.Desc)
	go func() { routers.Describe(descs); close(descs) }()
	for d := range descs {
		m, err := parse(d)
		if err != nil {
			return nil, err
		}
		switch { // its registry gives no types: by the unit
		case strings.HasSuffix(m.name, "_total"):
			m.kind = counter
		case strings.HasSuffix(m.name, "_seconds"):
			m.kind = histogram
		}
		r.all = append(r.all, m)
	}
	slices.SortFunc(r.all, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return r.all, nil
}

var names = regexp.MustCompile(`\bkvspray_[a-z0-9_]+`)

// check fails if an expression names a metric that is not defined.
func check(all []metric, expr string) error {
	for _, name := range names.FindAllString(expr, -1) {
		bare := name
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			bare = strings.TrimSuffix(bare, suffix)
		}
		if !slices.ContainsFunc(all, func(m metric) bool {
			return m.name == name || m.kind == histogram && m.name == bare
		}) {
			return fmt.Errorf("%s is no metric, in: %s", name, expr)
		}
	}
	return nil
}

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for,omitempty"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func alertRules(all []metric) ([]byte, error) {
	for _, r := range alerts {
		if err := check(all, r.Expr); err != nil {
			return nil, err
		}
	}
	var b strings.Builder
	b.WriteString("# Code generated by go generate in " +
		"internal/metrics. DO NOT EDIT.\n")
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	group := map[string]any{"name": "kvspray", "rules": alerts}
	err := e.Encode(map[string]any{"groups": []any{group}})
	return []byte(b.String()), err
}

// marshal writes JSON as people edit it.
func marshal(v any) ([]byte, error) {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(v)
	return []byte(b.String()), err
}
