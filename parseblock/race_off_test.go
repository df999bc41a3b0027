//go:build !race

package parseblock

const raceEnabled = false
