//! The tail: records acknowledged but not yet in a durable commit group, in memory that survives
//! the process. Two halves: one for the group being committed, one for the next.

use crate::format::crc::crc32c;
use crate::io::TailMemory;
use crate::sabotage::{self, Bug};
use std::sync::atomic::{Ordering, compiler_fence};

const MAGIC: [u8; 8] = *b"DBStail2";
const HEADER_BYTES: usize = 4096;
const HALF_HEADER_BYTES: usize = 64;
/// Length and checksum in front of each record batch.
const FRAME_BYTES: usize = 8;

/// What ties a tail to one state of one store in one boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailKey {
    /// Store.
    pub store: [u8; 16],
    /// Boot.
    pub boot: [u8; 16],
    /// Session that writes it.
    pub session: u64,
}

/// The writer's side.
pub struct Tail {
    memory: Box<dyn TailMemory>,
    key: TailKey,
    /// Group whose records are appended now.
    group: u64,
    used: usize,
    /// Last group of which records are missing here, while it is not durable. Later records may
    /// build on those, so that none is taken until it is.
    missing: Option<u64>,
    /// What it held was lost.
    lost: bool,
    /// Bytes that it holds of the group being committed.
    flying: usize,
    /// Bytes that it may hold of both groups together.
    limit: usize,
}

impl Tail {
    /// Starts an empty tail for `group`; whatever was there is gone.
    pub fn start(mut memory: Box<dyn TailMemory>, key: &TailKey, group: u64) -> Self {
        let bytes = memory.bytes_mut();
        // The key goes last: a half-made tail belongs to nobody.
        bytes[..HEADER_BYTES].fill(0);
        compiler_fence(Ordering::SeqCst);
        let (missing, limit) = (None, usize::MAX);
        let mut tail =
            Self { memory, key: *key, group, used: 0, missing, lost: false, flying: 0, limit };
        tail.begin();
        tail
    }

    /// Takes no more than so many bytes of what is not durable: recovery puts all of it into one group.
    pub fn limited(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Makes the memory an empty tail for the current group.
    fn begin(&mut self) {
        let (key, group) = (self.key, self.group);
        (self.used, self.flying) = (0, 0);
        self.reset_half(group + 1, 0);
        self.reset_half(group, group);
        let bytes = self.memory.bytes_mut();
        bytes[8..24].copy_from_slice(&key.store);
        bytes[24..40].copy_from_slice(&key.boot);
        bytes[40..48].copy_from_slice(&key.session.to_le_bytes());
        let crc = crc32c(&bytes[8..48]);
        bytes[48..52].copy_from_slice(&crc.to_le_bytes());
        compiler_fence(Ordering::SeqCst);
        bytes[..8].copy_from_slice(&MAGIC);
    }

    /// What the tail held is gone, and its memory zeros: it is of use again from the group after the
    /// current one on.
    fn begin_anew(&mut self) {
        self.begin();
        self.missing = Some(self.group);
        self.lost = true;
    }

    /// Whether what it held was lost since the last call.
    pub fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }

    /// Appends records of the current group; `false` if they do not fit or records before them
    /// did not (commit first).
    pub fn append(&mut self, records: &[u8]) -> bool {
        if sabotage::is(Bug::SkipTail) {
            return true;
        }
        if !self.memory.is_kept() && !sabotage::is(Bug::TrustLostTail) {
            self.begin_anew();
        }
        let appended = self.missing.is_none() && self.append_frame(records);
        if !appended {
            self.missing = Some(self.group);
        }
        appended
    }

    /// A group is durable: nobody needs its records here any more.
    pub fn group_durable(&mut self, sequence: u64) {
        if self.missing.is_some_and(|group| group <= sequence) {
            self.missing = None;
        }
        if sequence + 1 >= self.group {
            self.flying = 0;
        }
    }

