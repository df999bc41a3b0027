package charttest

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	budget "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write testdata/*.golden.yaml")

// sets are the value sets of the golden files, with the Pod Security level that their pods need.
var sets = map[string]api.Level{
	"small":        api.LevelRestricted, // CPU engines, nothing optional
	"gpu":          api.LevelRestricted,
	"rdma-store":   api.LevelRestricted,
	"cert-manager": api.LevelRestricted,
	"production":   api.LevelRestricted, // spread, policies, monitoring
	"node":         api.LevelPrivileged, // the node's namespaces, and a directory of it
	"multi-node":   api.LevelRestricted, // LeaderWorkerSets
	"ray":          api.LevelRestricted,

	"multi-node-policy": api.LevelRestricted, // LeaderWorkerSets behind policies
}

const namespace = "llm"

// render returns the documents of a release named kv.
func render(t *testing.T, text string) ([]string, error) {
	t.Helper()
	return Render("../chart", "kv", namespace, []byte(text))
}

func readSet(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name+".values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestGolden(t *testing.T) {
	for name := range sets {
		t.Run(name, func(t *testing.T) {
			docs, err := render(t, readSet(t, name))
			if err != nil {
				t.Fatal(err)
			}
			got := "# Made by: go test ./charttest -update\n---\n" +
				strings.Join(docs, "---\n")
			path := filepath.Join("testdata", name+".golden.yaml")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil || got != string(want) {
				t.Errorf("%s differs from what the chart renders (%v): look at it, then "+
					"cd deploy && go test ./charttest -update", path, err)
			}
		})
	}
}

// object is a decoded document with what the checks need of it.
type object struct {
	kind, name string
	selector   *meta.LabelSelector // of workloads, budgets and policies
	service    *core.Service
	pods       []*core.PodTemplateSpec // of a LeaderWorkerSet two, else one
	config     map[string]string
	set        *apps.StatefulSet
}

func pods(p ...*core.PodTemplateSpec) []*core.PodTemplateSpec { return p }

// decode reads a document strictly: a field that the API does not have is an error.
func decode(t *testing.T, doc string) object {
	t.Helper()
	var kind meta.TypeMeta
	if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
		t.Fatalf("%v:\n%s", err, doc)
	}
	strict := func(into meta.Object) object {
		if err := yaml.UnmarshalStrict([]byte(doc), into); err != nil {
			t.Fatalf("%v:\n%s", err, doc)
		}
		return object{kind: kind.Kind, name: into.GetName()}
	}
	switch kind.APIVersion + " " + kind.Kind {
	case "apps/v1 StatefulSet":
		var s apps.StatefulSet
		o := strict(&s)
		o.selector, o.pods, o.set = s.Spec.Selector, pods(&s.Spec.Template), &s
		return o
	case "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet":
		var s leaderWorkerSet
		o := strict(&s)
		s.check(t)
		o.pods = pods(s.Spec.Template.Leader, &s.Spec.Template.Worker)
		return o
	case "apps/v1 DaemonSet":
		var s apps.DaemonSet
		o := strict(&s)
		o.selector, o.pods = s.Spec.Selector, pods(&s.Spec.Template)
		return o
	case "apps/v1 Deployment":
		var s apps.Deployment
		o := strict(&s)
		o.selector, o.pods = s.Spec.Selector, pods(&s.Spec.Template)
		return o
	case "v1 Service":
		var s core.Service
		o := strict(&s)
		o.service, o.selector = &s, &meta.LabelSelector{MatchLabels: s.Spec.Selector}
		return o
	case "v1 ConfigMap":
		var s core.ConfigMap
		o := strict(&s)
		o.config = s.Data
		return o
	case "policy/v1 PodDisruptionBudget":
		var s budget.PodDisruptionBudget
		o := strict(&s)
		o.selector = s.Spec.Selector
		return o
	case "networking.k8s.io/v1 NetworkPolicy":
		var s networking.NetworkPolicy
		o := strict(&s)
		o.selector = &s.Spec.PodSelector
		return o
	case "monitoring.coreos.com/v1 PodMonitor":
		var s monitoring.PodMonitor
		o := strict(&s)
		o.selector = &s.Spec.Selector
		return o
	}
	t.Fatalf("%s %s: of no kind that this test reads", kind.APIVersion, kind.Kind)
	return object{}
}

