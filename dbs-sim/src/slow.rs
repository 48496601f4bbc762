//! Reads that are on their way for many steps: planned at one, read from the disk at a later one.
//! Whatever happens in between, such a read gives what the volume held at some moment of it.

use crate::content::{SECTOR, SECTORS, Tags, identify};
use crate::disk::SimDisk;
use crate::model::Volume as Modelled;
use dbs_core::Volume;
use dbs_core::io::Storage;
use dbs_core::volume::{Read, Request, Start};

/// A read of a whole head.
pub struct SlowRead {
    /// The model's number of the volume.
    pub id: u32,
    volume: Volume,
    request: Request,
    blocks: Vec<Seen>,
}

/// What a block has held since the read began.
#[derive(Default)]
struct Seen {
    tags: Vec<Tags>,
    any: bool,
}

impl SlowRead {
    /// Begins to read the whole blocks of a head through an open handle; `None` if there is nothing to
    /// read from the disk.
    ///
    /// # Errors
    /// What the store said.
    pub fn begin(volume: &Volume, model: &Modelled) -> Result<Option<Self>, String> {
        let spec = volume.spec().to_owned();
        let failed = |e| format!("a slow read of {spec}: {e}");
        let blocks = model.head.sectors as usize / SECTORS;
        let mut buf = vec![0; blocks * SECTORS * SECTOR];
        let blocks = std::iter::repeat_with(Seen::default).take(blocks).collect();
        let (id, volume) = (model.id, volume.clone());
        let mut slow = Self { id, volume, request: Request::new(), blocks };
        slow.note(model);
        // Before, as without the checksums in memory it would have to wait.
        slow.volume.read_at(0, &mut buf).map_err(failed)?;
        slow.compare(&buf, &format!("a read of {}", slow.volume.spec()))?;
        let start = slow.volume.start_read(0, buf.len() as u64, &mut slow.request);
        Ok((start.map_err(failed)? == Start::Io).then_some(slow))
    }

    /// The head holds this now.
    pub fn note(&mut self, model: &Modelled) {
        // The layers of a volume that is being rebuilt may change under it.
        let any = model.rebuilding || model.tree.is_some();
        let whole = model.head.sectors as usize / SECTORS;
        for (at, seen) in self.blocks.iter_mut().enumerate() {
            let now = model.head.blocks().get(at);
            // Behind the end of a volume that has shrunk there is what was there, beside what is new.
            seen.any |= any || at >= whole || now.is_some_and(|block| block.any);
            let tags = now.map(|block| block.now).unwrap_or_default();
            if !seen.tags.contains(&tags) {
                seen.tags.push(tags);
            }
        }
    }

    /// Reads from the disk, and compares.
    ///
    /// # Errors
    /// What it should not have read.
    pub fn end(mut self, disk: &SimDisk) -> Result<(), String> {
        let what = format!("a slow read of {}", self.volume.spec());
        let mut buf = vec![0xa5; self.blocks.len() * SECTORS * SECTOR];
        for zeros in self.request.zeros() {
            buf[zeros.clone()].fill(0);
        }
        for part in self.request.segments() {
            let buf = &mut buf[part.start..part.start + part.length];
            disk.read_at(part.device, buf).map_err(|e| format!("{what}: {e}"))?;
        }
        match self.request.finish_read(Ok(()), &buf) {
            Ok(Read::Done) => {}
            // Its bytes count for nothing.
            Ok(Read::Again) => return Ok(()),
            Err(e) => return Err(format!("{what}: {e}")),
        }
        self.compare(&buf, &what)
    }

    fn compare(&self, buf: &[u8], what: &str) -> Result<(), String> {
        for (at, sectors) in buf.chunks_exact(SECTORS * SECTOR).enumerate() {
            let mut tags = Tags::default();
            for (i, sector) in sectors.chunks_exact(SECTOR).enumerate() {
                let position = at * SECTORS + i;
                tags[i] = identify(sector, position as u64)
                    .map_err(|e| format!("{what}: sector {position} holds {e}"))?;
            }
            let seen = &self.blocks[at];
            if !seen.any && !seen.tags.contains(&tags) {
                return Err(format!(
                    "{what}: block {at} holds {tags:?}, not any of {:?}",
                    seen.tags
                ));
            }
        }
        Ok(())
    }
}
