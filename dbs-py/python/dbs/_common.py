"""What stores and volumes both use."""

import os
from typing import Any

from dbs import _dbs
from dbs._errors import NotFound

AnyPath = str | os.PathLike[str]


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
