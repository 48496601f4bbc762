//! Turning a stream back into a snapshot.
//!
//! How far an unfinished stream was received is kept in the store itself, in the labels of a
//! marker snapshot below the head that is being filled; `docs/stream.md` says why.

use super::header::{BaseSnapshot, ResumeToken, StreamHeader};
use super::record::{Decoder, Kind, Record};
use super::{RECEIVED_LABEL, StoreAccess, identity};
use crate::pipeline::pipeline;
use crate::{BlockAccess, Filler, Progress, report};
use dbs_control::api::MARKER;
use dbs_core::info::{Labels, SnapshotInfo, VolumeInfo};
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use std::collections::HashSet;
use std::io::Read;

/// The label of the marker snapshot with the token to resume with.
const TOKEN_LABEL: &str = "dbs.receiving";
/// Its label with the identity of the base; absent for a complete stream.
pub(super) const BASE_LABEL: &str = "dbs.receiving-base";

/// What was received.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Received {
    /// Volume it was received into.
    pub volume: String,
    /// Name of the snapshot.
    pub snapshot: String,
    /// Identity of the snapshot.
    pub uuid: String,
    /// Size of the snapshot in bytes.
    pub size: u64,
    /// Bytes of data written by this call.
    pub data: u64,
    /// The volume is encrypted, and its key is wrapped in another way than where it was sent from: the secret that unlocks
    /// it may be another one.
    pub other_secret: bool,
}

/// The token of the stream that a volume has received in part, if there is one.
///
/// # Errors
/// `NotFound`; those of the store.
pub fn pending(store: &dyn StoreAccess, volume: &str) -> Result<Option<ResumeToken>> {
    let snapshots = store.snapshots(volume)?;
    snapshots.iter().find(|s| s.name == MARKER).map(token_of).transpose()
}

/// Receives a stream into `volume`, or the volume it names. A complete stream makes the volume;
/// a difference goes on top of the snapshot it was made against, which must be the newest, with
/// an unchanged head. At the end the snapshot is taken. Nothing behind the stream is read: another
/// one may follow. A sequence is for [`receive_all`](super::receive_all).
///
/// When it fails half way, what arrived is kept and [`pending`] gives the token with which `send`
/// continues.
///
/// # Errors
/// `Exists`, `NotFound`, `Invalid`, `Busy` if the stream does not fit the volume, each with the way
/// out; `Corrupt` if the stream is damaged or ends early; `Unsupported` for another version;
/// `Interrupted`; those of the store and of the input.
pub fn receive(
    store: &dyn StoreAccess,
    volume: Option<&str>,
    input: impl Read + Send,
    progress: Progress<'_>,
) -> Result<Received> {
    let (decoder, header) = Decoder::new(input)?;
    if header.more {
        return Err(Error::invalid("the input carries several snapshots, and one is wanted"));
    }
    let volume = volume.unwrap_or(&header.volume);
    let base = header.base.as_ref().and_then(|base| base.volume.as_deref());
    let brought = &HashSet::new();
    let place =
        Place { volume, base, force: false, in_sequence: false, passes_over: false, brought };
    receive_one(store, &place, decoder, &header, progress)
}

/// Receives one stream, or a part of a sequence.
pub(super) fn receive_one(
    store: &dyn StoreAccess,
    place: &Place<'_>,
    mut decoder: Decoder<impl Read + Send>,
    header: &StreamHeader,
    progress: Progress<'_>,
) -> Result<Received> {
    // Not at the end, with all of it received.
    let options = final_options(header)?;
    let (volume, uuid) = (place.volume, String::new());
    let mut target = Target { store, volume, uuid, header, place, at: header.start };
    if let Prepared::Done = target.prepare()? {
        if place.passes_over {
            let mut record = Record::default();
            while record.kind != Kind::End {
                decoder.next(&mut record)?;
                report(progress, record.offset.min(header.size), header.size)?;
            }
        }
        return Ok(target.received(0));
    }
    let (data, filled) = target.fill(decoder, progress)?;
    target.check_same()?;
    // Open until it is complete: nobody else begins to fill it in between.
    store.create_snapshot(place.volume, &header.snapshot, &options)?;
    drop(filled);
    store.delete_snapshot(place.volume, MARKER)?;
    Ok(target.received(data))
}

