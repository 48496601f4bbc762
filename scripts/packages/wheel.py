#!/usr/bin/env python3
"""wheel.py DIRECTORY: uses the package `dbs` where nothing else is installed: a store, a snapshot, an encrypted volume,
backups, and what a notebook shows. DIRECTORY is made."""

import os
import sys

import dbs
import dbs.aio  # noqa: F401, it is there

place = sys.argv[1]
os.mkdir(place)
path, mark = f"{place}/store.dbs", b"nobody is to read this"


def refused(error, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except error:
        return
    raise AssertionError(f"{call} is not refused")


with dbs.Store.init(path, "256MiB") as store:
    volume = store.create_volume("v", "16MiB")
    volume.pwrite(b"tried", 1000)
    snapshot = volume.snapshot("s")
    volume.pwrite(b"later", 1000)
    assert snapshot.pread(5, 1000) == b"tried" and volume.pread(5, 1000) == b"later"
    secret = store.create_volume("secret", "16MiB", passphrase="correct horse")
    secret.pwrite(mark, 8192)
    for shown, name in (store, "secret"), (volume, "v"), (snapshot, "s"):
        html = shown._repr_html_()
        assert "<svg" in html and name in html, html
    with dbs.BackupStore.init(f"vfs://{place}", encrypt=True, passphrase="battery staple") as backups:
        backups.create(snapshot, name="first")
        assert backups.verify("v", "first", data=True).ok
        assert backups.restore("v", "first", store, "again").pread(5, 1000) == b"tried"
    assert store.check().ok
with open(path, "rb") as file:
    assert mark not in file.read()
with dbs.Store.open(path) as store:
    secret = store["secret"]
    refused(dbs.Locked, secret.pread, len(mark), 8192)
    refused(dbs.Invalid, secret.unlock, passphrase="another horse")
    secret.unlock(passphrase="correct horse")
    assert secret.pread(len(mark), 8192) == mark
