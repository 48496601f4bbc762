//! Holds each layer of each volume against the volume: laid over one another from the root to a
//! snapshot or head, as a chain of files would be, they must give what is read there.

use crate::content::{SECTOR, SECTORS};
use crate::image;
use crate::model::Model;
use dbs_core::Store;
use dbs_core::info::{LayerInfo, LayerRange, LayerState};
use dbs_core::volume::Layer;
use std::collections::BTreeMap;

/// Sectors read at first.
const READ_SECTORS: usize = 5;
/// Ranges asked for at once.
const RANGES: usize = 3;

/// Contents of the layers of a volume laid over what is below, by name.
type Laid = BTreeMap<Option<String>, Vec<u8>>;

/// What a layer is built on, and what it says of each block; of volumes that are being rebuilt.
pub type Observed = BTreeMap<String, BTreeMap<Option<String>, (Option<String>, Vec<LayerState>)>>;

/// Looks at the layers of those volumes of which the model may know them.
///
/// # Errors
/// What the store said.
pub fn observe(store: &Store, model: &Model) -> Result<Observed, String> {
    let mut observed = Observed::new();
    for (name, _) in model.volumes.iter().filter(|(_, volume)| volume.rebuilding) {
        let failed = |e| format!("layers of {name}: {e}");
        let of = observed.entry(name.clone()).or_default();
        for info in store.layers(name).map_err(failed)? {
            let layer = store.layer(name, info.name.as_deref()).map_err(failed)?;
            let mut states = Vec::new();
            for range in map_layer(&layer, 0, info.size)? {
                let blocks = range.length.div_ceil((SECTOR * SECTORS) as u64) as usize;
                states.resize(states.len() + blocks, range.state);
            }
            of.insert(info.name, (info.parent, states));
        }
    }
    Ok(observed)
}

/// Compares the layers of every volume with what is read of it.
///
/// # Errors
/// The first thing that differs.
pub fn check(store: &Store, model: &Model) -> Result<(), String> {
    for (volume, expected) in &model.volumes {
        let failed = |e| format!("layers of {volume}: {e}");
        let infos = store.layers(volume).map_err(|e| failed(e.to_string()))?;
        let names: Vec<_> = infos.iter().filter_map(|layer| layer.name.clone()).collect();
        let mut sorted = names.clone();
        sorted.sort();
        let known = sorted.iter().eq(expected.snapshots.keys());
        if !known || infos.len() != names.len() + 1 || infos.last().is_none_or(|l| l.name.is_some())
        {
            return Err(failed(format!("they are {names:?} and {} in all", infos.len())));
        }
        check_tree(&infos).map_err(failed)?;
        let mut laid = Laid::new();
        // Parents first, whatever their age says.
        while laid.len() < infos.len() {
            let due = infos.iter().find(|layer| {
                let below = layer.parent.as_ref().map(|parent| Some(parent.clone()));
                !laid.contains_key(&layer.name) && below.is_none_or(|b| laid.contains_key(&b))
            });
            let Some(info) = due else { return Err(failed("their parents form a loop".into())) };
            let content = lay(store, volume, info, &laid)
                .map_err(|e| failed(format!("{:?}: {e}", info.name)))?;
            laid.insert(info.name.clone(), content);
        }
    }
    Ok(())
}

fn check_tree(infos: &[LayerInfo]) -> Result<(), String> {
    for layer in infos {
        let above = infos.iter().filter(|l| l.parent.is_some() && l.parent == layer.name);
        if !above.map(|l| &l.name).eq(&layer.children) {
            return Err(format!("children of {:?}: {:?}", layer.name, layer.children));
        }
        if layer.parent.is_some() && layer.origin.is_some() {
            return Err(format!("{:?} has a parent and an origin", layer.name));
        }
    }
    Ok(())
}

