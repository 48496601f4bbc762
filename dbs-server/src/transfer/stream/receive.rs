//! Turning a stream back into a snapshot.
//!
//! How far an unfinished stream was received is kept in the store itself, in the labels of a
//! marker snapshot below the head that is being filled; `docs/stream.md` says why.

use super::header::{ResumeToken, StreamHeader};
use super::record::{Decoder, Kind, Record};
use super::{RECEIVED_LABEL, StoreAccess, identity};
use crate::transfer::pipeline::pipeline;
use crate::transfer::{Filler, Progress, report};
use dbs_core::info::{Labels, RangeState, SnapshotInfo, VolumeInfo};
use dbs_core::store::SnapshotOptions;
use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use std::io::Read;

/// Name of the marker snapshot. A volume that has it and is rebuilding is being received.
pub(crate) const MARKER: &str = "dbs-receiving";
/// Its label with the token to resume with.
const TOKEN_LABEL: &str = "dbs.receiving";
/// Its label with the identity of the base; absent for a complete stream.
const BASE_LABEL: &str = "dbs.receiving-base";
/// Bytes of a volume searched for changes at once.
const DIFF_BYTES: u64 = 256 << 20;

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
/// one may follow.
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
    receive_over(store, volume, false, input, progress)
}

/// As [`receive`]. With `force` a difference is received whatever became of the volume since its base:
/// it is rolled back to that, and what another, unfinished stream brought is given up.
///
/// # Errors
/// As [`receive`].
pub fn receive_over(
    store: &dyn StoreAccess,
    volume: Option<&str>,
    force: bool,
    input: impl Read + Send,
    progress: Progress<'_>,
) -> Result<Received> {
    let (decoder, header) = Decoder::new(input)?;
    // Not at the end, with all of it received.
    SnapshotOptions::default().check(&header.snapshot)?;
    let volume = volume.unwrap_or(&header.volume).to_owned();
    let mut target = Target { store, volume: &volume, header: &header, force, at: header.start };
    if let Prepared::Done = target.prepare()? {
        return Ok(target.received(0));
    }
    let data = target.fill(decoder, progress)?;
    target.finish()?;
    Ok(target.received(data))
}

/// What preparing found.
enum Prepared {
    /// The volume waits for the stream.
    Ready,
    /// All but the cleaning up was done before.
    Done,
}