    fn append_frame(&mut self, records: &[u8]) -> bool {
        let used = self.used;
        if self.flying + used + FRAME_BYTES + records.len() > self.limit {
            return false;
        }
        let half = half_mut(self.memory.bytes_mut(), self.group);
        let Some(room) = half.get_mut(HALF_HEADER_BYTES + used..) else { return false };
        if room.len() < FRAME_BYTES + records.len() {
            return false;
        }
        room[..4].copy_from_slice(&(records.len() as u32).to_le_bytes());
        room[4..8].copy_from_slice(&crc32c(records).to_le_bytes());
        room[FRAME_BYTES..][..records.len()].copy_from_slice(records);
        self.used += FRAME_BYTES + records.len();
        // Published last: a process killed in between leaves the shorter, valid tail.
        compiler_fence(Ordering::SeqCst);
        half[8..16].copy_from_slice(&(self.used as u64).to_le_bytes());
        true
    }

    /// The current group is being committed: records from now on belong to the next one. Its half
    /// is free, as the group before the current one is durable.
    pub fn next_group(&mut self) {
        self.reset_half(self.group + 1, self.group + 1);
        self.group += 1;
        self.flying = std::mem::take(&mut self.used);
    }

    /// The store is closed in good order, or nobody knows any more what is stored of what its records point to.
    pub fn remove(mut self) {
        forget(&mut *self.memory);
    }

    fn reset_half(&mut self, which: u64, group: u64) {
        let half = half_mut(self.memory.bytes_mut(), which);
        half[8..16].fill(0);
        compiler_fence(Ordering::SeqCst);
        half[..8].copy_from_slice(&group.to_le_bytes());
    }
}

/// Makes the memory no tail of any store, and removes its file.
pub fn forget(memory: &mut dyn TailMemory) {
    memory.bytes_mut()[..8].fill(0);
    memory.remove();
}

/// The records a tail holds beyond the last durable group, oldest first; `None` if the memory is
/// no tail of this store, boot and session.
pub fn replay(memory: &mut dyn TailMemory, key: &TailKey, durable: u64) -> Option<Vec<Vec<u8>>> {
    let bytes = memory.bytes_mut();
    let crc = u32::from_le_bytes(bytes[48..52].try_into().ok()?);
    if bytes[..8] != MAGIC || crc32c(&bytes[8..48]) != crc {
        return None;
    }
    let session = u64::from_le_bytes(bytes[40..48].try_into().ok()?);
    let stale = bytes[8..24] != key.store || bytes[24..40] != key.boot || session != key.session;
    if stale && !sabotage::is(Bug::ReplayStaleTail) {
        return None;
    }
    let mut batches = Vec::new();
    for group in [durable + 1, durable + 2] {
        let half = half_mut(bytes, group);
        let found = u64::from_le_bytes(half[..8].try_into().ok()?);
        if found != group && !sabotage::is(Bug::ReplayStaleTail) {
            // What a later half holds builds on this group.
            break;
        }
        let used = u64::from_le_bytes(half[8..16].try_into().ok()?) as usize;
        let mut rest = half.get(HALF_HEADER_BYTES..)?.get(..used)?;
        while let Some((head, body)) = rest.split_at_checked(FRAME_BYTES) {
            let length = u32::from_le_bytes(head[..4].try_into().ok()?) as usize;
            let crc = u32::from_le_bytes(head[4..].try_into().ok()?);
            let (records, next) = body.split_at_checked(length)?;
            if crc32c(records) != crc {
                return None;
            }
            batches.push(records.to_vec());
            rest = next;
        }
    }
    Some(batches)
}

