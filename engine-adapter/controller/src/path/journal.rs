//! The last requests to replicas, for whoever looks for what was slow. Each reactor keeps its own, in a
//! ring it alone writes: for a request that is some words, without a lock or an allocation.

use dbs_frontend::Action;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use std::fmt;
use std::time::{Duration, SystemTime};

/// Requests kept by all reactors together, as many as upstream keeps, ...
const ENTRIES: usize = 4000;
/// ... and by each at least.
const ENTRIES_MIN: usize = 250;

/// What a replica was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalKind {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To discard.
    Unmap,
    /// Whether it is well.
    Ping,
    /// To make what was written durable.
    Flush,
    /// To write a damaged block again.
    Heal,
}

impl JournalKind {
    pub(super) fn of(action: Action) -> Self {
        match action {
            Action::Read => Self::Read,
            Action::Write { .. } => Self::Write,
            Action::Discard => Self::Unmap,
            Action::Flush => Self::Flush,
        }
    }

    /// As upstream abbreviates it, which knows neither flushes nor healing.
    const fn letter(self) -> char {
        match self {
            Self::Read => 'R',
            Self::Write => 'W',
            Self::Unmap => 'U',
            Self::Ping => 'P',
            Self::Flush => 'F',
            Self::Heal => 'H',
        }
    }
}

/// How a request to a replica has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalEnd {
    /// It has not yet.
    Pending,
    /// After so long, well.
    Done(Duration),
    /// After so long, badly.
    Failed(Duration),
}

/// A request to a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalEntry {
    /// Which one, as error texts have it.
    pub replica: String,
    /// What for.
    pub kind: JournalKind,
    /// The number that it went under.
    pub sequence: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// When it was sent.
    pub asked: SystemTime,
    /// How it has ended.
    pub end: JournalEnd,
}

impl fmt::Display for JournalEntry {
    /// A line as upstream's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = Timestamp::try_from(self.asked).unwrap_or(Timestamp::UNIX_EPOCH);
        let time = time.to_zoned(TimeZone::UTC).strftime("%b %e %H:%M:%S%.6f");
        let (length, offset) = (self.length / 1024, self.offset / 1024);
        let (sequence, replica, kind) = (self.sequence, &self.replica, self.kind.letter());
        write!(f, "{time}: REQ {sequence} ->{replica} {kind}[{length:3}kB@{offset}kB] ")?;
        match self.end {
            JournalEnd::Pending => write!(f, "pending"),
            JournalEnd::Done(took) => write!(f, "{:8}us", took.as_micros()),
            JournalEnd::Failed(took) => write!(f, "{:8}us failed", took.as_micros()),
        }
    }
}

/// A request, as a shard keeps it: times since the path's epoch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    /// Number of the replica's name.
    pub target: u16,
    pub kind: JournalKind,
    pub sequence: u32,
    pub length: u32,
    pub offset: u64,
    pub asked: Duration,
    pub end: JournalEnd,
}

/// The ring of one reactor.
pub(super) struct Journal {
    ring: Vec<Kept>,
    /// Where the next one goes, once the ring is full.
    next: usize,
    most: usize,
    /// Names of replicas, each once; they outlive their replicas.
    names: Vec<String>,
}

impl Journal {
    /// Room for one reactor's share.
    pub fn new(reactors: usize) -> Self {
        let most = (ENTRIES / reactors.max(1)).max(ENTRIES_MIN);
        Self { ring: Vec::with_capacity(most), next: 0, most, names: Vec::new() }
    }

    /// The number of a replica's name.
    pub fn target(&mut self, name: &str) -> u16 {
        let known = self.names.iter().position(|known| known == name);
        let index = known.unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        // So many names are not seen in a process's life; the last one would stand for all others.
        u16::try_from(index).unwrap_or(u16::MAX)
    }

    /// Keeps a request that has ended, in place of the oldest.
    #[inline]
    pub fn keep(&mut self, kept: Kept) {
        if self.ring.len() < self.most {
            self.ring.push(kept);
        } else if let Some(oldest) = self.ring.get_mut(self.next) {
            *oldest = kept;
            self.next = if self.next + 1 == self.most { 0 } else { self.next + 1 };
        }
    }

    /// Takes all of them, oldest first; the next call begins anew, as upstream's does.
    pub fn take(&mut self) -> Vec<Kept> {
        let mut all = std::mem::replace(&mut self.ring, Vec::with_capacity(self.most));
        all.rotate_left(std::mem::take(&mut self.next));
        all
    }

    /// An entry for others, with the wall clock's time at the path's epoch.
    pub fn show(&self, kept: Kept, epoch: SystemTime) -> JournalEntry {
        let Kept { target, kind, sequence, length, offset, asked, end } = kept;
        let replica = self.names.get(usize::from(target)).cloned().unwrap_or_default();
        let asked = epoch + asked;
        JournalEntry { replica, kind, sequence, offset, length, asked, end }
    }
}

/// Keeps the newest `limit` of those that have ended, of all reactors, and all that have not; 0 or less
/// is no limit.
pub(super) fn newest(mut all: Vec<JournalEntry>, limit: i64) -> Vec<JournalEntry> {
    // Those that have not ended come last.
    all.sort_by_key(|entry| (entry.end == JournalEnd::Pending, entry.asked));
    let ended = all.iter().filter(|entry| entry.end != JournalEnd::Pending).count();
    let limit = usize::try_from(limit).unwrap_or(0);
    if limit > 0 && ended > limit {
        all.drain(..ended - limit);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(sequence: u32) -> Kept {
        Kept {
            target: 0,
            kind: JournalKind::Write,
            sequence,
            length: 4096,
            offset: 8192,
            asked: Duration::from_micros(u64::from(sequence)),
            end: JournalEnd::Done(Duration::from_micros(120)),
        }
    }

    #[test]
    fn the_newest_are_kept_in_order() {
        let mut journal = Journal::new(64);
        for round in 0..3_u32 {
            let first = round * 1000;
            (first..first + 260).for_each(|sequence| journal.keep(kept(sequence)));
            let all: Vec<u32> = journal.take().iter().map(|kept| kept.sequence).collect();
            assert_eq!(all, (first + 10..first + 260).collect::<Vec<_>>());
        }
        assert!(journal.take().is_empty());
        assert_eq!((journal.target("a"), journal.target("b"), journal.target("a")), (0, 1, 0));
    }

    #[test]
    fn lines_are_upstream_s() {
        let mut journal = Journal::new(1);
        journal.target("tcp://10.0.0.1:10000");
        let epoch = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_355_445);
        let ended = journal.show(kept(7), epoch);
        assert_eq!(
            ended.to_string(),
            "Jan  2 12:04:05.000007: REQ 7 ->tcp://10.0.0.1:10000 W[  4kB@8kB]      120us"
        );
        let failed = JournalEntry { end: JournalEnd::Failed(Duration::ZERO), ..ended.clone() };
        assert!(failed.to_string().ends_with("       0us failed"));
        let pending = JournalEntry { end: JournalEnd::Pending, ..ended.clone() };
        assert!(pending.to_string().ends_with("[  4kB@8kB] pending"));
        let all = vec![pending.clone(), journal.show(kept(9), epoch), ended.clone()];
        let sequences = |limit| -> Vec<u32> {
            newest(all.clone(), limit).iter().map(|entry| entry.sequence).collect()
        };
        assert_eq!(
            (sequences(0), sequences(1), sequences(-1)),
            (vec![7, 9, 7], vec![9, 7], vec![7, 9, 7])
        );
    }
}
