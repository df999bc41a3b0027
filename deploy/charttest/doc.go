// Package charttest renders the Helm chart as helm does and checks the result: strictly against the
// types of the Kubernetes API, against the Pod Security standards, and against itself (selectors,
// volumes, ports). Golden files show each change of what clusters get. It also evaluates the alert
// rules.
package charttest
