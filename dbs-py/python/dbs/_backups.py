"""Backups: what is in a backup store, and what makes volumes of it."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from dbs import _dbs
from dbs._common import AnyPath, Closing, size_of
from dbs._errors import make
from dbs._files import VolumeFile
from dbs._types import (
    Backup,
    BackupKey,
    BackupReport,
    BackupVolume,
    Collected,
    CreatedBackup,
    JudgedBackup,
    backup_report,
)
from dbs._volumes import Snapshot, Volume

if TYPE_CHECKING:
    from dbs._store import Store

Progress = Callable[[int, int], object]
"""Called now and then with the bytes (or steps) done and those in all; what it raises ends the work."""

_KEYS = ("DBS_BACKUP_PASSPHRASE", "DBS_BACKUP_PASSPHRASE_FILE", "DBS_BACKUP_KEY_FILE")


def _variables(
    environ: Mapping[str, str] | None, passphrase: str | None, key_file: AnyPath | None
) -> dict[str, str]:
    """The environment variables that a backup store is opened with."""
    variables = dict(os.environ if environ is None else environ)
    if passphrase is not None and key_file is not None:
        raise make("invalid", "give a passphrase or a key file, not both", None)
    if passphrase is not None or key_file is not None:
        for name in _KEYS:
            variables.pop(name, None)
    if passphrase is not None:
        variables["DBS_BACKUP_PASSPHRASE"] = passphrase
    if key_file is not None:
        variables["DBS_BACKUP_KEY_FILE"] = os.fspath(key_file)
    return variables


def _pace(rate: int | str | None, parallel: int) -> dict[str, int | None]:
    if not 1 <= parallel <= 64:
        raise make("invalid", f"{parallel} blocks at once: 1 to 64 can be", None)
    return {"rate": None if rate is None else size_of(rate), "parallel": parallel}


class BackupFile(VolumeFile):
    """A backup as an unbuffered binary file for reading; made by `BackupStore.open`.

    What is read comes from the backup store, is compared with its checksum, and stays in memory for a
    while. Closing it lets go of the backup.
    """

    def __init__(self, backup: _dbs.RawBackup) -> None:
        """For `BackupStore.open`, which is what to call."""
        self._backup = backup
        super().__init__(backup)

    def close(self) -> None:
        """Closes it: from then on its backup may be deleted."""
        super().close()
        self._backup.close()

    def __repr__(self) -> str:
        return f"<dbs.BackupFile {self.name!r}>"


class BackupStore(Closing):
    """A place with backups: ``s3://BUCKET@REGION/PATH``, ``vfs:///PATH`` and others.

    It has Longhorn's layout, or is a repository (``docs/backup.md``). Credentials, endpoints and keys
    come from the environment variables that ``dbs backup`` knows, or from `environ` in their place;
    `passphrase` or `key_file` is the key of an encrypted repository, and goes before those.

    It may be used from many threads, which work one after the other; reading files is not kept
    waiting. Ctrl-C, and whatever `progress` raises, ends an operation in good order: what was cut off
    goes on when it is called again. Files that are `open` together keep `cache` bytes of blocks in
    memory. In Longhorn's layout they also keep backups of their volume from being deleted, which
    writes to the backup store; not with ``lock=False``.

    Raises `Invalid` for a wrong key, `NotFound` for a bucket or directory that is not there, `IoFailed`
    if it cannot be reached.

    >>> backups = dbs.BackupStore(f"vfs://{folder}")
    >>> created = backups.create(store["disk"]["first"])
    >>> [(b.snapshot, b.state) for b in backups.backups("disk")]
    [('first', 'complete')]
    >>> backups.restore("disk", created.backup, store, "again").pread(6, 8192)
    b'golden'
    """

    __slots__ = ("_raw", "__weakref__")

    def __init__(
        self,
        url: str,
        *,
        passphrase: str | None = None,
        key_file: AnyPath | None = None,
        environ: Mapping[str, str] | None = None,
        cache: int | str = "256MiB",
        lock: bool = True,
    ) -> None:
        variables = _variables(environ, passphrase, key_file)
        self._raw = _dbs.RawBackupStore(url, variables, size_of(cache), lock)

    @classmethod
    def init(
        cls,
        url: str,
        *,
        encrypt: bool = False,
        passphrase: str | None = None,
        key_file: AnyPath | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> "BackupStore":
        """Makes a repository of a place without backups, and opens it.

        Raises `Exists` if there are backups; `Invalid` if it is to be encrypted and there is no key, or
        the other way round.

        >>> dbs.BackupStore.init(f"vfs://{empty}", encrypt=True, passphrase="secret").is_repository
        True
        """
        variables = _variables(environ, passphrase, key_file)
        _dbs.RawBackupStore.init(url, variables, encrypt)
        return cls(url, environ=variables)

    @property
    def url(self) -> str:
        """What names it."""
        return self._raw.url

    @property
    def is_repository(self) -> bool:
        """Whether it is a repository, and not in Longhorn's layout."""
        return self._raw.is_repository

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._raw.closed

    def close(self) -> None:
        """Lets go of it; once more does nothing. Files that are open stay open."""
        self._raw.close()

    def volumes(self) -> list[BackupVolume]:
        """The volumes that have backups there, in order of names."""
        return [BackupVolume._of(item) for item in self._look("volumes")]

    def volume(self, volume: str) -> BackupVolume:
        """A volume; raises `NotFound`."""
        return BackupVolume._of(self._look("volume", volume=volume))

    def backups(self, volume: str) -> list[Backup]:
        """The backups of a volume, oldest first, complete or not; raises `NotFound`."""
        return [Backup._of(item) for item in self._look("backups", volume=volume)]

    def backup(self, volume: str, backup: str) -> Backup:
        """A backup; raises `NotFound`."""
        return Backup._of(self._look("backup", volume=volume, backup=backup))

    def create(
        self,
        source: Volume | Snapshot,
        *,
        name: str | None = None,
        to: str | None = None,
        full: bool = False,
        compression: Literal["lz4", "gzip", "none"] = "lz4",
        block_size: int | str | None = None,
        labels: Mapping[str, str] | None = None,
        rate: int | str | None = None,
        parallel: int = 4,
        progress: Progress | None = None,
    ) -> CreatedBackup:
        """Backs up a snapshot; or a volume, of which it takes a snapshot.

        The first backup of a volume reads all its data, later ones what changed since the last one, if
        the snapshot of that is still there. Of a volume, the snapshot that was taken for the backup
        before is deleted at the end. `name` is that of the backup, `to` that of the volume in the backup
        store. With `full`, everything is read and written again. `rate` is a limit in bytes a second,
        and `parallel` how many blocks are in flight; each takes memory for about twelve.

        Raises `Exists` if the volume has a backup of this name; in Longhorn's layout `Busy` while
        somebody deletes backups of it.
        """
        how = {
            "name": name,
            "to": to,
            "full": full,
            "compression": compression,
            "block_size": None if block_size is None else size_of(block_size),
            "labels": dict(labels or {}),
            "pace": _pace(rate, parallel),
        }
        raw = source.store._raw
        created = self._raw.create(raw, source.spec, source.uuid, how, progress)
        return CreatedBackup._of(created)

    def restore(
        self,
        volume: str,
        backup: str,
        store: "Store",
        name: str | None = None,
        *,
        resume: bool = False,
        rate: int | str | None = None,
        parallel: int = 4,
        progress: Progress | None = None,
    ) -> Volume:
        """Makes a volume `name` of a backup, by default of the name that it had.

        Until everything is there, the volume is incomplete, and nobody can open it. What was cut off goes
        on with `resume`: blocks that are right already are not fetched again. Each block is compared with
        its checksum.

        Raises `Exists` if there is such a volume, `Corrupt` if a block is damaged or missing.
        """
        made = volume if name is None else name
        how = {
            "volume": volume,
            "backup": backup,
            "name": made,
            "resume": resume,
            "pace": _pace(rate, parallel),
        }
        self._raw.restore(store._raw, how, progress)
        return store[made]

    def verify(
        self,
        volume: str,
        backup: str,
        *,
        data: bool = False,
        rate: int | str | None = None,
        parallel: int = 4,
        progress: Progress | None = None,
    ) -> BackupReport:
        """Looks whether all blocks of a backup are there; with `data` reads and compares them.

        What is wrong is in the report. Raises `Corrupt` if the backup's facts cannot be read, `Busy` if
        it is not complete.
        """
        params = {"volume": volume, "backup": backup, "data": data, "pace": _pace(rate, parallel)}
        return backup_report(self._operate("verify", progress, params))

    def mend(self) -> int:
        """In a repository: has the next backups write anew what `verify` with `data` has found damaged by
        this object, as far as the volumes still have it. Returns the number of damaged packs."""
        return cast(int, self._look("mend"))

    def delete(self, volume: str, backup: str, *, progress: Progress | None = None) -> None:
        """Deletes a backup, and the blocks that no other one needs; in a repository, `collect` frees
        the space. Raises `NotFound`."""
        self._operate("delete", progress, {"volume": volume, "backup": backup})

    def delete_volume(self, volume: str, *, progress: Progress | None = None) -> None:
        """Deletes all backups of a volume; raises `NotFound`."""
        self._operate("delete_volume", progress, {"volume": volume})

    def prune(
        self,
        volume: str,
        *,
        keep_last: int = 0,
        keep_hourly: int = 0,
        keep_daily: int = 0,
        keep_weekly: int = 0,
        keep_monthly: int = 0,
        keep_yearly: int = 0,
        in_progress: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> list[JudgedBackup]:
        """Deletes the backups of a volume that no rule keeps; returns all, with what keeps each.

        Each rule keeps the newest backup of each of the last hours, days and so on that have one.
        Backups in progress are kept unless `in_progress`. With `dry_run` nothing is deleted. In a
        repository, `collect` then frees the space.

        Raises `Invalid` without a rule.
        """
        rules = {
            "last": keep_last,
            "hourly": keep_hourly,
            "daily": keep_daily,
            "weekly": keep_weekly,
            "monthly": keep_monthly,
            "yearly": keep_yearly,
            "in_progress": in_progress,
        }
        params = {"volume": volume, "rules": rules}
        judged = self._look("judge", **params) if dry_run else self._operate("prune", progress, params)
        return [JudgedBackup._of(item) for item in judged]

    def collect(self, *, progress: Progress | None = None) -> Collected | None:
        """Frees what no backup in a repository needs: it takes two calls, a day apart. None in
        Longhorn's layout, where deletions free it."""
        collected = self._operate("collect", progress, {})
        return None if collected is None else Collected._of(collected)

    def open(self, volume: str, backup: str) -> BackupFile:
        """A backup as a file for reading: what is read is fetched when it is read.

        A read waits while requests to the backup store are tried again, and then raises `IoFailed`. It
        raises `Corrupt` for a block that is damaged, and `NotFound` if the backup was deleted.

        >>> backups = dbs.BackupStore(f"vfs://{folder}")
        >>> created = backups.create(store["disk"]["first"])
        >>> with backups.open("disk", created.backup) as file:
        ...     file.seek(8192), file.read(6)
        (8192, b'golden')
        """
        return BackupFile(self._raw.open(volume, backup))

    def keys(self) -> list[BackupKey]:
        """The keys that open an encrypted repository."""
        return [BackupKey._of(item) for item in self._look("keys")]

    def add_key(self, *, passphrase: str | None = None, key_file: AnyPath | None = None) -> str:
        """Adds a key, which opens the repository as the present ones do; returns its id."""
        file = None if key_file is None else os.fspath(key_file)
        return cast(str, self._look("add_key", passphrase=passphrase, key_file=file))

    def remove_key(self, key: str) -> None:
        """Removes a key, which is not the one that this object was opened with. Whoever has had it may have
        kept what it opens."""
        self._look("remove_key", key=key)

    def __repr__(self) -> str:
        return "<dbs.BackupStore closed>" if self.closed else f"<dbs.BackupStore {self.url!r}>"

    def _look(self, method: str, **params: object) -> Any:
        return self._raw.look(method, params)

    def _operate(self, method: str, progress: Progress | None, params: dict[str, Any]) -> Any:
        return self._raw.operate(method, params, progress)