fn half_mut(bytes: &mut [u8], group: u64) -> &mut [u8] {
    let half = (bytes.len() - HEADER_BYTES) / 2;
    let start = HEADER_BYTES + (group % 2) as usize * half;
    &mut bytes[start..start + half]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone)]
    struct Shared(Arc<Mutex<Box<[u8]>>>);

    impl TailMemory for Shared {
        fn bytes_mut(&mut self) -> &mut [u8] {
            let mut guard = self.0.lock().unwrap();
            let bytes: *mut [u8] = &mut **guard;
            // SAFETY: the tests use one handle at a time.
            #[allow(unsafe_code)]
            unsafe {
                &mut *bytes
            }
        }
        fn remove(&mut self) {}
    }

    const KEY: TailKey = TailKey { store: [1; 16], boot: [2; 16], session: 3 };

    fn memory() -> Shared {
        Shared(Arc::new(Mutex::new(vec![0xee; 64 << 10].into_boxed_slice())))
    }

    #[test]
    fn replays_only_what_is_not_durable() {
        let mut shared = memory();
        let mut tail = Tail::start(Box::new(shared.clone()), &KEY, 5);
        assert!(tail.append(b"five"));
        tail.next_group();
        assert!(tail.append(b"six"));
        let replay = |memory: &mut Shared, durable| replay(memory, &KEY, durable).unwrap();
        assert_eq!(replay(&mut shared, 4), [b"five".to_vec(), b"six".to_vec()]);
        assert_eq!(replay(&mut shared, 5), [b"six".to_vec()]);
        assert!(replay(&mut shared, 6).is_empty());
        tail.next_group();
        assert_eq!(replay(&mut shared, 5), [b"six".to_vec()]);
        assert!(replay(&mut shared, 4).is_empty(), "what builds on group 5, which is not there");
    }

    #[test]
    fn another_boot_session_or_store_replays_nothing() {
        let mut shared = memory();
        assert!(replay(&mut shared, &KEY, 0).is_none());
        let mut tail = Tail::start(Box::new(shared.clone()), &KEY, 1);
        assert!(tail.append(b"one"));
        for key in [
            TailKey { store: [9; 16], ..KEY },
            TailKey { boot: [9; 16], ..KEY },
            TailKey { session: 9, ..KEY },
        ] {
            assert!(replay(&mut shared, &key, 0).is_none());
        }
        tail.remove();
        assert!(replay(&mut shared, &KEY, 0).is_none());
    }

    #[test]
    fn a_full_half_refuses() {
        let mut tail = Tail::start(Box::new(memory()), &KEY, 1);
        let batch = [7; 4000];
        let fits = (0..100).take_while(|_| tail.append(&batch)).count();
        assert_eq!(fits, 7);
        tail.next_group();
        tail.group_durable(1);
        assert!(tail.append(&batch));
    }

    #[test]
    fn both_halves_together_are_limited() {
        let mut shared = memory();
        let mut tail = Tail::start(Box::new(shared.clone()), &KEY, 1).limited(4 * 108);
        let batch = [7; 100];
        assert!((0..3).all(|_| tail.append(&batch)));
        tail.next_group();
        assert!(tail.append(&batch) && !tail.append(&batch), "group 1 counts until it is durable");
        assert_eq!(replay(&mut shared, &KEY, 0).unwrap().len(), 4);
        tail.next_group();
        tail.group_durable(2);
        assert!((0..4).all(|_| tail.append(&batch)) && !tail.append(&batch));
        assert_eq!(replay(&mut shared, &KEY, 2).unwrap().len(), 4);
    }

    #[test]
    fn no_records_follow_missing_ones() {
        let mut shared = memory();
        let mut tail = Tail::start(Box::new(shared.clone()), &KEY, 1);
        assert!(tail.append(b"first"));
        assert!(!tail.append(&[7; 40_000]));
        assert!(!tail.append(b"fits, but builds on what is missing"));
        tail.next_group();
        assert!(!tail.append(b"group 1 is not durable"));
        assert_eq!(replay(&mut shared, &KEY, 0).unwrap(), [b"first".to_vec()]);
        tail.group_durable(1);
        assert!(!tail.append(b"records of group 2 are missing too"));
        tail.next_group();
        tail.group_durable(2);
        assert!(tail.append(b"third"));
        assert_eq!(replay(&mut shared, &KEY, 2).unwrap(), [b"third".to_vec()]);
    }
}
