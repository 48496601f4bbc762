//! Writing a snapshot, or the difference between two, as a stream.

use super::header::{BaseSnapshot, ResumeToken, StreamHeader};
use super::record::Encoder;
use super::{RECEIVED_LABEL, StoreAccess, identity, spec_of};
use crate::pipeline::pipeline;
use crate::{BlockAccess, Copied, PIECE_BYTES, Piece, Progress, VolumeSource, read_part, report};
use dbs_control::api::MARKER;
use dbs_core::info::{MapRange, SnapshotInfo};
use dbs_core::{Error, ErrorKind, Result};
use std::io::{BufWriter, Write};

/// Data after which a checkpoint is written: what a receiver has to be sent again at most.
const CHECKPOINT_BYTES: u64 = 64 << 20;
/// Bytes of a volume whose differences are asked for at once, which bounds the answer.
const DIFF_BYTES: u64 = 256 << 20;

/// What to send.
#[derive(Debug, Clone, Default)]
pub struct SendOptions {
    /// Volume.
    pub volume: String,
    /// Its snapshot to send.
    pub snapshot: String,
    /// Send only the difference to this snapshot of the volume, or to `volume@snapshot` of another one:
    /// that is received as a clone.
    pub base: Option<String>,
    /// Continue where a receiver stopped.
    pub resume: Option<ResumeToken>,
    /// Another stream of the same sequence follows.
    pub more: bool,
}

/// Sends a snapshot. The same snapshot, base and token give the same bytes.
///
/// # Errors
/// `Corrupt` if the key of the volume is lost; `NotFound` for a snapshot, also if it or the base loses its name meanwhile; `Invalid` if the token belongs to another; `Interrupted`; those of
/// the store and of the output.
pub fn send(
    store: &dyn StoreAccess,
    options: &SendOptions,
    output: impl Write,
    progress: Progress<'_>,
) -> Result<Copied> {
    let (header, parts) = describe(store, options)?;
    // What is encrypted stays so, and no key is needed. Else an older server would be asked for what it does not know.
    let open = |spec: &str| match header.encryption {
        Some(_) => store.open_stored(spec),
        None => store.open(spec),
    };
    let access = open(&format!("{}@{}", options.volume, options.snapshot))?;
    // What is open is not deleted.
    let _base = parts.get(1).map(|base| open(&spec_of(base))).transpose()?;
    check_whole(store, &parts)?;
    if access.size() != header.size {
        return Err(Error::corrupt(format!(
            "{} has {} bytes and not {}",
            options.snapshot,
            access.size(),
            header.size
        )));
    }
    let mut source = match &options.base {
        None => Source::Full(VolumeSource::new(&*access, header.start)),
        Some(base) => Source::Difference(Differences {
            store,
            options,
            parts: &parts,
            base,
            access: &*access,
            at: header.start,
            found: Vec::new().into_iter(),
            range: None,
        }),
    };
    let output = BufWriter::with_capacity(PIECE_BYTES as usize, output);
    let mut sender = Sender {
        encoder: Encoder::new(output, &header)?,
        zeros: options.base.is_some(),
        copied: Copied { length: header.start, data: 0 },
        since_checkpoint: 0,
    };
    pipeline(
        |piece| source.next(piece),
        |piece: &Piece| {
            sender.piece(piece)?;
            report(progress, sender.copied.length, header.size)
        },
    )?;
    check_same(store, &parts)?;
    sender.encoder.finish(header.size)?;
    Ok(Copied { length: header.size, ..sender.copied })
}

/// What the stream says of itself, and what it is made of: the snapshot, and the base.
fn describe(
    store: &dyn StoreAccess,
    options: &SendOptions,
) -> Result<(StreamHeader, Vec<SnapshotInfo>)> {
    let own = store.snapshots(&options.volume)?;
    let encrypted = store.volume_info(&options.volume)?.encryption.is_some();
    let encryption = encrypted.then(|| store.wrapped_key(&options.volume)).transpose()?;
    let snapshot = find(&own, &options.volume, &options.snapshot)?;
    let base = options.base.as_ref().map(|base| match base.split_once('@') {
        Some((volume, name)) if volume != options.volume => {
            find(&store.snapshots(volume)?, volume, name)
        }
        Some((volume, name)) => find(&own, volume, name),
        None => find(&own, &options.volume, base),
    });
    let base = base.transpose()?;
    let start = match &options.resume {
        None => 0,
        Some(token) if token.uuid == identity(&snapshot) && token.offset <= snapshot.size => {
            token.offset
        }
        Some(token) => {
            return Err(Error::invalid(format!(
                "token {token} does not belong to {}@{}, whose tokens start with {}",
                options.volume,
                options.snapshot,
                identity(&snapshot)
            )));
        }
    };
    let mut labels = snapshot.labels.clone();
    labels.remove(RECEIVED_LABEL);
    let header = StreamHeader {
        volume: options.volume.clone(),
        snapshot: snapshot.name.clone(),
        uuid: identity(&snapshot).to_owned(),
        base: base.as_ref().map(|base| BaseSnapshot {
            snapshot: base.name.clone(),
            uuid: identity(base).to_owned(),
            volume: Some(base.volume.clone()).filter(|volume| *volume != options.volume),
        }),
        size: snapshot.size,
        created_ns: snapshot.created_ns,
        user_created: snapshot.user_created,
        labels,
        start,
        encryption,
        more: options.more,
    };
    Ok((header, std::iter::once(snapshot).chain(base).collect()))
}

fn find(snapshots: &[SnapshotInfo], volume: &str, name: &str) -> Result<SnapshotInfo> {
    let found = snapshots.iter().find(|snapshot| snapshot.name == name);
    found
        .cloned()
        .ok_or_else(|| Error::not_found(format!("volume `{volume}` has no snapshot `{name}`")))
}

