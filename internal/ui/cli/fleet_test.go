package cli

import (
	"slices"
	"testing"

	"github.com/kvspray/kvspray/cluster"
)

type servedOnce struct{ cluster.Fleet }

func (servedOnce) Served() []cluster.Served {
	return []cluster.Served{{Member: cluster.Member{Address: "10.0.0.7:7652",
		Endpoint: "169.254.169.254:80"}, Serving: cluster.Serving{
		APIs: []cluster.API{{URL: "http://169.254.169.254:80", Role: cluster.RoleBoth}}}}}
}

// A member's own host is where it answers gossip, not what it names as the endpoint of its peers:
// otherwise it could direct clients' requests anywhere.
func TestHostsOfAMember(t *testing.T) {
	f := &fleet{Fleet: servedOnce{}}
	if list := f.Found(); len(list) != 1 || !slices.Equal(list[0].Hosts, []string{"10.0.0.7"}) {
		t.Errorf("%+v", list)
	}
}
