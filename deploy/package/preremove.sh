#!/bin/sh
# $1 is "upgrade" (deb) or 1 (rpm) if another version replaces this one: the service then goes on.
set -e
if [ -d /run/systemd/system ] && { [ "$1" = remove ] || [ "$1" = 0 ]; }; then
	systemctl disable --now kvspray.service
fi
