"""What stores and volumes both use."""

import os
from types import TracebackType
from typing import Any, Self

from dbs import _dbs
from dbs._errors import NotFound

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


class MissingItem(NotFound, KeyError):
    """What a mapping raises."""

    __str__ = OSError.__str__


MissingItem.__name__ = MissingItem.__qualname__ = "NotFound"


def filled(item: dict[str, Any]) -> dict[str, Any]:
    """Without usage where none was computed."""
    none = dict.fromkeys(("referenced", "exclusive", "shared", "allocated", "reclaimable"), 0)
    return {"usage": none, **item}
