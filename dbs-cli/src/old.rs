//! Commands on an image of format 1.0.0. They answer with the same types; what the old format
//! does not know is empty or 0.

use dbs_control::api::Request;
use dbs_core::info::{SnapshotInfo, Usage, VolumeInfo};
use dbs_core::v1::{self, Image};
use dbs_core::{Error, Result};
use serde::Serialize;
use serde_json::Value;

/// Runs one of the requests that an old image can answer.
///
/// # Errors
/// `Unsupported` for the others; those of the image.
pub fn execute(image: &Image, request: &Request) -> Result<Value> {
    match request {
        Request::Info => json(&image.info()),
        Request::VolumeList { .. } => {
            json(&image.volumes().iter().map(|v| volume(image, v)).collect::<Result<Vec<_>>>()?)
        }
        Request::VolumeShow { volume: name, .. } => json(&volume(image, &image.volume(name)?)?),
        Request::SnapshotList { volume, .. } => json(&snapshots(image, volume)?),
        _ => Err(unsupported()),
    }
}

/// What the other commands say.
pub fn unsupported() -> Error {
    Error::unsupported(
        "this is an image of format 1.0.0: only info, volume list, volume show, volume export \
         and snapshot list read it; copy it with `dbs upgrade OLD NEW` to use the rest",
    )
}

fn json(value: &impl Serialize) -> Result<Value> {
    serde_json::to_value(value)
        .map_err(|e| Error::io(std::io::Error::other(e), "encoding the result"))
}

fn volume(image: &Image, volume: &v1::Volume) -> Result<VolumeInfo> {
    // By slot: nothing keeps names unique there.
    let snapshots = image.snapshots(&format!("#{}", volume.slot)).unwrap_or_default();
    Ok(VolumeInfo {
        name: volume.name.clone(),
        uuid: String::new(),
        size: volume.size,
        created_ns: image.created_ns(volume),
        parent: snapshots.last().map(|last| format!("{}@{}", volume.name, last.name())),
        origin: None,
        snapshots: snapshots.len() as u64,
        depth: snapshots.len() as u64 + 1,
        open: false,
        rebuilding: false,
        revision: 0,
        limits: Default::default(),
        backing: None,
        encryption: None,
        usage: Usage::default(),
    })
}

fn snapshots(image: &Image, name: &str) -> Result<Vec<SnapshotInfo>> {
    let volume = image.volume(name)?;
    let snapshots = image.snapshots(name)?;
    let spec = |snapshot: &v1::Snapshot| format!("{}@{}", volume.name, snapshot.name());
    let children = snapshots.iter().skip(1).map(&spec).chain([volume.name.clone()]);
    let parents = std::iter::once(None).chain(snapshots.iter().map(|s| Some(spec(s))));
    let infos = snapshots.iter().zip(children).zip(parents).map(|((s, child), parent)| {
        Ok(SnapshotInfo {
            volume: volume.name.clone(),
            name: s.name(),
            uuid: String::new(),
            size: image.view(s.id)?.size(),
            created_ns: s.created_ns(),
            parent,
            children: vec![child],
            protected: false,
            retired: false,
            user_created: s.user_created,
            labels: s.labels.clone(),
            rebuilds: 0,
            usage: Usage::default(),
        })
    });
    infos.collect()
}
