#!/usr/bin/env python3
"""backup-beside.py OURS UPSTREAM [--size MIB] [--rounds N] [--dir DIR] [--s3 VERSITYGW]: backups by `longhorn` of DBS and of
upstream, side by side: one replica and a controller each, in turns, with the same content. Three steps are measured: a full
backup, an incremental one after 1 % was changed (in runs of 1 MiB), and a restore to a new volume, whose content is
compared. Prints a table of medians, with the least and greatest in brackets.

Time is from the command to the state `complete`; CPU and memory are those of all processes of the volume, without the
commands and the server; memory is their greatest resident size. The target is a directory (vfs), and with --s3 also a
versitygw of that path, which keeps objects as files. Needs root, as controllers listen in /var/run."""
import argparse
import glob
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

from beside import MIB, READ, STARTED, WRITE, Data, Volume, answers, content, end_all, free_port, wait_for

STEPS = ("full backup", "incremental", "restore")
KEYS = {"AWS_ACCESS_KEY_ID": "beside", "AWS_SECRET_ACCESS_KEY": "beside-secret"}


def stored(place):
    """Objects of a target, and their bytes."""
    files = [path for path in glob.glob(f"{place}/**", recursive=True) if os.path.isfile(path)]
    return {"objects": len(files), "MiB of objects": sum(os.path.getsize(path) for path in files) / MIB}


def one(program, place, size, target, kept):
    """A round of one of the two."""
    figures = {}
    source = Volume(program, f"{place}/source", size, True)
    data = Data(source.socket)
    generations = dict.fromkeys(range(size // MIB), 0)
    changed = random.Random(1).sample(range(size // MIB), max(1, size // MIB // 100))
    before, urls = {"objects": 0, "MiB of objects": 0}, []
    for step, snapshot in zip(STEPS, ("s1", "s2")):
        if snapshot == "s2":
            generations.update(dict.fromkeys(changed, 1))
        for index in generations if snapshot == "s1" else changed:
            data.call(WRITE, index * MIB, MIB, content(index, generations[index]))
        source.run("snapshots", "create", snapshot)
        os.sync()
        url, figures[step] = source.measured(lambda: source.backup(snapshot, target))
        urls.append(url)
        after = stored(kept)
        figures[step].update({what: after[what] - before[what] for what in after})
        before = after
    data.socket.close()
    source.end()
    restored = Volume(program, f"{place}/restored", size, False)
    _, figures["restore"] = restored.measured(lambda: restored.restore(urls[1]))
    restored.end()
    check(Volume(program, f"{place}/restored", size, True), generations)
    return figures


def check(volume, generations):
    """What was restored is what was backed up."""
    data = Data(volume.socket)
    for index, generation in generations.items():
        if data.call(READ, index * MIB, MIB) != content(index, generation):
            sys.exit(f"{volume.program}: what was restored differs at {index} MiB")
    data.socket.close()
    volume.end()


def served(program, place):
    """Starts an S3 server; the directory with its objects."""
    port = free_port()
    os.makedirs(f"{place}/s3/bucket")
    os.environ.update(KEYS, AWS_ENDPOINTS=f"http://127.0.0.1:{port}")
    command = [program, "--port", f"127.0.0.1:{port}", "--access", KEYS["AWS_ACCESS_KEY_ID"], "--secret",
               KEYS["AWS_SECRET_ACCESS_KEY"], "posix", f"{place}/s3"]
    with open(f"{place}/s3.log", "wb") as log:
        STARTED.append(subprocess.Popen(command, stdout=log, stderr=log))
    wait_for("the S3 server", lambda: answers(("127.0.0.1", port)))
    return f"{place}/s3/bucket"


def measure(programs, options, target, kept, place):
    """Rounds in turns, each of the two first in every other one."""
    rounds = {name: [] for name in programs}
    for turn in range(options.rounds):
        names = list(programs)
        for name in names if turn % 2 == 0 else reversed(names):
            shutil.rmtree(f"{place}/volumes", ignore_errors=True)
            for left in glob.glob(f"{kept}/*"):
                shutil.rmtree(left)
            figures = one(programs[name], f"{place}/volumes", options.size * MIB, target, kept)
            print(f"round {turn + 1}, {name}: {figures}", file=sys.stderr)
            rounds[name].append(figures)
    return rounds


def shown(values):
    if not values:
        return ""
    digits = 0 if statistics.median(values) >= 100 else 2
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(rounds):
    ours, upstream = rounds
    print("| step | what | DBS | upstream | upstream / DBS |\n|---|---|---|---|---|")
    for step in STEPS:
        for what in rounds[ours][0][step]:
            values = [[figures[step][what] for figures in rounds[name]] for name in (ours, upstream)]
            ratios = [theirs / own for own, theirs in zip(*values) if own]
            print(f"| {step} | {what} | {shown(values[0])} | {shown(values[1])} | {shown(ratios)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours")
    parser.add_argument("upstream")
    parser.add_argument("--size", type=int, default=2048, help="MiB of the volume, all of them written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where volumes and the target lie; a file system with holes")
    parser.add_argument("--s3", help="path of versitygw")
    options = parser.parse_args()
    programs = {"DBS": options.ours, "upstream": options.upstream}
    with tempfile.TemporaryDirectory(prefix="backup-beside-", dir=options.dir) as place:
        os.makedirs(f"{place}/target")
        print("\nTarget: a directory (vfs)\n")
        table(measure(programs, options, f"vfs://{place}/target", f"{place}/target", place))
        if options.s3:
            kept = served(options.s3, place)
            print("\nTarget: versitygw (s3)\n")
            table(measure(programs, options, "s3://bucket@us-east-1/", kept, place))


if __name__ == "__main__":
    try:
        main()
    finally:
        end_all()
