"""Stores, volumes and snapshots as objects."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self, cast

from dbs import _dbs
from dbs._errors import Busy, Invalid, NotFound, make
from dbs._files import VolumeFile
from dbs._types import (
    CheckReport,
    Extent,
    SnapshotInfo,
    StoreInfo,
    Usage,
    VolumeInfo,
    check_report,
)

__all__ = ["Snapshot", "Store", "Volume"]

_Path = str | os.PathLike[str]

_LET_GO_SECONDS = 0.5


def _size(value: int | str) -> int:
    """Bytes, of a number or of a text such as ``"10GiB"``."""
    if isinstance(value, str):
        return _dbs.parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a size is an int or a str such as '10GiB', not {type(value).__name__}")
    return value


class Store(Mapping[str, "Volume"]):
    """A store: all volumes and snapshots in one file or block device.

    A mapping of names to volumes, in order of names. Made by `Store.init` and `Store.open`; closed
    by `close`, or at the end of a ``with`` block. One process has a store open for writing at a
    time; if that is ``dbs serve``, its server does what is asked for here.
    """

    __slots__ = ("_raw", "_path", "_read_only", "__weakref__")

    def __init__(self, raw: _dbs.RawStore, path: str, read_only: bool) -> None:
        """For `open` and `init`, which are what to call."""
        self._raw = raw
        self._path = path
        self._read_only = read_only

    @classmethod
    def init(
        cls,
        path: _Path,
        size: int | str | None = None,
        *,
        extent_size: int | str = "1MiB",
        max_size: int | str | None = None,
        max_volumes: int | None = None,
        max_snapshots: int | None = None,
        journal_size: int | str | None = None,
        force: bool = False,
    ) -> Self:
        """Formats a new store at `path`, and opens it.

        A file is made if there is none; it is sparse, and takes what is written. `size` is needed
        for a new file; a device has its own. The store can grow to `max_size` (16 times its size by
        default); `extent_size` is its unit of allocation, 64 KiB to 4 MiB. With `force` what is
        there now is destroyed, unless it is in use.

        Raises `Exists` if something else is there, `Busy` if it is in use, `Invalid` for sizes that
        cannot be.

        >>> with dbs.Store.init(path, size="64MiB") as st:
        ...     st.info().size
        67108864
        """
        options = {
            "size": None if size is None else _size(size),
            "extent_size": _size(extent_size),
            "max_size": None if max_size is None else _size(max_size),
            "max_volumes": max_volumes,
            "max_snapshots": max_snapshots,
            "journal_size": None if journal_size is None else _size(journal_size),
            "force": force,
        }
        _dbs.RawStore.init(path, options)
        return cls.open(path)

    @classmethod
    def open(
        cls,
        path: _Path,
        *,
        read_only: bool = False,
        driver: Literal["auto", "uring", "pread"] = "auto",
        runtime_dir: _Path | None = None,
    ) -> Self:
        """Opens the store at `path`, or connects to the server that owns it.

        Several programs may have an idle store open with `read_only`. `runtime_dir` is where
        servers have their control sockets, by default what ``DBS_RUNTIME_DIR`` says, as for the
        command line; `driver` is how an idle store does its I/O.

        Raises `NotFound`, `Busy` (somebody has it who is no server), `Corrupt`, `Denied`.
        """
        configured = runtime_dir if runtime_dir is not None else os.environ.get("DBS_RUNTIME_DIR")
        xdg = os.environ.get("XDG_RUNTIME_DIR")
        raw = _dbs.RawStore(path, read_only, driver, configured or None, xdg or None)
        return cls(raw, os.fspath(path), read_only)

    @property
    def path(self) -> str:
        """Where it is."""
        return self._path

    @property
    def read_only(self) -> bool:
        """Whether it was opened for reading only."""
        return self._read_only

    @property
    def served(self) -> bool:
        """Whether a server owns it."""
        return self._raw.served

    @property
    def server_process(self) -> int | None:
        """The process of that server, if it can be seen from here."""
        return self._raw.server_process

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._raw.closed

    def close(self) -> None:
        """Makes everything durable and closes the store, with all of its volumes.

        Once more does nothing. Without it, what was written survives, but the next one to open the
        store has to recover it.
        """
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def info(self) -> StoreInfo:
        """Facts about the store."""
        return StoreInfo._of(self._call("info"))

    def check(self) -> CheckReport:
        """Checks all metadata.

        >>> store.check().ok
        True
        """
        return check_report(self._call("check"))

    def grow(self, size: int | str) -> StoreInfo:
        """Grows the store in place; a file is extended, a device must have that size already."""
        return StoreInfo._of(self._call("grow", size=_size(size)))

    def vacuum(self) -> int:
        """Compacts and shortens a file; returns its size in bytes. Ctrl-C stops it in good order."""
        return cast(int, self._call("vacuum")["after"])

    def trim(self) -> int:
        """Gives freed space back to the file system or device; returns the bytes in use now.

        Deletions on an idle store have done so already, and a server does it in its own time.
        """
        return cast(int, self._call("volume.trim")["allocated"])

    def flush(self) -> None:
        """Makes everything written so far durable, on all volumes."""
        self._call("flush")

    def create_volume(self, name: str, size: int | str) -> "Volume":
        """Creates an empty volume of `size`, a multiple of 512; it takes space as it is written.

        >>> store.create_volume("data", "10GiB").size
        10737418240
        """
        self._call("volume.create", volume=name, size=_size(size))
        return Volume(self, name)

    def volumes(self, *, usage: bool = False) -> list[VolumeInfo]:
        """Facts about all volumes, in one go; space is computed only with `usage`, which walks
        every layer, and is zero otherwise."""
        return [VolumeInfo._of(_filled(item)) for item in self._call("volume.list", usage=usage)]

    def __getitem__(self, name: str) -> "Volume":
        """The volume of this name; raises `NotFound`, which here is also a `KeyError`."""
        if name not in self:
            raise _NoVolume(2, f"no volume `{name}` in this store")
        return Volume(self, name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self._call("volume.children", volume=name)
        except (NotFound, Invalid):
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter([item["name"] for item in self._call("volume.list", usage=False)])

    def __len__(self) -> int:
        return cast(int, self._call("info")["volumes"])

    # A mapping compares by content; a store is itself.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        state = " closed" if self.closed else " served" if self.served else ""
        return f"<dbs.Store {self._path!r}{state}>"

    def _call(self, method: str, **params: object) -> Any:
        return self._raw.call(method, params)


class _NoVolume(NotFound, KeyError):
    """What a mapping raises."""

    __str__ = OSError.__str__


_NoVolume.__name__ = _NoVolume.__qualname__ = "NotFound"


def _filled(item: dict[str, Any]) -> dict[str, Any]:
    """Without usage where none was computed."""
    none = dict.fromkeys(("referenced", "exclusive", "shared", "allocated", "reclaimable"), 0)
    return {"usage": none, **item}


def _ranges(
    store: Store, method: str, offset: int, length: int | None, params: dict[str, object]
) -> Iterator[Extent]:
    """Ranges of a map or a difference, asked for piece by piece."""
    end = None if length is None else offset + length
    following: int | None = offset
    while following is not None and (end is None or following < end):
        left = None if end is None else end - following
        answer = store._call(method, **params, offset=following, length=left)
        for item in answer["ranges"]:
            yield Extent(item["offset"], item["length"], item["state"])
        after = answer.get("next")
        if after is not None and after <= following:
            raise make("io", "the server's map does not end", None)
        following = after


def _delete(blocks: "Snapshot | Volume", delete: Callable[[], object]) -> None:
    """Deletes what this object may have open itself."""
    blocks.close()
    deadline = time.monotonic() + _LET_GO_SECONDS
    while True:
        try:
            delete()
        except Busy:
            # A server may be about to hear that we no longer use it.
            if not blocks.store.served or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


class Snapshot(_dbs.Blocks):
    """A snapshot: a volume as it was. Its bytes are read as a `Volume`'s.

    Got from `Volume.snapshots`, `Volume.snapshot` or ``volume["name"]``.
    """

    _store: Store
    _volume: str
    _name: str

    def __new__(cls, store: Store, volume: str, name: str) -> Self:
        """For `Volume`, which is what to ask for one."""
        this = super().__new__(cls, store._raw, f"{volume}@{name}")
        this._store, this._volume, this._name = store, volume, name
        return this

    @property
    def store(self) -> Store:
        """The store it is in."""
        return self._store

    @property
    def volume(self) -> "Volume":
        """The volume it is of."""
        return Volume(self._store, self._volume)

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    def info(self) -> SnapshotInfo:
        """Facts about it, its space among them."""
        return SnapshotInfo._of(self._call("snapshot.show"))

    def du(self) -> Usage:
        """Its space."""
        return Usage._of(self._call("volume.du"))

    def extents(self, offset: int = 0, length: int | None = None) -> Iterator[Extent]:
        """What it holds from `offset` on, in order and without gaps; see `Volume.extents`."""
        params: dict[str, object] = {"volume": self._volume, "snapshot": self._name}
        return _ranges(self._store, "volume.map", offset, length, params)

    def diff(
        self, since: "str | Snapshot | None" = None, offset: int = 0, length: int | None = None
    ) -> Iterator[Extent]:
        """Where it may differ from an earlier snapshot of its volume; see `Volume.diff`."""
        return self.volume.diff(since, self, offset, length)

    @property
    def labels(self) -> dict[str, str]:
        """A copy of its labels; `update_labels` changes them."""
        return self.info().labels

    def update_labels(
        self, labels: Mapping[str, str] | None = None, *, remove: "list[str] | None" = None
    ) -> dict[str, str]:
        """Adds or replaces labels, and removes some; returns all.

        >>> store["disk"]["first"].update_labels({"keep": "forever"})
        {'keep': 'forever'}
        """
        changes = {"set": dict(labels or {}), "remove": list(remove or [])}
        return SnapshotInfo._of(_filled(self._call("snapshot.label", **changes))).labels

    def protect(self) -> None:
        """From now on it refuses to be deleted."""
        self._call("snapshot.protect")

    def unprotect(self) -> None:
        """It can be deleted again."""
        self._call("snapshot.unprotect")

    def clone(self, name: str) -> "Volume":
        """Creates a writable volume on it, at once, whatever its size.

        >>> store["disk"]["first"].clone("copy").info().origin
        'disk@first'
        """
        self._call("volume.clone", new=name)
        return Volume(self._store, name)

    def rename(self, name: str) -> None:
        """Gives it another name. Other objects with the old name find nothing any more."""
        self._call("snapshot.rename", new=name)
        self._name = name
        self._renamed(f"{self._volume}@{name}")

    def delete(self) -> None:
        """Deletes it; the volume keeps its content.

        Raises `Busy` if it is protected or open elsewhere.
        """
        _delete(self, lambda: self._call("snapshot.delete"))

    def open(self, mode: Literal["rb"] = "rb") -> VolumeFile:
        """A file to read it with: an `io.RawIOBase`."""
        return VolumeFile(self, mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<dbs.Snapshot {self.spec!r}>"

    def _call(self, method: str, **params: object) -> Any:
        return self._store._call(method, volume=self._volume, snapshot=self._name, **params)


class Volume(_dbs.WritableBlocks):
    """A volume: a virtual disk. ``volume["name"]`` is one of its snapshots.

    Got from ``store["name"]``, `Store.create_volume` and `Snapshot.clone`. It is opened by its first
    read or write, and then cannot be deleted by others until it is closed.

    >>> with store["disk"] as v:
    ...     v.pwrite(b"hello", 4094)
    ...     v.flush()
    ...     v.pread(7, 4093)
    5
    b'\\x00hello\\x00'
    """

    _store: Store
    _name: str

    def __new__(cls, store: Store, name: str) -> Self:
        """For `Store`, which is what to ask for one."""
        this = super().__new__(cls, store._raw, name)
        this._store, this._name = store, name
        return this

    @property
    def store(self) -> Store:
        """The store it is in."""
        return self._store

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    def info(self) -> VolumeInfo:
        """Facts about it, its space among them."""
        return VolumeInfo._of(self._call("volume.show"))

    def du(self) -> Usage:
        """Its space."""
        return Usage._of(self._call("volume.du"))

    def extents(self, offset: int = 0, length: int | None = None) -> Iterator[Extent]:
        """What it holds from `offset` on, in order and without gaps; `length` is to its end if
        absent. Both are multiples of 512.

        >>> v = store.create_volume("sparse", "1MiB")
        >>> v.pwrite(bytes(8192), 4096)
        8192
        >>> [(e.offset, e.length, e.state) for e in v.extents()]
        [(0, 4096, 'hole'), (4096, 8192, 'data'), (12288, 1036288, 'hole')]
        """
        return _ranges(self._store, "volume.map", offset, length, {"volume": self._name})

    def diff(
        self,
        since: str | Snapshot | None = None,
        to: str | Snapshot | None = None,
        offset: int = 0,
        length: int | None = None,
    ) -> Iterator[Extent]:
        """Where its present content, or that of the snapshot `to`, may differ from the snapshot
        `since` (from an empty volume if absent).

        >>> v = store["disk"]
        >>> _ = v.pwrite(b"new", 1 << 20)
        >>> [(e.offset, e.length, e.state) for e in v.diff("first")]
        [(1048576, 4096, 'data')]
        """
        params: dict[str, object] = {
            "volume": self._name,
            "from": self._snapshot_name(since),
            "to": self._snapshot_name(to),
        }
        return _ranges(self._store, "volume.diff", offset, length, params)

    def snapshot(
        self, name: str, labels: Mapping[str, str] | None = None, *, system: bool = False
    ) -> Snapshot:
        """Takes a snapshot, at once; `system` says that no person asked for it.

        >>> store["disk"].snapshot("nightly-1", {"by": "cron"}).labels
        {'by': 'cron'}
        """
        labelled = dict(labels or {})
        self._call("snapshot.create", snapshot=name, labels=labelled, system=system)
        return Snapshot(self._store, self._name, name)

    def snapshots(self) -> Iterator[Snapshot]:
        """Its snapshots, oldest first."""
        for item in self._call("snapshot.list"):
            yield Snapshot(self._store, self._name, item["name"])

    def snapshot_infos(self, *, usage: bool = False) -> list[SnapshotInfo]:
        """Facts about all of its snapshots, oldest first, in one go; space is computed only with
        `usage`, and is zero otherwise."""
        items = self._call("snapshot.list", usage=usage)
        return [SnapshotInfo._of(_filled(item)) for item in items]

    def __getitem__(self, name: str) -> Snapshot:
        """The snapshot of this name; raises `NotFound`, which here is also a `KeyError`."""
        if name not in self:
            raise _NoVolume(2, f"no snapshot `{name}` of volume `{self._name}`")
        return Snapshot(self._store, self._name, name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self._call("volume.children", snapshot=name)
        except (NotFound, Invalid):
            return False
        return True

    def clone(self, snapshot: str | Snapshot, name: str) -> "Volume":
        """Creates a writable volume on one of its snapshots; see `Snapshot.clone`."""
        self._call("volume.clone", snapshot=self._snapshot_name(snapshot), new=name)
        return Volume(self._store, name)

    def children(self) -> list[str]:
        """Names of volumes and snapshots cloned from its snapshots."""
        return cast("list[str]", self._call("volume.children"))

    def flatten(self) -> None:
        """Makes a clone independent of its origin, by copying. Ctrl-C stops it in good order; it
        can be run again."""
        self._call("volume.flatten")

    def rollback(self, snapshot: str | Snapshot) -> None:
        """Gives it the content of one of its snapshots; what was written since is lost."""
        self._call("snapshot.rollback", snapshot=self._snapshot_name(snapshot))
        self.close()

    def rename(self, name: str) -> None:
        """Gives it another name. Other objects with the old name find nothing any more."""
        self._call("volume.rename", new=name)
        self._name = name
        self._renamed(name)

    def resize(self, size: int | str, *, shrink: bool = False) -> None:
        """Changes its size. A smaller one destroys what lies beyond, and needs `shrink`."""
        self._call("volume.resize", size=_size(size), shrink=shrink)
        self.close()

    def delete(self) -> None:
        """Deletes it and its snapshots; clones live on.

        Raises `Busy` if it is open elsewhere, or one of its snapshots is protected.
        """
        _delete(self, lambda: self._call("volume.delete"))

    def open(self, mode: Literal["rb", "r+b", "rb+"] = "rb") -> VolumeFile:
        """A file to read it with, or with ``"r+b"`` to write it, too: an `io.RawIOBase`.

        >>> import io
        >>> with io.BufferedRandom(store["disk"].open("r+b")) as f:
        ...     f.seek(1000), f.write(b"text")
        ...     f.seek(1000), f.read(4)
        (1000, 4)
        (1000, b'text')
        """
        return VolumeFile(self, mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<dbs.Volume {self._name!r}>"

    def _call(self, method: str, **params: object) -> Any:
        return self._store._call(method, volume=self._name, **params)

    def _snapshot_name(self, snapshot: str | Snapshot | None) -> str | None:
        if not isinstance(snapshot, Snapshot):
            return snapshot
        if snapshot._volume != self._name or snapshot._store is not self._store:
            raise make(
                "invalid", f"{snapshot.spec} is no snapshot of volume `{self._name}`", None
            )
        return snapshot.name
