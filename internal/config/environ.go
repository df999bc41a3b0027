package config

import (
	"slices"
	"strings"
)

// EnvPrefix begins the name of an environment variable that sets a key. It is longer than the
// program's name, because Kubernetes makes variables such as KVSPRAY_PORT for a service of that
// name.
const EnvPrefix = "KVSPRAY_SET_"

// EnvName is the environment variable of a key.
func EnvName(key string) string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
}

// FromEnvironment returns what the variables of an environment ("NAME=value") set, as "key=value",
// in the order of the keys. A name with EnvPrefix that belongs to no key is an error.
func FromEnvironment(environ []string) ([]string, error) {
	values := map[string]string{}
	for _, e := range environ {
		if name, value, ok := strings.Cut(e, "="); ok && strings.HasPrefix(name, EnvPrefix) {
			values[name] = value
		}
	}
	if len(values) == 0 {
		return nil, nil
	}
	var sets, known []string
	for _, f := range Fields() {
		if !settable(f) {
			continue
		}
		name := EnvName(f.Key)
		known = append(known, name)
		if value, ok := values[name]; ok {
			sets = append(sets, f.Key+"="+value)
			delete(values, name)
		}
	}
	if len(values) == 0 {
		return sets, nil
	}
	var unknown []string
	for name := range values {
		unknown = append(unknown, name)
	}
	slices.Sort(unknown)
	e := &Error{Key: unknown[0], Value: values[unknown[0]], Wrong: "an environment variable of no key",
		Remedy: "unset it, or name it as 'kvspray config print' names the key, in capitals and with _ " +
			"for each dot"}
	if near := Nearest(unknown[0], known); near != "" {
		e.Remedy = "did you mean " + near + "?"
	}
	return nil, e
}

// settable reports whether Set takes the key: a value, or a list of which Set has a short form.
func settable(f Field) bool {
	if strings.Contains(f.Key, "[]") {
		return false
	}
	return !f.Section || f.Key == "transports.tcp.rails" || f.Key == "store.disk"
}
