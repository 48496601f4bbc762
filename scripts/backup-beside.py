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
import json
import os
import random
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
MESSAGE = struct.Struct("<HIIQII")
READ, WRITE, RESPONSE = 0, 1, 2
TICK = os.sysconf("SC_CLK_TCK")
STEPS = ("full backup", "incremental", "restore")
# Ended with this program, however it ends.
STARTED = []
# As Longhorn's manager has it by default.
CONCURRENT = ("--concurrent-limit", "2")
KEYS = {"AWS_ACCESS_KEY_ID": "beside", "AWS_SECRET_ACCESS_KEY": "beside-secret"}


def content(index, generation):
    """A MiB of a volume: each 4 KiB half random, half of one byte."""
    halves = random.Random(index * 1000 + generation).randbytes(MIB // 2)
    return b"".join(halves[at:at + 2048] + bytes([index % 251]) * 2048 for at in range(0, MIB // 2, 2048))


class Data:
    """A data connection, of a replica or of the frontend `socket`."""

    def __init__(self, address):
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.settimeout(60)
        self.socket.connect(address)

    def receive(self, count):
        parts = bytearray()
        while len(parts) < count:
            part = self.socket.recv(count - len(parts))
            if not part:
                raise OSError("the connection has ended")
            parts += part
        return bytes(parts)

    def call(self, kind, offset, size, data=b""):
        self.socket.sendall(MESSAGE.pack(0x1B01, 1, kind, offset, size, len(data)) + data)
        _, _, answer, _, _, length = MESSAGE.unpack(self.receive(MESSAGE.size))
        body = self.receive(length)
        if answer != RESPONSE:
            raise OSError(f"answer {answer}: {body[:200]}")
        return body


def free_port(count=1):
    while True:
        first = random.randrange(12000, 31000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


def wait_for(what, ready, limit=600):
    until = time.monotonic() + limit
    while not ready():
        if time.monotonic() > until:
            sys.exit(f"not in time: {what}")
        time.sleep(0.02)


def answers(address):
    try:
        Data(address).socket.close()
        return True
    except OSError:
        return False


class Volume:
    """A replica and a controller."""

    def __init__(self, program, place, size, frontend):
        self.program, self.children = program, []
        self.name = f"beside-{os.getpid()}-{os.path.basename(place)}"
        port, self.control = free_port(15), free_port()
        os.makedirs(place, exist_ok=True)
        self.log = open(f"{place}.log", "ab")
        self.start("--volume-name", self.name, "replica", place, "--size", str(size), "--listen", f"127.0.0.1:{port}",
                   "--sync-agent-port-count", "7")
        for at in (port, port + 1, port + 2):
            wait_for("the replica", lambda: answers(("127.0.0.1", at)))
        self.socket = f"/var/run/longhorn-{self.name}.sock"
        self.start("controller", self.name, "--size", str(size), "--current-size", str(size), "--replica",
                   f"tcp://127.0.0.1:{port}", "--listen", f"127.0.0.1:{self.control}",
                   *(("--frontend", "socket") if frontend else ()))
        wait_for("the controller", lambda: answers(("127.0.0.1", self.control)))
        if frontend:
            wait_for("the frontend", lambda: answers(self.socket))

    def start(self, *arguments):
        started = subprocess.Popen([self.program, *arguments], stdout=self.log, stderr=self.log)
        STARTED.append(started)
        self.children.append(started)

    def run(self, *arguments):
        command = [self.program, "--url", f"127.0.0.1:{self.control}", "--volume-name", self.name, *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"{command}: {done.stderr.decode()}")
        return done.stdout.decode()

    def processes(self):
        """The processes of the volume, and those that they have started."""
        parents = {}
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                fields = open(path).read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(path.split("/")[2])] = int(fields[1])
        found = {child.pid for child in self.children}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found

    def cpu(self):
        total = 0
        for pid in self.processes():
            fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
            total += sum(int(field) for field in fields[11:15])
        return total / TICK

    def forget_peaks(self):
        for pid in self.processes():
            with open(f"/proc/{pid}/clear_refs", "w") as file:
                file.write("5")

    def peak(self):
        total = 0
        for pid in self.processes():
            lines = open(f"/proc/{pid}/status").read().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return total / 1024

    def measured(self, act):
        self.forget_peaks()
        cpu, begun = self.cpu(), time.monotonic()
        result = act()
        return result, {"s": time.monotonic() - begun, "CPU s": self.cpu() - cpu, "MiB of memory": self.peak()}

    def backup(self, snapshot, target):
        told = json.loads(self.run("backup", "create", "--dest", target, *CONCURRENT, snapshot))
        name, status = told["backupID"], {}

        def is_complete():
            status.update(json.loads(self.run("backup", "status", name)))
            if status.get("error"):
                sys.exit(f"the backup failed: {status}")
            return status["state"] == "complete"
        wait_for("the backup", is_complete)
        return status["backupURL"]

    def restore(self, url):
        self.run("backup", "restore", *CONCURRENT, url)

        def is_complete():
            states = json.loads(self.run("backup", "restore-status")).values()
            if any(state.get("error") for state in states):
                sys.exit(f"the restore failed: {list(states)}")
            return all(state["state"] == "complete" for state in states)
        wait_for("the restore", is_complete)

    def end(self):
        for child in reversed(self.children):
            child.send_signal(signal.SIGTERM)
        for child in self.children:
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self.log.close()


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
        for child in STARTED:
            if child.poll() is None:
                child.kill()
                child.wait()
