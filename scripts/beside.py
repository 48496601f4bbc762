"""beside.py: a volume of Longhorn's, served by one of two programs, DBS's or upstream's, for backup-beside.py and
take-over-beside.py."""
import glob
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time

MIB = 1 << 20
MESSAGE = struct.Struct("<HIIQII")
READ, WRITE, RESPONSE = 0, 1, 2
TICK = os.sysconf("SC_CLK_TCK")
# Ended with this program, however it ends.
STARTED = []
# As Longhorn's manager has it by default.
CONCURRENT = ("--concurrent-limit", "2")


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

    def __init__(self, program, place, size, frontend, *replica_options):
        self.program, self.children = program, []
        self.name = f"beside-{os.getpid()}-{os.path.basename(place)}"
        port, self.control = free_port(15), free_port()
        os.makedirs(place, exist_ok=True)
        self.log = open(f"{place}.log", "ab")
        self.start("--volume-name", self.name, "replica", place, "--size", str(size), "--listen", f"127.0.0.1:{port}",
                   "--sync-agent-port-count", "7", *replica_options)
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

    def kill(self):
        """As a machine that loses its power would, but for its memory."""
        for child in self.children:
            child.kill()
            child.wait()
        self.log.close()

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


def end_all():
    for child in STARTED:
        if child.poll() is None:
            child.kill()
            child.wait()
