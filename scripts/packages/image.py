#!/usr/bin/env python3
"""image.py ROOT IMAGE VERSION ARCHITECTURE SECONDS: the directory ROOT as a container image with `dbs` in it: an OCI image
layout in a tar file, IMAGE, which podman, skopeo and Docker load. Its one layer is IMAGE without `-image`, with `-rootfs` in
place of it, and packed. The same ROOT makes the same bytes; SECONDS is when everything is said to be from."""

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import time

root, image, version, architecture, seconds = sys.argv[1:]
seconds = int(seconds)


def entry(name, size=None):
    info = tarfile.TarInfo(name)
    info.mtime, info.mode = seconds, 0o755 if size is None else 0o644
    info.type, info.size = (tarfile.DIRTYPE, 0) if size is None else (tarfile.REGTYPE, size)
    return info


def layer():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder, folders, files in sorted(os.walk(root)):
            for name in sorted(folders + files):
                path = os.path.join(folder, name)
                info = tar.gettarinfo(path, os.path.relpath(path, root))
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mtime = seconds
                with open(path if info.isreg() else os.devnull, "rb") as file:
                    tar.addfile(info, file if info.isreg() else None)
    return packed.getvalue()


blobs = {}


def blob(kind, data):
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}


def text(value):
    return json.dumps(value, indent=2, sort_keys=True).encode()


tar = layer()
packed = gzip.compress(tar, mtime=seconds)
with open(image.replace("-image", "-rootfs") + ".gz", "wb") as file:
    file.write(packed)
config = blob("config.v1+json", text({
    "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
    "architecture": architecture,
    "os": "linux",
    "config": {
        "Entrypoint": ["/usr/bin/dbs"],
        "Cmd": ["serve", "--nbd", "tcp:0.0.0.0:10809"],
        "Env": ["PATH=/usr/bin", "DBS_STORE=/data/store.dbs", "DBS_RUNTIME_DIR=/run/dbs"],
        "WorkingDir": "/data",
        "Volumes": {"/data": {}},
        "ExposedPorts": {"10809/tcp": {}},
        "Labels": {
            "org.opencontainers.image.title": "dbs",
            "org.opencontainers.image.description": "Volumes, snapshots and clones in one file or block device, over NBD",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    },
    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(tar).hexdigest()]},
}))
manifest = text({
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.manifest.v1+json",
    "config": config,
    "layers": [blob("layer.v1.tar+gzip", packed)],
})
named = blob("manifest.v1+json", manifest)
named["annotations"] = {"org.opencontainers.image.ref.name": version}
named["platform"] = {"architecture": architecture, "os": "linux"}
files = {"oci-layout": text({"imageLayoutVersion": "1.0.0"}), "index.json": text({"schemaVersion": 2, "manifests": [named]})}
with tarfile.open(image, "w") as tar:
    for name in ("blobs", "blobs/sha256"):
        tar.addfile(entry(name))
    for name, data in sorted([*files.items(), *((f"blobs/sha256/{digest}", data) for digest, data in blobs.items())]):
        tar.addfile(entry(name, len(data)), io.BytesIO(data))
