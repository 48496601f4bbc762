"""What stores and volumes both use."""

import os
from types import TracebackType
from typing import Any, Self

from dbs import _dbs
from dbs._errors import NotFound, make

AnyPath = str | os.PathLike[str]


class Closing:
    """Closes at the end of a ``with`` block. The last base, so that `close` is another one's."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def size_of(value: int | str) -> int:
    """Bytes, of a number or of a text such as ``"10GiB"``."""
    if isinstance(value, str):
        return _dbs.parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a size is an int or a str such as '10GiB', not {type(value).__name__}")
    return value


_SECRET_FILE_MAX = 4096


def secret_of(passphrase: str | None, key_file: AnyPath | None) -> dict[str, str]:
    """What unlocks an encrypted volume, as the commands take it."""
    if passphrase is not None and key_file is None:
        return {"passphrase": passphrase}
    if key_file is not None and passphrase is None:
        with open(key_file, "rb") as file:
            content = file.read(_SECRET_FILE_MAX)
        # It says itself whether these are digits.
        digits = content.hex() if len(content) == 32 else content.decode("latin-1").rstrip()
        return {"key_file": digits}
    raise make("invalid", "give a passphrase or a key file, and not both", None)


class MissingItem(NotFound, KeyError):
    """What a mapping raises."""

    __str__ = OSError.__str__


MissingItem.__name__ = MissingItem.__qualname__ = "NotFound"


def filled(item: dict[str, Any]) -> dict[str, Any]:
    """Without usage where none was computed."""
    none = dict.fromkeys(("referenced", "exclusive", "shared", "allocated", "reclaimable"), 0)
    return {"usage": none, **item}
