"""Stores as objects."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

from dbs import _dbs, _notebook
from dbs._backups import BackupStore
from dbs._common import AnyPath, Closing, MissingItem, filled, secret_of, size_of
from dbs._errors import Invalid, NotFound
from dbs._types import (
    CheckReport,
    CreatedBackup,
    ScrubReport,
    StoreInfo,
    VolumeInfo,
    check_report,
    scrub_report,
)
from dbs._volumes import Volume


class Store(Mapping[str, Volume], Closing):
    """A store: all volumes and snapshots in one file or block device.

    A mapping of names to volumes, in order of names. Made by `Store.init` and `Store.open`; closed
    by `close`, or at the end of a ``with`` block. One process has a store open for writing at a
    time; if that is ``dbs serve``, its server does what is asked for here.
    """

    __slots__ = ("_raw", "_path", "_read_only", "__weakref__")

    def __init__(self, raw: _dbs.RawStore, path: Path, read_only: bool) -> None:
        """For `open` and `init`, which are what to call."""
        self._raw = raw
        self._path = path
        self._read_only = read_only

    @classmethod
    def init(
        cls,
        path: AnyPath,
        size: int | str | None = None,
        *,
        extent_size: int | str = "1MiB",
        max_size: int | str | None = None,
        max_volumes: int | None = None,
        max_snapshots: int | None = None,
        journal_size: int | str | None = None,
        checksums: bool = True,
        force: bool = False,
    ) -> Self:
        """Formats a new store at `path`, and opens it.

        A file is made if there is none; it is sparse, and takes what is written. `size` is needed
        for a new file; a device has its own. The store can grow to `max_size` (16 times its size by
        default); `extent_size` is its unit of allocation, 64 KiB to 4 MiB. It keeps a checksum of each
        block of data, and reading one that differs raises `IoFailed`; not with ``checksums=False``.
        With `force` what is there now is destroyed, unless it is in use.

        Raises `Exists` if something else is there, `Busy` if it is in use, `Invalid` for sizes that
        cannot be.

        >>> with dbs.Store.init(path, size="64MiB") as st:
        ...     st.info().size
        67108864
        """
        options = {
            "size": None if size is None else size_of(size),
            "extent_size": size_of(extent_size),
            "max_size": None if max_size is None else size_of(max_size),
            "max_volumes": max_volumes,
            "max_snapshots": max_snapshots,
            "journal_size": None if journal_size is None else size_of(journal_size),
            "checksums": checksums,
            "force": force,
        }
        _dbs.RawStore.init(path, options)
        return cls.open(path)

    @classmethod
    def open(
        cls,
        path: AnyPath,
        *,
        read_only: bool = False,
        driver: Literal["auto", "uring", "pread"] = "auto",
        checksum_cache: int | str | None = None,
        runtime_dir: AnyPath | None = None,
    ) -> Self:
        """Opens the store at `path`, or connects to the server that owns it.

        Several programs may have an idle store open with `read_only`. `runtime_dir` is where
        servers have their control sockets, by default what ``DBS_RUNTIME_DIR`` says, as for the
        command line; `driver` is how an idle store does its I/O. `checksum_cache` is the memory for
        checksums, if it has some and is idle: at least ``"256KiB"``, by default ``"64MiB"``, which hold
        those of about 64 GiB of data.

        Raises `NotFound`, `Busy` (somebody has it who is no server), `Corrupt`, `Denied`, `Invalid`.
        """
        configured = runtime_dir if runtime_dir is not None else os.environ.get("DBS_RUNTIME_DIR")
        xdg = os.environ.get("XDG_RUNTIME_DIR")
        cache = None if checksum_cache is None else size_of(checksum_cache)
        raw = _dbs.RawStore(path, read_only, driver, cache, configured or None, xdg or None)
        return cls(raw, Path(path), read_only)

    @property
    def path(self) -> Path:
        """Where it is, as it was given."""
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

        Once more does nothing. Without it, what was written survives, but the next one to open an
        idle store has to recover it, and a server makes it durable in its own time.

        Raises `IoFailed` if what was written is not durable, or may be lost because another server
        took the place of the one that had it. The store is closed all the same.
        """
        self._raw.close()

    def info(self) -> StoreInfo:
        """Facts about the store."""
        return StoreInfo._of(self._call("info"))

    def check(self) -> CheckReport:
        """Checks all metadata.

        >>> store.check().ok
        True
        """
        return check_report(self._call("check"))

    def scrub(self, *, rate: int | str | None = None, restart: bool = False) -> ScrubReport:
        """Reads all data and compares it with its checksums, at most `rate` bytes a second.

        Ctrl-C stops it in good order; it then goes on from there, unless `restart` says otherwise.

        Raises `Unsupported` if the store keeps no checksums (`init` with ``checksums=False``).

        >>> with dbs.Store.init(path, "64MiB") as st:
        ...     st.create_volume("v", "1MiB").pwrite(bytes(5000), 0)
        ...     st.scrub().checked, st.scrub().ok
        5000
        (8192, True)
        """
        limit = None if rate is None else size_of(rate)
        return scrub_report(self._call("scrub", rate=limit, restart=restart))

    def grow(self, size: int | str) -> StoreInfo:
        """Grows the store in place; a file is extended, a device must have that size already."""
        return StoreInfo._of(self._call("grow", size=size_of(size)))

    def vacuum(self) -> int:
        """Compacts and shortens a file; returns its size in bytes. Ctrl-C stops it in good order.

        >>> with dbs.Store.init(path, "1GiB") as st:
        ...     st.vacuum() < 1 << 30
        True
        """
        return cast(int, self._call("vacuum")["after"])

    def trim(self) -> int:
        """Gives freed space back to the file system or device; returns the bytes in use now.

        Deletions on an idle store have done so already, and a server does it in its own time.
        """
        return cast(int, self._call("volume.trim")["allocated"])

    def flush(self) -> None:
        """Makes everything written so far durable, on all volumes."""
        self._call("flush")

    def create_volume(
        self,
        name: str,
        size: int | str,
        *,
        passphrase: str | None = None,
        key_file: AnyPath | None = None,
    ) -> Volume:
        """Creates an empty volume of `size`, a multiple of 512; it takes space as it is written.

        With a `passphrase`, or a `key_file` of 32 random bytes, its data is encrypted. It is unlocked until `Volume.lock`, or
        until the store is closed. Without that secret nobody can read it any more.

        >>> store.create_volume("data", "10GiB").size
        10737418240
        """
        if passphrase is None and key_file is None:
            made = self._call("volume.create", volume=name, size=size_of(size))
        else:
            secret = secret_of(passphrase, key_file)
            made = self._call("volume.create_encrypted", volume=name, size=size_of(size), secret=secret)
        return Volume(self, name, made["uuid"])

    def volumes(self, *, usage: bool = False) -> list[VolumeInfo]:
        """Facts about all volumes, in one go; space is computed only with `usage`, which walks
        every layer, and is zero otherwise."""
        return [VolumeInfo._of(filled(item)) for item in self._call("volume.list", usage=usage)]

    def backup(
        self, source: str, to: "BackupStore | str", *, name: str | None = None, full: bool = False
    ) -> CreatedBackup:
        """Backs up a volume (``"volume"``) or a snapshot (``"volume@snapshot"``) to a backup store or its
        URL: `BackupStore.create` says how, and takes more options.

        >>> store.backup("disk@first", f"vfs://{folder}", name="backup-1").base is None
        True
        """
        volume, _, snapshot = source.partition("@")
        what = self[volume][snapshot] if "@" in source else self[volume]
        if not isinstance(to, str):
            return to.create(what, name=name, full=full)
        with BackupStore(to) as backups:
            return backups.create(what, name=name, full=full)

    def __getitem__(self, name: str) -> Volume:
        """The volume of this name; raises `NotFound`, which here is also a `KeyError`."""
        uuid = self._uuid(name)
        if uuid is None:
            raise MissingItem(2, f"no volume `{name}` in this store")
        return Volume(self, name, uuid)

    def __contains__(self, name: object) -> bool:
        return self._uuid(name) is not None

    def _uuid(self, name: object) -> str | None:
        if not isinstance(name, str):
            return None
        try:
            return cast(str, self._call("volume.show", volume=name, usage=False)["uuid"])
        except (NotFound, Invalid):
            return None

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
        return f"<dbs.Store {str(self._path)!r}{state}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return _notebook.store(self)

    def _call(self, method: str, same: Sequence[tuple[str, str]] = (), **params: object) -> Any:
        """Runs a command, if what these names mean still has these identities."""
        return self._raw.call(method, params, same)
