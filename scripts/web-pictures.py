#!/usr/bin/python3
"""web-pictures.py [DBS [LONGHORN]]: the pictures of docs/web.md, of a store with 1,000 volumes under load, and of a volume
over two replicas while one is being rebuilt. `-` in place of DBS leaves the store out.

Needs chromium-headless-shell, and libnbd's Python module (python3-libnbd). Takes four minutes.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbd

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
NAMES = ["db", "mail", "web-1", "web-2", "build", "registry", "home", "git", "wiki", "logs", "ci-1", "ci-2"]


class Store:
    """A served store in a directory."""

    def __init__(self, dbs: str, place: Path) -> None:
        self.dbs, self.place = dbs, place
        self.env = {**os.environ, "DBS_STORE": str(place / "store.dbs"), "DBS_RUNTIME_DIR": str(place / "run")}
        self.run("init", self.env["DBS_STORE"], "--size", "1500MiB", "--max-volumes", "1024", "--max-snapshots", "8192")
        command = [dbs, "serve", "--nbd", f"unix:{place}/nbd", "--web", "0", "--web-admin"]
        self.server = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.server.stdout:
            if line.startswith("web "):
                self.url = line.split()[1]
                break

    def run(self, *args: str) -> None:
        subprocess.run([self.dbs, *args], env=self.env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def open(self, volume: str) -> nbd.NBD:
        handle = nbd.NBD()
        handle.connect_uri(f"nbd+unix:///{volume}?socket={self.place}/nbd")
        return handle

    def fill(self, volume: str, start: int, count: int) -> None:
        """Writes so many extents from one on."""
        handle = self.open(volume)
        for at in range(start, start + count):
            handle.pwrite(os.urandom(MIB), at * MIB)
        handle.flush()
        handle.shutdown()


def prepare(store: Store, chance: random.Random) -> None:
    for at, name in enumerate(NAMES):
        store.run("volume", "create", name, f"{64 << chance.randrange(3)}MiB")
        store.fill(name, 0, 30 + chance.randrange(24))
        if at % 3 == 2:
            store.fill(NAMES[at - 1], 34, 6)
    for at in range(1000 - len(NAMES) - 2):
        store.run("volume", "create", f"vm-{at:04}", "20GiB")
    for day in ["monday", "tuesday", "wednesday"]:
        store.run("snapshot", "create", f"db@{day}", "--label", "keep=week")
        store.fill("db", chance.randrange(20), 9)
        if day == "monday":
            store.run("snapshot", "protect", "db@monday")
    store.run("volume", "clone", "db@tuesday", "db-upgrade")
    store.fill("db-upgrade", 3, 5)
    store.run("volume", "clone", "db@monday", "db-report")
    store.run("snapshot", "create", "db@before-migration")
    store.run("volume", "create", "scratch", "1GiB")
    store.fill("scratch", 0, 120)
    store.run("volume", "delete", "scratch", "--yes")
    store.fill("logs", 40, 12)
    store.run("check")
    time.sleep(40)


def load(store: Store, over: threading.Event, chance: random.Random) -> None:
    handles = [store.open(name) for name in ["db", "mail", "build", "web-1", "vm-0042"]]
    begun = time.monotonic()
    while not over.is_set():
        wave = 1 + int(8 * abs(((time.monotonic() - begun) / 23) % 2 - 1))
        for _ in range(wave):
            handle = chance.choice(handles)
            size = chance.choice([4096, 4096, 16384, 65536])
            offset = chance.randrange(0, 24 * MIB, 4096)
            if chance.random() < 0.35:
                handle.pwrite(os.urandom(size), offset)
            else:
                handle.pread(size, offset)
        time.sleep(0.01)


class Engine:
    """A controller over two replicas, one of which takes the place of one that was killed."""

    SIZE = str(512 * MIB)

    def __init__(self, longhorn: str, place: Path) -> None:
        self.longhorn, self.place, self.processes = longhorn, place, []
        self.env = {**os.environ, "DBS_RUNTIME_DIR": str(place / "run")}
        self.first = 21000 + os.getpid() % 2000 * 20
        self.replicas = [self.replica(at) for at in range(3)]
        urls = [self.url(at) for at in range(2)]
        self.engine = self.start(
            "controller", "db", "--frontend", "nbd", "--nbd-listen", f"unix:{place}/nbd", "--size", self.SIZE,
            "--current-size", self.SIZE, "--disableRevCounter", "--listen", f"127.0.0.1:{self.first + 60}", "--socket-dir", str(place),
            "--replica", urls[0], "--replica", urls[1], "--web", "0", "--web-token", f"{place}/token", "--web-admin",
        )  # fmt: skip
        web = next(word for word in self.ready(self.engine).split() if word.startswith("web="))
        self.page = f"{web.removeprefix('web=')}#{(place / 'token').read_text().strip()}"

    def start(self, *args: str) -> subprocess.Popen:
        command = [self.longhorn, *args]
        self.processes.append(subprocess.Popen(command, env=self.env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
        return self.processes[-1]

    @staticmethod
    def ready(process: subprocess.Popen) -> str:
        line = next(line for line in process.stderr if "event=ready" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return line

    def url(self, at: int) -> str:
        return f"tcp://127.0.0.1:{self.first + 15 * at}"

    def replica(self, at: int) -> subprocess.Popen:
        listen = self.url(at).removeprefix("tcp://")
        args = ["--size", self.SIZE, "--disableRevCounter", "--listen", listen, "--sync-agent-port-count", "5"]
        process = self.start("--volume-name", "db", "replica", f"{self.place}/r{at}", *args)
        self.ready(process)
        return process

    def run(self, *args: str) -> None:
        command = [self.longhorn, "--url", f"http://127.0.0.1:{self.first + 60}", "--volume-name", "db", *args]
        subprocess.run(command, env=self.env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def fill(self) -> None:
        handle = nbd.NBD()
        handle.connect_uri(f"nbd+unix://?socket={self.place}/nbd")
        for at in range(400):
            handle.pwrite(os.urandom(MIB), at * MIB)
        handle.flush()
        handle.shutdown()

    def end(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def volume(longhorn: str) -> None:
    """The picture of a rebuild: its source gets so little time that it lasts."""
    with tempfile.TemporaryDirectory() as place:
        engine = Engine(longhorn, Path(place))
        over = threading.Event()
        try:
            engine.fill()
            engine.run("snapshots", "create", "monday")
            engine.replicas[1].kill()
            engine.fill()
            engine.run("rm-replica", engine.url(1))
            add = ["add-replica", engine.url(2), "--size", engine.SIZE, "--current-size", engine.SIZE, "--file-sync-http-client-timeout", "600"]
            adds = threading.Thread(target=engine.run, args=add)
            adds.start()

            def slow() -> None:
                while not over.is_set():
                    engine.replicas[0].send_signal(signal.SIGSTOP)
                    time.sleep(0.15)
                    engine.replicas[0].send_signal(signal.SIGCONT)
                    time.sleep(0.02)

            slows = threading.Thread(target=slow)
            slows.start()
            script = ROOT / "dbs-cli/tests/web/volume.py"
            picture = ROOT / "docs/images/web-replicas-light.png"
            subprocess.run([sys.executable, script, "chromium-headless-shell", engine.page, picture], check=True)
            over.set()
            slows.join()
            adds.join()
        finally:
            over.set()
            engine.end()


def main() -> None:
    volume(str(Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "target/debug/longhorn").resolve()))
    if sys.argv[1:2] == ["-"]:
        return
    dbs = str(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/debug/dbs").resolve())
    chance = random.Random(7)
    with tempfile.TemporaryDirectory() as place:
        store = Store(dbs, Path(place))
        over = threading.Event()
        try:
            prepare(store, chance)
            worker = threading.Thread(target=load, args=(store, over, chance))
            worker.start()
            # A job that runs while the pictures are taken.
            scrub = subprocess.Popen([dbs, "scrub", "--rate", "2MiB"], env=store.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            script = ROOT / "dbs-cli/tests/web/browser.py"
            env = {**os.environ, "VOLUME": "db", "SECONDS_OF_GRAPHS": os.environ.get("SECONDS_OF_GRAPHS", "90")}
            directory = ROOT / "docs/images"
            subprocess.run(
                [sys.executable, script, "pictures", "chromium-headless-shell", store.url, "1000", directory], env=env, check=True
            )
            scrub.terminate()
        finally:
            over.set()
            store.server.terminate()
            store.server.wait()


if __name__ == "__main__":
    main()
