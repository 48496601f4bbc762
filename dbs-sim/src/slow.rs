//! Reads that are on their way for many steps: planned at one, read from the disk at a later one, and
//! compared with their checksums at a third. Whatever happens in between, such a read gives what was there
//! at some moment of it.

use crate::content::{SECTOR, SECTORS, Tags, identify};
use crate::disk::SimDisk;
use crate::job::stand_about_read;
use crate::model::{Content, Model};
use crate::op::{Reads, snapshot_name, volume_name};
use crate::standing::{Standing, State};
use dbs_core::io::Storage;
use dbs_core::volume::{Read, Request, Start};
use dbs_core::{Error, ErrorKind, Store, Volume};
use std::rc::Rc;

/// A read of all whole blocks of something.
pub struct SlowRead {
    /// The model's number of the volume.
    pub id: u32,
    /// What of it is read.
    pub of: Reads,
    what: String,
    snapshot: Option<String>,
    blocks: Vec<Seen>,
    /// It is not there any more, or not by this name.
    gone: bool,
    /// It has become smaller.
    shrunk: bool,
    way: Way,
}

/// How it is read.
enum Way {
    /// As a reactor does it, and what the disk gave.
    Request(Box<Request>, Option<Vec<u8>>),
    /// By blocking calls: one that stands still, and one at once after it.
    Call(Standing<Answers>),
    /// They have ended.
    Ended(Answers),
}

type Answer = Result<Vec<u8>, Error>;
type Reader = Box<dyn Fn(&mut [u8]) -> Result<(), Error>>;
type Answers = Result<(Vec<u8>, Answer), Error>;

impl Way {
    fn ended() -> Self {
        Self::Ended(Ok((Vec::new(), Ok(Vec::new()))))
    }
}

/// What a block has held since the read began.
#[derive(Default)]
struct Seen {
    tags: Vec<Tags>,
    any: bool,
}

impl SlowRead {
    /// Begins to read through an open handle; `None` if there is nothing to read from the disk.
    ///
    /// # Errors
    /// What the store said.
    pub fn begin(
        handle: Volume,
        model: &Model,
        vol: u8,
        of: Reads,
    ) -> Result<Option<Self>, String> {
        let Some((slow, mut buf)) = Self::new(model, vol, of) else { return Ok(None) };
        let failed = |e| format!("{}: {e}", slow.what);
        // Before, as without the checksums in memory it would have to wait.
        handle.read_at(0, &mut buf).map_err(failed)?;
        slow.compare(&buf)?;
        let mut request = Box::new(Request::new());
        let start = handle.start_read(0, buf.len() as u64, &mut request).map_err(failed)?;
        let way = Way::Request(request, None);
        Ok((start == Start::Io).then_some(Self { way, ..slow }))
    }

    /// Begins to read a layer, or by an observer; `None` if there is nothing to read from the disk.
    ///
    /// # Errors
    /// What it should not have read.
    pub fn begin_standing(
        store: &Store,
        model: &Model,
        vol: u8,
        of: Reads,
    ) -> Result<Option<Self>, String> {
        let Some((slow, mut buf)) = Self::new(model, vol, of) else { return Ok(None) };
        let (store, volume, snapshot) = (store.clone(), volume_name(vol), slow.snapshot.clone());
        let call = Standing::begin(move |stand| {
            let read: Reader = match of {
                Reads::Layer(_) => {
                    let layer = store.layer(&volume, snapshot.as_deref())?;
                    Box::new(move |buf| layer.read_at(0, buf))
                }
                _ => {
                    let at = snapshot.map_or_else(String::new, |name| format!("@{name}"));
                    let observer = store.observe(&format!("{volume}{at}"))?;
                    Box::new(move |buf| observer.read_at(0, buf))
                }
            };
            // Before, as what comes into memory is waited for by others.
            read(&mut buf)?;
            stand_about_read(&Rc::new(stand), store.info().metadata);
            read(&mut buf)?;
            let mut again = vec![0; buf.len()];
            let later = read(&mut again).map(|()| again);
            Ok((buf, later))
        });
        match call {
            State::Stands(call) => Ok(Some(Self { way: Way::Call(call), ..slow })),
            State::Ended(answers) => slow.judge_both(answers).map(|()| None),
        }
    }

    /// What was there when it begins, and room for what is read.
    fn new(model: &Model, vol: u8, of: Reads) -> Option<(Self, Vec<u8>)> {
        let volume = model.volumes.get(&volume_name(vol))?;
        let snapshot = of.snapshot().map(snapshot_name);
        let content = model.content(&volume_name(vol), snapshot.as_deref())?;
        let blocks = content.sectors as usize / SECTORS;
        let what = format!("a slow read of {of:?} of {}", volume_name(vol));
        let seen = std::iter::repeat_with(Seen::default).take(blocks).collect();
        let (id, way) = (volume.id, Way::ended());
        let mut slow =
            Self { id, of, what, snapshot, blocks: seen, gone: false, shrunk: false, way };
        slow.note(model);
        Some((slow, vec![0; blocks * SECTORS * SECTOR]))
    }

