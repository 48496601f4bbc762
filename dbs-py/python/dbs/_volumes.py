"""Volumes and snapshots as objects."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from dbs import _dbs, _notebook
from dbs._common import AnyPath, Closing, MissingItem, filled, secret_of, size_of
from dbs._errors import Busy, Invalid, NotFound, make
from dbs._files import VolumeFile
from dbs._types import Extent, SnapshotInfo, TrimReport, Usage, VolumeInfo

if TYPE_CHECKING:
    from dbs._store import Store

_LET_GO_SECONDS = 0.5


def _ranges(
    store: "Store",
    method: str,
    same: Sequence[tuple[str, str]],
    offset: int,
    length: int | None,
    params: dict[str, object],
) -> Iterator[Extent]:
    """Ranges of a map or a difference, asked for piece by piece."""
    end = None if length is None else offset + length
    following: int | None = offset
    while following is not None and (end is None or following < end):
        left = None if end is None else end - following
        answer = store._call(method, same, **params, offset=following, length=left)
        for item in answer["ranges"]:
            yield Extent(item["offset"], item["length"], item["state"])
        after = answer.get("next")
        if after is not None and after <= following:
            raise make("io", "the server's map does not end", None)
        following = after


def _closed(blocks: "Snapshot | Volume", change: Callable[[], object]) -> None:
    """Does what nobody may have it open for, not even this object."""
    blocks.close()
    deadline = time.monotonic() + _LET_GO_SECONDS
    while True:
        try:
            change()
        except Busy:
            # A server may be about to hear that we no longer use it.
            if not blocks.store.served or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


class Snapshot(_dbs.Blocks, Closing):
    """A snapshot: a volume as it was. Its bytes are read as a `Volume`'s.

    Got from `Volume.snapshots`, `Volume.snapshot` or ``volume["name"]``. If it is deleted, every
    use raises `NotFound`, whatever has its name then.
    """

    _store: "Store"
    _volume: str
    _volume_uuid: str
    _name: str

    def __new__(cls, volume: "Volume", name: str, uuid: str) -> Self:
        """For `Volume`, which is what to ask for one."""
        this = super().__new__(cls, volume._store._raw, f"{volume._name}@{name}", uuid)
        this._store, this._volume, this._name = volume._store, volume._name, name
        this._volume_uuid = volume.uuid
        return this

    @property
    def store(self) -> "Store":
        """The store it is in."""
        return self._store

    @property
    def volume(self) -> "Volume":
        """The volume it is of."""
        return Volume(self._store, self._volume, self._volume_uuid)

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
        return _ranges(self._store, "volume.map", self._same, offset, length, params)

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
        return SnapshotInfo._of(filled(self._call("snapshot.label", **changes))).labels

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
        return Volume(self._store, name, self._call("volume.clone", new=name)["uuid"])

    def rename(self, name: str) -> None:
        """Gives it another name. Other objects with the old name find nothing any more."""
        self._call("snapshot.rename", new=name)
        self._name = name
        self._renamed(f"{self._volume}@{name}")

    def delete(self) -> None:
        """Deletes it; the volume keeps its content.

        Raises `Busy` if it is protected or open elsewhere.
        """
        _closed(self, lambda: self._call("snapshot.delete"))

    def open(self, mode: Literal["rb"] = "rb") -> VolumeFile:
        """A file to read it with: an `io.RawIOBase`."""
        return VolumeFile(self, mode)

    def __repr__(self) -> str:
        return f"<dbs.Snapshot {self.spec!r}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return _notebook.snapshot(self)

    @property
    def _same(self) -> list[tuple[str, str]]:
        return [(self.spec, self.uuid)]

    def _call(self, method: str, **params: object) -> Any:
        return self._store._call(
            method, self._same, volume=self._volume, snapshot=self._name, **params
        )


class Volume(_dbs.WritableBlocks, Closing):
    """A volume: a virtual disk. ``volume["name"]`` is one of its snapshots.

    Got from ``store["name"]``, `Store.create_volume` and `Snapshot.clone`. It is opened by its first
    read or write, and then cannot be deleted by others until it is closed. If it is deleted, every
    use raises `NotFound`, whatever has its name then.

    >>> with store["disk"] as v:
    ...     v.pwrite(b"hello", 4094)
    ...     v.flush()
    ...     v.pread(7, 4093)
    5
    b'\\x00hello\\x00'
    """

    _store: "Store"
    _name: str

    def __new__(cls, store: "Store", name: str, uuid: str) -> Self:
        """For `Store`, which is what to ask for one."""
        this = super().__new__(cls, store._raw, name, uuid)
        this._store, this._name = store, name
        return this

    @property
    def store(self) -> "Store":
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
        params: dict[str, object] = {"volume": self._name}
        return _ranges(self._store, "volume.map", self._same(), offset, length, params)

    def diff(
        self,
        since: str | Snapshot | None = None,
        to: str | Snapshot | None = None,
        offset: int = 0,
        length: int | None = None,
    ) -> Iterator[Extent]:
        """Where its present content, or that of the snapshot `to`, may differ from the snapshot
        `since` (from an empty volume if absent).

        A `Snapshot` is that one alone; a name is whichever snapshot has it now. What a program has
        copied before it should remember by its `Snapshot.uuid`, and compare.

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
        return _ranges(self._store, "volume.diff", self._same(since, to), offset, length, params)

    def snapshot(
        self, name: str, labels: Mapping[str, str] | None = None, *, system: bool = False
    ) -> Snapshot:
        """Takes a snapshot, at once; `system` says that no person asked for it.

        >>> store["disk"].snapshot("nightly-1", {"by": "cron"}).labels
        {'by': 'cron'}
        """
        labelled = dict(labels or {})
        made = self._call("snapshot.create", snapshot=name, labels=labelled, system=system)
        return Snapshot(self, name, made["uuid"])

    def snapshots(self) -> Iterator[Snapshot]:
        """Its snapshots, oldest first."""
        for item in self._call("snapshot.list"):
            yield Snapshot(self, item["name"], item["uuid"])

    def snapshot_infos(self, *, usage: bool = False) -> list[SnapshotInfo]:
        """Facts about all of its snapshots, oldest first, in one go; space is computed only with
        `usage`, and is zero otherwise."""
        items = self._call("snapshot.list", usage=usage)
        return [SnapshotInfo._of(filled(item)) for item in items]

    def __getitem__(self, name: str) -> Snapshot:
        """The snapshot of this name; raises `NotFound`, which here is also a `KeyError`."""
        uuid = self._uuid(name)
        if uuid is None:
            raise MissingItem(2, f"no snapshot `{name}` of volume `{self._name}`")
        return Snapshot(self, name, uuid)

    def __contains__(self, name: object) -> bool:
        return self._uuid(name) is not None

    def _uuid(self, name: object) -> str | None:
        if not isinstance(name, str):
            return None
        try:
            return cast(str, self._call("snapshot.show", snapshot=name, usage=False)["uuid"])
        except (NotFound, Invalid):
            return None

    def clone(self, snapshot: str | Snapshot, name: str) -> "Volume":
        """Creates a writable volume on one of its snapshots; see `Snapshot.clone`."""
        made = self._call(
            "volume.clone", snapshot, snapshot=self._snapshot_name(snapshot), new=name
        )
        return Volume(self._store, name, made["uuid"])

    def children(self) -> list[str]:
        """Names of volumes and snapshots cloned from its snapshots."""
        return cast("list[str]", self._call("volume.children"))

    def flatten(self) -> None:
        """Makes a clone independent of its origin, by copying. Ctrl-C stops it in good order; it
        can be run again."""
        self._call("volume.flatten")

    def trim(self, *, dry_run: bool = False) -> TrimReport:
        """Gives up its blocks that hold nothing but zeros, while others write; with `dry_run` it only
        looks for them. What its snapshots hold stays. Ctrl-C stops it in good order.

        >>> v = store.create_volume("zeros", "1MiB")
        >>> v.pwrite(bytes(8192), 0)
        8192
        >>> v.trim()
        TrimReport(checked=8192, zeros=8192, freed=1048576, unreadable=0)
        """
        return TrimReport._of(self._call("volume.release", dry_run=dry_run))

    def rollback(self, snapshot: str | Snapshot) -> None:
        """Gives it the content of one of its snapshots; what was written since is lost.

        Raises `Busy` if it is open elsewhere on a served store.
        """
        name = self._snapshot_name(snapshot)
        if isinstance(snapshot, Snapshot):
            meant = snapshot
        else:
            found = self._call("snapshot.show", snapshot=snapshot, usage=False)
            meant = Snapshot(self, snapshot, found["uuid"])
        _closed(self, lambda: self._call("snapshot.rollback", meant, snapshot=name))

    def rename(self, name: str) -> None:
        """Gives it another name. Other objects with the old name find nothing any more."""
        self._call("volume.rename", new=name)
        self._name = name
        self._renamed(name)

    def resize(self, size: int | str, *, shrink: bool = False) -> None:
        """Changes its size. A smaller one destroys what lies beyond, and needs `shrink`.

        Raises `Busy` if a smaller one is asked for and it is open elsewhere on a served store.
        """
        wanted = size_of(size)
        _closed(self, lambda: self._call("volume.resize", size=wanted, shrink=shrink))

    def limit(
        self,
        *,
        iops: int | None = None,
        bandwidth: int | str | None = None,
        burst: int | None = None,
    ) -> None:
        """Limits how fast its clients may use it: requests and bytes in a second, 0 for no limit.

        What the limits allow in `burst` seconds may be used at once. What is not given stays as it is. Files that
        :meth:`open` returns on an idle store are not limited.

        >>> store["disk"].limit(iops=2000, bandwidth="50MiB")
        """
        wanted = None if bandwidth is None else size_of(bandwidth)
        given = {"iops": iops, "bandwidth": wanted, "burst_seconds": burst}
        self._call("volume.set", **{key: value for key, value in given.items() if value is not None})

    def unlock(self, *, passphrase: str | None = None, key_file: AnyPath | None = None) -> None:
        """Unlocks an encrypted volume, until `lock`, or until its store is closed or its server ends.

        Raises `Invalid` if the secret is another one.

        >>> v = store.create_volume("vault", "1MiB", passphrase="correct horse")
        >>> v.lock()
        >>> v.info().encryption
        Encryption(secret='passphrase', locked=True, family='...')
        >>> v.unlock(passphrase="correct horse")
        >>> v.pread(3, 0)
        b'\\x00\\x00\\x00'
        """
        self._call("volume.unlock", secret=secret_of(passphrase, key_file))

    def lock(self) -> None:
        """Forgets the key of an encrypted volume: it is neither read nor written until it is unlocked.

        Raises `Busy` if it or a snapshot of it is open elsewhere. Clones of it have locks of their own.
        """
        _closed(self, lambda: self._call("volume.lock"))

    def rekey(
        self,
        *,
        passphrase: str | None = None,
        key_file: AnyPath | None = None,
        new_passphrase: str | None = None,
        new_key_file: AnyPath | None = None,
    ) -> None:
        """Gives an encrypted volume another secret in place of the present one. No data is written.

        Clones of it keep the secrets that they have, and an older copy of the store is opened with the old one.
        """
        old, new = secret_of(passphrase, key_file), secret_of(new_passphrase, new_key_file)
        self._call("volume.rekey", secret=old, new=new)

    def delete(self) -> None:
        """Deletes it and its snapshots; clones live on.

        Raises `Busy` if it is open elsewhere, or one of its snapshots is protected.
        """
        _closed(self, lambda: self._call("volume.delete"))

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

    def __repr__(self) -> str:
        return f"<dbs.Volume {self._name!r}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return _notebook.volume(self)

    def _same(self, *snapshots: str | Snapshot | None) -> list[tuple[str, str]]:
        """What must not have become something else: it, and snapshots that are not mere names."""
        same = [(self._name, self.uuid)]
        same.extend(pair for s in snapshots if isinstance(s, Snapshot) for pair in s._same)
        return same

    def _call(self, method: str, *snapshots: str | Snapshot | None, **params: object) -> Any:
        return self._store._call(method, self._same(*snapshots), volume=self._name, **params)

    def _snapshot_name(self, snapshot: str | Snapshot | None) -> str | None:
        if not isinstance(snapshot, Snapshot):
            return snapshot
        if snapshot._volume != self._name or snapshot._store is not self._store:
            raise make(
                "invalid", f"{snapshot.spec} is no snapshot of volume `{self._name}`", None
            )
        return snapshot.name
