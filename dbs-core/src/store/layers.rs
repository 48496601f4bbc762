//! The layers of a volume, one by one.

use super::Store;
use super::facts::spec_of;
use super::identity::uuid_text;
use crate::error::Result;
use crate::format::labels;
use crate::format::slots::{SNAPSHOT_RETIRED, SNAPSHOT_USER_CREATED};
use crate::info::LayerInfo;
use crate::meta::Meta;
use crate::units::{BLOCK_BYTES, SnapshotId, VolumeId};
use std::collections::HashMap;

impl Store {
    /// The layers of a volume: its snapshots, oldest first, then its head. Cheap enough to be asked
    /// for every second: nothing is walked but the tree.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn layers(&self, volume: &str) -> Result<Vec<LayerInfo>> {
        let meta = self.inner.meta();
        let id = meta.find_volume(volume)?;
        let owner = meta.volume(id);
        let mut layers: Vec<_> =
            owner.snapshots.values().map(|at| layer_info(&meta, id, *at)).collect();
        let head = layer_info(&meta, id, owner.head);
        drop(meta);
        layers.sort_by(|a, b| (a.created_ns, &a.name).cmp(&(b.created_ns, &b.name)));
        layers.push(head);
        link_children(&mut layers);
        Ok(layers)
    }
}

fn layer_info(meta: &Meta, volume: VolumeId, id: SnapshotId) -> LayerInfo {
    let snapshot = meta.snapshot(id);
    let span = meta.span(id);
    let below = (!span.below.is_none()).then(|| meta.snapshot(span.below));
    let (parent, origin) = match below {
        Some(below) if below.volume == volume => (Some(below.name.clone()), None),
        below => (None, below.map(|below| spec_of(meta, below))),
    };
    LayerInfo {
        name: (!snapshot.head()).then(|| snapshot.name.clone()),
        uuid: uuid_text(&snapshot.uuid),
        parent,
        origin,
        children: Vec::new(),
        size: snapshot.size,
        created_ns: snapshot.created_ns,
        user_created: snapshot.flags & SNAPSHOT_USER_CREATED != 0,
        retired: snapshot.flags & SNAPSHOT_RETIRED != 0,
        labels: labels::decode(&snapshot.labels).unwrap_or_default(),
        data_bytes: meta.data_blocks(&span) * BLOCK_BYTES,
    }
}

fn link_children(layers: &mut [LayerInfo]) {
    let mut children = HashMap::<_, Vec<_>>::new();
    for layer in &*layers {
        if let Some(parent) = &layer.parent {
            children.entry(parent.clone()).or_default().push(layer.name.clone());
        }
    }
    for layer in layers {
        if let Some(name) = &layer.name {
            layer.children = children.remove(name).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InitOptions, OpenOptions, SnapshotOptions, TailPlace};
    use crate::volume::{Request, Start};
    use std::time::Instant;

    const SNAPSHOTS: u64 = 250;
    /// Extents written under each snapshot.
    const EXTENTS: u64 = 4096;

    /// What a replica asks for each second. No test: it prints figures.
    #[test]
    #[ignore = "measures; run with --release --nocapture"]
    fn cost_of_listing_and_mapping_layers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        Store::init(&path, &InitOptions { size: Some(4 << 40), ..Default::default() }).unwrap();
        let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
        let store = Store::open(&path, &options).unwrap();
        store.create_volume("v", 4 << 40).unwrap();
        let volume = store.volume("v").unwrap();
        let mut request = Request::new();
        let mut write = |offset| match volume.start_write(offset, 4096, &mut request).unwrap() {
            Start::Io => drop(request.finish_write(Ok(())).unwrap()),
            Start::Blocked => volume.write_at(offset, &[1; 4096], false).unwrap(),
            Start::Done => unreachable!("there is something to write"),
        };
        for snapshot in 0..SNAPSHOTS {
            // Scattered over the volume, so that all layers have something everywhere.
            let step = (4 << 20) / EXTENTS;
            (0..EXTENTS).for_each(|i| write((i * step + snapshot) << 20));
            let name = format!("s{snapshot}");
            store.create_snapshot("v", &name, &SnapshotOptions::default()).unwrap();
        }
        drop((request, volume));
        store.close().unwrap();
        let start = Instant::now();
        let store = Store::open(&path, &options).unwrap();
        println!("open: {:?}, {} extents", start.elapsed(), SNAPSHOTS * EXTENTS);
        for _ in 0..5 {
            let start = Instant::now();
            let layers = store.layers("v").unwrap();
            println!("layers(): {:?} for {}", start.elapsed(), layers.len());
        }
        let layer = store.layer("v", Some("s7")).unwrap();
        let start = Instant::now();
        let map = layer.map(0, 4 << 40, usize::MAX).unwrap();
        println!("map of a layer: {:?} for {} ranges", start.elapsed(), map.len());
        let head = store.layer("v", None).unwrap();
        let start = Instant::now();
        let map = head.map(0, 4 << 40, usize::MAX).unwrap();
        println!("map of an empty layer: {:?} for {} ranges", start.elapsed(), map.len());
    }
}
