package charttest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

// Render returns the documents of a release of the chart in dir, as helm template prints them.
func Render(dir, name, namespace string, values []byte) ([]string, error) {
	var v map[string]any
	if err := yaml.Unmarshal(values, &v); err != nil {
		return nil, fmt.Errorf("values: %w", err)
	}
	c, err := loader.LoadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("chart: %w", err)
	}
	release := common.ReleaseOptions{Name: name, Namespace: namespace, IsInstall: true}
	all, err := util.ToRenderValues(c, v, release, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, file := range slices.Sorted(maps.Keys(files)) {
		for doc := range strings.SplitSeq(files[file], "\n---\n") {
			doc = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(doc), "---"))
			if doc != "" {
				out = append(out, doc+"\n")
			}
		}
	}
	return out, nil
}
