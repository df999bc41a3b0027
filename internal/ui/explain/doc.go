// Package explain describes a model's KV cache and the cost of its transfer: bytes per token, a
// drawing of the page byte by byte, and the plan from every rank of a prefill engine to every rank
// of a decode engine.
//
// It owns the presets (models by name), the parser of a model's config.json (foreign, so bounded),
// and the layouts that an engine would register. Package parseblock plans from these layouts with
// the code for transfers; this package has no planner of its own. No I/O but the given writer, no
// goroutine.
package explain