/// The volume being received into.
struct Target<'a> {
    store: &'a dyn StoreAccess,
    volume: &'a str,
    header: &'a StreamHeader,
    /// What is in the way of a difference goes.
    force: bool,
    /// Everything before this byte is applied.
    at: u64,
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
        let mut snapshots = store.snapshots(volume)?;
        if self.clear_way(&info, &snapshots)? {
            (info, snapshots) = (store.volume_info(volume)?, store.snapshots(volume)?);
        }
        let marker = snapshots.iter().find(|s| s.name == MARKER);
        if snapshots.iter().any(|s| identity(s) == header.uuid) {
            if marker.map(token_of).transpose()?.is_some_and(|token| token.uuid == header.uuid) {
                store.delete_snapshot(volume, MARKER)?;
                return Ok(Prepared::Done);
            }
            return Err(Error::exists(format!(
                "volume `{volume}` already has snapshot {} of the stream",
                header.uuid
            )));
        }
        if snapshots.iter().any(|s| s.name == header.snapshot) {
            return Err(Error::exists(format!(
                "volume `{volume}` has another snapshot `{}`; rename it",
                header.snapshot
            )));
        }
        match marker {
            Some(marker) => self.check_marker(&info, marker)?,
            None => self.begin(&info, &snapshots)?,
        }
        if info.size != header.size {
            store.resize_volume(volume, header.size)?;
        }
        Ok(Prepared::Ready)
    }

    fn create(&self) -> Result<Prepared> {
        if let Some(base) = &self.header.base {
            return Err(Error::not_found(format!(
                "there is no volume `{}` for the difference to snapshot `{}`; receive that \
                 snapshot completely first",
                self.volume, base.snapshot
            )));
        }
        self.check_start(0)?;
        self.store.create_rebuilding(self.volume, self.header.size)?;
        self.mark_first()?;
        Ok(Prepared::Ready)
    }

    /// Rolls the volume back to the base of a difference that would not fit, if that is wanted; whether
    /// it did.
    fn clear_way(&self, info: &VolumeInfo, snapshots: &[SnapshotInfo]) -> Result<bool> {
        let Self { store, volume, header, .. } = *self;
        let Some(base) = header.base.as_ref().filter(|_| self.force) else { return Ok(false) };
        let has = |wanted: &str| snapshots.iter().find(|s| identity(s) == wanted);
        let marker = snapshots.iter().find(|s| s.name == MARKER);
        let fits = match marker {
            Some(marker) => self.check_marker(info, marker).is_ok(),
            None => self
                .check_base(info, snapshots, &base.uuid)
                .and_then(|base| self.check_unchanged(info, Some(base), None))
                .is_ok(),
        };
        // Without the base, or with the snapshot, there is nothing to do it for.
        let Some(base) = has(&base.uuid).filter(|_| !fits && has(&header.uuid).is_none()) else {
            return Ok(false);
        };
        if info.open {
            return Err(Error::busy(format!(
                "volume `{volume}` is open or exported: what was written to it cannot be given up"
            )));
        }
        store.rollback(volume, &base.name)?;
        if marker.is_some() {
            store.complete(volume)?;
            store.delete_snapshot(volume, MARKER)?;
        }
        Ok(true)
    }

    /// Begins to receive into a volume that is there.
    fn begin(&self, info: &VolumeInfo, snapshots: &[SnapshotInfo]) -> Result<()> {
        let Self { store, volume, header, .. } = *self;
        self.check_start(0)?;
        let base = match &header.base {
            Some(base) if info.rebuilding => {
                return Err(Error::busy(format!(
                    "volume `{volume}` is incomplete: what fills it must end before the difference \
                     to `{}` can be received",
                    base.snapshot
                )));
            }
            Some(base) => Some(self.check_base(info, snapshots, &base.uuid)?),
            None => self.check_pristine(info).map(|()| None)?,
        };
        let wanted = |at| self.check_unchanged(info, base, at);
        wanted(None)?;
        self.mark_first()?;
        // Until then anybody could write; from then on nobody can.
        wanted(Some(MARKER)).or_else(|changed| {
            store.complete(volume)?;
            store.delete_snapshot(volume, MARKER)?;
            Err(changed)
        })
    }

    /// A stream may repeat what was received, but not leave a gap.
    fn check_start(&self, received: u64) -> Result<()> {
        let start = self.header.start;
        if start <= received {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the stream starts at {start}, but volume `{}` has received only {received} bytes of \
             it; send again with `--resume {}`",
            self.volume,
            ResumeToken { uuid: self.header.uuid.clone(), offset: received }
        )))
    }

    fn check_marker(&self, info: &VolumeInfo, marker: &SnapshotInfo) -> Result<()> {
        let Self { volume, header, .. } = *self;
        // Rolled back even to the marker, the volume lacks what the token says it has.
        if info.parent.as_deref() != Some(&format!("{volume}@{MARKER}")) || !info.rebuilding {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "volume `{volume}` was rolled back in the middle of another stream: delete \
                     its snapshot `{MARKER}` first"
                ),
            ));
        }
        let token = token_of(marker)?;
        let base = header.base.as_ref().map(|base| &base.uuid);
        if token.uuid == header.uuid && marker.labels.get(BASE_LABEL) == base {
            return self.check_start(token.offset);
        }
        let give_up = match marker.labels.get(BASE_LABEL) {
            None => format!("delete volume `{volume}`"),
            Some(_) => format!(
                "roll `{volume}` back to the snapshot before `{MARKER}` and delete that one"
            ),
        };
        Err(Error::new(
            ErrorKind::Busy,
            format!(
                "volume `{volume}` is in the middle of another stream: finish it with `send \
                 --resume {token}`, or give it up: {give_up}"
            ),
        ))
    }

    /// A volume that nothing was ever done to is as good as a new one.
    fn check_pristine(&self, info: &VolumeInfo) -> Result<()> {
        if info.snapshots == 0 && info.parent.is_none() && info.size == self.header.size {
            return Ok(());
        }
        Err(self.taken())
    }

    fn taken(&self) -> Error {
        Error::exists(format!(
            "volume `{}` exists and the stream is complete in itself: receive it under another \
             name, or delete the volume",
            self.volume
        ))
    }

    /// The snapshot that the stream is the difference to, which is right below the head.
    fn check_base<'s>(
        &self,
        info: &VolumeInfo,
        snapshots: &'s [SnapshotInfo],
        wanted: &str,
    ) -> Result<&'s SnapshotInfo> {
        let volume = self.volume;
        let is_base = |s: &&SnapshotInfo| identity(s) == wanted || s.uuid == wanted;
        let Some(base) = snapshots.iter().find(is_base) else {
            return Err(Error::not_found(format!(
                "volume `{volume}` does not have snapshot {wanted}, which the stream is the \
                 difference to; send a difference to one of its snapshots, or all"
            )));
        };
        if info.parent.as_deref() != Some(&format!("{volume}@{}", base.name)) {
            return Err(Error::invalid(format!(
                "the stream is the difference to `{}`, but that is not the snapshot below the \
                 head of `{volume}`; {}",
                base.name,
                roll_back(volume, base)
            )));
        }
        Ok(base)
    }

    /// Whether the head, or a snapshot of it, shows what its base does, or nothing.
    fn check_unchanged(
        &self,
        info: &VolumeInfo,
        base: Option<&SnapshotInfo>,
        snapshot: Option<&str>,
    ) -> Result<()> {
        let Self { store, volume, .. } = *self;
        let mut changed = base.is_some_and(|base| info.size != base.size);
        let base_name = base.map(|base| base.name.as_str());
        let mut at = 0;
        while at < info.size && !changed {
            let length = DIFF_BYTES.min(info.size - at);
            let ranges = store.diff(volume, base_name, snapshot, at, length)?;
            changed = ranges.iter().any(|range| base.is_some() || range.state == RangeState::Data);
            at += length;
        }
        match base {
            _ if !changed => Ok(()),
            None => Err(self.taken()),
            Some(base) => Err(Error::invalid(format!(
                "volume `{volume}` has changed since its snapshot `{}`; {}",
                base.name,
                roll_back(volume, base)
            ))),
        }
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

    fn mark_first(&self) -> Result<()> {
        let options = SnapshotOptions {
            labels: self.mark(),
            system: true,
            rebuilding: Some(true),
            ..Default::default()
        };
        self.store.create_snapshot(self.volume, MARKER, &options)
    }

    /// Applies all records; returns the bytes of data written.
    fn fill(
        &mut self,
        mut decoder: Decoder<impl Read + Send>,
        progress: Progress<'_>,
    ) -> Result<u64> {
        let access = self.store.open_to_fill(self.volume)?;
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
                        self.store.set_labels(self.volume, MARKER, &self.mark())?;
                    }
                    Kind::End => self.at = self.header.size,
                }
                report(progress, self.at, self.header.size)
            },
        );
        // What is marked as received must be durable before the mark is.
        match (applied, access.flush()) {
            (Ok(()), Ok(())) => Ok(filler.data),
            (Err(error), Ok(())) => Err(self.stopped(error)),
            (Err(error), Err(_)) | (Ok(()), Err(error)) => Err(error),
        }
    }

    /// Marks how far it came, if the store still can, and tells how to continue.
    fn stopped(&self, error: Error) -> Error {
        let token = ResumeToken { uuid: self.header.uuid.clone(), offset: self.at };
        match self.store.set_labels(self.volume, MARKER, &self.mark()) {
            Ok(()) => error.context(format!("stopped; to continue, `send --resume {token}`")),
            Err(_) => error,
        }
    }

    fn finish(&self) -> Result<()> {
        let Self { store, volume, header, .. } = *self;
        let mut labels = header.labels.clone();
        labels.insert(RECEIVED_LABEL.into(), header.uuid.clone());
        let options = SnapshotOptions {
            labels,
            system: !header.user_created,
            // With the snapshot: whoever can write comes later.
            rebuilding: Some(false),
            ..Default::default()
        };
        store.create_snapshot(volume, &header.snapshot, &options)?;
        store.delete_snapshot(volume, MARKER)
    }

    fn received(&self, data: u64) -> Received {
        Received {
            volume: self.volume.to_owned(),
            snapshot: self.header.snapshot.clone(),
            uuid: self.header.uuid.clone(),
            size: self.header.size,
            data,
        }
    }
}

fn roll_back(volume: &str, base: &SnapshotInfo) -> String {
    format!("roll it back first: `dbs snapshot rollback {volume}@{}`", base.name)
}

/// The token in the labels of the marker.
fn token_of(marker: &SnapshotInfo) -> Result<ResumeToken> {
    let token = marker.labels.get(TOKEN_LABEL).map(|token| token.parse());
    token.and_then(Result::ok).ok_or_else(|| {
        Error::invalid(format!(
            "snapshot `{}@{MARKER}` marks an unfinished stream but has lost its label \
             `{TOKEN_LABEL}`: roll back to the snapshot before it and delete it",
            marker.volume
        ))
    })
}
