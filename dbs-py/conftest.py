"""Stores for the tests and the examples in the documentation: idle, and served by `dbs serve`."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dbs
import fsspec
import pytest

# What the installed package says of itself.
fsspec.register_implementation("dbs", "dbs.fs.FileSystem")

ROOT = Path(__file__).resolve().parent.parent
BINARY = Path(os.environ.get("DBS_BINARY", ROOT / "target/debug/dbs"))
READY_SECONDS = 120
END_SECONDS = 120


class Server:
    """A running `dbs serve`, which writes to a file and is ended with the test."""

    def __init__(self, store: Path, *arguments: str) -> None:
        self.log = store.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [BINARY, "--store", store, "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + READY_SECONDS
        while "event=ready" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"dbs serve did not get ready:\n{self.log.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """As a crash."""
        self.process.kill()
        self.process.wait(END_SECONDS)

    def lose(self, uuid: str) -> None:
        """As a power loss: what was not flushed to the store of this identity is lost."""
        self.kill()
        tails = list(Path("/dev/shm").glob(f"dbs-{os.getuid()}/*{uuid}*"))
        assert tails
        for tail in tails:
            tail.unlink()

    def stop(self) -> None:
        """In good order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
                raise


Serve = Callable[..., Server]


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place for control sockets, whose names must be short."""
    with tempfile.TemporaryDirectory(prefix="dbs-") as directory:
        monkeypatch.setenv("DBS_RUNTIME_DIR", directory)
        yield directory


@pytest.fixture
def serve(runtime_dir: str) -> Iterator[Serve]:
    """Serves stores until the test has ended."""
    if not BINARY.exists():
        pytest.skip(f"needs {BINARY}: cargo build -p dbs-cli")
    servers: list[Server] = []

    def start(store: Path, *arguments: str) -> Server:
        servers.append(Server(store, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store may be made."""
    return tmp_path / "store.dbs"


@pytest.fixture(params=["idle", "served"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[dbs.Store]:
    """An open store of 1 GiB, in either way."""
    opened = dbs.Store.init(path, "1GiB")
    if request.param == "served":
        opened.close()
        request.getfixturevalue("serve")(path)
        opened = dbs.Store.open(path)
        assert opened.served
    with opened:
        yield opened


@pytest.fixture(autouse=True)
def documented(
    request: pytest.FixtureRequest, tmp_path: Path, doctest_namespace: dict[str, object]
) -> Iterator[None]:
    """What examples in the documentation begin with."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with dbs.Store.init(tmp_path / "documented.dbs", "1GiB") as opened:
        disk = opened.create_volume("disk", "64MiB")
        disk.pwrite(b"golden" * 1000, 8192)
        disk.snapshot("first")
        disk.close()
        folders = {name: tmp_path / name for name in ("folder", "empty")}
        for folder in folders.values():
            folder.mkdir()
        dbs.BackupStore.init(f"vfs://{folders['folder']}").close()
        doctest_namespace.update(store=opened, path=tmp_path / "new.dbs", dbs=dbs, **folders)
        yield
