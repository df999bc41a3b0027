package connector

import (
	"fmt"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
)

func placeOf(h *msg.Hello) engines.Place {
	p := engines.Place{Engine: h.Engine.Name + "/" + h.Engine.ID, PP: int(h.Ranks.PP.Rank),
		TP: int(h.Ranks.TP.Rank), PPSize: int(h.Ranks.PP.Size),
		TPSize: int(h.Ranks.TP.Size)}
	if h.Ranks.DP.Size > 1 {
		p.Engine += fmt.Sprintf("/dp%d", h.Ranks.DP.Rank)
	}
	return p
}
