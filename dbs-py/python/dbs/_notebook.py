"""Stores, volumes and snapshots as notebooks show them: facts, and where space went as a small picture."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from dbs._dbs import format_size
from dbs._errors import Error
from dbs._types import Usage

if TYPE_CHECKING:
    from dbs._store import Store
    from dbs._volumes import Snapshot, Volume

_ROWS = 20
_WIDTH = 480
_COLOURS = ("#2f6fb0", "#79aede", "#d0892f")


def store(shown: "Store") -> str:
    """A store: its space, and its volumes."""

    def body() -> Iterable[str]:
        info = shown.info()
        yield _facts(("path", str(shown.path)), ("served", "yes" if shown.served else "no"))
        data = info.extents_total * info.extent_size
        pending = info.extents_pending * info.extent_size
        yield _plot(data, (("in use", info.allocated), ("freed, not usable yet", pending)), "free")
        columns = ("volume", "size", "snapshots", "origin", "created")
        rows = (
            (v.name, format_size(v.size), str(v.snapshots), v.origin or "", _minute(v.created))
            for v in shown.volumes()
        )
        yield _table(columns, list(rows), _ROWS)
        yield from (f"<p>{escape(warning)}</p>" for warning in info.warnings)

    return _shown(shown, body)


def volume(shown: "Volume") -> str:
    """A volume: its space, and its newest snapshots."""

    def body() -> Iterable[str]:
        info = shown.info()
        yield _facts(("size", format_size(info.size)), ("created", _minute(info.created)))
        yield _usage(info.usage, info.size)
        rows = [
            (s.name, _minute(s.created), "yes" if s.protected else "", _labels(s.labels))
            for s in reversed(shown.snapshot_infos())
        ]
        yield _table(("snapshot", "taken", "protected", "labels"), rows, _ROWS)

    return _shown(shown, body)


def snapshot(shown: "Snapshot") -> str:
    """A snapshot: its space, and what is known of it."""

    def body() -> Iterable[str]:
        info = shown.info()
        yield _facts(
            ("size", format_size(info.size)),
            ("taken", _minute(info.created)),
            ("parent", info.parent or ""),
            ("protected", "yes" if info.protected else ""),
            ("labels", _labels(info.labels)),
        )
        yield _usage(info.usage, info.size)
        yield f"<p>Deleting it would free {format_size(info.usage.reclaimable)}.</p>"

    return _shown(shown, body)


def _shown(what: object, body: Callable[[], Iterable[str]]) -> str:
    """All of it; where the store says no, what it says: a cell of a notebook never fails by showing something."""
    try:
        parts = list(body())
    except Error as error:
        parts = [f"<p>{escape(str(error))}</p>"]
    return f"<div><p><code>{escape(repr(what))}</code></p>{''.join(parts)}</div>"


def _usage(usage: Usage, size: int) -> str:
    parts = (("exclusive", usage.exclusive), ("shared with others", usage.shared))
    return _plot(size, parts, "not written")


def _plot(whole: int, parts: Iterable[tuple[str, int]], rest: str) -> str:
    """A bar as long as `whole`, with `parts` in it, and what each is. A part that is there can be seen."""
    left, x = whole, 0.0
    bars, legend = [], []
    for colour, (name, size) in zip(_COLOURS, parts, strict=False):
        left -= size
        text = f"{name}: {format_size(size)}"
        legend.append(f'<span style="color:{colour}">&#9632;</span> {escape(text)}')
        if size > 0:
            width = min(max(_WIDTH * size / max(whole, 1), 1.0), _WIDTH - x)
            bars.append(
                f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="16" fill="{colour}">'
                f"<title>{escape(text)}</title></rect>"
            )
            x += width
    legend.append(f"&#9633; {escape(f'{rest}: {format_size(max(left, 0))}')}")
    return (
        f'<svg role="img" width="{_WIDTH}" height="16" style="border:1px solid currentColor">'
        f"<title>{escape(f'space, of {format_size(whole)}')}</title>{''.join(bars)}</svg>"
        f"<p>{' &nbsp; '.join(legend)}</p>"
    )


def _facts(*facts: tuple[str, str]) -> str:
    said = (f"{name} <b>{escape(value)}</b>" for name, value in facts if value)
    return f"<p>{', '.join(said)}</p>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[:most]
    )
    more = f"<p>and {len(rows) - most} more</p>" if len(rows) > most else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>{more}"


def _labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def _minute(time: object) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
