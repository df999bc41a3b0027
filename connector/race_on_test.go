//go:build race

package connector_test

const raceEnabled = true
