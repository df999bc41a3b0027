package shm

import "github.com/kvspray/kvspray/transfer"

// copier copies the jobs that readers pass to it.
func (b *Backend) copier() {
	waiting, owner := 0, (*lane)(nil) // answers of a lane that are not sent yet
	flush := func() {
		if owner != nil {
			owner.out.kick()
		}
		waiting, owner = 0, nil
	}
	for {
		var j *job
		select {
		case j = <-b.jobs:
		default:
			flush()
			select {
			case j = <-b.jobs:
			case <-b.stop:
				b.dropJobs(b.jobs)
				return
			}
		}
		if owner != j.l || waiting >= batchAnswers {
			flush()
		}
		owner = j.l
		waiting++
		j.finish(j.copy())
	}
}

func (b *Backend) dropJobs(queue chan *job) {
	for {
		select {
		case j := <-queue:
			j.finish(transfer.ReasonLaneLost)
		default:
			return
		}
	}
}
