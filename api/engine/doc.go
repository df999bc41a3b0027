// Package engine has the schema of the messages between an engine and its sidecar,
// messages.schema. It has no code: connector/msg and the Python package have what is generated from
// the schema.
package engine

//go:generate go run ./gen -root ../..
