//! Starting requests.

use super::{Kind, Request, Running, Start};
use crate::crypt::{self, DataKey};
use crate::error::Result;
use crate::limits::EXTENTS_PER_WRITE;
use crate::meta::locks::{HoldId, Space};
use crate::meta::sums::Who;
use crate::meta::{Meta, Stop};
use crate::units::BLOCK_BYTES;
use crate::volume::{Volume, blocks_of, is_whole};
use std::ops::Range;
use std::sync::Arc;

impl Volume {
    /// Starts a read of whole sectors. It never waits for other operations, only for the metadata
    /// lock; a very long range is `Blocked`, and so is all of an encrypted volume, whose content must not be seen
    /// before it is decrypted.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned. Nothing is held then.
    ///
    /// # Panics
    /// If the request is under way.
    pub fn start_read(&self, offset: u64, length: u64, request: &mut Request) -> Result<Start> {
        self.start_read_as(offset, length, false, request)
    }

    /// As [`Volume::start_read`], by who has room for [`Request::extra_bytes`] behind the bytes asked
    /// for: what is needed to check them is fetched beside them, as further segments. The buffer
    /// given to [`Request::finish_read_own`] is the whole. Nobody else sees it before: so an encrypted volume is read in
    /// this way, too, but for what is long to decrypt.
    ///
    /// # Errors
    /// As there; `Locked`.
    ///
    /// # Panics
    /// As there.
    pub fn start_read_beside(
        &self,
        offset: u64,
        length: u64,
        request: &mut Request,
    ) -> Result<Start> {
        self.start_read_as(offset, length, true, request)
    }

    fn start_read_as(
        &self,
        offset: u64,
        length: u64,
        beside: bool,
        request: &mut Request,
    ) -> Result<Start> {
        request.clear();
        let shared = self.store().shared();
        let meta: &Meta = &shared;
        self.check_range_in(meta, offset, length)?;
        if length == 0 {
            return Ok(Start::Done);
        }
        if length > self.step_bytes() as u64
            || (self.handle.encrypted && (!beside || length > crypt::start_max()))
        {
            return Ok(Start::Blocked);
        }
        // Before anything is begun. As long as the volume is open nobody locks it.
        let key = self.key_of_request(meta)?;
        let (source, blocks) = (self.source(meta), blocks_of(offset, length));
        if meta.plan_remembered(source, blocks, &mut request.reads)?
            && !request.is_far()
            && (!request.needs_sums(meta)
                || (is_whole(offset | length) && request.knows_sums(meta)))
        {
            return Ok(self.begin_read(meta, (offset, length), key, request));
        }
        drop(shared);
        self.start_read_alone((offset, length), beside, key, request)
    }

    /// Starts a read, of which something is to be looked up, or checksums are not in memory.
    fn start_read_alone(
        &self,
        (offset, length): (u64, u64),
        beside: bool,
        key: Option<Arc<DataKey>>,
        request: &mut Request,
    ) -> Result<Start> {
        let mut meta = self.store().meta();
        self.check_range_in(&meta, offset, length)?;
        let (source, blocks) = (self.source(&meta), blocks_of(offset, length));
        let planned = match meta.plan_read(source, blocks, &mut request.reads) {
            Ok(()) => true,
            Err(Stop::Error(error)) => return Err(error),
            Err(_) => false,
        };
        // Checked are whole blocks only, and only by what is in memory by then.
        let ready = planned
            && !request.is_far()
            && (!request.needs_sums(&meta)
                || (is_whole(offset | length)
                    && (request.knows_sums(&meta) || (beside && request.start_beside(&mut meta)))));
        if !ready {
            meta.requests += 1;
            return Ok(Start::Blocked);
        }
        Ok(self.begin_read(&meta, (offset, length), key, request))
    }

