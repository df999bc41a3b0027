#include <sys/prctl.h>

static void __attribute__((constructor)) kvs_slack(void) {
	// Nanoseconds of slack.go. An error is no harm: pauses are longer then.
	(void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
}
