package connector

// Nap is how the watcher sleeps.
var Nap = nap