    /// Starts a write. `Blocked` if it would wait for another operation, if space must be made or
    /// reserved for it, if it is not of whole blocks, or is very long, or if the volume is encrypted.
    ///
    /// # Errors
    /// `Invalid` outside the volume or unaligned, `ReadOnly`, `Poisoned`. Nothing is held then.
    ///
    /// # Panics
    /// If the request is under way.
    pub fn start_write(&self, offset: u64, length: u64, request: &mut Request) -> Result<Start> {
        self.start_write_as(offset, length, false, request)
    }

    /// As [`Volume::start_write`], by who may change the payload, and gives it to [`Request::seal_own`] before its transfers
    /// begin: so an encrypted volume is written in this way, too, but for what is long to encrypt.
    ///
    /// # Errors
    /// As there; `Locked`.
    ///
    /// # Panics
    /// As there.
    pub fn start_write_own(
        &self,
        offset: u64,
        length: u64,
        request: &mut Request,
    ) -> Result<Start> {
        self.start_write_as(offset, length, true, request)
    }

    fn start_write_as(
        &self,
        offset: u64,
        length: u64,
        own: bool,
        request: &mut Request,
    ) -> Result<Start> {
        request.clear();
        let meta = self.store().shared();
        self.check_unlocked()?;
        self.check_range_in(&meta, offset, length)?;
        if length == 0 {
            return Ok(Start::Done);
        }
        let is_long = length > self.step_bytes() as u64
            || (self.handle.encrypted && (!own || length > crypt::start_max()));
        if !is_whole(offset | length) || is_long {
            return Ok(Start::Blocked);
        }
        let key = self.key_of_request(&meta)?;
        let blocks = blocks_of(offset, length);
        let mut started = self.try_overwrite(&meta, blocks.clone(), Who::Passing, request);
        drop(meta);
        if !started {
            let mut meta = self.store().meta();
            self.check_unlocked()?;
            self.check_range_in(&meta, offset, length)?;
            started = self.try_write(&mut meta, blocks, Who::Passing, request)?;
        }
        match &mut request.running {
            Some(running) if started => running.key = key,
            _ => return Ok(Start::Blocked),
        }
        request.lay_out_write();
        Ok(Start::Io)
    }

    /// Starts a write of whole blocks, waiting for whatever it needs.
    pub(in crate::volume) fn wait_write(
        &self,
        blocks: Range<u64>,
        request: &mut Request,
    ) -> Result<()> {
        request.clear();
        let overwrites = {
            let meta = self.store().shared();
            self.store().check_sound()?;
            self.check_inside(&meta, &blocks)?;
            self.try_overwrite(&meta, blocks.clone(), Who::Waiting, request)
        };
        let started = overwrites || {
            let mut meta = self.store().meta();
            self.store().check_sound()?;
            self.check_inside(&meta, &blocks)?;
            self.try_write(&mut meta, blocks.clone(), Who::Waiting, request)?
        };
        if started {
            request.lay_out_write();
            return Ok(());
        }
        // With checksums, writes to the same blocks take their turns.
        self.wait_hold(blocks.clone(), self.store().has_sums, request);
        self.plan_held(blocks, request)
    }

    /// Waits for blocks, which the request then holds.
    pub(in crate::volume) fn wait_hold(
        &self,
        blocks: Range<u64>,
        exclusive: bool,
        request: &mut Request,
    ) {
        request.clear();
        let hold = self.store().hold(self.handle.volume, blocks, exclusive).keep();
        request.running = Some(self.writing(hold, false, false));
    }

    /// Finds places for the blocks that the request holds, waiting for space.
    pub(in crate::volume) fn plan_held(
        &self,
        blocks: Range<u64>,
        request: &mut Request,
    ) -> Result<()> {
        let volume = self.handle.volume;
        let writes = &mut request.writes;
        let length = (blocks.end - blocks.start) * BLOCK_BYTES;
        let step = self.store().step(|meta| {
            self.check_inside(meta, &blocks)?;
            meta.plan_write(volume, blocks.clone(), writes)?;
            meta.count_write(volume, length);
            Ok(())
        });
        match (step, &mut request.running) {
            (
                Ok(((), early)),
                Some(Running { kind: Kind::Write { planned, must_commit, .. }, .. }),
            ) => {
                (*planned, *must_commit) = (true, early);
                request.lay_out_write();
                self.claim(request)
            }
            (Ok(_), _) => panic!("the blocks are not held"),
            (Err(error), _) => {
                request.abandon();
                Err(error)
            }
        }
    }