func TestPodsFitTheAPIAndEachOther(t *testing.T) {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, level := range sets {
		t.Run(name, func(t *testing.T) {
			docs, err := render(t, readSet(t, name))
			if err != nil {
				t.Fatal(err)
			}
			var objects []object
			for _, doc := range docs {
				objects = append(objects, decode(t, doc))
			}
			for _, o := range objects {
				checkSelector(t, o, objects)
				for _, pod := range o.pods {
					checkPod(t, o, pod, objects)
					need := level
					if o.name == "kv-router" {
						need = api.LevelRestricted
					}
					at := api.LevelVersion{Level: need, Version: api.LatestVersion()}
					for _, r := range evaluator.EvaluatePod(at, &pod.ObjectMeta, &pod.Spec) {
						if !r.Allowed {
							t.Errorf("%s %s is not %s: %s: %s", o.kind, o.name, need, r.ForbiddenReason,
								r.ForbiddenDetail)
						}
					}
				}
			}
		})
	}
}

// checkSelector fails if a selector selects nothing, or a workload not its own pods.
func checkSelector(t *testing.T, o object, all []object) {
	t.Helper()
	if o.selector == nil {
		return
	}
	s, err := meta.LabelSelectorAsSelector(o.selector)
	if err != nil || s.Empty() {
		t.Fatalf("%s %s: selector %v, %v", o.kind, o.name, o.selector, err)
	}
	matches := func(p *core.PodTemplateSpec) bool { return s.Matches(labels.Set(p.Labels)) }
	if len(o.pods) > 0 {
		if !matches(o.pods[0]) {
			t.Errorf("%s %s does not select its own pods", o.kind, o.name)
		}
		return
	}
	if !slices.ContainsFunc(all, func(p object) bool { return slices.ContainsFunc(p.pods, matches) }) {
		t.Errorf("%s %s selects no pod", o.kind, o.name)
	}
}

// checkPod checks names that Kubernetes resolves only when the pod starts.
func checkPod(t *testing.T, o object, pod *core.PodTemplateSpec, all []object) {
	t.Helper()
	spec := pod.Spec
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, m := range c.VolumeMounts {
			if !slices.ContainsFunc(spec.Volumes, func(v core.Volume) bool { return v.Name == m.Name }) {
				t.Errorf("%s: %s mounts %s, which is no volume of the pod", o.name, c.Name, m.Name)
			}
		}
		for _, p := range []*core.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			if p == nil || p.HTTPGet == nil {
				continue
			}
			port := p.HTTPGet.Port.String()
			if !slices.ContainsFunc(c.Ports, func(q core.ContainerPort) bool { return q.Name == port }) {
				t.Errorf("%s: a probe of %s names port %s, which it has not", o.name, c.Name, port)
			}
		}
	}
	for _, v := range spec.Volumes {
		if v.ConfigMap != nil && !slices.ContainsFunc(all, func(p object) bool {
			return p.config != nil && p.name == v.ConfigMap.Name
		}) {
			t.Errorf("%s: no ConfigMap %s", o.name, v.ConfigMap.Name)
		}
	}
	if o.set != nil && !slices.ContainsFunc(all, func(p object) bool {
		return p.service != nil && p.name == o.set.Spec.ServiceName
	}) {
		t.Errorf("%s: no Service %s", o.name, o.set.Spec.ServiceName)
	}
}

// TestSidecarsAcceptTheirConfiguration runs `kvspray config check` with the arguments of each
// sidecar container.
func TestSidecarsAcceptTheirConfiguration(t *testing.T) {
	kvspray := filepath.Join(t.TempDir(), "kvspray")
	build := exec.Command("go", "build", "-o", kvspray, "./cmd/kvspray")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name := range sets {
		t.Run(name, func(t *testing.T) {
			docs, err := render(t, readSet(t, name))
			if err != nil {
				t.Fatal(err)
			}
			var config string
			var sidecars []core.Container
			for _, doc := range docs {
				o := decode(t, doc)
				if o.config != nil {
					config = o.config["kvspray.yaml"]
				}
				for _, pod := range o.pods {
					for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
						if c.Name == "kvspray" {
							sidecars = append(sidecars, c)
						}
					}
				}
			}
			if len(sidecars) == 0 {
				t.Fatal("no sidecar")
			}
			for _, c := range sidecars {
				checkConfig(t, kvspray, config, c.Args)
			}
		})
	}
}

