//go:build race

package parseblock

const raceEnabled = true
