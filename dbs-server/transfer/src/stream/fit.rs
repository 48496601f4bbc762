//! Whether a stream fits the volume that it is received into, and if not, what to do about it.

use super::header::ResumeToken;
use super::receive::{BASE_LABEL, Target, token_of};
use super::{identity, spec_of};
use dbs_control::api::MARKER;
use dbs_core::info::{RangeState, SnapshotInfo, VolumeInfo};
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, ErrorKind, Result};

/// Bytes of a volume searched for changes at once.
const DIFF_BYTES: u64 = 256 << 20;

/// How to give up what was received in part.
fn give_up(info: &VolumeInfo, volume: &str) -> String {
    // Where there is nothing else it is the first of its volume.
    if info.snapshots == 1 {
        format!("delete volume `{volume}`")
    } else {
        format!("roll `{volume}` back to the snapshot before `{MARKER}` and delete that one")
    }
}

impl Target<'_> {
    /// A stream may repeat what was received, but not leave a gap.
    pub(super) fn check_start(&self, received: u64) -> Result<()> {
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

    /// Blocks of an encrypted volume mean something only in one that has the same key, and content only in one that is not
    /// encrypted.
    pub(super) fn check_family(&self, info: &VolumeInfo) -> Result<()> {
        let sent = self.header.encryption.as_ref().map(|key| &key.family);
        let name = &info.name;
        let why = match (info.encryption.as_ref().map(|here| &here.family), sent) {
            (here, sent) if here == sent => return Ok(()),
            (Some(_), Some(_)) => {
                format!("volume `{name}` is encrypted with another key than the stream")
            }
            (Some(_), None) => format!("volume `{name}` is encrypted, and the stream is not"),
            (None, _) => format!("volume `{name}` is not encrypted, and the stream is"),
        };
        Err(Error::invalid(format!("{why}: receive it under another name")))
    }

    /// Behind the end of an encrypted volume the rest of its last block becomes zeros when it grows, which needs the key.
    pub(super) fn check_growth(&self, info: &VolumeInfo) -> Result<()> {
        let locked = info.encryption.as_ref().is_some_and(|encryption| encryption.locked);
        let is_cut = !info.size.is_multiple_of(BLOCK_BYTES) && self.header.size > info.size;
        if !locked || !is_cut || info.rebuilding {
            return Ok(());
        }
        // Unless it is unlocked by what its store was opened with.
        self.store.open(self.volume).map(drop).map_err(|error| {
            error.context(format!(
                "the stream makes volume `{}` larger, whose size is no multiple of {BLOCK_BYTES} bytes: this needs its key",
                self.volume
            ))
        })
    }

    pub(super) fn check_marker(&self, info: &VolumeInfo, marker: &SnapshotInfo) -> Result<()> {
        let Self { volume, header, .. } = *self;
        let on_marker = info.parent.as_ref() == Some(&spec_of(marker));
        // Rolled back even to the marker, the volume lacks what the token says it has.
        if !on_marker || !info.rebuilding {
            let delete = format!("with `dbs snapshot delete {volume}@{MARKER}`");
            // Whoever rolled it back did not come to complete it; the command does.
            let remedy = match &info.parent {
                Some(parent) if info.rebuilding && parent.starts_with(&format!("{volume}@")) => {
                    format!(
                        "complete the rollback first with `dbs snapshot rollback {parent}`, then \
                         delete the snapshot `{MARKER}` {delete}"
                    )
                }
                _ if info.rebuilding => format!(
                    "roll it back to one of its snapshots first, then delete the snapshot \
                     `{MARKER}` {delete}"
                ),
                _ => format!("delete its snapshot `{MARKER}` first, {delete}"),
            };
            return Err(Error::busy(format!(
                "volume `{volume}` was rolled back in the middle of another stream: {remedy}"
            )));
        }
        let token = token_of(marker)?;
        let base = header.base.as_ref().map(|base| &base.uuid);
        if token.uuid == header.uuid && marker.labels.get(BASE_LABEL) == base {
            // Its size is the stream's before anything is marked as received.
            if token.offset > 0 && info.size != header.size {
                return Err(Error::busy(format!(
                    "volume `{volume}` was resized in the middle of the stream, to {} bytes, and may lack what was \
                     received: {}",
                    info.size,
                    give_up(info, volume)
                )));
            }
            return self.check_start(token.offset);
        }
        let give_up = give_up(info, volume);
        Err(Error::new(
            ErrorKind::Busy,
            format!(
                "volume `{volume}` is in the middle of another stream: finish it with `send \
                 --resume {token}`, or give it up: {give_up}"
            ),
        ))
    }

    /// A volume that nothing was ever done to is as good as a new one.
    pub(super) fn check_pristine(&self, info: &VolumeInfo) -> Result<()> {
        if info.snapshots == 0 && info.parent.is_none() && info.size == self.header.size {
            return Ok(());
        }
        Err(self.taken())
    }

    fn taken(&self) -> Error {
        Error::exists(format!(
            "volume `{}` exists and the stream makes the volume: receive it under another name, or \
             delete the volume",
            self.volume
        ))
    }

    /// The snapshot that the stream is the difference to, of this volume or of another one.
    pub(super) fn find_base(&self, own: &[SnapshotInfo]) -> Result<SnapshotInfo> {
        let (store, volume) = (self.store, self.volume);
        let Some(base) = &self.header.base else { return Err(self.taken()) };
        let is_base = |s: &&SnapshotInfo| identity(s) == base.uuid || s.uuid == base.uuid;
        if let Some(found) = own.iter().find(is_base) {
            return Ok(found.clone());
        }
        let missing = |of: &str| {
            Error::not_found(format!(
                "{of} does not have snapshot {}, which the stream is the difference to; send a \
                 difference to one of its snapshots, or all",
                base.uuid
            ))
        };
        let Some(origin) = self.place.base else {
            return Err(missing(&format!("volume `{volume}`")));
        };
        // It may have been received under any name; those of a sequence are known.
        let others = match self.place.in_sequence {
            true => Vec::new(),
            false => store.volumes()?.into_iter().map(|info| info.name).collect(),
        };
        for name in std::iter::once(origin).chain(others.iter().map(String::as_str)) {
            let snapshots = match store.snapshots(name) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                snapshots => snapshots?,
            };
            if let Some(found) = snapshots.iter().find(is_base) {
                return Ok(found.clone());
            }
        }
        Err(missing("the store"))
    }

    /// The base, which is right below the head.
    pub(super) fn check_base(
        &self,
        info: &VolumeInfo,
        snapshots: &[SnapshotInfo],
    ) -> Result<SnapshotInfo> {
        let volume = self.volume;
        let base = self.find_base(snapshots)?;
        if self.place.base.is_some() && base.volume == volume {
            return Err(Error::exists(format!(
                "the stream makes a clone of `{}`, and cannot be received into `{volume}` itself: \
                 receive it under another name",
                spec_of(&base)
            )));
        }
        if info.parent.as_ref() == Some(&spec_of(&base)) {
            return Ok(base);
        }
        let what = format!(
            "the stream is the difference to `{}`, but that is not the snapshot below the head of \
             `{volume}`",
            if base.volume == volume { base.name.clone() } else { spec_of(&base) }
        );
        Err(match base.volume == volume {
            true => Error::invalid(format!("{what}; {}", roll_back(&base))),
            false => Error::exists(format!("{what}: receive it under another name")),
        })
    }

    /// A clone that a sequence passes over or completes is one of the volume that the sequence means. Of
    /// a single stream the origin may have any name here.
    pub(super) fn check_origin(&self, first: &SnapshotInfo) -> Result<()> {
        let origin = self.place.base.filter(|_| self.place.in_sequence);
        let (Some(origin), Some(parent)) = (origin, &first.parent) else { return Ok(()) };
        match parent.split_once('@') {
            Some((found, _)) if found != origin => Err(Error::exists(format!(
                "volume `{}` exists and builds on `{parent}`, not on volume `{origin}`: receive the \
                 clones under other names, with `--prefix`",
                self.volume
            ))),
            _ => Ok(()),
        }
    }

    /// Whether the head, or a snapshot of it, shows what its base does, or nothing.
    pub(super) fn check_unchanged(
        &self,
        info: &VolumeInfo,
        base: Option<&SnapshotInfo>,
        snapshot: Option<&str>,
    ) -> Result<()> {
        let Self { store, volume, .. } = *self;
        let mut changed = base.is_some_and(|base| info.size != base.size);
        let from = base.map(|base| match base.volume == volume {
            true => base.name.clone(),
            false => spec_of(base),
        });
        let mut at = 0;
        while at < info.size && !changed {
            let length = DIFF_BYTES.min(info.size - at);
            let ranges = store.diff(volume, from.as_deref(), snapshot, at, length)?;
            changed = ranges.iter().any(|range| base.is_some() || range.state == RangeState::Data);
            at += length;
        }
        match base {
            _ if !changed => Ok(()),
            Some(base) if base.volume == volume => Err(Error::invalid(format!(
                "volume `{volume}` has changed since its snapshot `{}`; {}",
                base.name,
                roll_back(base)
            ))),
            _ => Err(self.taken()),
        }
    }

    /// The snapshot that is `parent`, if this sequence has brought it.
    pub(super) fn brought_below<'a>(
        &self,
        parent: Option<&String>,
        snapshots: &'a [SnapshotInfo],
    ) -> Option<&'a SnapshotInfo> {
        let below = snapshots.iter().find(|s| parent == Some(&spec_of(s)))?;
        let key = (self.volume.to_owned(), identity(below).to_owned());
        self.place.brought.contains(&key).then_some(below)
    }

    /// Whether the marker was put on a head for this stream, and what is below shows what the head does:
    /// neither a user nor a receiver has anything to lose.
    pub(super) fn is_held(&self, info: &VolumeInfo, snapshots: &[SnapshotInfo]) -> bool {
        let Some(marker) = snapshots.iter().find(|s| s.name == MARKER) else { return false };
        let ours = token_of(marker).is_ok_and(|token| token.uuid == self.header.uuid);
        let below = self.brought_below(marker.parent.as_ref(), snapshots);
        ours && info.rebuilding
            && !info.open
            && info.parent.as_ref() == Some(&spec_of(marker))
            && below.is_some_and(|below| self.check_unchanged(info, Some(below), None).is_ok())
    }
}

fn roll_back(base: &SnapshotInfo) -> String {
    format!("roll it back first: `dbs snapshot rollback {}`", spec_of(base))
}
