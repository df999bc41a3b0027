package charttest

import (
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// leaderWorkerSet has the fields of leaderworkerset.x-k8s.io/v1 that the chart sets, and no others:
// decoded strictly, a field that this test does not have is an error. The pods are of the types of
// the Kubernetes API. The Go module of LeaderWorkerSet is not used.
type leaderWorkerSet struct {
	meta.TypeMeta   `json:",inline"`
	meta.ObjectMeta `json:"metadata"`
	Spec            struct {
		Replicas *int32 `json:"replicas"`
		Rollout  struct {
			Type    string `json:"type"`
			Rolling struct {
				MaxUnavailable int `json:"maxUnavailable"`
			} `json:"rollingUpdateConfiguration"`
		} `json:"rolloutStrategy"`
		Template struct {
			Leader        *core.PodTemplateSpec `json:"leaderTemplate"`
			Worker        core.PodTemplateSpec  `json:"workerTemplate"`
			Size          *int32                `json:"size"`
			RestartPolicy string                `json:"restartPolicy"`
		} `json:"leaderWorkerTemplate"`
	} `json:"spec"`
}

// check fails for what the API's validation would refuse.
func (s *leaderWorkerSet) check(t *testing.T) {
	t.Helper()
	spec := &s.Spec
	if spec.Replicas == nil || spec.Template.Size == nil || *spec.Template.Size < 1 ||
		spec.Template.Leader == nil {
		t.Fatalf("%s: replicas, size or leader are missing", s.Name)
	}
	if spec.Rollout.Type != "RollingUpdate" || spec.Rollout.Rolling.MaxUnavailable < 1 {
		t.Errorf("%s: rollout %+v", s.Name, spec.Rollout)
	}
	if !slices.Contains([]string{"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
		spec.Template.RestartPolicy) {
		t.Errorf("%s: restartPolicy %q", s.Name, spec.Template.RestartPolicy)
	}
}

// TestWorkersOfAGroup checks what distinguishes the workers of an engine from its leader: routers
// find the leader only, and it alone answers probes.
func TestWorkersOfAGroup(t *testing.T) {
	for name, spans := range map[string]bool{"multi-node": true, "ray": false} {
		docs, err := render(t, readSet(t, name))
		if err != nil {
			t.Fatal(err)
		}
		var engines *core.Service
		var decodes []*core.PodTemplateSpec
		router := ""
		for _, doc := range docs {
			switch o := decode(t, doc); o.name {
			case "kv-engines":
				engines = o.service
			case "kv-decode":
				if len(o.pods) > 0 {
					decodes = o.pods
				}
			case "kv-router":
				if len(o.pods) > 0 {
					router = strings.Join(o.pods[0].Spec.Containers[0].Args, " ")
				}
			}
		}
		if len(decodes) != 2 {
			t.Fatalf("%s: %d kinds of decode pods", name, len(decodes))
		}
		// Without gossip the router lists the pods, which a LeaderWorkerSet names below a service of its
		// own name.
		want, joins := "--engine=url=http://kv-decode-0.kv-decode:8000,role=decode", name == "ray"
		if joins {
			want = "--join=kv-peers:7652"
		}
		if !strings.Contains(router, want) {
			t.Errorf("%s: the router's arguments %s lack %s", name, router, want)
		}
		for i, pod := range decodes {
			worker := i == 1
			sidecar := strings.Join(pod.Spec.InitContainers[0].Args, " ")
			if got := strings.Contains(sidecar, "engine.api=http://$(POD_IP):8000 "+
				"--set=engine.role=decode"); got != (joins && !worker) {
				t.Errorf("%s, worker %v: the sidecar's arguments %s", name, worker, sidecar)
			}
			c := pod.Spec.Containers[0]
			args := strings.Join(c.Args, " ")
			if got := strings.Contains(args, "--node-rank=$(LWS_WORKER_INDEX)"); got != spans {
				t.Errorf("%s, worker %v: arguments %s", name, worker, args)
			}
			if got := strings.HasSuffix(args, "--headless"); got != (worker && spans) {
				t.Errorf("%s, worker %v: arguments %s", name, worker, args)
			}
			if probes := c.ReadinessProbe != nil && c.LivenessProbe != nil && c.StartupProbe !=
				nil; probes == worker {
				t.Errorf("%s, worker %v: probes %v", name, worker, probes)
			}
			key := "kvspray/engine"
			if got := pod.Labels[key] == engines.Spec.Selector[key]; got == worker {
				t.Errorf("%s, worker %v: labels %v", name, worker, pod.Labels)
			}
			host := "$POD_IP:8000"
			if worker {
				host = "$LWS_LEADER_ADDRESS:8000"
			}
			if hook := strings.Join(c.Lifecycle.PreStop.Exec.Command, " "); !strings.Contains(hook, host) {
				t.Errorf("%s, worker %v: preStop %s waits for another engine than %s", name, worker, hook, host)
			}
		}
	}
}
