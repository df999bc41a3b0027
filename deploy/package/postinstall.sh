#!/bin/sh
# The service is not started: it needs no configuration on loopback, but engines must be pointed to it.
set -e
if command -v systemd-sysusers >/dev/null; then
	systemd-sysusers kvspray.conf
fi
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