    /// Whether what is read, or its volume, is not deleted meanwhile.
    #[must_use]
    pub fn has_handle(&self) -> bool {
        !matches!(self.of, Reads::Head | Reads::Observed(_))
    }

    /// The volumes hold this now.
    pub fn note(&mut self, model: &Model) {
        let volume = model.volumes.values().find(|volume| volume.id == self.id);
        let content = volume.and_then(|volume| match &self.snapshot {
            None => Some(&volume.head),
            Some(name) => volume.snapshots.get(name).map(|snapshot| &snapshot.content),
        });
        self.gone |= content.is_none();
        // The layers of a volume that is being rebuilt may change under it.
        let any = volume.is_some_and(|volume| volume.rebuilding || volume.tree.is_some());
        self.blocks.iter_mut().for_each(|seen| seen.any |= any);
        if let Some(content) = content {
            self.note_content(content);
        }
    }

    fn note_content(&mut self, content: &Content) {
        let whole = content.sectors as usize / SECTORS;
        self.shrunk |= whole < self.blocks.len();
        for (at, seen) in self.blocks.iter_mut().enumerate() {
            let now = content.blocks().get(at);
            // Behind the end of a volume that has shrunk there is what was there, beside what is new.
            seen.any |= at >= whole || now.is_some_and(|block| block.any);
            let tags = now.map(|block| block.now).unwrap_or_default();
            if !seen.tags.contains(&tags) {
                seen.tags.push(tags);
            }
        }
    }

    /// Reads from the disk, and does not end.
    ///
    /// # Errors
    /// What the disk said.
    pub fn read_on(&mut self, disk: &SimDisk) -> Result<(), String> {
        match std::mem::replace(&mut self.way, Way::ended()) {
            Way::Request(request, None) => {
                let mut buf = vec![0xa5; self.blocks.len() * SECTORS * SECTOR];
                for zeros in request.zeros() {
                    buf[zeros.clone()].fill(0);
                }
                for part in request.segments() {
                    let buf = &mut buf[part.start..part.start + part.length];
                    disk.read_at(part.device, buf).map_err(|e| format!("{}: {e}", self.what))?;
                }
                self.way = Way::Request(request, Some(buf));
            }
            Way::Call(call) => {
                self.way = match call.next(true) {
                    State::Stands(call) => Way::Call(call),
                    State::Ended(answers) => Way::Ended(answers),
                };
            }
            way => self.way = way,
        }
        Ok(())
    }

    /// Reads from the disk if that is still to be done, and compares.
    ///
    /// # Errors
    /// What it should not have read.
    pub fn end(mut self, disk: &SimDisk) -> Result<(), String> {
        self.read_on(disk)?;
        match std::mem::replace(&mut self.way, Way::ended()) {
            Way::Request(mut request, buf) => {
                let buf = buf.unwrap_or_default();
                match request.finish_read(Ok(()), &buf) {
                    // Its bytes count for nothing.
                    Ok(Read::Again) => Ok(()),
                    read => self.judge(read.map(|_| buf)),
                }
            }
            Way::Call(call) => self.judge_both(call.end(true)),
            Way::Ended(answers) => self.judge_both(answers),
        }
    }

    /// What is read once it is gone is nothing, whatever has its place by then.
    fn judge_both(&self, answers: Answers) -> Result<(), String> {
        let (buf, later) = match answers {
            Ok((buf, later)) => (Ok(buf), later),
            Err(error) => return self.judge(Err(error)),
        };
        self.judge(buf)?;
        self.judge(later)
    }

    fn judge(&self, answer: Answer) -> Result<(), String> {
        match answer {
            Ok(buf) => self.compare(&buf),
            Err(error) if self.gone && error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) if self.shrunk && error.kind() == ErrorKind::Invalid => Ok(()),
            Err(error) => Err(format!("{}: {error}", self.what)),
        }
    }

    fn compare(&self, buf: &[u8]) -> Result<(), String> {
        // Of what a layer does not hold itself it has zeros.
        let zeros = matches!(self.of, Reads::Layer(_));
        for (at, sectors) in buf.chunks_exact(SECTORS * SECTOR).enumerate() {
            let mut tags = Tags::default();
            for (i, sector) in sectors.chunks_exact(SECTOR).enumerate() {
                let position = at * SECTORS + i;
                tags[i] = identify(sector, position as u64)
                    .map_err(|e| format!("{}: sector {position} holds {e}", self.what))?;
            }
            let seen = &self.blocks[at];
            let allowed = seen.tags.contains(&tags) || (zeros && tags == Tags::default());
            if !seen.any && !allowed {
                return Err(format!(
                    "{}: block {at} holds {tags:?}, not any of {:?}",
                    self.what, seen.tags
                ));
            }
        }
        Ok(())
    }
}