/// What the snapshot is taken with once all of the stream is there, if it can be.
fn final_options(header: &StreamHeader) -> Result<SnapshotOptions> {
    let mut labels = header.labels.clone();
    labels.insert(RECEIVED_LABEL.into(), header.uuid.clone());
    let options = SnapshotOptions {
        labels,
        system: !header.user_created,
        // With the snapshot: whoever can write comes later.
        rebuilding: Some(false),
        ..Default::default()
    };
    let cannot = |error: Error| {
        error.context(format!("snapshot `{}` of the stream cannot be received", header.snapshot))
    };
    options.check(&header.snapshot).map_err(cannot)?;
    if header.snapshot == MARKER {
        return Err(cannot(Error::invalid(
            "snapshots of this name mark unfinished streams; rename it where it is sent",
        )));
    }
    Ok(options)
}

/// Where a stream is received.
pub(super) struct Place<'a> {
    /// Into this volume.
    pub volume: &'a str,
    /// The volume of its base, if that is another one.
    pub base: Option<&'a str>,
    /// What is in the way of a difference goes.
    pub force: bool,
    /// Others of the same sequence come before or behind it.
    pub in_sequence: bool,
    /// A snapshot that is there already is no error.
    pub passes_over: bool,
    /// What the sequence has brought so far: volumes and identities of snapshots.
    pub brought: &'a HashSet<(String, String)>,
}

/// What preparing found.
enum Prepared {
    /// The volume waits for the stream.
    Ready,
    /// All but the cleaning up was done before.
    Done,
}

/// The volume being received into.
pub(super) struct Target<'a> {
    pub store: &'a dyn StoreAccess,
    pub volume: &'a str,
    /// Its identity, once it is open: names are used again.
    pub uuid: String,
    pub header: &'a StreamHeader,
    pub place: &'a Place<'a>,
    /// Everything before this byte is applied.
    pub at: u64,
}