func checkConfig(t *testing.T, kvspray, config string, args []string) {
	t.Helper()
	dir := t.TempDir()
	run := func(args ...string) {
		t.Helper()
		cmd := exec.Command(kvspray, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("kvspray %s: %v: %s\n%s", strings.Join(args, " "), err, out, config)
		}
	}
	for _, sub := range []string{"config", "keys", "store", "run"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	run("keygen", "cluster", "--out", "keys/cluster.key")
	run("keygen", "ca")
	run("keygen", "node", "--name", "tls", "--host", "127.0.0.1")
	for _, name := range []string{"tls.crt", "tls.key", "ca.crt"} {
		if err := os.Rename(filepath.Join(dir, name), filepath.Join(dir, "keys", name)); err != nil {
			t.Fatal(err)
		}
	}
	here := strings.NewReplacer("$(POD_IP)", "127.0.0.1", "$(POD_NAME)", "kv-prefill-0",
		"$(POD_NAMESPACE)", namespace, "/etc/kvspray", dir, "/run/kvspray", filepath.Join(dir, "run"),
		"/var/lib/kvspray", filepath.Join(dir, "store"))
	path := filepath.Join(dir, "config", "kvspray.yaml")
	if err := os.WriteFile(path, []byte(here.Replace(config)), 0o600); err != nil {
		t.Fatal(err)
	}
	check := []string{"config", "check"}
	for _, a := range args[1:] {
		check = append(check, here.Replace(a))
	}
	run(check...)
}

// Numbers are whole ones in every document, also the largest that the schema permits: Helm reads
// them as floating-point numbers, which it writes with an exponent.
func TestLargeNumbers(t *testing.T) {
	const large = "4294967294" // also the user of a namespace of OpenShift has such a number
	exponent := regexp.MustCompile(`[0-9]e[+-]?[0-9]+\b`)
	for _, set := range []string{"cert-manager", "node", "rdma-store", "multi-node"} {
		docs, err := render(t, readSet(t, set)+"runAsUser: "+large+"\n"+
			"drain: {routerSeconds: 3600, engineSeconds: 86400, sidecarSeconds: 3600}\n")
		if err != nil {
			t.Fatal(err)
		}
		all := strings.Join(docs, "---\n")
		if at := exponent.FindStringIndex(all); at != nil {
			t.Errorf("%s: a number has an exponent: ...%s...", set,
				all[max(0, at[0]-60):min(len(all), at[1]+20)])
		}
		if !strings.Contains(all, large) {
			t.Errorf("%s: no document has the user %s", set, large)
		}
		for _, doc := range docs {
			decode(t, doc)
		}
	}
}

func TestBadValues(t *testing.T) {
	good := "engine: {model: m}\nkeys: {existingSecret: s}\n"
	if _, err := render(t, good); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ values, text string }{
		"unknown":             {good + "prefil: {replicas: 2}\n", "prefil"},
		"unknown below":       {good + "router: {replica: 2}\n", "replica"},
		"type":                {good + "decode: {replicas: many}\n", "/decode/replicas"},
		"no time for engines": {good + "drain: {engineSeconds: 0}\n", "/drain/engineSeconds"},
		"range":               {good + "runAsUser: 0\n", "/runAsUser"},
		"placement":           {good + "sidecar: {placement: host}\n", "/sidecar/placement"},
		"size":                {good + "store: {memory: 16Gi}\n", "/store/memory"},
		"disk alone":          {good + "store: {disk: {size: 1GiB}}\n", "store.memory is empty"},
		"group of a StatefulSet": {good + "decode: {group: {size: 2}}\n",
			"set decode.kind to LeaderWorkerSet"},
		"kind":    {good + "decode: {kind: Deployment}\n", "/decode/kind"},
		"no size": {good + "decode: {group: {size: 0}}\n", "/decode/group/size"},
		"prefill of several nodes": {good + "prefill: {kind: LeaderWorkerSet, group: {size: 2}}\n",
			"prefill.group.size: kvspray does not move"},
		"no model": {"keys: {existingSecret: s}\n", "engine.model is empty"},
		"no keys":  {"engine: {model: m}\n", "keys: name a secret"},
		"two keys": {good + "keys: {existingSecret: s, certManager: {enabled: true, issuerName: i}}\n",
			"choose one"},
		"no issuer": {"engine: {model: m}\nkeys: {certManager: {enabled: true}}\n",
			"issuerName is empty"},
		"node with certificates": {"engine: {model: m}\nsidecar: {placement: node}\n" +
			"keys: {certManager: {enabled: true, issuerName: i}}\n", "use keys.existingSecret"},
	} {
		t.Run(name, func(t *testing.T) {
			text := c.values
			if name == "two keys" { // a key may not be there twice
				text = strings.Replace(text, "keys: {existingSecret: s}\n", "", 1)
			}
			if _, err := render(t, text); err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want an error with %q", err, c.text)
			}
		})
	}
}

