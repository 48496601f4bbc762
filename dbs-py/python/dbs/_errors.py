"""What can go wrong, as exceptions."""

import errno as _errno
from typing import Final


class Error(Exception):
    """The base of all errors of this package.

    The text names the thing and, where there is one, the way out.
    """

    kind: str = "io"
    """A stable name of what went wrong, as in the JSON of the command line."""

    _code: int | None = None


class NotFound(Error, FileNotFoundError):
    """There is no such store, volume or snapshot (``ENOENT``)."""

    kind, _code = "not_found", _errno.ENOENT


class Exists(Error, FileExistsError):
    """The name is taken, or something else is where a store was to be made (``EEXIST``)."""

    kind, _code = "exists", _errno.EEXIST


class Busy(Error, OSError):
    """Somebody else holds it: another process, an open volume, a protected snapshot (``EBUSY``)."""

    kind, _code = "busy", _errno.EBUSY


class NoSpace(Error, OSError):
    """No space is left in the store, in one of its tables, or behind it (``ENOSPC``)."""

    kind, _code = "no_space", _errno.ENOSPC


class Corrupt(Error, OSError):
    """Metadata of the store is damaged (``EUCLEAN``)."""

    kind, _code = "corrupt", _errno.EUCLEAN


class ReadOnly(Error, OSError):
    """The store or snapshot may not be written (``EROFS``)."""

    kind, _code = "read_only", _errno.EROFS


class Invalid(Error, ValueError):
    """An argument is wrong, or names something that is no store."""

    kind = "invalid"


class Closed(Error, ValueError):
    """The store was closed."""

    kind = "closed"


class IoFailed(Error, OSError):
    """The storage below, or the connection to the server, failed (``EIO``, or what it said)."""

    kind, _code = "io", _errno.EIO


class Denied(Error, PermissionError):
    """The system does not allow it (``EACCES`` or ``EPERM``)."""

    kind, _code = "io", _errno.EACCES


class Poisoned(Error, OSError):
    """An earlier write failed: nothing is written until the store is opened again (``EIO``)."""

    kind, _code = "poisoned", _errno.EIO


class Unsupported(Error, OSError):
    """This version cannot do it (``EOPNOTSUPP``)."""

    kind, _code = "unsupported", _errno.EOPNOTSUPP


class Interrupted(Error, InterruptedError):
    """A signal, or the server's end, stopped it (``EINTR``)."""

    kind, _code = "interrupted", _errno.EINTR


class Elsewhere(Error, OSError):
    """Another machine writes the store, too: do not try again before that has ended (``EBUSY``)."""

    kind, _code = "elsewhere", _errno.EBUSY


class Locked(Error, PermissionError):
    """The volume is encrypted, and nobody has unlocked it (``EACCES``)."""

    kind, _code = "locked", _errno.EACCES


_CLASSES: Final[dict[str, type[Error]]] = {
    cls.kind: cls
    for cls in (
        NotFound, Exists, Busy, NoSpace, Corrupt, ReadOnly, Invalid, Closed, IoFailed, Poisoned,
        Unsupported, Interrupted, Elsewhere, Locked,
    )
}  # fmt: skip


def make(kind: str, message: str, code: int | None) -> Error:
    """The exception for an error of the store; `code` is what the system said, if it did."""
    cls = _CLASSES.get(kind, IoFailed)
    if cls is IoFailed and code in (_errno.EACCES, _errno.EPERM):
        cls = Denied
    if cls._code is None:
        return cls(message)
    return cls(code if code is not None and cls in (IoFailed, Denied) else cls._code, message)
