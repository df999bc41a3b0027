/* SPDX-License-Identifier: Apache-2.0
 *
 * capture.h: a graph of four layers on the fake driver, whose replays take what work.c arms.
 */
#ifndef KVSPRAY_CAPTURE_H
#define KVSPRAY_CAPTURE_H

#include <dlfcn.h>

#include "graph.h"
#include "require.h"

enum { CAPTURED_LAYERS = 4, CAPTURE_STREAM = 1 };

static void capture(struct graph *g, void *fake)
{
	static uint64_t word, flags[CAPTURED_LAYERS];
	handle origin = (handle)CAPTURE_STREAM;
	const char *call = NULL;
	void (*begin)(int);
	int (*end)(int);
	REQUIRE(*(void **)&begin = dlsym(fake, "fake_capture_begin"));
	REQUIRE(*(void **)&end = dlsym(fake, "fake_capture_end"));
	REQUIRE(graph_open(g, CAPTURED_LAYERS, 3, &call) == 0);
	begin(CAPTURE_STREAM);
	for (uint32_t i = 0; i < CAPTURED_LAYERS; i++)
		REQUIRE(graph_capture(g, i, (devptr)(uintptr_t)&word, (devptr)(uintptr_t)&flags[i], origin, &call) == 0);
	REQUIRE(graph_join(g, origin, &call) == 0 && end(CAPTURE_STREAM) == 0);
}

#endif