// Policies admit what the pods of a release send each other, and nothing else.
func TestPolicies(t *testing.T) {
	docs, err := render(t, readSet(t, "multi-node-policy"))
	if err != nil {
		t.Fatal(err)
	}
	pods := map[string]labels.Set{}
	var policies []*networking.NetworkPolicy
	for _, doc := range docs {
		o := decode(t, doc)
		for i, name := range []string{o.name, o.name + " worker"}[:len(o.pods)] {
			pods[name] = o.pods[i].Labels
		}
		if o.kind == "NetworkPolicy" {
			var p networking.NetworkPolicy
			if err := yaml.UnmarshalStrict([]byte(doc), &p); err != nil {
				t.Fatal(err)
			}
			policies = append(policies, &p)
		}
	}
	selects := func(s *meta.LabelSelector, pod string) bool {
		sel, err := meta.LabelSelectorAsSelector(s)
		if err != nil {
			t.Fatal(err)
		}
		return sel.Matches(pods[pod])
	}
	admitted := func(from, to string, port int) bool {
		for _, p := range policies {
			if !selects(&p.Spec.PodSelector, to) {
				continue
			}
			for _, rule := range p.Spec.Ingress {
				peer := slices.ContainsFunc(rule.From, func(f networking.NetworkPolicyPeer) bool {
					return f.PodSelector != nil && selects(f.PodSelector, from)
				})
				if peer && (len(rule.Ports) == 0 || slices.ContainsFunc(rule.Ports,
					func(x networking.NetworkPolicyPort) bool { return x.Port.IntValue() == port })) {
					return true
				}
			}
		}
		return false
	}
	const leader, worker, prefill, router = "kv-decode", "kv-decode worker", "kv-prefill", "kv-router"
	for _, name := range []string{leader, worker, prefill, router} {
		if pods[name] == nil {
			t.Fatalf("no pod %s in %v", name, pods)
		}
	}
	for _, c := range []struct {
		from, to string
		port     int
		want     bool
	}{
		{leader, worker, 29500, true},
		{worker, leader, 41234, true},
		{worker, leader, 8000, true}, // its drain asks for the leader's metrics
		{router, leader, 8000, true},
		{router, leader, 7651, true},
		{prefill, worker, 7653, true},
		{router, leader, 7652, true}, // gossip
		{leader, router, 7652, true},
		{leader, router, 9000, false},
		{prefill, leader, 41234, false},
		{router, worker, 29500, false},
		{leader, prefill, 29500, false},
	} {
		if got := admitted(c.from, c.to, c.port); got != c.want {
			t.Errorf("%s to port %d of %s: %v, want %v", c.from, c.port, c.to, got, c.want)
		}
	}
}

// A router that finds engines by gossip depends on neither their number nor their names, so that
// scaling changes nothing but replicas.
func TestRouterDoesNotDependOnReplicas(t *testing.T) {
	router := func(values string) (args []string, pod string) {
		docs, err := render(t, readSet(t, "small")+values)
		if err != nil {
			t.Fatal(err)
		}
		for _, doc := range docs {
			if o := decode(t, doc); o.name == "kv-router" && len(o.pods) > 0 {
				return o.pods[0].Spec.Containers[0].Args, doc
			}
		}
		t.Fatal("no router")
		return nil, ""
	}
	args, one := router("")
	_, many := router("\nprefill: {replicas: 7}\ndecode: {replicas: 9}\n")
	if one != many || !slices.Contains(args, "--join=kv-peers:7652") {
		t.Errorf("the router depends on the number of engines:\n%s\n%s", one, many)
	}
	args, _ = router("\nrouter: {join: false}\n")
	if text := strings.Join(args, " "); strings.Contains(text, "--join") ||
		!strings.Contains(text, "--engine=url=http://kv-prefill-0.kv-engines:8000,role=prefill") {
		t.Errorf("router.join false: %s", text)
	}
}

// Hooks use the socket of the pod's sidecar, and sidecars answer for the names by which the router
// asks them.
func TestHooksAndRouterReachSidecars(t *testing.T) {
	asks := regexp.MustCompile(`--(?:prefill|decode)-sidecar=http://([^:]+):7651`)
	socket := regexp.MustCompile(`--socket=(\S+)`)
	hosts := regexp.MustCompile(`http:\\n  hosts:((?:\\n  - '[^']+')+)`)
	for name := range sets {
		docs, err := render(t, readSet(t, name))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Join(docs, "\n")
		for _, m := range socket.FindAllStringSubmatch(text, -1) {
			if m[1] != "/run/kvspray/kvspray.sock" {
				t.Errorf("%s: socket %s", name, m[1])
			}
		}
		named := hosts.FindString(text)
		for _, m := range asks.FindAllStringSubmatch(text, -1) {
			_, parent, _ := strings.Cut(m[1], ".")
			if !strings.Contains(named, "'*."+parent+"'") {
				t.Errorf("%s: the router asks %s, sidecars have %q", name, m[1], named)
			}
		}
	}
}
