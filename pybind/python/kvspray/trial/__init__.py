# SPDX-License-Identifier: Apache-2.0
"""``kvspray try``: a pair of engines with their sidecars and a router on this host, and a plain
engine to compare with. test/rig starts its processes with the same modules."""
