"""The same for ``asyncio``: every call that may wait does so on a thread, and is awaited.

>>> import asyncio
>>> from dbs import aio
>>> async def main():
...     async with await aio.Store.open(store.path) as st:
...         v = await st.volume("disk")
...         await asyncio.gather(*(v.pwrite(b"x" * 4096, i * 4096) for i in range(8)))
...         return await v.pread(3, 4095)
>>> store.close()
>>> asyncio.run(main())
b'xxx'

Cancelling a task does not stop a call that has begun: it goes on, and what it did stays. What is not
here is reached with `run`, as ``await aio.run(volume.sync.flatten)``.
"""

from asyncio import to_thread as run
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import dbs
from dbs import CheckReport, Extent, SnapshotInfo, StoreInfo, Usage, VolumeInfo
from dbs._common import AnyPath

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Snapshot", "Store", "Volume", "run"]

_AT_ONCE = 1024

_T = TypeVar("_T")
_B = TypeVar("_B", dbs.Volume, dbs.Snapshot)


async def _spread(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Items of an iterator that may wait, some at a time."""
    iterator: Iterator[_T] = iter(items)
    while part := await run(lambda: list(islice(iterator, _AT_ONCE))):
        for item in part:
            yield item


class Store:
    """A `dbs.Store`, which is `sync`; made by `open` and `init`."""

    def __init__(self, sync: dbs.Store) -> None:
        """Of an open store."""
        self.sync = sync

    @classmethod
    async def open(cls, path: AnyPath, **options: Any) -> Self:
        """See `dbs.Store.open`."""
        return cls(await run(lambda: dbs.Store.open(path, **options)))

    @classmethod
    async def init(cls, path: AnyPath, size: int | str | None = None, **options: Any) -> Self:
        """See `dbs.Store.init`."""
        return cls(await run(lambda: dbs.Store.init(path, size, **options)))

    async def close(self) -> None:
        """See `dbs.Store.close`."""
        await run(self.sync.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def info(self) -> StoreInfo:
        """See `dbs.Store.info`."""
        return await run(self.sync.info)

    async def check(self) -> CheckReport:
        """See `dbs.Store.check`."""
        return await run(self.sync.check)

    async def flush(self) -> None:
        """See `dbs.Store.flush`."""
        await run(self.sync.flush)

    async def volume(self, name: str) -> "Volume":
        """The volume of this name; raises `dbs.NotFound`."""
        return Volume(await run(self.sync.__getitem__, name))

    async def volumes(self, *, usage: bool = False) -> list[VolumeInfo]:
        """See `dbs.Store.volumes`."""
        return await run(lambda: self.sync.volumes(usage=usage))

    async def create_volume(
        self,
        name: str,
        size: int | str,
        *,
        passphrase: str | None = None,
        key_file: AnyPath | None = None,
    ) -> "Volume":
        """See `dbs.Store.create_volume`."""
        create = self.sync.create_volume
        return Volume(
            await run(lambda: create(name, size, passphrase=passphrase, key_file=key_file))
        )


class _Blocks(Generic[_B]):
    """What volumes and snapshots have in common."""

    def __init__(self, sync: _B) -> None:
        """Of a volume or snapshot."""
        self.sync: _B = sync

    async def size(self) -> int:
        """Size in bytes."""
        return await run(lambda: self.sync.size)

    async def pread(self, length: int, offset: int) -> bytes:
        """See `dbs.Volume.pread`."""
        return await run(self.sync.pread, length, offset)

    async def readinto(self, buffer: "Buffer", offset: int) -> int:
        """See `dbs.Volume.readinto`."""
        return await run(self.sync.readinto, buffer, offset)

    async def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `dbs.Volume.read_many`."""
        return await run(self.sync.read_many, ranges)

    async def du(self) -> Usage:
        """See `dbs.Volume.du`."""
        return await run(self.sync.du)

    def extents(self, offset: int = 0, length: int | None = None) -> AsyncIterator[Extent]:
        """See `dbs.Volume.extents`."""
        return _spread(self.sync.extents(offset, length))

    async def delete(self) -> None:
        """See `dbs.Volume.delete`."""
        await run(self.sync.delete)

    async def close(self) -> None:
        """See `dbs.Volume.close`."""
        await run(self.sync.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class Snapshot(_Blocks[dbs.Snapshot]):
    """A `dbs.Snapshot`, which is `sync`."""

    async def info(self) -> SnapshotInfo:
        """See `dbs.Snapshot.info`."""
        return await run(self.sync.info)

    async def clone(self, name: str) -> "Volume":
        """See `dbs.Snapshot.clone`."""
        return Volume(await run(self.sync.clone, name))


class Volume(_Blocks[dbs.Volume]):
    """A `dbs.Volume`, which is `sync`."""

    async def info(self) -> VolumeInfo:
        """See `dbs.Volume.info`."""
        return await run(self.sync.info)

    async def pwrite(self, data: "Buffer", offset: int) -> int:
        """See `dbs.Volume.pwrite`."""
        return await run(self.sync.pwrite, data, offset)

    async def discard(self, offset: int, length: int) -> None:
        """See `dbs.Volume.discard`."""
        await run(self.sync.discard, offset, length)

    async def write_zeroes(self, offset: int, length: int) -> None:
        """See `dbs.Volume.write_zeroes`."""
        await run(self.sync.write_zeroes, offset, length)

    async def flush(self) -> None:
        """See `dbs.Volume.flush`."""
        await run(self.sync.flush)

    async def snapshot(self, name: str, labels: Mapping[str, str] | None = None) -> Snapshot:
        """See `dbs.Volume.snapshot`."""
        return Snapshot(await run(self.sync.snapshot, name, labels))

    async def snapshots(self) -> list[Snapshot]:
        """See `dbs.Volume.snapshots`."""
        return [Snapshot(snapshot) for snapshot in await run(lambda: list(self.sync.snapshots()))]

    def diff(self, since: str | None = None, to: str | None = None) -> AsyncIterator[Extent]:
        """See `dbs.Volume.diff`."""
        return _spread(self.sync.diff(since, to))

    async def rollback(self, snapshot: str) -> None:
        """See `dbs.Volume.rollback`."""
        await run(self.sync.rollback, snapshot)

    async def resize(self, size: int | str, *, shrink: bool = False) -> None:
        """See `dbs.Volume.resize`."""
        await run(lambda: self.sync.resize(size, shrink=shrink))

    async def unlock(
        self, *, passphrase: str | None = None, key_file: AnyPath | None = None
    ) -> None:
        """See `dbs.Volume.unlock`."""
        await run(lambda: self.sync.unlock(passphrase=passphrase, key_file=key_file))

    async def lock(self) -> None:
        """See `dbs.Volume.lock`."""
        await run(self.sync.lock)
