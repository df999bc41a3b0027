// SPDX-License-Identifier: Apache-2.0

// Package explain says what a model's KV cache looks like and what a transfer of it costs: bytes per token, the page drawn byte by
// byte, and the plan from every rank of a prefill engine to every rank of a decode engine.
//
// It owns the presets (models by name), the reading of a model's config.json (foreign, so bounded), and the layouts that an engine
// would register for them. What is planned is planned by parseblock from these layouts, by the code that plans transfers; nothing
// here computes a copy of its own. No I/O but the writer that it is given, no goroutine.
package explain
