"""Each example is run as its users run it."""

import importlib
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dbs
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MIB = 1 << 20


def run(example: str, *arguments: object, code: int = 0) -> str:
    """What an example prints; if it is to fail, with what it says about that."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    # Libraries may have something to say on the way, as that they make a cache.
    return done.stdout if code == 0 else done.stdout + done.stderr


def test_every_example_is_tried_here() -> None:
    text = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in text


def closed_if_idle(store: dbs.Store) -> Path:
    """Its path, for another process: an idle store is one process's at a time."""
    if not store.served:
        store.close()
    return Path(store.path)


def test_nightly_snapshots(store: dbs.Store) -> None:
    store.create_volume("a", "1MiB")
    store.create_volume("b", "1MiB").snapshot("by hand")
    path = closed_if_idle(store)
    for _ in range(3):
        assert "a: took nightly-" in run("nightly.py", path, "--days", 1, "--weeks", 1)
    with dbs.Store.open(path) as again:
        # All of today: the newest stays.
        assert len(list(again["a"].snapshots())) == 1
        assert {snapshot.name for snapshot in again["b"].snapshots()} > {"by hand"}


def test_what_nightly_keeps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    to_keep = importlib.import_module("nightly").to_keep
    with dbs.Store.init(path, "64MiB") as store:
        store.create_volume("v", "1MiB").snapshot("s")
        [info] = store["v"].snapshot_infos()
    monday = datetime(2026, 11, 23, 1, tzinfo=UTC)
    taken = [
        replace(info, name=str(hours), created=monday - timedelta(hours=hours))
        for hours in (0, 2, 24, 48, 24 * 7, 24 * 7 + 1, 24 * 30)
    ]
    assert to_keep(taken, days=2, weeks=0) == {"0", "2"}
    assert to_keep(taken, days=1, weeks=3) == {"0", "2", "720"}
    assert to_keep(taken, days=100, weeks=100) == {"0", "2", "48", "168", "720"}


def test_only_changes_are_copied(store: dbs.Store, tmp_path: Path) -> None:
    other = tmp_path / "other.dbs"
    dbs.Store.init(other, "1GiB").close()
    volume = store.create_volume("v", "64MiB")
    volume.pwrite(b"first" * MIB, 0)
    path = closed_if_idle(store)
    assert "v@copy-1: copied 5.0 MiB" in run("copy_changes.py", path, "v", other)
    with dbs.Store.open(path) as again:
        again["v"].pwrite(b"second", 40 * MIB)
        again["v"].discard(0, MIB)
        again["v"].resize("65MiB")
    assert "v@copy-2: copied 4.0 KiB" in run("copy_changes.py", path, "v", other)
    with dbs.Store.open(path) as source, dbs.Store.open(other) as target:
        assert source["v"].size == target["v"].size == 65 * MIB
        assert source["v"].pread(65 * MIB, 0) == target["v"].pread(65 * MIB, 0)
    assert "no volume `none`" in run("copy_changes.py", path, "none", other, code=1)


def test_clones_of_a_golden_image(store: dbs.Store, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"golden" * 100_000)
    path = closed_if_idle(store)
    printed = run("clone_many.py", path, "base", "--image", image, "--stamp", 4096)
    assert "100 clones of base@golden" in printed
    with dbs.Store.open(path) as again:
        assert len(again) == 101
        for name in ("vm-001", "vm-100"):
            assert again[name].pread(10, 4096) == name.encode() + image.read_bytes()[4102:4106]


def test_an_import_that_was_killed_is_made_again(store: dbs.Store, tmp_path: Path) -> None:
    """Found by review: clones were made of a part of the image."""
    image = tmp_path / "image"
    image.write_bytes(b"golden" * 1_000_000)
    path = closed_if_idle(store)
    killed = """
import os, shutil, sys
sys.path.insert(0, sys.argv[1])
import clone_many, dbs
def copy(source, target, piece):
    target.write(source.read(1 << 20))
    os._exit(9)
shutil.copyfileobj = copy
sys.argv[1:] = sys.argv[2:]
clone_many.main()
"""
    arguments = [EXAMPLES, path, "base", "--image", image, "--count", "1"]
    command = [sys.executable, "-c", killed, *map(str, arguments)]
    assert subprocess.run(command, timeout=600, check=False).returncode == 9
    assert "1 clones" in run("clone_many.py", path, "base", "--image", image, "--count", 1)
    with dbs.Store.open(path) as again:
        assert again["vm-001"].pread(6_000_000, 0) == image.read_bytes()


def test_a_report_of_space(store: dbs.Store, tmp_path: Path) -> None:
    volume = store.create_volume("v", "16MiB")
    volume.pwrite(b"x" * MIB, 0)
    volume.snapshot("s")
    volume.pwrite(b"y" * MIB, 0)
    volume.close()
    path = closed_if_idle(store)
    chart = tmp_path / "chart.png"
    lines = run("space.py", path, "--chart", chart).splitlines()
    assert [line.split()[0] for line in lines] == ["TAKEN", "v@s", "v"]
    assert "1.0 MiB" in lines[1]
    assert chart.read_bytes().startswith(b"\x89PNG")
