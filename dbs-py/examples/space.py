#!/usr/bin/env python3
"""Reports what each snapshot takes: a table, and with ``--chart FILE`` a picture (needs matplotlib).

*Referenced* is what can be read of it, *exclusive* what can be read of nothing else, *reclaimable*
what deleting it would free, in whole extents.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import dbs


class Row(NamedTuple):
    """One volume's head, or one of its snapshots."""

    spec: str
    taken: str
    usage: dbs.Usage


def rows(store: dbs.Store) -> Iterator[Row]:
    """Snapshots, oldest first, and behind them the volume."""
    for volume in store.volumes(usage=True):
        for info in store[volume.name].snapshot_infos(usage=True):
            taken = f"{info.created.astimezone():%Y-%m-%d %H:%M}"
            yield Row(f"{volume.name}@{info.name}", taken, info.usage)
        yield Row(volume.name, "", volume.usage)


def table(report: list[Row]) -> str:
    """The report as text."""
    cells: list[tuple[str, ...]] = [("", "TAKEN", "REFERENCED", "EXCLUSIVE", "RECLAIMABLE")]
    for row in report:
        usage = row.usage
        sizes = (usage.referenced, usage.exclusive, usage.reclaimable)
        cells.append((row.spec, row.taken, *map(dbs.format_size, sizes)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def chart(report: list[Row], path: Path) -> None:
    """The report as a picture, in the format that the name of the file says."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.3 * len(report)), layout="constrained")
    names = [row.spec for row in report]
    exclusive = [row.usage.exclusive / 2**20 for row in report]
    shared = [row.usage.shared / 2**20 for row in report]
    axes.barh(names, exclusive, label="exclusive")
    axes.barh(names, shared, left=exclusive, label="shared with others", alpha=0.5)
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="file or block device")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw it: .png, .svg, .pdf")
    options = parser.parse_args()
    try:
        with dbs.Store.open(options.store, read_only=True) as store:
            report = list(rows(store))
    except dbs.Error as error:
        sys.exit(str(error))
    print(table(report))
    if options.chart is not None:
        chart(report, options.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
