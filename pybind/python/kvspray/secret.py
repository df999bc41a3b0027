"""A tenant's secret: an engine without it can name none of the tenant's pages. It is in a file or
an environment variable, so that it is in no command line, configuration or log; nothing here shows
it."""

from __future__ import annotations

import os

from kvspray._messages import MAX_SECRET_BYTES

MIN_SECRET_BYTES = 16


def read(file: str = "", env: str = "") -> bytes:
    """The content of a file, or of an environment variable, without the space around it; empty if
    neither is named. A ValueError names the place and what is wrong with it."""
    if file and env:
        raise ValueError(f"is in a file ({file}) and in an environment variable ({env}); name one")
    if file:
        where = file
        try:
            with open(file, "rb") as f:
                mode = os.fstat(f.fileno()).st_mode
                secret = f.read(MAX_SECRET_BYTES + 3).strip()
        except OSError as err:
            raise ValueError(f"cannot be read from {file}: {err.strerror}") from err
        if mode & 0o007:
            raise ValueError(f"can be read by every user of this host in {file}: chmod 0600 {file}")
    elif env:
        where = "$" + env
        if env not in os.environ:
            raise ValueError(f"is to be in the environment variable {env}, which is not set")
        secret = os.environb[env.encode()].strip()
    else:
        return b""
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"has {len(secret)} bytes in {where}, want {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} "
            "random ones: head -c 32 /dev/urandom | base64"
        )
    return secret
