"""Volumes and snapshots for programs that open files by URL with fsspec (pandas, Dask, xarray and others).

>>> import fsspec
>>> store.close()
>>> with fsspec.open(f"dbs://{store.path}/disk@first") as f:
...     f.seek(8192), f.read(6)
(8192, b'golden')

A URL is ``dbs://STORE/VOLUME`` or ``dbs://STORE/VOLUME@SNAPSHOT``, where STORE is the path of the store's file or
device. Reading opens an idle store for reading alone, which is refused while a program has it open for writing; of a
served store it asks the server. Mode ``"r+b"`` writes in place: a volume keeps its size, so it is never created or
truncated here.
"""

import io
import os
import stat
from typing import Any

try:
    from fsspec.spec import AbstractFileSystem
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "dbs.fs needs the package fsspec: pip install fsspec", name=_error.name
    ) from _error

from dbs._errors import NotFound, make
from dbs._files import VolumeFile
from dbs._store import Store
from dbs._volumes import Snapshot, Volume

__all__ = ["FileSystem"]

# It has no types, and its signatures say less than what it takes.
_Base: Any = AbstractFileSystem


class _StoreFile(VolumeFile):
    """A file that was opened with a store of its own, which it closes."""

    _store: Store | None = None

    def __init__(self, store: Store, blocks: Volume | Snapshot, mode: str) -> None:
        super().__init__(blocks, mode)
        self._store = store

    def close(self) -> None:
        """Flushes, and closes the store."""
        try:
            super().close()
        finally:
            if self._store is not None:
                self._store.close()


class FileSystem(_Base):  # type: ignore[misc]
    """The file system of ``dbs://``: a store is a directory, in which volumes and snapshots are files.

    Options, such as ``checksum_cache``, are those of `dbs.Store.open`.
    """

    protocol = "dbs"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The volumes and snapshots of a store; of one of them, itself."""
        where, name = _parted(self._strip_protocol(path))
        with self._open_store(where) as store:
            if name:
                found = [_facts(where, _found(store, name))]
            else:
                found = []
                for volume in store.values():
                    found.append(_facts(where, volume))
                    found.extend(_facts(where, snapshot) for snapshot in volume.snapshots())
        return found if detail else [item["name"] for item in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Name, size in bytes and type; of a volume or snapshot also ``uuid`` and ``created``."""
        where, name = _parted(self._strip_protocol(path))
        with self._open_store(where) as store:
            if not name:
                return {"name": where, "size": 0, "type": "directory"}
            return _facts(where, _found(store, name))

    def created(self, path: str) -> Any:
        """When a volume was made, or a snapshot taken."""
        return self.info(path).get("created")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> io.BufferedIOBase:
        if mode not in ("rb", "r+b", "rb+"):
            raise make(
                "unsupported",
                f"mode {mode!r}: a volume is opened with 'rb' or 'r+b'; Store.create_volume makes one",
                None,
            )
        where, name = _parted(path)
        store = self._open_store(where, read_only=mode == "rb")
        try:
            file = _StoreFile(store, _found(store, name), mode)
        except BaseException:
            store.close()
            raise
        return io.BufferedReader(file) if mode == "rb" else io.BufferedRandom(file)

    def _open_store(self, path: str, *, read_only: bool = True) -> Store:
        return Store.open(path, read_only=read_only, **self.storage_options)


def _parted(path: str) -> tuple[str, str]:
    """The store of a path, and what is behind it. The store is the first that is no directory."""
    at = 0
    while at != len(path):
        end = path.find("/", at + 1)
        at = len(path) if end < 0 else end
        try:
            is_store = not stat.S_ISDIR(os.stat(path[:at]).st_mode)
        except OSError:
            break
        if is_store:
            return path[:at], path[at + 1 :]
    raise NotFound(2, f"no store at `{path}`")


def _found(store: Store, name: str) -> Volume | Snapshot:
    if not name:
        raise make("invalid", f"`{store.path}` is a store: name a volume in it", None)
    volume, _, snapshot = name.partition("@")
    return store[volume][snapshot] if snapshot else store[volume]


def _facts(where: str, blocks: Volume | Snapshot) -> dict[str, Any]:
    info = blocks.info()
    return {
        "name": f"{where}/{blocks.spec}",
        "size": info.size,
        "type": "file",
        "uuid": blocks.uuid,
        "created": info.created,
    }
