#!/usr/bin/env python3
"""What a read costs from Python: beside the Rust API, and beside `os.pread` on the store's file.

Prints tables in Markdown; with ``--document FILE`` they replace what is between the lines
``<!-- python:begin -->`` and ``<!-- python:end -->`` there. Run by ``make bench-python``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import dbs

BLOCK = 4096
MIB = 1 << 20
SIZE = 256 * MIB
ROUNDS = 5
LARGE = 256
SMALL = 10_000
AT_ONCE = 256


def fastest(read: Callable[[int], object], length: int, reads: int) -> float:
    """Microseconds of one read, in the fastest of some rounds."""
    offsets = [number * 7919 % (SIZE // length) * length for number in range(reads)]
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for offset in offsets:
            read(offset)
        best = min(best, (time.perf_counter() - begun) * 1e6 / reads)
    return best


def batched(volume: dbs.Volume, buffer: bytearray) -> float:
    """Microseconds of one block, where many are read at once."""
    offsets = [number * 7919 % (SIZE // BLOCK) * BLOCK for number in range(SMALL)]
    batches = [offsets[at : at + AT_ONCE] for at in range(0, SMALL, AT_ONCE)]
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for batch in batches:
            volume.readinto_many(buffer, batch, BLOCK)
        best = min(best, (time.perf_counter() - begun) * 1e6 / SMALL)
    return best


def measure(path: Path, rust: Path) -> str:
    """All of it, as text."""
    with dbs.Store.init(path, SIZE * 2) as store:
        store.create_volume("empty", SIZE)
        volume = store.create_volume("v", SIZE)
        for offset in range(0, SIZE, MIB):
            volume.pwrite(os.urandom(MIB), offset)
    done = subprocess.run(
        [rust, path, "v"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, timeout=300
    )
    api = json.loads(done.stdout)
    buffer = bytearray(MIB)
    block = bytearray(BLOCK)
    with dbs.Store.open(path, read_only=True) as store:
        volume = store["v"]
        driver = store.info().driver
        large_into = fastest(lambda at: volume.readinto(buffer, at), MIB, LARGE)
        large_new = fastest(lambda at: volume.pread(MIB, at), MIB, LARGE)
        small_into = fastest(lambda at: volume.readinto(block, at), BLOCK, SMALL)
        small_new = fastest(lambda at: volume.pread(BLOCK, at), BLOCK, SMALL)
        small_many = batched(volume, buffer)
        empty = store["empty"]
        holes = fastest(lambda at: empty.readinto(block, at), BLOCK, SMALL)
    file = os.open(path, os.O_RDONLY)
    try:
        system = fastest(lambda at: os.pread(file, 0, at), BLOCK, SMALL)
        cached = fastest(lambda at: os.pread(file, BLOCK, at), BLOCK, SMALL)
    finally:
        os.close(file)
    return "\n".join(
        [
            f"Driver {driver}, Python {sys.version.split()[0]}; the fastest of {ROUNDS} rounds, one thread.",
            "",
            "| read | µs each | beside the Rust API |",
            "| --- | --- | --- |",
            f"| 1 MiB, Rust `read_at` | {api['large_us']:.1f} | |",
            f"| 1 MiB, `readinto` | {large_into:.1f} | {large_into / api['large_us']:.2f} |",
            f"| 1 MiB, `pread` | {large_new:.1f} | {large_new / api['large_us']:.2f} |",
            f"| 4 KiB, Rust `read_at` | {api['small_us']:.2f} | |",
            f"| 4 KiB, `readinto` | {small_into:.2f} | {small_into / api['small_us']:.2f} |",
            f"| 4 KiB, `pread` | {small_new:.2f} | {small_new / api['small_us']:.2f} |",
            f"| 4 KiB, `readinto_many`, {AT_ONCE} at once | {small_many:.2f} "
            f"| {small_many / api['small_us']:.2f} |",
            "",
            "| overhead of a call | µs |",
            "| --- | --- |",
            f"| `os.pread` of nothing: interpreter and system call | {system:.2f} |",
            f"| `os.pread` of 4 KiB out of the page cache | {cached:.2f} |",
            f"| `readinto` of 4 KiB of a hole: all but the device | {holes:.2f} |",
            f"| `readinto` of 4 KiB less Rust's `read_at`: Python's part | "
            f"{small_into - api['small_us']:.2f} |",
        ]
    )


def document(path: Path, text: str) -> None:
    """Puts it between the marks of a document."""
    before, rest = path.read_text().split("<!-- python:begin -->\n", 1)
    _, after = rest.split("<!-- python:end -->\n", 1)
    path.write_text(f"{before}<!-- python:begin -->\n{text}\n<!-- python:end -->\n{after}")


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rust", type=Path, required=True, help="the program `reads` of benches/")
    parser.add_argument("--dir", type=Path, default=Path("target"), help="where the store is made")
    parser.add_argument("--document", type=Path, help="document to put the tables into")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        text = measure(Path(directory) / "store.dbs", options.rust.absolute())
    print(text)
    if options.document is not None:
        document(options.document, text)


if __name__ == "__main__":
    main()