    /// Starts a write of whole blocks that overwrites data, if nothing is in its way.
    #[inline]
    fn try_overwrite(
        &self,
        meta: &Meta,
        blocks: Range<u64>,
        who: Who,
        request: &mut Request,
    ) -> bool {
        let volume = self.handle.volume;
        if !meta.plan_overwrite(volume, blocks.clone(), &mut request.writes) {
            return false;
        }
        let length = (blocks.end - blocks.start) * BLOCK_BYTES;
        let Some(hold) = meta.locks.try_share(Space::Head(volume), blocks) else { return false };
        if request.try_claim(meta, who).is_err() {
            meta.locks.release_shared(hold);
            return false;
        }
        meta.count_write(volume, length);
        // Whether a commit must follow shows at its end.
        request.running = Some(self.writing(HoldId::Shared(hold), true, false));
        true
    }

    /// Starts a write of whole blocks if nothing is in its way.
    fn try_write(
        &self,
        meta: &mut Meta,
        blocks: Range<u64>,
        who: Who,
        request: &mut Request,
    ) -> Result<bool> {
        let volume = self.handle.volume;
        let length = (blocks.end - blocks.start) * BLOCK_BYTES;
        let Some(hold) = meta.locks.try_share(Space::Head(volume), blocks.clone()) else {
            return Ok(false);
        };
        let mut planned = meta.plan_write(volume, blocks, &mut request.writes);
        if planned.is_ok() && !request.try_claim_alone(meta, who) {
            meta.abort_write(volume, &request.writes);
            planned = Err(Stop::Space);
        }
        match planned {
            Ok(()) => {
                meta.count_write(volume, length);
                let early = meta.publish();
                request.running = Some(self.writing(HoldId::Shared(hold), true, early));
                Ok(true)
            }
            Err(stop) => {
                // Nobody has seen it in the queue, so that nobody need be woken.
                meta.locks.release_shared(hold);
                if let Stop::Error(error) = stop { Err(error) } else { Ok(false) }
            }
        }
    }

    fn writing(&self, hold: HoldId, planned: bool, must_commit: bool) -> Running {
        let kind = Kind::Write { hold, planned, must_commit };
        Running { handle: Arc::clone(&self.handle), kind, key: None }
    }

    /// The key that whoever does the I/O of a request is to use.
    fn key_of_request(&self, meta: &Meta) -> Result<Option<Arc<DataKey>>> {
        if self.handle.encrypted { meta.key_for(self.source(meta)) } else { Ok(None) }
    }

    /// Begins a read whose pieces are found.
    fn begin_read(
        &self,
        meta: &Meta,
        (offset, length): (u64, u64),
        key: Option<Arc<DataKey>>,
        request: &mut Request,
    ) -> Start {
        let blocks = blocks_of(offset, length);
        meta.count_read(self.handle.volume, (blocks.end - blocks.start) * BLOCK_BYTES);
        let any = request.reads.iter().any(|piece| piece.address.is_some());
        let fence = meta.fence.begin_request(any);
        request.lay_out_read(offset, length);
        request.lay_out_beside(length);
        let Some(fence) = fence else { return Start::Done };
        let (handle, kind) = (Arc::clone(&self.handle), Kind::Read { fence, offset });
        request.running = Some(Running { handle, kind, key });
        Start::Io
    }

    /// Bytes of a write that is planned in one step.
    pub(in crate::volume) fn step_bytes(&self) -> usize {
        EXTENTS_PER_WRITE * self.store().extent_bytes
    }
}
