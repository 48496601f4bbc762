//! What `dbs serve --record-writes` has recorded, and what a power loss leaves of it.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const BLOCK: u64 = 4096;

/// Something that was handed to the kernel, or its end.
pub enum Entry {
    Write {
        ticket: u64,
        offset: u64,
        bytes: std::ops::Range<usize>,
    },
    Flush {
        ticket: u64,
    },
    /// Reads as anything afterwards; here as zeros.
    Discard {
        ticket: u64,
        offset: u64,
        length: u64,
    },
    End {
        ticket: u64,
    },
}

impl Entry {
    /// The ticket of a flush.
    pub fn flush(&self) -> Option<u64> {
        if let Self::Flush { ticket } = self { Some(*ticket) } else { None }
    }
}

/// A record in memory.
pub struct Record {
    bytes: Vec<u8>,
    pub entries: Vec<Entry>,
    /// Where each entry ends in the record.
    ends: Vec<u64>,
}

/// The end of a flush.
pub struct Mark {
    /// Entries up to and with it.
    entries: usize,
    /// Bytes of the record up to there.
    pub bytes: u64,
}

impl Record {
    pub fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let (mut entries, mut ends, mut at) = (Vec::new(), Vec::new(), 0);
        while at + 32 <= bytes.len() {
            let word =
                |index: usize| u64::from_le_bytes(bytes[at + index * 8..][..8].try_into().unwrap());
            let (kind, ticket, offset, length) = (word(0), word(1), word(2), word(3));
            at += 32;
            entries.push(match kind {
                1 => {
                    let start = at;
                    at += length as usize;
                    Entry::Write { ticket, offset, bytes: start..at }
                }
                2 => Entry::Flush { ticket },
                3 => Entry::Discard { ticket, offset, length },
                5 => Entry::End { ticket },
                _ => panic!("an entry of kind {kind} at byte {}", at - 32),
            });
            ends.push(at as u64);
        }
        Self { bytes, entries, ends }
    }

    /// So many ends of flushes, evenly over the record, the last one among them.
    pub fn marks(&self, count: usize) -> Vec<Mark> {
        let mut flushes = HashSet::new();
        let mut all = Vec::new();
        for (index, entry) in self.entries.iter().enumerate() {
            match entry {
                Entry::Flush { ticket } => drop(flushes.insert(*ticket)),
                Entry::End { ticket } if flushes.remove(ticket) => {
                    all.push(Mark { entries: index + 1, bytes: self.ends[index] });
                }
                _ => {}
            }
        }
        let (total, count) = (all.len(), count.min(all.len()));
        assert!(count > 0, "nothing was flushed");
        let chosen: HashSet<_> = (1..=count).map(|n| n * total / count - 1).collect();
        all.into_iter().enumerate().filter(|(n, _)| chosen.contains(n)).map(|(_, m)| m).collect()
    }

    /// The storage under this record, from an image as of its beginning on.
    pub fn replay(&self, image: PathBuf, seed: u64) -> Replay<'_> {
        Replay {
            record: self,
            image,
            next: 0,
            flushes: self.entries.iter().filter_map(Entry::flush).collect(),
            ended: HashSet::new(),
            covers: HashMap::new(),
            pending: Vec::new(),
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            lost: 0,
            kept: 0,
        }
    }
}

/// The durable content of the storage, and what is on its way.
pub struct Replay<'a> {
    record: &'a Record,
    /// Everything that a flush has made durable.
    image: PathBuf,
    next: usize,
    /// Tickets of all flushes.
    flushes: HashSet<u64>,
    /// Tickets of changes that have ended.
    ended: HashSet<u64>,
    /// For each flush on its way, what had ended when it began.
    covers: HashMap<u64, HashSet<u64>>,
    /// Changes that no flush has covered, by ticket and entry, in the order they began.
    pending: Vec<(u64, usize)>,
    random: u64,
    /// Changes left out of all images, and those in them, that no flush had covered.
    pub lost: usize,
    pub kept: usize,
}

impl Replay<'_> {
    /// Makes in `path` what a power loss may leave that comes after the mark and before the next
    /// flush has ended: how many blocks that no flush had covered it has lost, how many it has not,
    /// and where in the record it came.
    pub fn crash_after(&mut self, mark: &Mark, path: &Path) -> (usize, usize, u64) {
        let image = File::options().write(true).open(&self.image).unwrap();
        while self.next < mark.entries {
            self.take(&image);
        }
        let mut rest = self.record.entries[self.next..].iter();
        let ends =
            |entry: &Entry| matches!(entry, Entry::End { ticket } if self.flushes.contains(ticket));
        let room = rest.position(ends).unwrap_or(0) as u64;
        for _ in 0..self.below(room + 1) {
            self.take(&image);
        }
        let copied = Command::new("cp").arg("--sparse=always").arg(&self.image).arg(path).status();
        assert!(copied.unwrap().success());
        let crashed = File::options().write(true).open(path).unwrap();
        // None, all, each block as it comes, or a beginning.
        let (way, before) = (self.below(4), (self.lost, self.kept));
        let first = self.below(self.pending.len() as u64 + 1) as usize;
        for (index, (_, entry)) in self.pending.clone().into_iter().enumerate() {
            self.apply(entry, &crashed, |replay| match way {
                0 => false,
                1 => true,
                2 => replay.below(2) == 0,
                _ => index < first,
            });
        }
        let at = self.record.ends[self.next.max(1) - 1];
        (self.lost - before.0, self.kept - before.1, at)
    }

    /// The next entry.
    fn take(&mut self, image: &File) {
        match &self.record.entries[self.next] {
            Entry::Write { ticket, .. } | Entry::Discard { ticket, .. } => {
                self.pending.push((*ticket, self.next));
            }
            Entry::Flush { ticket } => {
                self.covers.insert(*ticket, self.ended.clone());
            }
            Entry::End { ticket } => match self.covers.remove(ticket) {
                None => drop(self.ended.insert(*ticket)),
                Some(covered) => {
                    let counts = (self.lost, self.kept);
                    for (ticket, entry) in std::mem::take(&mut self.pending) {
                        if covered.contains(&ticket) {
                            self.apply(entry, image, |_| true);
                            self.ended.remove(&ticket);
                        } else {
                            self.pending.push((ticket, entry));
                        }
                    }
                    (self.lost, self.kept) = counts;
                }
            },
        }
        self.next += 1;
    }

    /// Makes a change, in each block that `keep` says.
    fn apply(&mut self, entry: usize, file: &File, mut keep: impl FnMut(&mut Self) -> bool) {
        let record = self.record;
        let (offset, length, bytes) = match &record.entries[entry] {
            Entry::Write { offset, bytes, .. } => {
                (*offset, bytes.len() as u64, Some(&record.bytes[bytes.clone()]))
            }
            Entry::Discard { offset, length, .. } => (*offset, *length, None),
            _ => return,
        };
        let mut at = 0;
        while at < length {
            let part = (BLOCK - (offset + at) % BLOCK).min(length - at);
            if keep(self) {
                let zeros = [0; BLOCK as usize];
                let range = at as usize..(at + part) as usize;
                let bytes = bytes.map_or(&zeros[..range.len()], |bytes| &bytes[range]);
                file.write_all_at(bytes, offset + at).unwrap();
                self.kept += 1;
            } else {
                self.lost += 1;
            }
            at += part;
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }
}
