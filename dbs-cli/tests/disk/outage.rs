//! What power cuts leave of a disk.

use super::{BLOCK, Disk, SECTOR, What};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Power cuts of a disk, each at the same moment as the one before or later.
pub struct Outages<'a> {
    disk: &'a Disk,
    /// Writes tear at sectors before this byte, at blocks behind it.
    data: usize,
    /// What syncs have made durable.
    durable: PathBuf,
    /// Things of the disk's record that are in there.
    applied: usize,
    /// Parts that no sync had covered: left out of all images, and in them.
    pub lost: usize,
    pub kept: usize,
}

impl<'a> Outages<'a> {
    /// The file `durable` is made.
    pub fn new(disk: &'a Disk, data: u64, durable: PathBuf) -> Self {
        File::create(&durable).unwrap();
        Self { disk, data: data as usize, durable, applied: 0, lost: 0, kept: 0 }
    }

    /// Makes in `path` what a power cut leaves when `cut` things are done: what had been done when a sync
    /// began that is among them, and any part of what came after or was on its way.
    pub fn image(&mut self, cut: usize, rng: &mut fastrand::Rng, path: &Path) {
        let state = self.disk.state();
        let syncs = state.log[..cut].iter().filter(|event| matches!(event.what, What::Sync));
        let covered = syncs.map(|sync| sync.begun).max().unwrap_or(0);
        assert!(self.applied <= covered, "moments go on");
        let durable = File::options().write(true).open(&self.durable).unwrap();
        for event in &state.log[self.applied..covered] {
            event.what.apply(&durable, self.data, &mut || true);
        }
        self.applied = covered;
        let _gone = std::fs::remove_file(path);
        let copy = Command::new("cp").arg("--sparse=always").arg(&self.durable).arg(path).status();
        assert!(copy.unwrap().success());
        let image = File::options().write(true).open(path).unwrap();
        // All, none, each part for itself, or a beginning.
        let way = rng.usize(0..6);
        let first = rng.usize(covered..=cut);
        for (at, event) in state.log.iter().enumerate().skip(covered) {
            if at >= cut && event.begun >= cut {
                continue;
            }
            event.what.apply(&image, self.data, &mut || {
                let chance = [256, 0, 128, 240, 16].get(way);
                let keeps = chance.map_or(at < first, |chance| rng.u16(0..256) < *chance);
                *(if keeps { &mut self.kept } else { &mut self.lost }) += 1;
                keeps
            });
        }
    }
}

impl What {
    /// Does it again, as far as it is kept.
    fn apply(&self, file: &File, data: usize, keeps: &mut dyn FnMut() -> bool) {
        let size = file.metadata().unwrap().len() as usize;
        match self {
            Self::Sync => {}
            Self::Size(new) => {
                if *new > size || keeps() {
                    file.set_len(*new as u64).unwrap();
                }
            }
            Self::Write { offset, data: written } => {
                let unit = if *offset < data { SECTOR } else { BLOCK };
                for (part, at) in written.chunks(unit).zip((*offset..).step_by(unit)) {
                    if keeps() && at + part.len() <= size {
                        file.write_all_at(part, at as u64).unwrap();
                    }
                }
            }
            Self::Punch { offset, length } => {
                for at in (*offset..offset + length).step_by(BLOCK) {
                    let end = (at + BLOCK).min(offset + length).min(size);
                    if keeps() && at < end {
                        file.write_all_at(&[0; BLOCK][..end - at], at as u64).unwrap();
                    }
                }
            }
        }
    }
}
