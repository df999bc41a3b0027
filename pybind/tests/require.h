/* A check of a test in C: one that fails names its line, its text and errno, and ends the process. */
#ifndef KVS_REQUIRE_H
#define KVS_REQUIRE_H

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define REQUIRE(x)                                                                           \
	do {                                                                                 \
		if (!(x)) {                                                                  \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #x, strerror(errno)); \
			_exit(1);                                                            \
		}                                                                            \
	} while (0)

#endif
