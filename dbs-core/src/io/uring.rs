//! The `io_uring` driver: a batch is submitted with one system call, and its requests are at the
//! device together.
#![allow(unsafe_code)]

use super::piece::{Piece, Remaining};
use io_uring::{IoUring, opcode, squeue, types};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Requests a ring has in flight at most; also bounds the bounce buffers of a batch.
const DEPTH: usize = 64;
/// Rings of a storage at most; more threads than that wait for one another.
const RINGS_MAX: usize = 64;
/// How often a request is tried again that the kernel had no resources for.
const ATTEMPTS_MAX: u8 = 100;
/// How often, and after which pause, to ask a kernel again that has no memory for any request.
const SHORTAGE_ATTEMPTS: u32 = 1000;
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

const _: () = assert!(DEPTH == u64::BITS as usize, "the free slots are the bits of a u64");

/// Whether this kernel, and what confines this process, allow the driver.
///
/// # Errors
/// Why not: `EPERM` or `ENOSYS` where it is blocked, `Unsupported` where the kernel is too old.
pub fn uring_available() -> io::Result<()> {
    let ring = IoUring::new(2)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring of this kernel cannot read and write"))
}

/// Rings for any number of threads: each call takes one for itself and brings it back.
pub(super) struct Pool {
    fd: RawFd,
    state: Mutex<PoolState>,
    returned: Condvar,
}

struct PoolState {
    idle: Vec<Ring>,
    /// Rings there are, idle or taken.
    made: usize,
    /// Sinks to `made` when the kernel gives no more.
    limit: usize,
}

impl Pool {
    /// A pool with its first ring, for the descriptor `fd`, which must outlive it.
    pub(super) fn new(fd: RawFd) -> io::Result<Self> {
        let state = PoolState { idle: vec![Ring::new(fd)?], made: 1, limit: RINGS_MAX };
        Ok(Self { fd, state: Mutex::new(state), returned: Condvar::new() })
    }

    pub(super) fn run<'a>(&self, pieces: impl Iterator<Item = Piece<'a>>) -> io::Result<()> {
        let mut pieces = pieces.peekable();
        if pieces.peek().is_none() {
            return Ok(());
        }
        let mut taken = Taken { pool: self, ring: Some(self.take()?) };
        match &mut taken.ring {
            Some(ring) => ring.run(&mut pieces),
            None => unreachable!("a ring was just put there"),
        }
    }

    fn take(&self) -> io::Result<Ring> {
        let mut state = self.state();
        loop {
            if let Some(ring) = state.idle.pop() {
                return Ok(ring);
            }
            if state.made < state.limit {
                state.made += 1;
                drop(state);
                let result = Ring::new(self.fd);
                if result.is_ok() {
                    return result;
                }
                state = self.state();
                state.made -= 1;
                if state.made == 0 {
                    return result;
                }
                state.limit = state.made;
                continue;
            }
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ring out of the pool; goes back when dropped, unless it is broken.
struct Taken<'a> {
    pool: &'a Pool,
    ring: Option<Ring>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let ring = self.ring.take().filter(|ring| ring.clean);
        let mut state = self.pool.state();
        match ring {
            Some(ring) => state.idle.push(ring),
            None => state.made -= 1,
        }
        drop(state);
        self.pool.returned.notify_one();
    }
}

/// One ring with the storage's descriptor registered as number 0.
struct Ring {
    ring: IoUring,
    /// The storage's descriptor, which is not this one's to close.
    file: ManuallyDrop<File>,
    /// Nothing of an earlier batch is in any queue.
    clean: bool,
}

impl Ring {
    fn new(fd: RawFd) -> io::Result<Self> {
        let ring = IoUring::new(DEPTH as u32)?;
        ring.submitter().register_files(&[fd])?;
        // SAFETY: the descriptor outlives the pool, and so the ring.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
        Ok(Self { ring, file, clean: true })
    }

