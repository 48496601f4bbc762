#!/usr/bin/env python3
"""Takes a snapshot of every volume, and deletes those that are too old.

Run it once a night, say from cron or a systemd timer. Snapshots that it took carry the label
``nightly``; others, and protected ones, are left alone. Of its own it keeps the newest of each of
the last DAYS days, and the newest of each of the last WEEKS weeks.
"""

import argparse
import sys
from collections.abc import Iterable
from datetime import UTC, datetime

import dbs

LABEL = "nightly"


def to_keep(taken: Iterable[dbs.SnapshotInfo], days: int, weeks: int) -> set[str]:
    """Names of the snapshots to keep.

    Periods without a snapshot do not count: a machine that was off for a month keeps what it had.
    """
    newest_first = sorted(taken, key=lambda info: info.created, reverse=True)
    by_day: dict[object, str] = {}
    by_week: dict[object, str] = {}
    for info in newest_first:
        by_day.setdefault(info.created.date(), info.name)
        by_week.setdefault(info.created.isocalendar()[:2], info.name)
    return {*list(by_day.values())[:days], *list(by_week.values())[:weeks]}


def rotate(volume: dbs.Volume, now: datetime, days: int, weeks: int) -> tuple[str, list[str]]:
    """Takes tonight's snapshot of one volume; its name, and those of the ones deleted for it."""
    name = now.strftime("nightly-%Y%m%dT%H%M%S.%fZ")
    volume.snapshot(name, {LABEL: "1"}, system=True)
    ours = [info for info in volume.snapshot_infos() if LABEL in info.labels]
    keep = to_keep(ours, days, weeks)
    gone = [info.name for info in ours if info.name not in keep and not info.protected]
    for old in gone:
        volume[old].delete()
    return name, gone


def main() -> int:
    """Runs it; 1 if some volume failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="file or block device")
    parser.add_argument("--days", type=int, default=7, help="dailies to keep (7)")
    parser.add_argument("--weeks", type=int, default=4, help="weeklies to keep (4)")
    options = parser.parse_args()
    failed = 0
    with dbs.Store.open(options.store) as store:
        for volume in store.values():
            try:
                name, gone = rotate(volume, datetime.now(UTC), options.days, options.weeks)
            except dbs.Error as error:
                # The others still want their snapshot.
                print(f"{volume.name}: {error}", file=sys.stderr)
                failed = 1
            else:
                print(f"{volume.name}: took {name}, deleted {len(gone)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