impl Target<'_> {
    /// Checks that the stream fits and makes the volume or the marker where they are missing.
    fn prepare(&self) -> Result<Prepared> {
        let Self { store, volume, header, .. } = *self;
        let info = match store.volume_info(volume) {
            Ok(info) => info,
            Err(error) if error.kind() == ErrorKind::NotFound => return self.create(),
            Err(error) => return Err(error),
        };
        let mut info = info;
        self.check_family(&info)?;
        let mut snapshots = store.snapshots(volume)?;
        if self.clear_way(&info, &snapshots)? {
            (info, snapshots) = (store.volume_info(volume)?, store.snapshots(volume)?);
        }
        let marker = snapshots.iter().find(|s| s.name == MARKER);
        if let Some(there) = snapshots.iter().find(|s| identity(s) == header.uuid) {
            let token = marker.map(token_of).transpose()?;
            let of_stream = token.is_some_and(|token| token.uuid == header.uuid);
            // Until it goes the marker is between the snapshot and what that builds on.
            self.check_origin(marker.filter(|_| of_stream).unwrap_or(there))?;
            if of_stream {
                store.delete_snapshot(volume, MARKER)?;
            }
            if of_stream || self.place.passes_over {
                return Ok(Prepared::Done);
            }
            return Err(Error::exists(format!(
                "volume `{volume}` already has snapshot `{}` of the stream",
                there.name
            )));
        }
        if snapshots.iter().any(|s| s.name == header.snapshot) {
            return Err(Error::exists(format!(
                "volume `{volume}` has another snapshot `{}`; rename it",
                header.snapshot
            )));
        }
        match marker {
            Some(marker) => {
                self.check_marker(&info, marker)?;
                self.check_origin(marker)?;
            }
            None => {
                self.check_growth(&info)?;
                self.begin(&info, &snapshots)?;
            }
        }
        if info.size != header.size {
            store.resize_volume(volume, header.size)?;
        }
        Ok(Prepared::Ready)
    }

    fn create(&self) -> Result<Prepared> {
        let Self { store, volume, header, .. } = *self;
        self.check_start(0)?;
        match &header.base {
            None => match &header.encryption {
                Some(key) => store.create_wrapped(volume, header.size, key)?,
                None => store.create_rebuilding(volume, header.size)?,
            },
            Some(BaseSnapshot { volume: Some(_), .. }) => {
                let base = self.find_base(&[])?;
                self.check_family(&store.volume_info(&base.volume)?)?;
                store.clone_rebuilding(&base.volume, &base.name, volume)?;
            }
            Some(base) => {
                return Err(Error::not_found(format!(
                    "there is no volume `{volume}` for the difference to snapshot `{}`; receive that \
                     snapshot completely first",
                    base.snapshot
                )));
            }
        }
        self.mark_first(self.mark())?;
        if store.volume_info(volume)?.size != header.size {
            store.resize_volume(volume, header.size)?;
        }
        Ok(Prepared::Ready)
    }

    /// Rolls the volume back to the base of a difference that would not fit, if that is wanted or costs
    /// nothing; whether it did.
    fn clear_way(&self, info: &VolumeInfo, snapshots: &[SnapshotInfo]) -> Result<bool> {
        let Self { store, volume, header, place, .. } = *self;
        // No rollback makes a clone of a volume.
        let Some(base) = header.base.as_ref().filter(|_| place.base.is_none()) else {
            return Ok(false);
        };
        let has = |wanted: &str| snapshots.iter().find(|s| identity(s) == wanted);
        let marker = snapshots.iter().find(|s| s.name == MARKER);
        let fits = match marker {
            Some(marker) => self.check_marker(info, marker).is_ok(),
            None => self
                .check_base(info, snapshots)
                .and_then(|base| self.check_unchanged(info, Some(&base), None))
                .is_ok(),
        };
        // Without the base, or with the snapshot, there is nothing to do it for.
        let Some(base) = has(&base.uuid).filter(|_| !fits && has(&header.uuid).is_none()) else {
            return Ok(false);
        };
        let held = !place.force && place.in_sequence && self.hold_unchanged(info, snapshots)?;
        if !(place.force || held) {
            return Ok(false);
        }
        // Refused while a client, a block device or a replica has the volume.
        if let Err(error) = store.rollback(volume, &base.name) {
            // The head is as it was, which is complete.
            return if held { self.release().and(Err(error)) } else { Err(error) };
        }
        if marker.is_some() || held {
            self.release()?;
        }
        Ok(true)
    }

    /// Marks a head that shows what the snapshot below it does, if this sequence has brought that one, so
    /// that nobody writes to the head before it is rolled back; whether it did.
    fn hold_unchanged(&self, info: &VolumeInfo, snapshots: &[SnapshotInfo]) -> Result<bool> {
        let Self { store, volume, .. } = *self;
        if snapshots.iter().any(|s| s.name == MARKER) {
            return Ok(self.is_held(info, snapshots));
        }
        // Whoever fills it says when it is complete.
        if info.rebuilding {
            return Ok(false);
        }
        let Some(below) = self.brought_below(info.parent.as_ref(), snapshots) else {
            return Ok(false);
        };
        if self.check_unchanged(info, Some(below), None).is_err() {
            return Ok(false);
        }
        // The marker is on that snapshot: no difference to another one is taken up there.
        let mut labels = self.mark();
        labels.insert(BASE_LABEL.into(), identity(below).to_owned());
        self.mark_first(labels)?;
        // Until then anybody could write; from then on nobody can.
        let held = self.is_held(&store.volume_info(volume)?, &store.snapshots(volume)?);
        if !held {
            self.release()?;
        }
        Ok(held)
    }

    /// Gives up the marker, with the volume complete.
    fn release(&self) -> Result<()> {
        self.store.complete(self.volume)?;
        self.store.delete_snapshot(self.volume, MARKER)
    }

    /// Begins to receive into a volume that is there.
    fn begin(&self, info: &VolumeInfo, snapshots: &[SnapshotInfo]) -> Result<()> {
        let Self { volume, header, .. } = *self;
        self.check_start(0)?;
        // A clone may have been made and not marked any more.
        let is_new = info.snapshots == 0 && self.place.base.is_some();
        let base = match &header.base {
            Some(base) if info.rebuilding && !is_new => {
                return Err(Error::busy(format!(
                    "volume `{volume}` is incomplete: the import or receive that fills it must \
                     end before the difference to `{}` can be received",
                    base.snapshot
                )));
            }
            Some(_) => Some(self.check_base(info, snapshots)?),
            None => self.check_pristine(info).map(|()| None)?,
        };
        let wanted = |at| self.check_unchanged(info, base.as_ref(), at);
        wanted(None)?;
        self.mark_first(self.mark())?;
        // Until then anybody could write; from then on nobody can.
        wanted(Some(MARKER)).or_else(|changed| {
            self.release()?;
            Err(changed)
        })
    }

    /// The labels of the marker at the present offset.
    fn mark(&self) -> Labels {
        let token = ResumeToken { uuid: self.header.uuid.clone(), offset: self.at };
        let mut labels = Labels::from([(TOKEN_LABEL.into(), token.to_string())]);
        if let Some(base) = &self.header.base {
            labels.insert(BASE_LABEL.into(), base.uuid.clone());
        }
        labels
    }

    fn mark_first(&self, labels: Labels) -> Result<()> {
        let options =
            SnapshotOptions { labels, system: true, rebuilding: Some(true), ..Default::default() };
        self.store.create_snapshot(self.volume, MARKER, &options)
    }

    /// Whether the volume that is filled still has its name, by which the store is asked.
    fn check_same(&self) -> Result<()> {
        match self.store.volume_info(self.volume) {
            Ok(info) if info.uuid == self.uuid && info.size != self.header.size => {
                Err(Error::busy(format!(
                    "volume `{}` was resized while it was received: make its size {} bytes again, and go on",
                    self.volume, self.header.size
                )))
            }
            Ok(info) if info.uuid == self.uuid => Ok(()),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Err(Error::not_found(format!(
                "volume `{}` was renamed while it was received; continue under its new name",
                self.volume
            ))),
        }
    }

    /// Applies all records; returns the bytes of data written, and the volume, which is open still.
    fn fill(
        &mut self,
        mut decoder: Decoder<impl Read + Send>,
        progress: Progress<'_>,
    ) -> Result<(u64, Box<dyn BlockAccess>)> {
        let stored = self.header.encryption.is_some();
        let access = self.store.open_to_fill(self.volume, stored)?;
        let info = self.store.volume_info(self.volume)?;
        // Names are used again: open, it is this one.
        self.check_family(&info)?;
        self.uuid = info.uuid;
        let mut filler = Filler::new(&*access)?;
        let mut ended = false;
        let applied = pipeline(
            |record: &mut Record| {
                if ended {
                    return Ok(false);
                }
                decoder.next(record)?;
                ended = record.kind == Kind::End;
                Ok(true)
            },
            |record| {
                match record.kind {
                    Kind::Data => {
                        access.write_at(record.offset, &record.payload)?;
                        filler.data += record.length;
                        self.at = record.offset + record.length;
                    }
                    Kind::Zero => {
                        filler.zero(record.offset, record.length)?;
                        self.at = record.offset + record.length;
                    }
                    Kind::Checkpoint => {
                        self.at = record.offset;
                        access.flush()?;
                        self.check_same()?;
                        self.store.set_labels(self.volume, MARKER, &self.mark())?;
                    }
                    Kind::End => self.at = self.header.size,
                }
                report(progress, self.at, self.header.size)
            },
        );
        let data = filler.data;
        // What is marked as received must be durable before the mark is.
        match (applied, access.flush()) {
            (Ok(()), Ok(())) => Ok((data, access)),
            (Err(error), Ok(())) => Err(self.stopped(error)),
            (Err(error), Err(_)) | (Ok(()), Err(error)) => Err(error),
        }
    }

    /// Marks how far it came, if the store still can, and tells how to continue.
    fn stopped(&self, error: Error) -> Error {
        let token = ResumeToken { uuid: self.header.uuid.clone(), offset: self.at };
        let marked = self.check_same();
        match marked.and_then(|()| self.store.set_labels(self.volume, MARKER, &self.mark())) {
            Ok(()) if self.place.in_sequence => error.context(format!(
                "stopped in {}@{}; to continue, send and receive the whole stream again: \
                 snapshots that are there already are skipped",
                self.volume, self.header.snapshot
            )),
            Ok(()) => error.context(format!("stopped; to continue, `send --resume {token}`")),
            Err(_) => error,
        }
    }

    fn received(&self, data: u64) -> Received {
        let here = || self.store.wrapped_key(self.volume).ok();
        let sent = self.header.encryption.as_ref();
        Received {
            other_secret: sent.is_some_and(|sent| here().is_some_and(|here| here != *sent)),
            volume: self.volume.to_owned(),
            snapshot: self.header.snapshot.clone(),
            uuid: self.header.uuid.clone(),
            size: self.header.size,
            data,
        }
    }
}

/// The token in the labels of the marker.
pub(super) fn token_of(marker: &SnapshotInfo) -> Result<ResumeToken> {
    let token = marker.labels.get(TOKEN_LABEL).map(|token| token.parse());
    token.and_then(Result::ok).ok_or_else(|| {
        Error::invalid(format!(
            "snapshot `{}@{MARKER}` marks an unfinished stream but has lost its label \
             `{TOKEN_LABEL}`: roll back to the snapshot before it and delete it",
            marker.volume
        ))
    })
}
