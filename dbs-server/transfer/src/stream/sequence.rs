//! Receiving what one input carries: a stream, or a sequence of them.

use super::receive::{Place, Received, receive_one};
use super::record::Decoder;
use super::{StoreAccess, StreamHeader};
use crate::Progress;
use dbs_core::{Error, Result};
use std::collections::HashSet;
use std::io::Read;

/// How to receive.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReceiveOptions<'a> {
    /// The name of the volume that the first stream is of; by default its own.
    pub volume: Option<&'a str>,
    /// In front of the names of the other volumes of a sequence.
    pub prefix: &'a str,
    /// Receive a difference whatever became of the volume since its base: it is rolled back to that, and
    /// what another, unfinished stream brought is given up.
    pub force: bool,
    /// Refuse a sequence, before anything is received.
    pub single: bool,
}

/// Receives a stream, or all streams of a sequence; see [`receive`](super::receive()) for one of them. Snapshots
/// that are there already are passed over, unless the input has to be one stream or the receiving is forced: a
/// sequence that failed half way is sent and received again as a whole, and a volume with one snapshot is no
/// exception. `began` is told of each stream as it begins.
///
/// # Errors
/// As [`receive`](super::receive()); `Invalid` for a sequence that is not wanted, or that carries a snapshot
/// twice; `Exists` if another volume of it would be the volume that the first stream is received into.
pub fn receive_all(
    store: &dyn StoreAccess,
    options: &ReceiveOptions<'_>,
    mut input: impl Read + Send,
    began: &mut dyn FnMut(&StreamHeader),
    progress: Progress<'_>,
) -> Result<Vec<Received>> {
    let mut all = Vec::new();
    let mut brought = HashSet::new();
    let mut first = None;
    loop {
        let (decoder, header) = Decoder::new(&mut input)?;
        if options.single && header.more {
            return Err(Error::invalid(
                "the input carries several snapshots, which keep their names: name the volume alone",
            ));
        }
        began(&header);
        let in_sequence = header.more || first.is_some();
        let first = first.get_or_insert_with(|| header.volume.clone());
        let name_of = |volume: &str| match options.volume {
            _ if volume != first => format!("{}{volume}", options.prefix),
            Some(name) => name.to_owned(),
            None => volume.to_owned(),
        };
        let volume = name_of(&header.volume);
        if header.volume != *first && volume == name_of(first) {
            return Err(Error::exists(format!(
                "the input carries another volume `{}`, which is not the one that is received into \
                 volume `{volume}`: choose another name, or a `--prefix` for the clones",
                header.volume
            )));
        }
        let key = (volume.clone(), header.uuid.clone());
        // Each of them is in the store by then, which bounds what is kept of an input without end.
        if brought.contains(&key) {
            return Err(Error::invalid(format!(
                "the input carries snapshot {} of volume `{volume}` twice",
                header.uuid
            )));
        }
        let base = header.base.as_ref().and_then(|base| base.volume.as_deref());
        let base = base.map(|base| if in_sequence { name_of(base) } else { base.to_owned() });
        let place = Place {
            volume: &volume,
            base: base.as_deref(),
            // What else an input names is not what the user has named.
            force: options.force && header.volume == *first,
            in_sequence,
            passes_over: in_sequence || !(options.single || options.force),
            brought: &brought,
        };
        all.push(receive_one(store, &place, decoder, &header, progress)?);
        brought.insert(key);
        if !header.more {
            return Ok(all);
        }
    }
}

#[cfg(test)]
mod tests;
