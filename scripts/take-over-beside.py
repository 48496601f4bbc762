#!/usr/bin/env python3
"""take-over-beside.py OURS UPSTREAM [--size MIB] [--rate RATE] [--dir DIR]: a volume that upstream's engine has written, with
five snapshots, is taken over in place by `longhorn` of DBS, and given back.

Told is how long it takes until the volume answers, what a read of 4 KiB costs while content comes over and afterwards, and how
long both ways take. Both are killed (SIGKILL) in the middle once, and go on. The whole volume is read and compared before, in
the middle, and after each. Needs root, as controllers listen in /var/run."""
import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from beside import MIB, READ, WRITE, Data, Volume, content, end_all, wait_for

SNAPSHOTS = 5


def written(program, place, size):
    """A volume of upstream's; which generation of its content each MiB has."""
    volume = Volume(program, place, size * MIB, True)
    data, chosen = Data(volume.socket), random.Random(1)
    generations = {}
    for snapshot in range(SNAPSHOTS):
        part = range(size * snapshot // SNAPSHOTS, size * (snapshot + 1) // SNAPSHOTS)
        again = chosen.sample(sorted(generations), len(generations) // 50)
        for index in [*part, *again]:
            generations[index] = snapshot
            data.call(WRITE, index * MIB, MIB, content(index, snapshot))
        volume.run("snapshots", "create", f"s{snapshot}")
    for index in chosen.sample(sorted(generations), size // 100):
        generations[index] = SNAPSHOTS
        data.call(WRITE, index * MIB, MIB, content(index, SNAPSHOTS))
    data.socket.close()
    volume.end()
    return generations


def compare(volume, generations, when):
    data = Data(volume.socket)
    for index, generation in generations.items():
        if data.call(READ, index * MIB, MIB) != content(index, generation):
            sys.exit(f"{when}: the volume differs at {index} MiB")
    data.socket.close()
    print(f"{when}: equal", flush=True)


def latency(volume, size, count=4000):
    """Microseconds of a read of 4 KiB, the median and the 99th of 100."""
    data, taken = Data(volume.socket), []
    for _ in range(count):
        at = random.randrange(size * MIB // 4096) * 4096
        begun = time.monotonic()
        data.call(READ, at, 4096)
        taken.append((time.monotonic() - begun) * 1e6)
    data.socket.close()
    parts = statistics.quantiles(taken, n=100)
    return f"{parts[49]:.0f} µs, p99 {parts[98]:.0f} µs"


def taken_over(options, place, generations):
    """Until nothing is left of upstream's files."""
    size = options.size
    begun = time.monotonic()
    volume = Volume(options.ours, place, size * MIB, True, "--take-over", options.rate)
    data = Data(volume.socket)
    data.call(READ, 0, 4096)
    data.socket.close()
    print(f"answers after {time.monotonic() - begun:.2f} s; a read meanwhile: {latency(volume, size)}", flush=True)
    wait_for("a third of the content", lambda: os.stat(f"{place}/volume.dbs").st_blocks * 512 > size * MIB // 3)
    volume.kill()
    print(f"killed after {time.monotonic() - begun:.1f} s", flush=True)
    again = time.monotonic()
    volume = Volume(options.ours, place, size * MIB, True, "--take-over", options.rate)
    print(f"answers again after {time.monotonic() - again:.2f} s", flush=True)
    compare(volume, generations, "while content comes over")
    wait_for("the end of the take-over", lambda: not os.path.exists(f"{place}/volume.taken"), 3600)
    print(f"over after {time.monotonic() - begun:.1f} s, with the comparison; a read now: {latency(volume, size)}", flush=True)
    compare(volume, generations, "taken over")
    volume.end()


def given_back(options, place, generations):
    command = [options.ours, "--volume-name", f"beside-{os.getpid()}-{os.path.basename(place)}", "replica-export", place]
    begun = time.monotonic()
    with open(f"{place}.log", "ab") as log:
        cut = subprocess.Popen(command, stdout=log, stderr=log)
        time.sleep(options.size / 4096)
        cut.kill()
        if cut.wait() == 0:
            print("the export had ended before it was killed")
        elif subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            sys.exit(f"the export failed: {place}.log")
    print(f"given back after {time.monotonic() - begun:.1f} s, killed once", flush=True)
    volume = Volume(options.upstream, place, options.size * MIB, True)
    listed = volume.run("snapshots", "ls")
    missing = [name for name in (f"s{number}" for number in range(SNAPSHOTS)) if name not in listed.split()]
    if missing:
        sys.exit(f"upstream lists no snapshot {missing}: {json.dumps(listed)}")
    compare(volume, generations, "served by upstream again")
    volume.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours")
    parser.add_argument("upstream")
    parser.add_argument("--size", type=int, default=10240, help="MiB of the volume, all of them written")
    parser.add_argument("--rate", default="0", help="of what comes over, as `--take-over` has it; 0 for no limit")
    parser.add_argument("--dir", help="where the volume lies; a file system with holes")
    options = parser.parse_args()
    place = tempfile.mkdtemp(prefix="take-over-beside-", dir=options.dir)
    generations = written(options.upstream, f"{place}/volume", options.size)
    taken_over(options, f"{place}/volume", generations)
    given_back(options, f"{place}/volume", generations)
    shutil.rmtree(place)


if __name__ == "__main__":
    try:
        main()
    finally:
        end_all()
