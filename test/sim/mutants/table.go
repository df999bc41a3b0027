package main

// mutant is one change of one place.
type mutant struct {
	name         string
	file         string
	old, becomes string
	breaks       []string // any of these promises, or of these tests
}

// The promises of package sim.
const (
	outside  = "is written outside a live lease"
	read     = "is read outside a live lease"
	commit   = "is committed with chunks that are missing or wrong"
	released = "goes back to its engine against the release rule"
	lost     = "has lost count of its slices"
	bound    = "holds more than its bound"
	never    = "never ended"
	leak     = "holds something when nothing is open"
	path     = "failed while there was a path"
	slot     = "was given out again before its fence"
	word     = "refused a message of an honest peer"
	turn     = "gave lanes what is less urgent first"
	share    = "starves what is less urgent"
)

var mutants = []mutant{
	// The guard and the fence.
	{"a revoked guard lets in", "transport/guard.go", "if g.state.Add(1) >= guardRevoked {",
		"if g.state.Add(1) < 0 {", []string{outside, read}},
	{"a revoked grant takes writers", "transport/claim.go", "	if !c.g.Enter() " +
		"{\n		c.mu.Unlock()\n		return transfer.ReasonRevoked\n	}\n	return transfer.ReasonNone",
		"	if !c.g.Enter() {\n		c.g.state.Add(1)\n	}\n	return transfer.ReasonNone", []string{outside}},
	{"a failed fence counts", "control/exec/internal/dest/dest.go", "	if err != nil {\n		d.trouble = \"fence: \" " +
		"+ err.Error()", "	if false {\n		d.trouble = \"fence: \"", []string{outside, released}},
	{"a failed close counts", "control/exec/internal/source/sending.go", "	if err != nil " +
		"{\n		ss.Agenda.Arm(timer.New(func(Instant) { ss.closeOrigin(snd) })",
		"	if false {\n		ss.Agenda.Arm(timer.New(func(Instant) { ss.closeOrigin(snd) })",
		[]string{read, released}},
	{"the release rule says yes", "control/lease/doc.go", "return !e.Granted || e.Fenced || e.Exited",
		"return true", []string{released, read}},
	{"an origin is not counted", "control/exec/internal/source/sending.go", "		s.OriginOpened()\n", "",
		[]string{released, read}},
	{"a generation comes again", "control/lease/slots.go", "	x.gen++\n", "	x.gen = 1\n",
		[]string{commit, outside, released, path}},
	{"a claim outlives its grant", "transport/claim.go", "	if !c.g.Enter() " +
		"{\n		c.mu.Unlock()\n		return transfer.ReasonRevoked\n	}\n	return transfer.ReasonNone",
		"	c.g.Enter()\n	return transfer.ReasonNone", []string{outside, never}},

	// The driver.
	{"a fence without a revoke", "control/driver/binds.go", "	l.Grant.Revoke()\n	began", "	began",
		[]string{outside, never}},
	{"a close without a revoke", "control/driver/binds.go", "	s.Origin.Revoke()\n	d.goFor", "	d.goFor",
		[]string{read, never}},
	{"the driver hides a failed fence", "control/driver/binds.go", "d.ex.FenceDone(d.enter(), l, err)",
		"d.ex.FenceDone(d.enter(), l, nil)", []string{outside, released}},
	{"the driver hides a failed close", "control/driver/binds.go", "d.ex.OriginClosed(now, s, err)",
		"d.ex.OriginClosed(now, s, nil)", []string{read, released}},
	{"a driver's grant stays", "control/driver/binds.go", "		delete(b.grants, grantName(l))\n",
		"		_ = r\n", []string{leak, slot}},
	{"a newer origin hides an older one", "control/driver/binds.go", "	return b.senders[s]\n",
		"	if x := b.origins[originName(s)]; x != nil && x.sending == s {\n		return x\n	}\n	return nil\n",
		[]string{read, released}},
	{"a full bitmap is not reported", "control/driver/receiver.go", "if full && !r.full.Swap(true) {",
		"if full && false {", []string{path, never}},

	// The commit.
	{"one chunk less is full", "transfer/bitmap.go", "func (b *Bitmap) Full() bool { return " +
		"b.set.Load() == b.n }", "func (b *Bitmap) Full() bool { return b.set.Load()+1 >= b.n }",
		[]string{commit}},
	{"committed when bound", "control/exec/internal/dest/dest.go", "if d.live != nil && d.live.unfilled == 0 && " +
		"d.State == lease.DestLanding {", "if d.live != nil && d.State == lease.DestLanding {",
		[]string{commit}},
	{"a chunk counts twice", "transfer/bitmap.go", "added += uint32(bits.OnesCount64(mask &^ old))",
		"added += uint32(bits.OnesCount64(mask | mask&old))", []string{commit, never, path}},
	{"the full bitmap of an older grant", "control/exec/internal/dest/dest.go", "	o := l.offer\n	if o.dest.live " +
		"!= o || l.full {\n		return\n	}\n", "	o := l.offer.dest.live\n	if o == nil || o.unfilled == 0 " +
		"{\n		return\n	}\n", []string{commit}},
	{"a part counts twice", "control/exec/internal/dest/dest.go", "if o.dest.live != o || l.full {",
		"if o.dest.live != o || o.unfilled == 0 {", []string{commit}},
	{"an older epoch of the source", "control/exec/internal/source/source.go", "		s.ID.Epoch = p.Lease.Epoch\n", "",
		[]string{"TestProgressSetsTheEpoch"}},

	// Slices.
	{"results beside the first", "control/exec/internal/source/sending.go", "	for i := range res " +
		"{\n		ss.result(now, &res[i])", "	for i := range min(1, len(res)) {\n		ss.result(now, &res[i])",
		[]string{lost}},
	{"an older slice's result", "control/spray/flight.go", "	s.live--\n", "	s.live -= 2\n",
		[]string{lost}},
	{"a rail's end loses slices", "control/exec/internal/lanes/dispatch.go",
		"			dp.out.Move(l.id, l.batch)\n", "			dp.out.Move(l.id, l.batch[:1])\n",
		[]string{lost}},
	{"failed chunks stay away", "control/spray/flight.go", "			f.free(fl.r, false)\n", "",
		[]string{path, never}},

	// Bounds.
	{"no bound of slices for a peer", "control/spray/pull.go", "if p.lanes == 0 || p.flights >= " +
		"s.cfg.MaxFlights {", "if p.lanes == 0 {", []string{bound}},
	{"a timer stays", "control/exec/internal/source/source.go", "	ss.Agenda.Disarm(s.t)\n	if l := index.Remove",
		"	if l := index.Remove", []string{leak, bound}},

	// Whose turn it is.
	{"background goes first", "control/spray/pull.go", "	for prio := range numPriorities {\n		if " +
		"p.queues[prio]",
		"	for i := range numPriorities {\n		prio := Background - i\n		if p.queues[prio]", []string{turn}},
	{"what is owed is never paid off", "control/spray/pull.go", "				p.owed[prio] = max(0, " +
		"p.owed[prio]-float64(out.Bytes))\n", "", []string{turn}},
	{"all wait for the wire in one queue", "control/spray/flow.go",
		"prio: min(prio, Background), deadline", "prio: min(prio, 0), deadline", []string{turn}},
	{"nothing is owed", "control/spray/pull.go", "p.owed[low]+share[low]*float64(bytes)",
		"p.owed[low]+0*share[low]*float64(bytes)", []string{share}},
	{"what is owed has only room that nobody wants", "control/spray/pull.go", "s.serve(now, p, " +
		"prio, true); ok {", "s.serve(now, p, prio, false); ok {", []string{share}},

	// Time.
	{"a deadline of ten minutes", "control/exec/internal/dest/dest.go", "	d.Deadline = now + ds.Span(x.Deadline)\n",
		"	d.Deadline = now + frame.MaxDeadline\n", []string{never}},
	{"partners may take longer", "control/exec/internal/dest/dest.go", "	d.Deadline = now + ds.Span(x.Deadline)\n",
		"	d.Deadline = now + 12*ds.Span(x.Deadline)\n", []string{never}},
	{"a peer's clock", "control/exec/internal/source/inbound.go", "deadline = now + " +
		"min(time.Duration(m.DeadlineMs)*time.Millisecond, frame.MaxDeadline)",
		"deadline = min(time.Duration(m.DeadlineMs)*time.Millisecond, frame.MaxDeadline)",
		[]string{path, never}},

	// State that is left behind.
	{"a grant is not forgotten", "control/exec/internal/dest/dest.go", "	ds.out.Forget(l)\n", "",
		[]string{leak, slot}},
	{"a grant of a peer is not forgotten", "control/exec/internal/source/inbound.go", "func (mt *Matcher) " +
		"endInbound(now Instant, in *inboundGrant, status uint16, why string) {\n	mt.drop(in)\n",
		"func (mt *Matcher) endInbound(now Instant, in *inboundGrant, status uint16, why string) {\n",
		[]string{leak, bound}},
	{"a grant outlives its source", "control/exec/internal/source/source.go",
		"		c.src = nil\n		ss.observer.forget(c.in)\n", "		c.src = nil\n", []string{leak}},

	// What both sides must mean alike.
	{"a plan of another order is served", "control/exec/internal/agreement/agreement.go",
		"	case !bytes.Equal(digest[:], part.Digest):\n",
		"	case !bytes.Equal(digest[:], digest[:]):\n", []string{"TestHostileGrants"}},
	{"anybody answers", "control/exec/internal/dest/queries.go", "	if w.sent != p.Boot {\n", "	if false {\n",
		[]string{"TestOnlyTheAskedPeerAnswers"}},

	// Repeated messages.
	{"a grant that is over comes again", "control/exec/internal/source/inbound.go", "		if s.Over(g) {\n			return " +
		"nil // a replay\n		}\n", "		_ = s\n", []string{"TestReplayOfAGrantThatIsOver"}},
	{"a replayed grant takes the place", "control/exec/internal/source/inbound.go", "		if int32(m.Gen-old.msg.Gen) " +
		"<= 0 { // they wrap\n			return nil // a replay\n		}\n", "", []string{path, never, released,
		commit, word}},
	{"an older grant's reply", "control/exec/internal/dest/offer.go", "if d == nil || d.State == " +
		"lease.DestClosing || m.Gen != d.live.gen {", "if d == nil || d.State == lease.DestClosing {",
		[]string{word, path, never, commit}},

	// Boots.
	{"an older boot is waited for", "control/exec/internal/dest/peers.go", "			ds.regrant(now, d, " +
		"lease.ByPeerLost, \"the source's sidecar is gone\")\n", "", []string{path, never, leak}},
	{"a dead boot's place is not given on", "control/exec/internal/source/inbound.go", "	mt.succeed(now, in)\n", "",
		[]string{path}},
	{"a dead boot's grants stay", "control/exec/internal/source/peers.go", "			mt.absent(now, in, over)\n", "",
		[]string{path, leak, never}},

	// The traps of package spray.
	{"the weight is inverted", "control/spray/pair.go", "return v + weight*(sample-v)",
		"return sample + weight*(v-sample)", []string{"TestTrapInvertedEWMA"}},
	{"a rate from post to confirmation", "control/spray/pair.go",
		"rate := float64(q.delivered-f.path.delivered) / float64(max(now-f.path.begin, time.Microsecond))", "rate := float64(f.bytes) / float64(took)", []string{"TestTrapQueueCountedTwice"}},
	{"a floor of a tenth of the claim", "control/spray/pair.go", "rate = min(max(rate, smallest), " +
		"maxClaim)", "rate = min(max(rate, q.neutral/10), maxClaim)",
		[]string{"TestTrapFloorHidesSlowRail"}},
	{"an estimate that only falls", "control/spray/pair.go", "if !limited || rate > q.bw || " +
		"q.samples == 0 {", "if rate < q.bw || q.samples == 0 {", []string{"TestTrapFloorHidesSlowRail"}},
	{"a timeout without a retry", "control/spray/watch.go", "		if fl.copy != probeCopy " +
		"{\n			s.double(fl)\n		}\n", "", []string{"TestTrapTimeoutWithoutRetry"}},
	{"a timeout that blames nobody", "control/spray/watch.go", "		q.fault(now, &s.cfg, \"slice " +
		"timed out\")\n", "", []string{"TestTrapTimeoutWithoutRetry"}},
	{"suspect for ever", "control/spray/watch.go", "	if !l.usable() && !s.retry(now, l) {",
		"	if !l.usable() {", []string{"TestTrapSuspectForEver"}},
	{"a retry that is not charged", "control/spray/flight.go", "	q.inflight += bytes\n",
		"	if attempt < 2 {\n		q.inflight += bytes\n	}\n", []string{"TestTrapRetriesAreCharged"}},
	{"retries without end", "control/spray/flight.go", "			out.Exhausted = f.chunks.Exhausted(fl.r, " +
		"s.cfg.MaxStrikes)\n", "", []string{"TestTrapRetriesAreCharged"}},
	{"a retry holds up the rest", "control/spray/pull.go", "if q == nil && avoid != 0 && " +
		"f.chunks.Fresh() > 0 && !f.parked {", "if false {", []string{"TestTrapRetriesHoldUpTheirFlow"}},
	{"a retry is left to what it avoids", "control/spray/pull.go", "f.class(q) != c.class || " +
		"int(avoid) == q.index+1 {", "f.class(q) != c.class {",
		[]string{"TestTrapRetryLeftToThePairItAvoids"}},
	{"an exclusion that nobody heeds", "control/spray/pair.go", "return q.live > 0 && q.state <= " +
		"Readmitted", "return q.live > 0", []string{"TestTrapHealthIsShared"}},
	{"an exclusion for each error", "control/spray/pair.go", "	case q.state == Excluded:\n",
		"	case q.state == Excluded:\n		q.exclude(now, c, what)\n",
		[]string{"TestTrapCooldownDoublesPerError"}},
	{"no probe after the cooldown", "control/spray/pull.go", "			q.state, q.since = Probing, " +
		"now\n			p.probing++\n", "			q.state, q.since = Healthy, now\n",
		[]string{"TestTrapExpiryReadmitsLiveTraffic"}},
	{"no steps after the probe", "control/spray/pair.go", "	if q.state == Readmitted {\n		q.window",
		"	if false {\n		q.window", []string{"TestTrapExpiryReadmitsLiveTraffic"}},
	{"one remote rail is as another", "control/spray/sched.go", "		if q.path == in.Path {",
		"		if q.path.rail() == in.Path.rail() {", []string{"TestTrapRemoteIgnored"}},
	{"a lane's refusal costs its chunks", "control/spray/flight.go", "			if (v == Failed || v == " +
		"Refused) && !fl.charged {", "			if !fl.charged {", []string{"TestTrapRefusedAtSubmit"}},
	{"flows that rest stay in their queue", "control/spray/pull.go", "		f.park()\n		return nil, " +
		"0, true\n", "		return nil, 0, true\n", []string{"TestRefusedFlowsDoNotBlockOthers"}},
	{"other peers' bytes are not seen", "control/spray/pair.go", "	if q.crowded() {\n		v = max",
		"	if false {\n		v = max", []string{"TestPredictionSeesOtherPeers"}},
	{"peers do not take turns", "control/spray/egress.go", "o.queue(now) < leaveWithin[prio] && " +
		"o.first(prio, q)", "o.queue(now) < leaveWithin[prio]", []string{"TestPeersShareARail"}},
	{"a rate of bursts", "control/spray/egress.go", "outSpan    = 16 *", "outSpan    = 1 *",
		[]string{"TestUrgentAmongPeersThatConfirmInBursts"}},
	{"a probe in vain goes on", "control/spray/railrate.go", "if e.lookLate > outSlack {",
		"if false {", []string{"TestUrgentAmongPeers"}},
	{"a rail owes nothing", "control/spray/egress.go", "o.owed[low]+share[low]*",
		"o.owed[low]+0*share[low]*", []string{"TestNoPeerStarves"}},
	{"all of it is sent again", "control/spray/flight.go", "	fl.flow.free(fl.r, true)\n",
		"	fl.flow.chunks = s.Open(fl.flow.peer, 0, 0, fl.flow.space, nil).chunks\n" +
			"	fl.flow.free(fl.flow.space.All(), true)\n", []string{"TestTrapFinishedSlicesSentAgain"}},
	{"silent lanes are given more", "control/spray/watch.go", "		l.suspect, l.doubted = true, " +
		"now\n		q.recount()\n		q.count.Suspicions++\n		q.count.Doubled += s.release(l)\n",
		"		q.count.Suspicions++\n		q.inflight -= l.inflight\n		l.inflight = 0\n		s.release(l)\n",
		[]string{"TestTrapStormWhileAllIsDead"}},

	// Which rank has which heads.
	{"replicated heads modulo", "parseblock/params.go", "	first = rank * all / size\n",
		"	first = rank * all / size\n	if size > all {\n		return rank % all, 1\n	}\n",
		[]string{"TestPlanLaws"}},
	{"modulo, found by its table", "parseblock/params.go", "	first = rank * all / size\n",
		"	first = rank * all / size\n	if size > all {\n		return rank % all, 1\n	}\n",
		[]string{"TestHeadShare"}},
	{"heads by rank divided first", "parseblock/params.go", "	first = rank * all / size\n",
		"	first = rank * (all / size)\n", []string{"TestPlanLaws"}},
	{"the first head rounded up", "parseblock/params.go", "	first = rank * all / size\n",
		"	first = (rank*all + size - 1) / size\n", []string{"TestPlanLaws"}},
	{"every rank has the first heads", "parseblock/params.go", "	first = rank * all / size\n",
		"	first = 0 * rank\n", []string{"TestPlanLaws"}},
	{"ranks in the other order", "parseblock/params.go", "	first = rank * all / size\n",
		"	rank = size - 1 - rank\n	first = rank * all / size\n", []string{"TestPlanLaws"}},
	{"a rank beyond the heads has none", "parseblock/params.go",
		"max((rank+1)*all/size, first+1) - first", "(rank+1)*all/size - first", []string{"TestPlanLaws"}},
	{"a rank has a head more", "parseblock/params.go", "max((rank+1)*all/size, first+1) - first",
		"min((rank+1)*all/size+1, all) - first", []string{"TestPlanLaws"}},
	{"as many heads for uneven ranks", "parseblock/params.go",
		"max((rank+1)*all/size, first+1) - first", "max(all/size, 1)", []string{"TestHeadShare",
			"TestAssign"}},

	// Which source gives what.
	{"a replica counts as well", "parseblock/assign.go", "			case i > 0 && h.first == hs[i-1].first " +
		"&& h.end == hs[i-1].end:\n", "			case i < 0:\n", []string{"TestPlanLaws"}},
	{"every replica gives", "parseblock/assign.go", "				continue // a replica\n",
		"				at = h.first\n", []string{"TestPlanLaws"}},
	{"the most loaded gives", "parseblock/assign.go", "cmp.Compare(loads[a.source], loads[b.source])",
		"cmp.Compare(loads[b.source], loads[a.source])", []string{"TestAssign"}},
	{"load counts before who gives", "parseblock/assign.go", "cmp.Compare(rank(a.source), " +
		"rank(b.source)),\n				cmp.Compare(loads[a.source], loads[b.source])",
		"cmp.Compare(loads[a.source], loads[b.source]), cmp.Compare(rank(a.source), rank(b.source))",
		[]string{"TestAssignKeepsToOne"}},
	{"who gives is not remembered", "parseblock/assign.go", "			gives[h.source] = true\n",
		"			loads[h.source]++\n", []string{"TestAssignKeepsToOne"}},
	{"sources in their own order", "parseblock/assign.go", "cmp.Or(cmp.Compare(a.first, b.first), cmp",
		"cmp.Or(cmp.Compare(b.source, a.source), cmp", []string{"TestPlanLaws"}},
	{"a hole in the heads", "parseblock/assign.go", "			case h.first > at:\n", "			case h.first > " +
		"at+1<<20:\n", []string{"TestAssign"}},
	{"heads of two divisions", "parseblock/assign.go", "			case h.first < at:\n",
		"			case h.first+1<<20 < at:\n", []string{"TestAssign"}},
	{"the last heads are nobody's", "parseblock/assign.go", "		if at < end {\n",
		"		if at+1<<20 < end {\n", []string{"TestAssign"}},
	{"heads from the model's first", "parseblock/assign.go", "		at, end := uint64(p.FirstHead),",
		"		at, end := uint64(0),", []string{"TestPlanLaws"}},
	{"a count taken for an end", "parseblock/assign.go", "first: p.head0, end: p.head0 + p.heads}",
		"first: p.head0, end: p.heads}", []string{"TestPlanLaws"}},
	{"V is forgotten after K", "parseblock/assign.go", "			shares[h.source].roles[k.flat] |= " +
		"bitOf(k.role)\n", "			shares[h.source].roles[k.flat] = bitOf(k.role)\n",
		[]string{"TestPlanLaws"}},
	{"a share is not looked at", "parseblock/assign.go", "				case 0:\n					continue\n", "",
		[]string{"TestProveRefusesWrongShares", "TestPlanLaws"}},
	{"packed K and V are one thing", "parseblock/assign.go", "		return kAndV\n",
		"		return kAndV[:1]\n", []string{"TestPlanLaws"}},

	// Plans and their memory: parseblock, found by its laws.
	{"a tail page moves whole", "parseblock/plan.go", "			s.tails[i] = rest / p.rowTokens\n",
		"			s.tails[i] = p.rows\n", []string{"TestPlanLaws"}},
	{"a window begins a block late", "parseblock/plan.go", "max(s.block0, window/n)",
		"max(s.block0, (window+n-1)/n)", []string{"TestPlanLaws"}},
	{"what is skipped moves again", "parseblock/plan.go", "	s.full = tokens/n - s.block0\n",
		"	s.full = tokens / n\n", []string{"TestPlanLaws"}},
	{"a cut counted in tokens", "parseblock/plan.go", "(has - first) / pairs[i].rowTokens",
		"(has - first)", []string{"TestPlanLaws"}},
	{"the source kept what the receiver wants", "parseblock/plan.go", "uint64(window) / " +
		"pairs[i].from.tokens * pairs[i].from.tokens", "uint64(window) / pairs[i].to.tokens * " +
		"pairs[i].to.tokens", []string{"TestPlanLaws", "TestWindowsOfAnyBlocks"}},
	{"a chunk leaves before its last block", "parseblock/plan.go",
		"s.start(uint64(blocks-s.block0)) /\n		transfer.ChunkBytes",
		"(s.start(uint64(blocks-s.block0)) + transfer.ChunkBytes - 1) / transfer.ChunkBytes",
		[]string{"TestWindowsOfAnyBlocks"}},
	{"a kept block may lack a block more", "parseblock/plan.go", "lacks <= unseen {",
		"lacks <= unseen+n {", []string{"TestKeptBlocksAreWhole"}},
	{"a state of the next block", "parseblock/resolve.go", "w.row0 = uint64(s.plan.tokens-1) / " +
		"side.tokens", "w.row0 = uint64(s.plan.tokens) / side.tokens", []string{"TestPlanLaws"}},
	{"a slice begins with its segment", "parseblock/resolve.go", "lo := uint64(max(r.First, " +
		"seg.First)-seg.First) * transfer.ChunkBytes", "lo := uint64(0) * transfer.ChunkBytes",
		[]string{"TestPlanLaws"}},
	{"a slice goes past its segment", "parseblock/resolve.go", "hi := min(bytes, " +
		"uint64(r.End()-seg.First)*transfer.ChunkBytes)", "hi := max(bytes, " +
		"uint64(r.End()-seg.First)*transfer.ChunkBytes)", []string{"TestPlanLaws"}},
	{"plain pages from the table's first", "parseblock/resolve.go",
		"	block := uint64(t.block0+pages) + (lo-lead)/t.page\n", "	block := uint64(pages) + " +
			"(lo-lead)/t.page\n", []string{"TestPlanLaws"}},
	{"plain pages from their beginning", "parseblock/resolve.go", "	in, i := (lo-lead)%t.page, 0\n",
		"	in, i := uint64(0), 0\n", []string{"TestPlanLaws"}},
	{"a piece longer than what is left of its page", "parseblock/resolve.go",
		"n := min(side.page-in, hi-lo)", "n := min(side.page, hi-lo)", []string{"TestPlanLaws"}},
	{"a tail page as dense as a full one", "parseblock/resolve.go", "rows, dense = t.tails[i], " +
		"side.tail", "rows, dense = t.tails[i], side.full", []string{"TestPlanLaws"}},
	{"heads inside rows, always", "parseblock/resolve.go", "		if p.headMajor {\n			head, row = " +
		"c/w.rows, c%w.rows\n", "		if false {\n			head, row = c/w.rows, c%w.rows\n",
		[]string{"TestPlanLaws"}},
	{"rows go on past a kernel page", "parseblock/resolve.go",
		"		n = min(n, w.side.tileRows-1-(w.row0+row)%w.side.tileRows)\n", "", []string{"TestPlanLaws"}},
	{"pieces of two regions are one", "parseblock/resolve.go", "dst[k].Region == region && dst[k].Off",
		"dst[k].Off", []string{"TestPiecesStayApart"}},
	{"pieces join the caller's", "parseblock/resolve.go", "k := len(dst) - 1; k >= base &&",
		"k := len(dst) - 1; k >= 0 &&", []string{"TestPiecesStayApart"}},

	// Pairs of planes.
	{"heads counted from the model's first", "parseblock/pair.go",
		"uint64(firstHead-s.FirstHead)*s.HeadStride", "uint64(firstHead)*s.HeadStride",
		[]string{"TestLaws"}},
	{"a step of the smaller block", "parseblock/pair.go", "p.step = gcd(p.from.tileRows, " +
		"p.to.tileRows)", "p.step = min(p.from.tileRows, p.to.tileRows)", []string{"TestLaws"}},
	{"a state is not turned", "parseblock/pair.go", "		f.RowStride, f.ColStride = f.ColStride, " +
		"f.RowStride\n", "", []string{"TestLaws"}},
	{"V where K is", "parseblock/pair.go", "layout.RoleV, s.CellBytes-key, 0, s.Offset+key",
		"layout.RoleV, s.CellBytes-key, 0, s.Offset", []string{"TestLaws", "TestPlanLaws"}},
	{"all heads of the source", "parseblock/pair.go", "first := max(f.FirstHead, t.FirstHead)",
		"first := f.FirstHead", []string{"TestLaws"}},
	{"a page that is begun stays", "parseblock/pair.go", "end = (uint64(t.End)-1)/p.rowTokens + 1",
		"end = uint64(t.End) / p.rowTokens", []string{"TestLaws"}},
	{"dense on one side is enough", "parseblock/pair.go", "k < 0 && src == s.len && dst == s.len",
		"k < 0 && src == s.len", []string{"TestLaws"}},
	{"axes joined on one side", "parseblock/pair.go", "src == s.n[k]*s.src[k] && dst == " +
		"s.n[k]*s.dst[k]", "src == s.n[k]*s.src[k]", []string{"TestAxesJoinOnBothSides"}},
	{"kernel pages are not counted", "parseblock/pair.go", "p.tiles = uint64(s.Rows) / p.tileRows",
		"p.tiles = 1", []string{"TestLaws"}},
	{"what the source has alone stays behind", "parseblock/pair.go", "if !has(to, from[i].Role) {",
		"if false {", []string{"TestNothingStaysBehind"}},

	// Runs.
	{"rows that touch on one side are one", "parseblock/runs.go", "if s == endSrc && d == endDst &&",
		"if s == endSrc &&", []string{"TestLaws"}},
	{"rows of unequal size in a run", "parseblock/runs.go",
		"for j++; j < n && sizes[j] == size && src", "for j++; j < n && src", []string{"TestLaws"}},
	{"a run that is even at the source alone", "parseblock/runs.go", " && dst[j]-dst[j-1] == byDst; {",
		"; {", []string{"TestLaws"}},
	{"a run goes on with other rows", "parseblock/runs.go", "case sizes[i] != size || c >= maxCount:",
		"case sizes[i] != size && c > 1 || c >= maxCount:", []string{"TestLaws"}},
	{"a run goes on elsewhere at the receiver", "parseblock/runs.go", "case src[i] != " +
		"r.SrcOff+c**bySrc || dst[i] != r.DstOff+c**byDst:", "case src[i] != r.SrcOff+c**bySrc:",
		[]string{"TestLaws"}},
	{"a begun step taken whole", "parseblock/runs.go", "n := min(p.step-in, end-r)",
		"n := p.step - in", []string{"TestLaws"}},
	{"steps from a kernel page's first", "parseblock/runs.go", "per: per,\n		unit: first % per,",
		"per: per,", []string{"TestLaws"}},
	{"kernel pages of a block in one place", "parseblock/runs.go", "uint64(c.table[0])*block + " +
		"c.tile*c.place.tile", "uint64(c.table[0])*block", []string{"TestLaws"}},
	{"the third axis stands still", "parseblock/runs.go", "w.src[i]+k*s.src[2], w.dst[i]+k*s.dst[2]",
		"w.src[i]+k*s.src[2], w.dst[i]", []string{"TestLaws"}},
	{"two axes after one of another kind", "parseblock/runs.go", "if kind != w.kind || s.dims > 1 {",
		"if kind != w.kind {", []string{"TestLaws"}},

	// What replicas owe.
	{"nobody owes anything", "control/exec/internal/dest/peers.go", "			n += l.Part.Bytes\n", "",
		[]string{"TestReplicasAreChosenByLoad"}},
	{"what is owed is owed for ever", "control/exec/internal/dest/dest.go", "		ds.Engines.charge(p, o, false)\n", "",
		[]string{"TestReplicasAreChosenByLoad"}},
	{"only the last grant is owed", "control/exec/internal/dest/peers.go", "			n += l.Part.Bytes\n",
		"			n = l.Part.Bytes\n", []string{"TestReplicasAreChosenByLoad"}},

	// The price of a place.
	{"a hit saves nothing", "placement/cost.go", "Wait: g.Wait, Prefill: g.prefill(float64(a.Tokens - hit)), " +
		"Decode: g.step()}", "Wait: g.Wait, Prefill: g.prefill(float64(a.Tokens)), Decode: g.step()}",
		[]string{"TestChoices"}},
	{"bytes before others cost nothing", "placement/cost.go", "p.Fixed + (p.Before+bytes)/p.Rate",
		"p.Fixed + bytes/p.Rate", []string{"TestChoices"}},
	{"all or nothing is fetched", "placement/cost.go", "n >= 1 && n < float64(fetchable)",
		"n >= 1 && n > float64(fetchable)", []string{"TestFetchTakesTheBestNumberOfTokens", "TestLawsOfPrice"}},
	{"overlap is all of it", "placement/cost.go", "	c.Hidden = s.Overlap * min(c.Prefill, c.Transfer)\n" +
		"	// The decode", "	c.Hidden = min(c.Prefill, c.Transfer)\n	// The decode", []string{"TestChoices"}},
	{"a full decode engine takes a pair", "placement/cost.go", "to.Wait > done", "false",
		[]string{"TestChoices"}},
	{"others wait for free", "placement/cost.go", "c.TTFT() + c.Next + e.delay(c.Prefill)",
		"c.TTFT() + c.Next", []string{"TestChoices"}},
	{"the next turn is free", "placement/cost.go", "c.Next = s.next(a, p, d)", "c.Next = 0",
		[]string{"TestExpectedAnswer"}},
	{"good engines are left out", "placement/rank.go", "bound*(1-rounding) > q.best.Price",
		"bound > 0.8*q.best.Price", []string{"TestDecideIsTheFirstOfRank"}},
	{"a shorter hit is fetched", "placement/cost.go", "	if held <= own {", "	if false {",
		[]string{"TestFetchTakesTheBestNumberOfTokens"}},
	{"one engine wins all ties", "placement/rank.go", "return (engine - a.First%n + n) % n",
		"return engine", []string{"TestFirst"}},
	{"excluded links count", "placement/links.go", `(x.State == "healthy" || x.State == "readmitted")`,
		"true", []string{"TestLinks"}},
}
