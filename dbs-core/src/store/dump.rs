//! All metadata as JSON, for people and tools.

use super::Store;
use super::identity::uuid_text;
use crate::error::{Error, Result};
use crate::format::{RegionKind, labels};
use crate::meta::Meta;
use serde_json::{Value, json};
use std::sync::PoisonError;

impl Store {
    /// All metadata as text for people and tools: one JSON object.
    ///
    /// # Errors
    /// `Io` if `out` fails.
    pub fn dump(&self, out: &mut dyn std::io::Write) -> Result<()> {
        let created_ns =
            self.inner.superblock.lock().unwrap_or_else(PoisonError::into_inner).created_ns;
        let meta = self.inner.meta();
        let regions: Vec<_> = RegionKind::ALL
            .into_iter()
            .map(|kind| (kind, meta.geometry.region(kind)))
            .filter(|(_, region)| region.length > 0)
            .map(|(kind, region)| {
                json!({"name": kind.name(), "offset": region.offset, "length": region.length})
            })
            .collect();
        let value = json!({
            "format": "2.0.0",
            "uuid": uuid_text(&meta.identity()),
            "metadata_uuid": uuid_text(&meta.uuid),
            "created_ns": created_ns,
            "size": meta.geometry.size,
            "extent_size": meta.geometry.extent_bytes,
            "volumes_max": meta.geometry.volumes,
            "snapshots_max": meta.geometry.snapshots,
            "spares_max": meta.geometry.spares,
            "extents_max": meta.geometry.extents_max,
            "sequence": meta.log.durable,
            "marks": meta.marks(),
            "regions": regions,
            "volumes": volumes(&meta),
            "snapshots": snapshots(&meta),
            "entries": entries(&meta),
        });
        drop(meta);
        serde_json::to_writer_pretty(&mut *out, &value)
            .map_err(|error| Error::io(error.into(), "writing the dump failed"))?;
        writeln!(out).map_err(|error| Error::io(error, "writing the dump failed"))
    }
}

fn volumes(meta: &Meta) -> Vec<Value> {
    meta.volumes()
        .map(|(id, volume)| {
            json!({
                "id": id.0,
                "uuid": uuid_text(&volume.uuid),
                "name": volume.name,
                "size": volume.size,
                "created_ns": volume.created_ns,
                "revision": volume.revision,
                "head": volume.head.0,
                "flags": volume.flags,
            })
        })
        .collect()
}

fn snapshots(meta: &Meta) -> Vec<Value> {
    meta.snapshots()
        .map(|(id, snapshot)| {
            json!({
                "id": id.0,
                "uuid": uuid_text(&snapshot.uuid),
                "name": snapshot.name,
                "size": snapshot.size,
                "created_ns": snapshot.created_ns,
                "revision": snapshot.revision,
                "volume": snapshot.volume.0,
                "parent": snapshot.parent.0,
                "flags": snapshot.flags,
                "labels": labels::decode(&snapshot.labels).unwrap_or_default(),
            })
        })
        .collect()
}

fn entries(meta: &Meta) -> Vec<Value> {
    let blocks = meta.blocks_per_extent();
    let runs = |bits: crate::meta::entries::Bits| -> Vec<_> {
        bits.runs(blocks).map(|run| [run.start, run.end]).collect()
    };
    meta.entries
        .used()
        .filter_map(|id| {
            let (snapshot, logical) = meta.entries.owner(id)?;
            Some(json!({
                "entry": id,
                "snapshot": snapshot,
                "extent": logical,
                "zero_run": meta.entries.run(id),
                "lost": meta.entries.is_lost(id),
                "data": runs(meta.entries.data_bits(id)),
                "zero": runs(meta.entries.zero_bits(id)),
            }))
        })
        .collect()
}
