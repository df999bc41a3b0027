package parseblock

import "github.com/kvspray/kvspray/layout"

// KimiK3 is the latent of Kimi-K3's MLA layers in vLLM 0.32. It fills the front of pages that are
// as wide as a KDA state, because both kinds of layers draw their pages from one pool. page_bytes
// is the size of the tokens, block_stride the width of a page; the bytes after the tokens are
// unused. token_bytes, if given, must be the size of one token. The KDA layers are KDAState.
//
//	| t0: 512 latent, 64 rope | t1: ... | tN-1 | nothing | next page: ...
const KimiK3 = "kimi_k3"

func kimiK3(p *params) []layout.Plane {
	token := p.divide(p.l.PageBytes, p.n, "tokens_per_block")
	if want := p.get(paramTokenBytes, token); want != token {
		p.refuseParam(paramTokenBytes, want, "page_bytes implies another size of a token")
	}
	if p.g.NumBlocks > 1 && p.l.BlockStride < p.l.PageBytes {
		p.refuse("block_stride", p.l.BlockStride, "a page is at least as wide as its tokens")
	}
	return []layout.Plane{p.replicated(layout.RoleLatent, token, 1)}
}
