"""Memory that the sidecar may reach."""

from __future__ import annotations

import ctypes
import enum
import os

from . import _lib, limits

_ERROR_BYTES = 256


class KvsprayError(RuntimeError):
    """A foreground call failed. Background faults never become exceptions."""


class RegionKind(enum.IntEnum):
    MEMFD = 1
    PROCESS = 2
    DEVICE = 3


class Region:
    """One range of this process's memory, reachable by the sidecar once registered.

    Keep it until the client is closed: its pages belong to open leases. ``buffer`` is a writable
    view of the bytes.
    """

    __slots__ = ("_c", "id", "kind", "fd", "addr", "nbytes")

    def __init__(self, c: _lib.CRegion) -> None:
        self._c = c
        self.id = bytes(c.id)
        self.kind = RegionKind(c.kind)
        self.fd = int(c.fd)
        self.addr = int(c.addr)
        self.nbytes = int(c.bytes)

    @property
    def buffer(self) -> memoryview:
        if self.kind == RegionKind.DEVICE:
            raise KvsprayError(
                "kvspray: a region of GPU memory has no buffer that the CPU can read"
            )
        return memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.addr)).cast("B")

    def close(self) -> None:
        """Closes the descriptor and unmaps what alloc mapped. Views of ``buffer`` must be gone."""
        if self._c.fd >= 0:
            _lib.lib.kvs_region_free(ctypes.byref(self._c))
            self.fd = -1

    def __repr__(self) -> str:
        return (
            f"Region(id={self.id.hex()}, kind={self.kind.name}, fd={self.fd}, nbytes={self.nbytes})"
        )

    @classmethod
    def alloc(cls, nbytes: int) -> Region:
        """A sealed memfd, mapped shared; rounded up to pages."""
        c = _lib.CRegion()
        _check("region alloc", _lib.lib.kvs_region_alloc(nbytes, ctypes.byref(c)), nbytes)
        return cls(c)

    @classmethod
    def reserve(cls, nbytes: int) -> Region:
        """As alloc(), without memory yet. An access to a range before populate() of it, by this
        process or the sidecar, raises SIGBUS."""
        c = _lib.CRegion()
        _check("region reserve", _lib.lib.kvs_region_reserve(nbytes, ctypes.byref(c)), nbytes)
        return cls(c)

    @classmethod
    def of_file(cls, fd: int, addr: int, nbytes: int) -> Region:
        """The first bytes of a sealed memfd that the caller has, and has mapped at ``addr``.
        close() leaves both to the caller."""
        c = _lib.CRegion(kind=RegionKind.MEMFD, fd=fd, addr=addr, bytes=nbytes, part=1)
        c.id[:] = os.urandom(16)
        return cls(c)

    def populate(self, offset: int, nbytes: int) -> None:
        """Memory for a range of a region of reserve(), at a multiple of the page size; in huge
        pages where it is one of 2 MiB. What has memory already keeps its bytes."""
        rc = _lib.lib.kvs_region_populate(ctypes.byref(self._c), offset, nbytes)
        if rc == _lib.E_ARG:
            raise KvsprayError(
                f"kvspray: populate {nbytes} bytes at {offset} of {self!r}: want a multiple of the "
                "page size inside a region of reserve()"
            )
        _check("region populate", rc, nbytes)

    @classmethod
    def gpu(cls, ptr: int, nbytes: int) -> Region:
        """Memory of a GPU: any range of one allocation (``tensor.data_ptr()``). Keep the tensor as
        long as the client."""
        c = _lib.CRegion()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        rc = _lib.lib.kvs_region_gpu(ptr, nbytes, ctypes.byref(c), error, _ERROR_BYTES)
        if rc == _lib.E_GPU:
            raise KvsprayError(
                f"kvspray: region of {nbytes} bytes of GPU memory at {ptr:#x}: "
                f"{error.value.decode()}"
            )
        _check("region gpu", rc, nbytes)
        return cls(c)

    def part(self, offset: int, nbytes: int) -> Region:
        """A part of this region as one of its own, at a multiple of the page size. The parts of a
        region use one descriptor.

        Only regions of alloc() and reserve() have parts. Keep this one as long as its parts. A
        sidecar refuses regions that share bytes.
        """
        c = _lib.CRegion()
        rc = _lib.lib.kvs_region_part(ctypes.byref(self._c), offset, nbytes, ctypes.byref(c))
        if rc != 0:
            raise KvsprayError(
                f"kvspray: part of {nbytes} bytes at {offset} of {self!r}: {_lib.strerror(rc)}; "
                "want a multiple of the page size inside a region of alloc() or reserve()"
            )
        return Region(c)

    @classmethod
    def process(cls, ptr: int, nbytes: int) -> Region:
        """Any range of this process, reached through its own /proc/self/mem descriptor: slower,
        works for all memory."""
        c = _lib.CRegion()
        _check("region process", _lib.lib.kvs_region_process(ptr, nbytes, ctypes.byref(c)), nbytes)
        return cls(c)


def _check(what: str, rc: int, nbytes: int) -> None:
    if rc == 0:
        return
    if rc == _lib.E_SYS:
        raise KvsprayError(
            f"kvspray: {what} of {nbytes} bytes: {limits.explain(ctypes.get_errno())}"
        )
    raise KvsprayError(
        f"kvspray: {what} of {nbytes} bytes: {_lib.strerror(rc)}; the range must be page-aligned, "
        "private, anonymous, readable and writable"
    )
