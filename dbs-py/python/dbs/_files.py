"""A volume or snapshot as a file."""

import errno
import io
import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

from dbs._dbs import WritableBlocks
from dbs._errors import make

_PIECE = 256 << 20


class _Bytes(Protocol):
    """What a file is made of."""

    @property
    def spec(self) -> str: ...
    @property
    def size(self) -> int: ...
    def pread(self, length: int, offset: int) -> bytes: ...
    def readinto(self, buffer: "Buffer", offset: int) -> int: ...
    def _find(self, offset: int, data: bool) -> int: ...


class VolumeFile(io.RawIOBase):
    """An unbuffered binary file over a volume or snapshot; made by ``open``.

    It is as long as the volume and stays so, as a block device: a write that does not fit is cut at
    the end, and one at the end raises `dbs.NoSpace`. Closing it flushes, and leaves the volume as it
    is. Each file has a position of its own; one file belongs to one thread at a time.
    """

    def __init__(self, blocks: _Bytes, mode: str = "rb") -> None:
        super().__init__()
        # Closed it will be, even if this ends here.
        self._blocks = blocks
        self._writer: WritableBlocks | None = None
        if mode not in ("rb", "r+b", "rb+"):
            raise make(
                "invalid",
                f"mode {mode!r}: a volume is opened with 'rb' for reading, or 'r+b' for writing too",
                None,
            )
        writable = mode != "rb"
        if writable and not isinstance(blocks, WritableBlocks):
            raise make(
                "read_only", f"`{blocks.spec}` is a snapshot: open it with 'rb', or clone it", None
            )
        self._writer = blocks if writable and isinstance(blocks, WritableBlocks) else None
        self._position = 0
        # Now rather than at the first read: does it exist?
        self._size = blocks.size

    @property
    def name(self) -> str:
        """``"volume"`` or ``"volume@snapshot"``."""
        return self._blocks.spec

    @property
    def mode(self) -> str:
        """``"rb"`` or ``"rb+"``."""
        return "rb" if self._writer is None else "rb+"

    def readable(self) -> bool:
        """Yes."""
        self._check_open()
        return True

    def writable(self) -> bool:
        """Whether it was opened with ``"r+b"``."""
        self._check_open()
        return self._writer is not None

    def seekable(self) -> bool:
        """Yes."""
        self._check_open()
        return True

    def tell(self) -> int:
        """The position, in bytes."""
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves the position; behind the end there is nothing to read.

        With ``os.SEEK_DATA`` to the first byte of data from `offset` on, with ``os.SEEK_HOLE`` to the
        first one that reads as zero and takes no space, or to the end, as `os.lseek` does: an `OSError`
        with ``ENXIO`` tells that there is none.

        >>> f = store["disk"]["first"].open()
        >>> f.seek(0, os.SEEK_DATA), f.seek(8192, os.SEEK_HOLE)
        (8192, 16384)
        """
        self._check_open()
        if whence in (os.SEEK_DATA, os.SEEK_HOLE):
            return self._seek_to(offset, whence == os.SEEK_DATA)
        bases = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: self._size,
        }
        if whence not in bases:
            known = "SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE"
            raise make("invalid", f"whence {whence!r} is none of {known}", None)
        position = bases[whence] + offset
        if position < 0:
            raise make("invalid", f"position {position} is before the beginning", None)
        self._position = position
        return position

    def readinto(self, buffer: "Buffer", /) -> int:
        """Fills a buffer; returns the number of bytes, 0 at the end."""
        self._check_open()
        if self._position >= self._size:
            return 0
        count = self._blocks.readinto(buffer, self._position)
        self._position += count
        return count

    def readall(self) -> bytes:
        """All bytes from the position to the end, in few large reads."""
        self._check_open()
        pieces: list[bytes] = []
        while self._position < self._size:
            piece = self._blocks.pread(min(_PIECE, self._size - self._position), self._position)
            # A volume that became smaller meanwhile.
            if not piece:
                break
            self._position += len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _seek_to(self, offset: int, data: bool) -> int:
        if 0 <= offset < self._size:
            found = min(self._blocks._find(offset, data), self._size)
            if found < self._size or not data:
                self._position = found
                return found
        what = "data" if data else "hole"
        raise OSError(errno.ENXIO, f"no {what} in `{self.name}` from byte {offset} on")

    def write(self, data: "Buffer", /) -> int:
        """Writes what fits; returns the number of bytes."""
        self._check_open()
        if self._writer is None:
            raise io.UnsupportedOperation("the file was opened for reading; open it with 'r+b'")
        view = memoryview(data).cast("B")
        room = self._size - self._position
        if room <= 0 and view.nbytes > 0:
            raise make("no_space", f"`{self.name}` ends at {self._size} bytes; resize it", None)
        count = self._writer.pwrite(view[:room], self._position)
        self._position += count
        return count

    def truncate(self, size: int | None = None, /) -> int:
        """Refused: `Volume.resize` does that."""
        raise io.UnsupportedOperation("a volume keeps its size; use Volume.resize")

    def flush(self) -> None:
        """Makes everything written durable."""
        super().flush()
        if self._writer is not None:
            self._writer.flush()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    def __repr__(self) -> str:
        return f"<dbs.VolumeFile {self.name!r} mode={self.mode!r}>"
