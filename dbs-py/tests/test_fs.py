"""Volumes and snapshots by URL, through fsspec."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import dbs
import dbs.fs
import fsspec
import pytest

MIB = 1 << 20


@pytest.fixture
def url(store: dbs.Store) -> Iterator[str]:
    """The URL of a store with a volume ``v`` that has a snapshot ``s``."""
    volume = store.create_volume("v", 8 * MIB)
    volume.pwrite(b"first" * 1000, 5 * MIB)
    volume.snapshot("s")
    volume.pwrite(b"other" * 1000, 5 * MIB)
    volume.close()
    store.create_volume("a/b", MIB)
    # An idle store is one process's at a time.
    if not store.served:
        store.close()
    yield f"dbs://{store.path}"


def test_volumes_and_snapshots_are_files(url: str) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    assert fs.ls(path, detail=False) == [f"{path}/{name}" for name in ("a/b", "v", "v@s")]
    info = fs.info(f"{path}/v@s")
    assert info["type"] == "file" and info["size"] == 8 * MIB == fs.size(f"{path}/v")
    assert info["created"] == fs.created(f"{path}/v@s") and fs.isdir(path)
    assert fs.ls(f"{path}/v@s") == [info] and fs.exists(f"{path}/a/b")
    assert not fs.exists(f"{path}/none") and not fs.exists(f"{path}/v@none")
    assert fs.cat_file(f"{path}/v@s", 5 * MIB, 5 * MIB + 5) == b"first"
    assert fs.cat_ranges([f"{path}/v"] * 2, [5 * MIB, 0], [5 * MIB + 5, 2]) == [b"other", b"\0\0"]


def test_a_file_is_read_as_any_other(url: str) -> None:
    with fsspec.open(f"{url}/v@s") as file, fsspec.open(f"{url}/v") as other:
        assert isinstance(file, io.BufferedReader) and file.seekable()
        assert file.seek(5 * MIB) == 5 * MIB and file.read(5) == b"first"
        assert other.seek(5 * MIB) and other.read(5) == b"other"
        assert file.seek(0, os.SEEK_END) == 8 * MIB and file.read() == b""
    with fsspec.open(f"{url}/v", "r+b") as file:
        file.seek(100)
        file.write(b"new")
    with dbs.Store.open(url.removeprefix("dbs://")) as store:
        assert store["v"].pread(5, 99) == b"\0new\0"
        assert store["v"]["s"].pread(5, 99) == bytes(5)


def test_what_is_wrong_is_said_and_nothing_stays_open(url: str, tmp_path: Path) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    with pytest.raises(dbs.NotFound, match="none"):
        fs.open(f"{path}/none")
    with pytest.raises(dbs.ReadOnly, match="snapshot"):
        fs.open(f"{path}/v@s", "r+b")
    with pytest.raises(dbs.Unsupported, match="create_volume"):
        fs.open(f"{path}/new", "wb")
    with pytest.raises(dbs.Invalid, match="name a volume"):
        fs.open(path)
    for missing in (tmp_path / "none" / "v", tmp_path):
        with pytest.raises(FileNotFoundError, match="no store at"):
            fs.info(str(missing))
    with pytest.raises(TypeError):
        fsspec.filesystem("dbs", no_such_option=1).ls(path)
    # For writing, which nothing that is still open allows.
    with dbs.Store.open(path) as store:
        store["v"].delete()
