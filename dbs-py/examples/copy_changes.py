#!/usr/bin/env python3
"""Copies a volume to another store: only what has changed since the last time.

The first run copies what the volume holds; later ones compare the new snapshot with that of the run
before, and copy the blocks that differ. Either store may be idle or served. Each run leaves the
snapshot ``copy-N`` on both sides, by which the next one knows what both have.
"""

import argparse
import sys

import dbs

PIECE = 1 << 20


def numbers(volume: dbs.Volume) -> set[int]:
    """N of its snapshots ``copy-N``."""
    names = (info.name.removeprefix("copy-") for info in volume.snapshot_infos())
    return {int(name) for name in names if name.isascii() and name.isdigit()}


def copy(source: dbs.Volume, target: dbs.Store, name: str) -> tuple[str, int]:
    """Makes volume `name` of `target` equal to `source`; the snapshot that both have now, and the
    bytes copied."""
    if name in target:
        volume = target[name]
        common = max(numbers(source) & numbers(volume), default=None)
        if common is None:
            raise SystemExit(f"{name} is in the other store, but has no copy-N that {source.name} has")
        since = f"copy-{common}"
        # Whatever was written to the copy, or left by a run that failed, goes.
        volume.rollback(since)
        volume.resize(source.size, shrink=True)
    else:
        volume = target.create_volume(name, source.size)
        since = None
    latest = max(numbers(source) | numbers(volume), default=0) + 1
    snapshot = source.snapshot(f"copy-{latest}")
    buffer = bytearray(PIECE)
    copied = 0
    for extent in snapshot.diff(since):
        if not extent.is_data:
            volume.write_zeroes(extent.offset, extent.length)
            continue
        for offset in range(extent.offset, extent.end, PIECE):
            piece = memoryview(buffer)[: min(PIECE, extent.end - offset)]
            snapshot.readinto(piece, offset)
            copied += volume.pwrite(piece, offset)
    volume.flush()
    volume.snapshot(snapshot.name)
    return snapshot.name, copied


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="store to copy from")
    parser.add_argument("volume", help="volume to copy")
    parser.add_argument("target", help="store to copy to")
    parser.add_argument("--as", dest="name", help="name of the copy, that of the volume if absent")
    options = parser.parse_args()
    try:
        with dbs.Store.open(options.source) as source, dbs.Store.open(options.target) as target:
            snapshot, copied = copy(source[options.volume], target, options.name or options.volume)
    except dbs.Error as error:
        sys.exit(str(error))
    print(f"{options.volume}@{snapshot}: copied {dbs.format_size(copied)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