/// Checks that snapshots which have just been opened are whole. Of a retired one what is hidden may be gone. One that
/// is retired later loses nothing as long as it is open.
///
/// # Errors
/// `Invalid` for a retired one; those of [`check_same`].
pub fn check_whole<'a>(
    store: &dyn StoreAccess,
    snapshots: impl IntoIterator<Item = &'a SnapshotInfo>,
) -> Result<()> {
    for snapshot in snapshots {
        check_same(store, [snapshot])?;
        if store.snapshot_info(&snapshot.volume, &snapshot.name)?.retired {
            return Err(Error::invalid(format!(
                "snapshot `{}` is retired: parts of its content may be gone. Take another one",
                spec_of(snapshot)
            )));
        }
    }
    Ok(())
}

/// Checks that snapshots which are open are still the ones of their names, by which the store is asked, and
/// that nobody rebuilds their volumes: snapshots may lack what has not come yet.
///
/// # Errors
/// `NotFound`, `Busy` for one of a volume that is rebuilt; those of the store.
pub fn check_same<'a>(
    store: &dyn StoreAccess,
    snapshots: impl IntoIterator<Item = &'a SnapshotInfo>,
) -> Result<()> {
    for snapshot in snapshots {
        let spec = spec_of(snapshot);
        match store.snapshot_info(&snapshot.volume, &snapshot.name) {
            // One that began and ended meanwhile has written its layers anew.
            Ok(now) if now.uuid == snapshot.uuid && now.rebuilds != snapshot.rebuilds => {
                return Err(Error::busy(format!(
                    "volume `{}` was rebuilt while `{spec}` was read, or its store was opened anew: begin again",
                    snapshot.volume
                )));
            }
            Ok(now) if now.uuid == snapshot.uuid => check_not_rebuilt(store, &snapshot.volume)?,
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {
                return Err(Error::not_found(format!(
                    "`{spec}` was deleted or renamed while it was read: begin again"
                )));
            }
        }
    }
    Ok(())
}

fn check_not_rebuilt(store: &dyn StoreAccess, volume: &str) -> Result<()> {
    let rebuilding = || Ok::<_, Error>(store.volume_info(volume)?.rebuilding);
    let received = || Ok::<_, Error>(store.snapshots(volume)?.iter().any(|s| s.name == MARKER));
    // A receive that ends between the two questions has removed its marker.
    if !rebuilding()? || received()? || !rebuilding()? {
        return Ok(());
    }
    Err(rebuilt(volume))
}

fn rebuilt(volume: &str) -> Error {
    Error::busy(format!(
        "volume `{volume}` is rebuilt: its snapshots are incomplete until that has ended. Read another replica"
    ))
}

/// Turns pieces into records.
struct Sender<W> {
    encoder: Encoder<W>,
    /// Zeros are sent: they may stand over data of the base.
    zeros: bool,
    copied: Copied,
    since_checkpoint: u64,
}

impl<W: Write> Sender<W> {
    fn piece(&mut self, piece: &Piece) -> Result<()> {
        for run in piece.runs() {
            match run.data {
                Some(data) => {
                    self.encoder.data(run.offset, data)?;
                    self.copied.data += run.length;
                    self.since_checkpoint += run.length;
                }
                None if self.zeros => self.encoder.zero(run.offset, run.length)?,
                None => {}
            }
        }
        self.copied.length = piece.end();
        if self.since_checkpoint >= CHECKPOINT_BYTES {
            self.encoder.checkpoint(self.copied.length)?;
            self.since_checkpoint = 0;
        }
        Ok(())
    }
}

/// Where pieces come from.
enum Source<'a> {
    Full(VolumeSource<'a>),
    Difference(Differences<'a>),
}

impl Source<'_> {
    fn next(&mut self, piece: &mut Piece) -> Result<bool> {
        match self {
            Self::Full(source) => source.next(piece),
            Self::Difference(source) => source.next(piece),
        }
    }
}

/// Reads what differs between two snapshots.
struct Differences<'a> {
    store: &'a dyn StoreAccess,
    options: &'a SendOptions,
    parts: &'a [SnapshotInfo],
    base: &'a str,
    access: &'a dyn BlockAccess,
    /// Up to where differences were asked for.
    at: u64,
    found: std::vec::IntoIter<MapRange>,
    range: Option<MapRange>,
}

impl Differences<'_> {
    fn next(&mut self, piece: &mut Piece) -> Result<bool> {
        loop {
            if let Some(range) = self.range.as_mut().filter(|range| range.length > 0) {
                read_part(self.access, range, piece)?;
                return Ok(true);
            }
            self.range = self.found.next();
            if self.range.is_none() && !self.ask()? {
                return Ok(false);
            }
        }
    }

    /// Asks for the next differences; false at the end of the snapshot.
    fn ask(&mut self) -> Result<bool> {
        let length = DIFF_BYTES.min(self.access.size() - self.at);
        if length == 0 {
            return Ok(false);
        }
        let SendOptions { volume, snapshot, .. } = self.options;
        let found = self.store.diff(volume, Some(self.base), Some(snapshot), self.at, length)?;
        // Before anything of it is sent: a receiver keeps what it got.
        check_same(self.store, self.parts)?;
        let mut at = self.at;
        for range in &found {
            let end = range.offset.checked_add(range.length);
            match end {
                Some(end) if range.offset >= at && end <= self.at + length => at = end,
                _ => {
                    return Err(Error::corrupt(
                        "the differences of the snapshots are out of order",
                    ));
                }
            }
        }
        self.found = found.into_iter();
        self.at += length;
        Ok(true)
    }
}
