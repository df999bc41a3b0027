package lease

// Cause is the reason of a fence.
type Cause uint8

// The causes.
const (
	ByCommit Cause = iota + 1
	ByCancel
	ByDeadline
	ByRefusal    // the source's sidecar will not serve the grant
	BySourceLost // preempted, aborted, or its engine is dead
	ByPeerLost   // the source's sidecar is dead, or could not be reached until the time was over
	ByEngineGone // the receiver's
	ByDrain
	ByPeerSilent   // the source's sidecar answers nothing
	BySourceSilent // the source's engine shows no sign of life, its sidecar does
	ByLanesSilent  // the source's sidecar answers, but bytes do not arrive
)
