"""Backups of idle and served stores, in both layouts."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dbs
import pytest

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "backups"
    made.mkdir()
    return made


@pytest.fixture(params=["longhorn", "encrypted"])
def backups(
    request: pytest.FixtureRequest,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[dbs.BackupStore]:
    """An empty backup store of each kind."""
    # Locks of Longhorn's layout take seconds; builds for tests know that they are alone.
    monkeypatch.setenv("DBS_TEST_ALONE", "1")
    url = f"vfs://{folder}"
    if request.param == "longhorn":
        opened = dbs.BackupStore(url)
    else:
        key = tmp_path / "key"
        key.write_bytes(bytes(range(32)))
        opened = dbs.BackupStore.init(url, encrypt=True, key_file=key)
    assert opened.is_repository == (request.param == "encrypted")
    with opened:
        yield opened
    assert opened.closed


def filled(store: dbs.Store, size: int = 5 * MIB) -> tuple[dbs.Volume, bytes]:
    """A volume with data that does not compress, a hole, and an end that is no whole block."""
    content = bytes(MIB) + os.urandom(size - 2 * MIB) + bytes(MIB - 512) + b"e" * 512
    volume = store.create_volume("vol", size)
    volume.pwrite(content, 0)
    return volume, content


def blocks(folder: Path) -> list[Path]:
    """The files with what volumes hold, the largest first."""
    files = [f for f in folder.rglob("*") if f.suffix == ".blk" or "packs" in f.parts]
    return sorted((f for f in files if f.is_file()), key=lambda f: -f.stat().st_size)


def damage(folder: Path) -> None:
    """Changes a byte of the largest file with blocks."""
    file = blocks(folder)[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_the_life_of_backups(store: dbs.Store, backups: dbs.BackupStore) -> None:
    volume, content = filled(store)
    snapshot = volume.snapshot("one")
    first = backups.create(snapshot, name="backup-1", labels={"by": "test"})
    assert (first.volume, first.backup, first.base) == ("vol", "backup-1", None)
    volume.pwrite(b"changed", 2 * MIB)
    told: list[tuple[int, int]] = []
    second = backups.create(volume, name="backup-2", progress=lambda *far: told.append(far))
    assert second.base == "backup-1" and second.read < first.read
    assert told[-1] == (second.read, second.read)
    [facts] = backups.volumes()
    assert facts == backups.volume("vol")
    assert (facts.volume, facts.backups, facts.last_backup) == ("vol", 2, "backup-2")
    one, two = backups.backups("vol")
    assert two == backups.backup("vol", "backup-2") and two.url == second.url
    assert (one.state, one.snapshot, one.labels["by"]) == ("complete", "one", "test")
    assert two.incremental and not one.incremental

    assert backups.restore("vol", "backup-1", store, "again").pread(5 * MIB, 0) == content
    with pytest.raises(dbs.Exists):
        backups.restore("vol", "backup-1", store)
    for backup in ("backup-1", "backup-2"):
        report = backups.verify("vol", backup, data=True)
        assert report.ok and report.read > 0 and backups.verify("vol", backup).ok

    judged = backups.prune("vol", keep_last=1, dry_run=True)
    assert [(j.backup, j.kept_by) for j in judged] == [("backup-1", []), ("backup-2", ["last"])]
    assert len(backups.backups("vol")) == 2
    assert backups.prune("vol", keep_last=1) == judged
    assert [b.backup for b in backups.backups("vol")] == ["backup-2"]
    collected = backups.collect()
    assert (collected is not None) == backups.is_repository
    assert collected is None or (collected.backups, collected.removed) == (1, 0)
    backups.delete("vol", "backup-2")
    for use in (backups.delete, backups.verify, backups.backup, backups.open):
        with pytest.raises(dbs.NotFound):
            use("vol", "backup-2")
    assert store.check().ok


def test_only_its_own_snapshots_are_deleted(store: dbs.Store, backups: dbs.BackupStore) -> None:
    volume, _ = filled(store)
    volume.snapshot("mine")
    backups.create(volume)
    [mine, taken] = [snapshot.name for snapshot in volume.snapshots()]
    assert mine == "mine" and taken.startswith("backup-")
    again = backups.create(volume)
    assert again.uploaded == 0 and again.base is not None
    [mine, other] = [snapshot.name for snapshot in volume.snapshots()]
    assert mine == "mine" and other != taken


def test_a_backup_is_a_file(store: dbs.Store, backups: dbs.BackupStore) -> None:
    volume, content = filled(store)
    made = store.backup("vol", backups, name="backup-1")
    with backups.open("vol", "backup-1") as file:
        assert file.name == made.url and file.mode == "rb" and not file.writable()
        assert file.read() == content and file.read() == b""
        file.seek(-100, os.SEEK_END)
        buffer = bytearray(200)
        assert file.readinto(buffer) == 100 and buffer[:100] == content[-100:]
        found = file.seek(0, os.SEEK_DATA)
        assert 0 <= found <= MIB and not any(content[:found])
        file.seek(3 * MIB - 7)
        assert file.read(14) == content[3 * MIB - 7 : 3 * MIB + 7]
        assert file.seek(10 * MIB) == 10 * MIB and file.read(1) == b""
        with pytest.raises(OSError):
            file.write(b"x")
        if backups.is_repository:
            backups.delete("vol", "backup-1")
        else:
            with pytest.raises(dbs.Busy):
                backups.delete("vol", "backup-1")
    with pytest.raises(ValueError):
        file.read(1)
    assert volume.pread(7, MIB) == content[MIB : MIB + 7]


def test_damage_is_found_and_never_given_out(
    store: dbs.Store, backups: dbs.BackupStore, folder: Path
) -> None:
    volume, content = filled(store)
    snapshot = volume.snapshot("one")
    backups.create(snapshot, name="backup-1")
    damage(folder)
    report = backups.verify("vol", "backup-1", data=True)
    assert not report.ok and report.bad[0].problem
    assert (len(report.damaged_packs) == 1) == backups.is_repository
    with backups.open("vol", "backup-1") as file, pytest.raises(dbs.Corrupt):
        file.read()
    with pytest.raises(dbs.Corrupt, match="incomplete"):
        backups.restore("vol", "backup-1", store, "again")
    with pytest.raises(dbs.Busy):
        store["again"].pread(1, 0)
    # The next backup mends it, and the restore goes on.
    if backups.is_repository:
        assert backups.mend() == 1
    else:
        with pytest.raises(dbs.Invalid):
            backups.mend()
    backups.create(snapshot, name="backup-2", full=True)
    again = backups.restore("vol", "backup-1", store, "again", resume=True)
    assert again.pread(len(content), 0) == content


class Enough(Exception):
    pass


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_what_ends_an_operation(store: dbs.Store, backups: dbs.BackupStore) -> None:
    volume, _ = filled(store, 24 * MIB)

    def end(done: int, total: int) -> None:
        raise Enough(f"{done} of {total}")

    # Each would take many minutes.
    def create(progress: dbs.Progress | None = None) -> None:
        backups.create(volume, name="backup-1", rate="16KiB", parallel=1, progress=progress)

    def restore() -> None:
        backups.restore("vol", "backup-1", store, "again", rate="16KiB", parallel=1, progress=end)

    with pytest.raises(Enough):
        create(end)
    # What was written before is not written again.
    content = os.urandom(24 * MIB)
    volume.pwrite(content, 0)
    timer = threading.Timer(0.3, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        create()
    timer.join()
    assert [b for facts in backups.volumes() for b in backups.backups(facts.volume)] == []
    assert list(volume.snapshots()) == []
    # Nothing is left that is in the way.
    backups.create(volume, name="backup-1")
    with pytest.raises(Enough):
        restore()
    again = backups.restore("vol", "backup-1", store, "again", resume=True)
    assert again.pread(len(content), 0) == content
    with pytest.raises(Enough):
        backups.verify("vol", "backup-1", data=True, rate="16KiB", parallel=1, progress=end)
    assert backups.verify("vol", "backup-1", data=True).ok and store.check().ok


def test_what_comes_after_an_end(store: dbs.Store, backups: dbs.BackupStore) -> None:
    volume, _ = filled(store)
    backups.create(volume, name="backup-1")

    def end(done: int, total: int) -> None:
        raise Enough

    uses: list[Callable[[], object]] = [
        lambda: backups.backups("vol"),
        lambda: backups.volume("vol"),
        lambda: backups.backup("vol", "backup-1"),
        lambda: backups.prune("vol", keep_last=1, dry_run=True),
        lambda: backups.prune("vol", keep_last=1),
        lambda: backups.delete_volume("vol"),
    ]
    for use in uses:
        with pytest.raises(Enough):
            backups.verify("vol", "backup-1", data=True, rate="16KiB", parallel=1, progress=end)
        use()
    assert backups.volumes() == []


def test_a_change_that_is_given_up_is_not_made(
    store: dbs.Store, tmp_path: Path, folder: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    backups = dbs.BackupStore.init(f"vfs://{folder}", encrypt=True, key_file=key)
    other = backups.add_key(passphrase="other")
    volume, _ = filled(store)
    begun, end = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        begun.set()
        if end.is_set():
            raise Enough

    def create() -> None:
        with contextlib.suppress(Enough):
            backups.create(volume, rate="16KiB", parallel=1, progress=progress)

    changes: list[Callable[[], object]] = [
        lambda: backups.remove_key(other),
        lambda: backups.add_key(passphrase="third"),
    ]
    for change in changes:
        begun.clear()
        end.clear()
        thread = threading.Thread(target=create)
        thread.start()
        assert begun.wait(60)
        timer = threading.Timer(0.3, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            change()
        timer.join()
        end.set()
        thread.join()
        for _ in range(10):
            assert len(backups.keys()) == 2 and other in [k.id for k in backups.keys()]
            time.sleep(0.05)


def test_a_change_is_waited_for(tmp_path: Path, folder: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    backups = dbs.BackupStore.init(f"vfs://{folder}", encrypt=True, key_file=key)

    def files() -> list[Path]:
        return sorted(folder.rglob("*"))

    timer = threading.Timer(0.1, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for number in range(1000):
            # Its passphrase is stretched for longer than that.
            backups.remove_key(backups.add_key(passphrase=f"a secret {number}"))
    there = files()
    # When it is this one's turn, the last one has ended.
    backups.keys()
    assert files() == there and not list(folder.glob("*/clock/*"))


def test_progress_does_not_wait_for_itself(store: dbs.Store, backups: dbs.BackupStore) -> None:
    volume, _ = filled(store)

    def ask(done: int, total: int) -> None:
        backups.volumes()

    with pytest.raises(dbs.Busy, match="one more object"):
        backups.create(volume, rate="16KiB", parallel=1, progress=ask)
    # After its end it may be asked for.
    assert backups.create(volume, name="backup-1").size > 0
    assert len(backups.backups("vol")) == 1


def test_threads_take_turns(store: dbs.Store, backups: dbs.BackupStore) -> None:
    volume, _ = filled(store)
    snapshot = volume.snapshot("one")
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            backups.create(snapshot, name=f"backup-{number}")
            assert backups.verify("vol", f"backup-{number}").ok
            with backups.open("vol", f"backup-{number}") as file:
                assert len(file.read()) == 5 * MIB
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    made = sorted(b.backup for b in backups.backups("vol"))
    assert made == [f"backup-{number}" for number in range(4)]


def test_keys(path: Path, tmp_path: Path, folder: Path) -> None:
    url, key = f"vfs://{folder}", tmp_path / "key"
    key.write_bytes(os.urandom(32))
    with pytest.raises(dbs.Invalid):
        dbs.BackupStore.init(url, encrypt=True, environ={})
    with pytest.raises(dbs.Invalid):
        dbs.BackupStore.init(url, key_file=key)
    first = dbs.BackupStore.init(url, encrypt=True, key_file=key)
    with pytest.raises(dbs.Exists):
        dbs.BackupStore.init(url, encrypt=True, key_file=key)
    added = first.add_key(passphrase="a secret")
    with pytest.raises(dbs.Exists):
        first.add_key(key_file=key)
    second = dbs.BackupStore(url, passphrase="a secret")
    [old] = [k.id for k in second.keys() if not k.used]
    assert [(k.id, k.kind) for k in second.keys() if k.used] == [(added, "passphrase")]
    with pytest.raises(dbs.Invalid):
        second.remove_key(added)
    second.remove_key(old)
    assert [k.id for k in second.keys()] == [added]
    attempts: list[Callable[[], dbs.BackupStore]] = [
        lambda: dbs.BackupStore(url, key_file=key),
        lambda: dbs.BackupStore(url, passphrase="another"),
        lambda: dbs.BackupStore(url, environ={}),
    ]
    for attempt in attempts:
        with pytest.raises(dbs.Invalid):
            attempt()
    with pytest.raises(dbs.Invalid, match="not both"):
        dbs.BackupStore(url, passphrase="a secret", key_file=key)
    dbs.BackupStore(url, environ={"DBS_BACKUP_PASSPHRASE": "a secret"}).close()


def test_what_is_refused(store: dbs.Store, backups: dbs.BackupStore, path: Path) -> None:
    volume, _ = filled(store)
    snapshot = volume.snapshot("one")
    with pytest.raises(dbs.NotFound):
        dbs.BackupStore(f"vfs://{path.parent}/absent")
    for url in ("", "nonsense", f"{backups.url}?volume=vol"):
        with pytest.raises(dbs.Invalid):
            dbs.BackupStore(url)
    wrong: list[dict[str, Any]] = [
        {"compression": "zip"},
        {"block_size": "3MiB"},
        {"parallel": 0},
        {"labels": {"dbs-x": "y"}},
        {"to": "../x"},
    ]
    for options in wrong:
        with pytest.raises(dbs.Invalid):
            backups.create(volume, **options)
    assert [s.name for s in volume.snapshots()] == ["one"]
    assert backups.volumes() == []
    for use in (backups.volume, backups.backups, backups.delete_volume):
        with pytest.raises(dbs.NotFound):
            use("vol")
    backups.create(snapshot, name="backup-1")
    with pytest.raises(dbs.Exists):
        backups.create(snapshot, name="backup-1")
    with pytest.raises(dbs.Invalid):
        backups.prune("vol")
    # Another snapshot of the name is not meant.
    snapshot.delete()
    volume.snapshot("one")
    with pytest.raises(dbs.NotFound):
        backups.create(snapshot)
    volume.close()
    if not store.served:
        store.close()
        with dbs.Store.open(path, read_only=True) as reading:
            assert backups.create(reading["vol"]["one"]).size > 0
            with pytest.raises(dbs.ReadOnly):
                backups.create(reading["vol"])
            with pytest.raises(dbs.ReadOnly):
                backups.restore("vol", "backup-1", reading, "again")
    backups.close()
    with pytest.raises(dbs.Closed):
        backups.volumes()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_made_by_fork_is_refused(store: dbs.Store, backups: dbs.BackupStore) -> None:
    _, content = filled(store)
    store.backup("vol", backups, name="backup-1")
    file = backups.open("vol", "backup-1")
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            for use in (backups.volumes, backups.close, lambda: file.read(1)):
                with contextlib.suppress(dbs.Busy):
                    use()
                    break
                refused += 1
            file.close()
            del file
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert file.read(MIB + 9) == content[: MIB + 9]
    file.close()
    backups.delete("vol", "backup-1")