    /// Moves all pieces, up to [`DEPTH`] at a time, and returns when the kernel holds none.
    ///
    /// # Errors
    /// The first failure; no further piece is started after it.
    fn run<'a>(&mut self, pieces: &mut impl Iterator<Item = Piece<'a>>) -> io::Result<()> {
        let mut batch = Batch::new();
        self.clean = false;
        loop {
            while batch.error.is_none()
                && let Some(slot) = batch.free_slot()
                && let Some(piece) = pieces.next()
            {
                batch.put(slot, piece);
                batch.push(slot, &mut self.ring.submission());
            }
            if batch.in_flight == 0 {
                break;
            }
            self.wait(&mut batch)?;
            let (_, mut submission, completion) = self.ring.split();
            for entry in completion {
                let Ok(slot) = usize::try_from(entry.user_data()) else { continue };
                batch.complete(slot, entry.result(), &mut submission, &self.file);
            }
        }
        self.clean = true;
        batch.error.take().map_or(Ok(()), Err)
    }

    /// Hands over what is queued and waits for a completion.
    ///
    /// # Errors
    /// Only if the kernel holds no request: the buffers may be given back.
    ///
    /// # Panics
    /// If requests are in the kernel and it can no longer be asked for their completion; the
    /// batch then turns the panic into an abort.
    fn wait(&mut self, batch: &mut Batch<'_>) -> io::Result<()> {
        let mut shortages = 0;
        loop {
            let Err(error) = self.ring.submit_and_wait(1) else { return Ok(()) };
            let idle = self.ring.submission().len() == batch.in_flight;
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN | libc::EBUSY) if !idle || shortages < SHORTAGE_ATTEMPTS => {
                    shortages += 1;
                    std::thread::sleep(SHORTAGE_PAUSE);
                    if !self.ring.completion().is_empty() {
                        return Ok(());
                    }
                }
                _ if idle => {
                    // The ring is not used again, so nobody ever submits what is queued.
                    batch.in_flight = 0;
                    return Err(error);
                }
                _ if !self.ring.completion().is_empty() => return Ok(()),
                _ => panic!("io_uring failed with requests in the kernel: {error}"),
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel takes a ring down some time after it is closed; the descriptor should not
        // stay open as long. Failing that, it merely does.
        let _ = self.ring.submitter().unregister_files();
    }
}

/// The pieces of one call that are in flight. It owns their borrows of the caller's memory, and
/// must not go away while the kernel may still use that memory.
struct Batch<'a> {
    slots: [Option<Piece<'a>>; DEPTH],
    attempts: [u8; DEPTH],
    /// Bit set: slot free.
    free: u64,
    /// Pushed and not yet completed.
    in_flight: usize,
    error: Option<io::Error>,
}

impl<'a> Batch<'a> {
    fn new() -> Self {
        Self {
            slots: [const { None }; DEPTH],
            attempts: [0; DEPTH],
            free: u64::MAX,
            in_flight: 0,
            error: None,
        }
    }

    fn free_slot(&self) -> Option<usize> {
        (self.free != 0).then_some(self.free.trailing_zeros() as usize)
    }

    fn put(&mut self, slot: usize, piece: Piece<'a>) {
        self.slots[slot] = Some(piece);
        self.attempts[slot] = 0;
        self.free &= !(1 << slot);
    }

    fn clear(&mut self, slot: usize) {
        self.slots[slot] = None;
        self.free |= 1 << slot;
    }

    /// Queues what is still to do of the piece in `slot`.
    fn push(&mut self, slot: usize, submission: &mut squeue::SubmissionQueue<'_>) {
        let Some(piece) = &mut self.slots[slot] else { return };
        let file = types::Fixed(0);
        // The length fits: a piece has at most 1 GiB.
        let entry = match piece.remaining() {
            (Remaining::Read(buf), offset) => {
                let len = buf.len() as u32;
                opcode::Read::new(file, buf.as_mut_ptr(), len).offset(offset).build()
            }
            (Remaining::Write(buf), offset) => {
                let len = buf.len() as u32;
                opcode::Write::new(file, buf.as_ptr(), len).offset(offset).build()
            }
        };
        // SAFETY: the memory is borrowed, or owned, by the piece, which stays untouched in its
        // slot until the completion with this slot's number is taken (`complete`). The batch
        // outlives the request: `Ring::run` leaves only with nothing in flight, and on any other
        // way out, a panic, `drop` aborts the process. The descriptor is registered with the ring.
        let pushed = unsafe { submission.push(&entry.user_data(slot as u64)) };
        match pushed {
            Ok(()) => self.in_flight += 1,
            // Cannot be: there are no more slots than entries. The request was not queued.
            Err(_) => {
                self.clear(slot);
                self.error.get_or_insert_with(|| io::Error::other("the submission queue is full"));
            }
        }
    }

