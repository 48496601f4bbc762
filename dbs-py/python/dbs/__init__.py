"""Volumes, snapshots and clones in one file or block device: a *store*.

>>> import dbs
>>> with dbs.Store.init(path, size="2GiB") as st:
...     v = st.create_volume("v", "1GiB")
...     v.pwrite(b"hello", 0)
...     s = v.snapshot("first")
...     v.pwrite(b"HELLO", 0)
...     s.pread(5, 0), v.pread(5, 0), list(v.snapshots())
5
5
(b'hello', b'HELLO', [<dbs.Snapshot 'v@first'>])

A store that ``dbs serve`` owns is used in the same way: its server does the work. All sizes and
offsets are bytes, all times aware. Errors are `dbs.Error`; most are also an `OSError` with an
``errno``. Objects may be used from many threads, and calls run without the interpreter's lock; they
may not be used in a child made by ``fork``. `dbs.aio` has the same for ``asyncio``.
"""

import sysconfig as _sysconfig

if _sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "dbs is not for free-threaded interpreters: it was never tested with one; use the ordinary "
        "build of this Python (docs/python.md)"
    )

from dbs._backups import BackupFile, BackupStore, Progress
from dbs._dbs import format_size, parse_size
from dbs._errors import (
    Busy,
    Closed,
    Corrupt,
    Denied,
    Elsewhere,
    Error,
    Exists,
    Interrupted,
    Invalid,
    IoFailed,
    Locked,
    NoSpace,
    NotFound,
    Poisoned,
    ReadOnly,
    Unsupported,
)
from dbs._files import VolumeFile
from dbs._store import Store
from dbs._types import (
    Backup,
    BackupKey,
    BackupReport,
    BackupVolume,
    BadBlock,
    CheckReport,
    ChecksumInfo,
    Collected,
    CreatedBackup,
    DamagedRange,
    Encryption,
    Extent,
    Finding,
    JudgedBackup,
    ScrubReport,
    SnapshotInfo,
    StoreInfo,
    TrimReport,
    Usage,
    VolumeInfo,
)
from dbs._volumes import Snapshot, Volume

__all__ = [
    "Backup",
    "BackupFile",
    "BackupKey",
    "BackupReport",
    "BackupStore",
    "BackupVolume",
    "BadBlock",
    "Busy",
    "CheckReport",
    "ChecksumInfo",
    "Closed",
    "Collected",
    "Corrupt",
    "CreatedBackup",
    "DamagedRange",
    "Denied",
    "Elsewhere",
    "Encryption",
    "Error",
    "Exists",
    "Extent",
    "Finding",
    "Interrupted",
    "Invalid",
    "IoFailed",
    "JudgedBackup",
    "Locked",
    "NoSpace",
    "NotFound",
    "Poisoned",
    "Progress",
    "ReadOnly",
    "ScrubReport",
    "Snapshot",
    "SnapshotInfo",
    "Store",
    "StoreInfo",
    "TrimReport",
    "Unsupported",
    "Usage",
    "Volume",
    "VolumeFile",
    "VolumeInfo",
    "format_size",
    "parse_size",
]
