"""Stores, volumes and snapshots, idle and served alike."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dbs
import pytest
from conftest import Serve

MIB = 1 << 20


def test_a_store_is_a_mapping_of_its_volumes(store: dbs.Store) -> None:
    assert len(store) == 0 and list(store) == []
    for name in ("b", "a"):
        assert store.create_volume(name, "10MiB").size == 10 * MIB
    assert list(store) == ["a", "b"] and len(store) == 2
    assert "a" in store and "c" not in store and "a@b" not in store
    assert [volume.name for volume in store.values()] == ["a", "b"]
    assert [(info.name, info.size) for info in store.volumes()] == [("a", 10 * MIB), ("b", 10 * MIB)]
    with pytest.raises(KeyError) as missing:
        store["c"]
    assert isinstance(missing.value, dbs.NotFound) and "`c`" in str(missing.value)
    assert store.get("c") is None
    assert store != dict(store) and {store: 1}[store] == 1


def test_facts(store: dbs.Store) -> None:
    info = store.info()
    assert info.size == 1 << 30 and info.extent_size == MIB and info.allocated == 0
    assert store.check().ok
    assert store.grow("2GiB").size == 2 << 30
    volume = store.create_volume("v", 3 * MIB)
    volume.pwrite(bytes(100), 0)
    store.flush()
    facts = volume.info()
    assert (facts.size, facts.parent, facts.snapshots) == (3 * MIB, None, 0)
    assert abs(datetime.now(UTC) - facts.created) < timedelta(minutes=1)
    assert facts.created.tzinfo is UTC
    assert facts.usage.referenced == 4096 and volume.du().allocated == MIB
    assert facts.open


def test_the_life_of_snapshots(store: dbs.Store) -> None:
    volume = store.create_volume("v", "4MiB")
    volume.pwrite(b"one", 0)
    first = volume.snapshot("s1", {"by": "test"})
    volume.pwrite(b"two", 0)
    second = volume.snapshot("s2", system=True)
    volume.pwrite(b"six", MIB)
    assert [s.name for s in volume.snapshots()] == ["s1", "s2"]
    assert (first.pread(3, 0), second.pread(3, 0), volume.pread(3, 0)) == (b"one", b"two", b"two")
    assert [(e.offset, e.length) for e in volume.diff("s1", "s2")] == [(0, 4096)]
    assert [(e.offset, e.length) for e in volume.diff(second)] == [(MIB, 4096)]
    assert list(second.diff(first)) == list(volume.diff("s1", "s2"))
    assert first.labels == {"by": "test"}
    assert first.update_labels({"keep": "yes"}, remove=["by", "none"]) == {"keep": "yes"}
    assert first.info().user_created and not second.info().user_created
    assert "s1" in volume and "s3" not in volume and volume["s1"].spec == "v@s1"

    clone = first.clone("c")
    assert clone.pread(3, 0) == b"one" and clone.info().origin == "v@s1"
    assert volume.children() == ["c"]
    clone.flatten()
    assert clone.info().origin is None and clone.pread(3, 0) == b"one"

    volume.rollback(first)
    assert volume.pread(3, 0) == b"one" and volume.pread(3, MIB) == bytes(3)
    first.protect()
    with pytest.raises(dbs.Busy):
        first.delete()
    first.unprotect()
    first.rename("s0")
    assert first.pread(3, 0) == b"one" and first.spec == "v@s0"
    second.delete()
    assert [s.name for s in volume.snapshots()] == ["s0"]
    with pytest.raises(dbs.NotFound):
        second.info()
    with pytest.raises(dbs.NotFound):
        second.pread(1, 0)


def test_the_life_of_volumes(store: dbs.Store) -> None:
    volume = store.create_volume("v", "1MiB")
    volume.pwrite(b"x", MIB - 1)
    volume.resize("2MiB")
    assert volume.size == 2 * MIB and volume.pread(2, MIB - 1) == b"x\0"
    with pytest.raises(dbs.Invalid, match="destroys"):
        volume.resize("1MiB")
    volume.resize(MIB, shrink=True)
    assert volume.size == MIB
    volume.rename("w")
    assert volume.pread(1, MIB - 1) == b"x" and list(store) == ["w"]
    with pytest.raises(dbs.Exists):
        store.create_volume("w", 4096)
    # It is open here, and others must not delete it under us.
    with pytest.raises(dbs.Busy):
        store["w"].delete()
    volume.delete()
    assert list(store) == []
    assert store.trim() == 0


def test_blocks_of_zeros_are_given_up(store: dbs.Store) -> None:
    volume = store.create_volume("v", "8MiB")
    volume.pwrite(b"x" * MIB, 0)
    volume.pwrite(bytes(2 * MIB), MIB)
    found = volume.trim(dry_run=True)
    assert found == dbs.TrimReport(3 * MIB, 2 * MIB, 2 * MIB, 0)
    assert volume.du().referenced == 3 * MIB
    # Also while it is open here.
    assert volume.trim() == found
    assert volume.du().referenced == MIB
    assert volume.trim() == dbs.TrimReport(MIB, 0, 0, 0)
    assert volume.pread(2 * MIB, 0) == b"x" * MIB + bytes(MIB)


def test_a_snapshot_is_not_whatever_has_its_name_later(store: dbs.Store) -> None:
    volume = store.create_volume("v", "64MiB")
    volume.pwrite(b"one", 0)
    snapshot = volume.snapshot("s")
    assert snapshot.pread(3, 0) == b"one" and snapshot.uuid == snapshot.info().uuid
    volume.pwrite(b"two", 0)
    snapshot.close()
    store["v"]["s"].delete()
    again = volume.snapshot("s")
    assert list(volume.diff("s")) == [] and list(volume.diff(again)) == []
    assert snapshot.uuid != again.uuid
    uses = (
        lambda: list(volume.diff(snapshot)),
        lambda: list(volume.diff(again, snapshot)),
        lambda: list(snapshot.extents()),
        lambda: snapshot.pread(3, 0),
        lambda: snapshot.size,
        snapshot.info,
        snapshot.du,
        snapshot.protect,
        lambda: snapshot.update_labels({"a": "b"}),
        lambda: snapshot.clone("c"),
        lambda: snapshot.rename("t"),
        snapshot.delete,
        lambda: volume.clone(snapshot, "c"),
        lambda: volume.rollback(snapshot),
    )
    for use in uses:
        with pytest.raises(dbs.NotFound, match="v@s.*something else has the name"):
            use()
    assert again.pread(3, 0) == b"two" and not again.info().protected and again.labels == {}


def test_a_volume_is_not_whatever_has_its_name_later(store: dbs.Store) -> None:
    volume = store.create_volume("v", "1MiB")
    snapshot = volume.snapshot("s")
    store["v"].delete()
    again = store.create_volume("v", "1MiB")
    again.snapshot("s")
    for use in (
        lambda: volume.pwrite(b"lost", 0),
        lambda: volume.pread(1, 0),
        lambda: volume["s"],
        lambda: list(volume.diff("s")),
        lambda: list(volume.snapshots()),
        lambda: snapshot.volume.info(),
        lambda: volume.resize("2MiB"),
        volume.delete,
    ):
        with pytest.raises(dbs.NotFound):
            use()
    assert again.pread(4, 0) == bytes(4) and again.size == MIB and "s" in again


def test_a_difference_ends_when_one_of_its_sides_is_replaced(store: dbs.Store) -> None:
    volume = store.create_volume("v", "64MiB")
    first = volume.snapshot("s")
    for offset in range(0, 5000 * 8192, 8192):
        volume.pwrite(b"x" * 4096, offset)
    # More than one answer holds.
    ranges = volume.diff(first)
    next(ranges)
    store["v"]["s"].delete()
    volume.snapshot("s")
    with pytest.raises(dbs.NotFound, match="something else has the name"):
        list(ranges)


def test_extents(store: dbs.Store) -> None:
    volume = store.create_volume("v", "64MiB")
    for offset in range(0, 20 * MIB, 8192):
        volume.pwrite(b"x" * 4096, offset)
    assert sum(1 for extent in volume.extents() if extent.is_data) == 2560
    extents = list(volume.extents())
    assert extents[0] == dbs.Extent(0, 4096, "data") and extents[-1].end == 64 * MIB
    assert all(a.end == b.offset for a, b in zip(extents, extents[1:], strict=False))
    volume.discard(0, 12288)
    volume.write_zeroes(16384, 4096)
    states = [extent.state for extent in volume.extents(0, 20480)]
    assert "data" not in states
    assert sum(extent.length for extent in volume.extents(512, 1024)) == 1024
    assert list(volume.extents(64 * MIB)) == []


def test_errors_are_of_the_system_too(store: dbs.Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        dbs.Store.open(tmp_path / "none")
    assert missing.value.errno == errno.ENOENT and isinstance(missing.value, dbs.Error)
    (tmp_path / "other").write_bytes(b"no store" * 1000)
    with pytest.raises(dbs.Invalid):
        dbs.Store.open(tmp_path / "other")
    (tmp_path / "image").write_bytes(bytes(1080) + b"\x53\xef" + bytes(1 << 24))
    with pytest.raises(FileExistsError):
        dbs.Store.init(tmp_path / "image", "16MiB")
    with pytest.raises(dbs.Busy) as busy:
        dbs.Store.init(store.path, force=True)
    assert busy.value.errno == errno.EBUSY and busy.value.kind == "busy"
    with pytest.raises(dbs.Invalid, match="12 parsecs"):
        store.create_volume("v", "12 parsecs")
    with pytest.raises(dbs.Invalid):
        store.create_volume("a@b", 4096)
    with pytest.raises(dbs.Invalid, match="512"):
        store.create_volume("v", 1000)
    with pytest.raises(dbs.Invalid):
        store.create_volume("v", -1)
    for size in (1.5, None, True):
        with pytest.raises(TypeError):
            store.create_volume("v", size)  # type: ignore[arg-type]


def test_no_space_is_an_error_and_then_none(path: Path) -> None:
    with dbs.Store.init(path, "64MiB") as store:
        volume = store.create_volume("v", "128MiB")
        with pytest.raises(dbs.NoSpace) as full:
            for offset in range(0, 128 * MIB, MIB):
                volume.pwrite(b"x" * MIB, offset)
        assert full.value.errno == errno.ENOSPC
        volume.discard(0, 32 * MIB)
        volume.pwrite(b"again", 0)
        assert volume.pread(5, 0) == b"again" and store.check().ok


def test_checksums_tell_damage(path: Path) -> None:
    with dbs.Store.init(path, "64MiB") as store:
        store.create_volume("v", "4MiB").pwrite(b"kept as it was" * 1000, 0)
        store["v"].snapshot("s")
        report = store.scrub(rate="1GiB", restart=True)
        assert report.ok and report.checked == 16384 and report.done == report.total
        sums = store.info().checksums
        assert sums is not None and sums.mismatches == 0
    image = bytearray(path.read_bytes())
    damaged = image.index(b"kept as it was") + 5000
    image[damaged] ^= 1
    path.write_bytes(image)
    with dbs.Store.open(path) as store:
        with pytest.raises(dbs.IoFailed, match="byte 4096 of `v@s` is damaged") as damage:
            store["v"].pread(1, 5000)
        assert damage.value.errno == errno.EIO
        assert store["v"].pread(4, 0) == b"kept"
        report = store.scrub()
        assert (report.ok, report.damaged) == (False, 4096)
        assert report.ranges == [dbs.DamagedRange("v", "s", 4096, 4096)]


def test_the_cache_of_checksums_has_the_size_it_was_given(path: Path) -> None:
    with dbs.Store.init(path, "1GiB") as store:
        volume = store.create_volume("v", "1GiB")
        for offset in range(0, 600 * MIB, MIB):
            volume.pwrite(b"x", offset)
    with dbs.Store.open(path, checksum_cache="256KiB") as store:
        for offset in range(0, 600 * MIB, MIB):
            assert store["v"].pread(1, offset) == b"x"
        sums = store.info().checksums
        assert sums is not None and sums.verified == 600 and sums.memory <= 320 << 10
    with pytest.raises(dbs.Invalid, match="at least 256.0 KiB, and not 255"):
        dbs.Store.open(path, checksum_cache=255)


def test_without_checksums_there_is_nothing_to_compare(path: Path) -> None:
    store = dbs.Store.init(path, "64MiB", checksums=False)
    assert store.info().checksums is None
    with pytest.raises(dbs.Unsupported, match="checksums"):
        store.scrub()


def test_for_reading_only(store: dbs.Store) -> None:
    store.create_volume("v", "1MiB").snapshot("s")
    if not store.served:
        store.close()
    with dbs.Store.open(Path(store.path), read_only=True) as reader:
        assert reader.read_only and reader["v"].pread(1, 0) == b"\0"
        for change in (
            lambda: reader["v"].pwrite(b"x", 0),
            lambda: reader["v"].discard(0, 4096),
            lambda: reader["v"]["s"].delete(),
            lambda: reader.create_volume("w", 4096),
        ):
            with pytest.raises(dbs.ReadOnly) as refused:
                change()
            assert refused.value.errno == errno.EROFS


def test_after_close_nothing_works_and_the_file_is_free(store: dbs.Store) -> None:
    volume = store.create_volume("v", "1MiB")
    file = volume.open("r+b")
    file.write(b"kept")
    store.close()
    store.close()
    assert store.closed and "closed" in repr(store)
    for use in (store.info, volume.info, lambda: volume.pread(1, 0), lambda: file.read(1)):
        with pytest.raises(dbs.Closed):
            use()
    volume.close()
    # Though `volume` still lives.
    with dbs.Store.open(store.path) as again:
        assert again["v"].pread(4, 0) == b"kept"


def test_two_in_one_process_are_as_two_processes(path: Path) -> None:
    with dbs.Store.init(path, "64MiB"), pytest.raises(dbs.Busy, match=str(os.getpid())):
        dbs.Store.open(path)


def test_a_server_that_was_killed_and_replaced(path: Path, serve: Serve) -> None:
    dbs.Store.init(path, "64MiB").close()
    server = serve(path)
    store = dbs.Store.open(path)
    assert store.server_process == server.process.pid
    volume = store.create_volume("v", "1MiB")
    volume.pwrite(b"acknowledged", 0)
    server.kill()
    # Found by testing from outside: this was `NotFound`, which says of a volume that it was deleted.
    for use in (lambda: volume.pread(1, 0), lambda: store["v"], lambda: len(store)):
        with pytest.raises(dbs.IoFailed):
            use()
    serve(path)
    assert volume.pread(12, 0) == b"acknowledged"
    assert len(store) == 1
    with pytest.raises(dbs.IoFailed, match="may be lost"):
        store.close()
    assert store.closed


# Found by testing from outside: its reads raised `Invalid`.
def test_a_volume_is_locked_after_its_server_was_replaced(
    path: Path, serve: Serve, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    dbs.Store.init(path, "64MiB").close()
    server = serve(path)
    store = dbs.Store.open(path)
    volume = store.create_volume("v", "1MiB", key_file=key)
    volume.pwrite(b"secret", 0)
    volume.flush()
    server.kill()
    serve(path)
    with pytest.raises(dbs.Locked, match="dbs volume unlock v"):
        volume.pread(6, 0)
    volume.unlock(key_file=key)
    assert volume.pread(6, 0) == b"secret"
    store.close()


# Found by testing from outside: checksums were lost as by a crash, and who opened the store next found it in use.
def test_a_store_that_others_write_meanwhile_is_closed_in_good_order(path: Path) -> None:
    dbs.Store.init(path, "64MiB").close()
    for number in range(10):
        store = dbs.Store.open(path)
        volume = store.create_volume(f"v{number}", "4MiB")

        def write(place: int, volume: dbs.Volume = volume) -> None:
            with contextlib.suppress(dbs.Closed, dbs.Poisoned):
                while True:
                    volume.pwrite(bytes([place]) * 4096, place * 4096)

        threads = [threading.Thread(target=write, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        while volume.pread(1, 7 * 4096) != b"\x07":
            pass
        store.close()
        with dbs.Store.open(path, read_only=True) as closed:
            assert closed.check().checksums_open == 0
        for thread in threads:
            thread.join()


# Found by review: `close` of a served store left to the server when to flush.
def test_what_was_written_to_a_served_store_is_durable_when_it_is_closed(
    path: Path, serve: Serve
) -> None:
    with dbs.Store.init(path, "64MiB") as idle:
        uuid = idle.info().uuid
        idle.create_volume("v", "1MiB")
    server = serve(path, "--commit-interval", "1h")
    with dbs.Store.open(path) as store:
        store["v"].pwrite(b"kept", 0)
    server.lose(uuid)
    with dbs.Store.open(path) as idle:
        assert idle["v"].pread(4, 0) == b"kept"


# Found by review: nobody was told by `close`.
def test_closing_a_store_tells_what_a_former_server_has_lost(path: Path, serve: Serve) -> None:
    with dbs.Store.init(path, "64MiB") as idle:
        uuid = idle.info().uuid
        idle.create_volume("v", "1MiB")
    for flushed in (False, True):
        server = serve(path, "--commit-interval", "1h")
        store = dbs.Store.open(path)
        store["v"].pwrite(b"lost", 0)
        if flushed:
            store["v"].flush()
        server.lose(uuid)
        server = serve(path)
        told = contextlib.nullcontext() if flushed else pytest.raises(dbs.IoFailed, match="lost")
        with told:
            store.close()
        assert store.closed
        server.stop()


def test_a_new_server_may_have_something_else_of_that_name(path: Path, serve: Serve) -> None:
    dbs.Store.init(path, "64MiB").close()
    server = serve(path)
    store = dbs.Store.open(path)
    volume = store.create_volume("v", "1MiB")
    volume.pwrite(b"one", 0)
    snapshot = volume.snapshot("s")
    assert snapshot.pread(3, 0) == b"one"
    server.kill()
    with pytest.raises(OSError):
        snapshot.pread(3, 0)
    with dbs.Store.open(path) as idle:
        idle["v"]["s"].delete()
        idle["v"].pwrite(b"two", 0)
        idle["v"].snapshot("s")
    serve(path)
    # It was open, and is connected to anew.
    with pytest.raises(dbs.NotFound, match="something else has the name"):
        snapshot.pread(3, 0)
    assert store["v"]["s"].pread(3, 0) == b"two"
    store.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_made_by_fork_is_refused_and_harms_nothing(store: dbs.Store) -> None:
    volume = store.create_volume("v", "1MiB")
    volume.pwrite(b"parent", 0)
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            uses = (store.info, lambda: volume.pwrite(b"child!", 0), store.close, volume.close)
            for use in uses:
                with contextlib.suppress(dbs.Busy):
                    use()
                    break
                refused += 1
            del volume, store
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert volume.pread(6, 0) == b"parent"
    if not store.served:
        with pytest.raises(dbs.Busy):
            dbs.Store.open(store.path)
    assert store.check().ok


def test_encrypted_volumes(store: dbs.Store, tmp_path: Path) -> None:
    raw, digits = tmp_path / "raw", tmp_path / "digits"
    raw.write_bytes(bytes(range(32)))
    digits.write_text(bytes(range(32)).hex() + "\n")
    volume = store.create_volume("v", "1MiB", key_file=raw)
    assert volume.pwrite(b"secret", 4000) == 6
    made = volume.info().encryption
    assert made is not None and (made.secret, made.locked) == ("key file", False)
    assert store.create_volume("plain", "1MiB").info().encryption is None
    # It is closed first, as for all that nobody may have it open for.
    volume.lock()
    info = next(info for info in store.volumes() if info.name == "v")
    assert info.encryption is not None and info.encryption.locked
    with pytest.raises(dbs.Locked, match="dbs volume unlock v") as locked:
        volume.pread(6, 4000)
    assert isinstance(locked.value, PermissionError) and locked.value.errno == errno.EACCES
    with pytest.raises(dbs.Invalid, match="a key file unlocks it"):
        volume.unlock(passphrase="word")
    for wrong in ({}, {"passphrase": "a", "key_file": raw}):
        with pytest.raises(dbs.Invalid, match="a passphrase or a key file, and not both"):
            volume.unlock(**wrong)  # type: ignore[arg-type]
    short = tmp_path / "short"
    short.write_bytes(b"hush")
    with pytest.raises(dbs.Invalid, match="is no key file") as refused:
        volume.unlock(key_file=short)
    assert "hush" not in str(refused.value)
    volume.unlock(key_file=digits)
    assert volume.pread(6, 4000) == b"secret"
    volume.rekey(key_file=digits, new_passphrase="word")
    volume.lock()
    with pytest.raises(dbs.Invalid, match="a passphrase unlocks it"):
        volume.unlock(key_file=raw)
    volume.unlock(passphrase="word")
    assert volume.pread(6, 4000) == b"secret"


def test_a_free_threaded_interpreter_is_refused() -> None:
    pretend = "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = {}; import dbs"
    for free in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", pretend.format(free)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == free, done.stderr
        assert ("ImportError: dbs is not for free-threaded" in done.stderr) == bool(free)