/// What the file has that a volume rests on, if it does.
fn file_below(store: &Store, volume: &str) -> Result<Vec<u8>, String> {
    if store.backing(volume).map_err(|e| e.to_string())?.is_none() {
        return Ok(Vec::new());
    }
    let mut bytes = vec![0; image::file().size() as usize];
    image::file().read_at(0, &mut bytes).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// The content of a layer over what is below it, which must be what is read of the snapshot.
fn lay(store: &Store, volume: &str, info: &LayerInfo, laid: &Laid) -> Result<Vec<u8>, String> {
    let spec = info.name.as_ref().map_or_else(|| volume.to_owned(), |s| format!("{volume}@{s}"));
    let mut content = match (&info.parent, &info.origin) {
        (Some(parent), _) => laid.get(&Some(parent.clone())).cloned().unwrap_or_default(),
        (None, Some(origin)) => read_volume(store, origin)?,
        (None, None) => file_below(store, volume)?,
    };
    content.resize(info.size as usize, 0);
    let layer = store.layer(volume, info.name.as_deref()).map_err(|e| e.to_string())?;
    if layer.size() != info.size {
        return Err(format!("listed with {} bytes, opened with {}", info.size, layer.size()));
    }
    let own = read_layer(&layer, info.size)?;
    let map = map_layer(&layer, 0, info.size)?;
    let blocks = |range: &LayerRange| range.length.next_multiple_of(4096);
    let data = map.iter().filter(|r| r.state == LayerState::Data).map(blocks).sum::<u64>();
    if data > info.data_bytes {
        return Err(format!("the map has {data} bytes of data, the list {}", info.data_bytes));
    }
    check_middle(&layer, &map, info.size)?;
    for range in &map {
        let part = range.offset as usize..(range.offset + range.length) as usize;
        match range.state {
            LayerState::Data => content[part.clone()].copy_from_slice(&own[part.clone()]),
            LayerState::Zero => content[part.clone()].fill(0),
            LayerState::Absent => {}
        }
        if range.state != LayerState::Data && own[part].iter().fold(0, |or, byte| or | byte) != 0 {
            return Err(format!("{range:?} reads as other than zeros"));
        }
    }
    let wanted = read_volume(store, &spec)?;
    if content != wanted {
        let at = content.iter().zip(&wanted).position(|(a, b)| a != b);
        return Err(format!("laid over what is below differs at byte {at:?}; the map is {map:?}"));
    }
    Ok(content)
}

fn read_volume(store: &Store, spec: &str) -> Result<Vec<u8>, String> {
    let failed = |e| format!("reading {spec}: {e}");
    let volume = store.volume(spec).map_err(failed)?;
    let mut bytes = vec![0xa5; volume.size() as usize];
    volume.read_at(0, &mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// All bytes, read in ever larger parts that begin and end anywhere in blocks and extents.
fn read_layer(layer: &Layer, size: u64) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0xa5; size as usize];
    let (mut at, mut length) = (0, READ_SECTORS * SECTOR);
    while at < bytes.len() {
        let end = bytes.len().min(at + length);
        layer
            .read_at(at as u64, &mut bytes[at..end])
            .map_err(|e| format!("reading the layer at {at}: {e}"))?;
        (at, length) = (end, length * 3);
    }
    Ok(bytes)
}

/// The map of a range, asked for a few ranges at a time.
fn map_layer(layer: &Layer, offset: u64, end: u64) -> Result<Vec<LayerRange>, String> {
    let mut map: Vec<LayerRange> = Vec::new();
    let mut next = offset;
    while next < end {
        let some =
            layer.map(next, end - next, RANGES).map_err(|e| format!("map at {next}: {e}"))?;
        if some.is_empty() || some.len() > RANGES {
            return Err(format!("map at {next} gives {} ranges", some.len()));
        }
        for range in some {
            let before = map.last().map(|last| last.state);
            if range.offset != next || range.length == 0 || before == Some(range.state) {
                return Err(format!("map: {range:?} does not follow {before:?} at {next}"));
            }
            next += range.length;
            map.push(range);
        }
    }
    if next == end { Ok(map) } else { Err(format!("map ends at {next}, not {end}")) }
}

/// A part of the map is that part of the map.
fn check_middle(layer: &Layer, map: &[LayerRange], size: u64) -> Result<(), String> {
    let sector = SECTOR as u64;
    let (start, end) = (size / 3 / sector * sector, size - size / 5 / sector * sector);
    let cut = |range: &LayerRange| {
        let offset = range.offset.max(start);
        let last = (range.offset + range.length).min(end);
        (offset < last).then(|| LayerRange { offset, length: last - offset, state: range.state })
    };
    let wanted: Vec<_> = map.iter().filter_map(cut).collect();
    let found = map_layer(layer, start, end)?;
    if found == wanted {
        Ok(())
    } else {
        Err(format!("part of the map: {found:?}, not {wanted:?}"))
    }
}
