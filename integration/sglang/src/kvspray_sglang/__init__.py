"""kvspray's side inside SGLang: a storage backend of HiCache on the store of the node's sidecar.

``hicache`` has the backend, which SGLang loads by ``--hicache-storage-backend dynamic``. ``plugin``
puts SGLang's host pools into memory that the sidecar can map. docs/sglang.md shows the set-up.
"""

__version__ = "0.0.0.dev0"  # of a checkout; `make wheels` writes that of the tag


def check_release() -> None:
    """Refuses the package kvspray of another release, which pip installs only with --no-deps."""
    import kvspray

    if kvspray.__version__ != __version__:
        raise RuntimeError(
            f"kvspray: the package kvspray-sglang has release {__version__}, the package kvspray "
            f"{kvspray.__version__}; install one release of both: python -m pip install "
            "'kvspray[sglang]==RELEASE'"
        )
