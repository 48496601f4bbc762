//! Compiles the protocol definitions in `proto/`, without `protoc`.

use prost::Message;
use std::env;
use std::error::Error;
use std::path::PathBuf;
use tonic_prost_build::Builder;

const REPLICA: [&str; 6] = [
    "grpc/health.proto",
    "longhorn/common.proto",
    "longhorn/replica.proto",
    "longhorn/syncagent.proto",
    "longhorn/profiler.proto",
    "dbs/peer.proto",
];

/// Apart, so that the reflection of either side does not show what only the other offers.
const CONTROLLER: [&str; 3] =
    ["grpc/health.proto", "longhorn/profiler.proto", "longhorn/controller.proto"];

/// What the controller's definitions share with the replica's.
const SHARED: [&str; 2] = ["SyncFileInfo", "VersionOutput"];

/// Messages that commands print, with the keys of upstream's JSON.
const PRINTED: [&str; 7] = [
    "BackupStatusResponse",
    "RestoreStatusResponse",
    "SnapshotPurgeStatusResponse",
    "SnapshotCloneStatusResponse",
    "SnapshotHashStatusResponse",
    "VersionOutput",
    "Volume",
];

/// Keys of theirs that are not the fields' names in camel case.
const KEYS: [(&str, &str); 8] = [
    ("BackupStatusResponse.backup_url", "backupURL"),
    ("RestoreStatusResponse.backup_url", "backupURL"),
    ("RestoreStatusResponse.dest_file_name", "filename"),
    ("VersionOutput.cliAPIVersion", "cliAPIVersion"),
    ("VersionOutput.cliAPIMinVersion", "cliAPIMinVersion"),
    ("VersionOutput.controllerAPIVersion", "controllerAPIVersion"),
    ("VersionOutput.controllerAPIMinVersion", "controllerAPIMinVersion"),
    ("Volume.snapshot_max_size", "SnapshotMaxSize"),
];

/// Fields of theirs that are left out if they are empty. Upstream has no block device at all.
const OPTIONAL: [&str; 6] = [
    "BackupStatusResponse.backup_url",
    "BackupStatusResponse.error",
    "RestoreStatusResponse.progress",
    "RestoreStatusResponse.error",
    "RestoreStatusResponse.dest_file_name",
    "Volume.block_device",
];

fn configure() -> Builder {
    let attribute = "#[derive(serde::Serialize)] #[serde(rename_all = \"camelCase\")]";
    let printed = |build: Builder, name| build.type_attribute(format!(".ptypes.{name}"), attribute);
    let build = PRINTED.into_iter().fold(tonic_prost_build::configure(), printed);
    let build = KEYS.into_iter().fold(build, |build, (field, key)| {
        build.field_attribute(format!(".ptypes.{field}"), format!("#[serde(rename = \"{key}\")]"))
    });
    let optional = "#[serde(skip_serializing_if = \"crate::proto::is_empty\")]";
    OPTIONAL
        .into_iter()
        .fold(build, |build, field| build.field_attribute(format!(".ptypes.{field}"), optional))
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(REPLICA, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    configure().bytes(".dbs").compile_fds(descriptors)?;

    let out = out.join("controller");
    std::fs::create_dir_all(&out)?;
    let descriptors = protox::compile(CONTROLLER, ["proto"])?;
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    let mut build = configure().out_dir(out);
    for name in SHARED {
        let ours = format!("crate::proto::ptypes::{name}");
        build = build.extern_path(format!(".ptypes.{name}"), ours);
    }
    build.compile_fds(descriptors)?;
    Ok(())
}