    /// Takes the completion of the piece in `slot`; queues it again if it is not all done.
    fn complete(
        &mut self,
        slot: usize,
        result: i32,
        submission: &mut squeue::SubmissionQueue<'_>,
        file: &File,
    ) {
        let Some(Some(piece)) = self.slots.get_mut(slot) else { return };
        self.in_flight -= 1;
        let outcome = match usize::try_from(result) {
            Ok(count) => piece.advance(count),
            // The kernel could make no thread for it, as where a container may have no more of them, and has not begun it.
            Err(_) if -result == libc::ECANCELED => piece.transfer_some(file),
            Err(_) => match io::Error::from_raw_os_error(-result) {
                error if self.attempts[slot] == ATTEMPTS_MAX => Err(error),
                error if is_transient(&error) => {
                    self.attempts[slot] += 1;
                    Ok(false)
                }
                error => Err(error),
            },
        };
        match outcome {
            Ok(false) if self.error.is_none() => self.push(slot, submission),
            Ok(_) => self.clear(slot),
            Err(error) => {
                self.clear(slot);
                self.error.get_or_insert(error);
            }
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        // The kernel would go on reading or writing memory whose owner has it back. There is no
        // way to wait here, as waiting is what failed: ending the process is all that is sound.
        if self.in_flight > 0 {
            std::process::abort();
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::conformance::{self, Resize};
    use crate::io::file::{FileStorage, Target};
    use crate::io::lock::StoreLock;
    use crate::io::piece::{self, Alignment};
    use crate::io::{ReadRequest, Storage, WriteRequest};
    use std::fs::File;
    use std::os::fd::AsRawFd;

    fn open(path: &std::path::Path) -> Option<FileStorage> {
        if let Err(error) = uring_available() {
            eprintln!("skipped: io_uring is not available here: {error}");
            return None;
        }
        File::create(path).unwrap().set_len(conformance::SIZE_BYTES).unwrap();
        let target = Target::open(StoreLock::acquire(path, false).unwrap()).unwrap();
        Some(FileStorage::uring(target).unwrap())
    }

    fn rings(storage: &FileStorage) -> &Pool {
        storage.rings.as_ref().unwrap()
    }

    #[test]
    fn threads_share_few_rings() {
        let directory = tempfile::tempdir().unwrap();
        let Some(storage) = open(&directory.path().join("store")) else { return };
        rings(&storage).state().limit = 2;
        conformance::run(&storage, Resize::Possible);
        let state = rings(&storage).state();
        assert!(state.made <= 2);
        assert_eq!(state.idle.len(), state.made);
    }

    /// A pipe moves as much as there is, or as there is room for. The kernel goes on with files itself, mostly.
    #[test]
    fn it_goes_on_behind_what_was_moved() {
        use std::io::{Read, Write};
        if let Err(error) = uring_available() {
            eprintln!("skipped: io_uring is not available here: {error}");
            return;
        }
        let data: Vec<_> = (0..300_000_u32).map(|at| (at / 7) as u8).collect();
        let (mut reader, writer) = io::pipe().unwrap();
        let reading = std::thread::spawn(move || {
            let mut found = Vec::new();
            reader.read_to_end(&mut found).map(|_| found)
        });
        let writes = [WriteRequest { offset: 0, buf: &data }];
        let mut pieces = piece::of_writes(&writes, Alignment::NONE);
        Ring::new(writer.as_raw_fd()).unwrap().run(&mut pieces).unwrap();
        drop(writer);
        assert!(reading.join().unwrap().unwrap() == data, "writing");
        let (reader, mut writer) = io::pipe().unwrap();
        let (mut found, bytes) = (vec![0; data.len()], data.clone());
        // Nobody may read it all.
        std::thread::spawn(move || bytes.chunks(77_000).try_for_each(|p| writer.write_all(p)));
        let mut reads = [ReadRequest { offset: 0, buf: &mut found }];
        let mut pieces = piece::of_reads(&mut reads, Alignment::NONE);
        Ring::new(reader.as_raw_fd()).unwrap().run(&mut pieces).unwrap();
        drop(pieces);
        assert!(found == data, "reading");
    }

    #[test]
    fn a_failed_request_fails_its_batch_only() {
        const COUNT: u64 = 300;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let Some(storage) = open(&path) else { return };
        // The driver does not know, so that the failure comes from the kernel.
        File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        for bad in [0, 63, 64, COUNT - 1] {
            let mut bufs = vec![[7; 4096]; COUNT as usize];
            let mut reads: Vec<_> = (0..COUNT)
                .zip(&mut bufs)
                .map(|(index, buf)| {
                    let offset = if index == bad { 2 << 20 } else { index % 256 * 4096 };
                    ReadRequest { offset, buf }
                })
                .collect();
            let error = storage.read_many(&mut reads).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            storage.read_at(0, &mut [0; 4096]).unwrap();
        }
        let state = rings(&storage).state();
        assert_eq!((state.made, state.idle.len()), (1, 1), "the ring is used again");
    }
}
