#!/usr/bin/env python3
"""Makes many volumes from one golden image, as for a fleet of virtual machines.

The image is imported once (unless the volume is there), a snapshot is taken of it and protected, and
each clone is made at once and takes space only for what it changes. With ``--stamp OFFSET`` the name
of each clone is written into it there, for whatever wants to know which one it is.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import dbs

SECTOR = 512
PIECE = 4 << 20


def import_image(store: dbs.Store, name: str, image: Path) -> dbs.Volume:
    """A volume with the content of a raw image.

    It gets its name once all of the content is there: what a run leaves that is killed is not taken for the image.
    """
    half = f"{name}.importing"
    if half in store:
        store[half].delete()
    size = -(-image.stat().st_size // SECTOR) * SECTOR
    volume = store.create_volume(half, size)
    with image.open("rb") as source, volume.open("r+b") as target:
        shutil.copyfileobj(source, target, PIECE)
    volume.flush()
    volume.rename(name)
    return volume


def golden(volume: dbs.Volume) -> dbs.Snapshot:
    """The snapshot that clones are made of, which nobody shall delete by mistake."""
    if "golden" in volume:
        return volume["golden"]
    snapshot = volume.snapshot("golden")
    snapshot.protect()
    return snapshot


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="file or block device")
    parser.add_argument("volume", help="volume of the golden image")
    parser.add_argument("--image", type=Path, help="raw image to import, if there is no such volume")
    parser.add_argument("--count", type=int, default=100, help="clones (100)")
    parser.add_argument("--prefix", default="vm-", help="their names: PREFIX001 and so on (vm-)")
    parser.add_argument("--stamp", type=int, metavar="OFFSET", help="write each one's name there")
    options = parser.parse_args()
    try:
        with dbs.Store.open(options.store) as store:
            if options.volume not in store and options.image is not None:
                import_image(store, options.volume, options.image)
            snapshot = golden(store[options.volume])
            begun = time.perf_counter()
            for number in range(1, options.count + 1):
                name = f"{options.prefix}{number:03}"
                with snapshot.clone(name) as clone:
                    if options.stamp is not None:
                        clone.pwrite(name.encode(), options.stamp)
            store.flush()
            each = (time.perf_counter() - begun) / max(options.count, 1)
            used = dbs.format_size(store.info().allocated)
    except dbs.Error as error:
        sys.exit(str(error))
    print(f"{options.count} clones of {snapshot.spec}, {each * 1e3:.1f} ms each; {used} in use")
    return 0


if __name__ == "__main__":
    sys.exit(main())
