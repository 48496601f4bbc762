//! What a volume must hold, and verified I/O that keeps it so.

use super::io::{Address, Client, IoError};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const SECTOR: usize = 512;
const BLOCK: usize = 4096;
/// Clients that work on a volume at once, each on its own part.
const WORKERS: usize = 4;

/// What is known of a sector.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Known {
    Yes,
    /// A write to it was not acknowledged: old or new, and what is read once stays.
    OnceRead,
    /// Unmapped where the replica does not promise zeros.
    No,
}

/// The content of a volume.
#[derive(Clone)]
pub struct Image {
    bytes: Vec<u8>,
    known: Vec<Known>,
}

impl Image {
    /// A new volume.
    pub fn zero(size: usize) -> Self {
        Self { bytes: vec![0; size], known: vec![Known::Yes; size / SECTOR] }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The volume grows; what is new reads zero.
    pub fn grow(&mut self, size: usize) {
        self.bytes.resize(size, 0);
        self.known.resize(size / SECTOR, Known::Yes);
    }

    /// Writes, here and there.
    pub fn write(&mut self, client: &mut Client, offset: usize, data: &[u8]) {
        client.write(offset as u64, data).unwrap();
        self.wrote(offset, data);
    }

    /// Notes what was written (whole sectors).
    pub fn wrote(&mut self, offset: usize, data: &[u8]) {
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
        self.mark(offset, data.len(), Known::Yes);
    }

    fn mark(&mut self, offset: usize, length: usize, known: Known) {
        self.known[offset / SECTOR..(offset + length) / SECTOR].fill(known);
    }

    /// Compares what was read at `offset` and learns from it; the first byte that should not be.
    fn differs(&mut self, offset: usize, read: &[u8]) -> Option<usize> {
        for (index, sector) in read.chunks(SECTOR).enumerate() {
            let at = offset + index * SECTOR;
            let known = &mut self.known[at / SECTOR];
            let expected = &mut self.bytes[at..at + SECTOR];
            match *known {
                Known::Yes if expected != sector => {
                    return expected
                        .iter()
                        .zip(sector)
                        .position(|(a, b)| a != b)
                        .map(|byte| at + byte);
                }
                Known::OnceRead => {
                    expected.copy_from_slice(sector);
                    *known = Known::Yes;
                }
                Known::Yes | Known::No => {}
            }
        }
        None
    }

    /// Reads everything; it must be as it should.
    pub fn check(&mut self, what: &str, address: &Address) {
        let read = read_all(address, self.len());
        self.check_bytes(what, &read);
    }

    /// The same for bytes read already.
    pub fn check_bytes(&mut self, what: &str, read: &[u8]) {
        assert_eq!(read.len(), self.len(), "{what}: size");
        if let Some(at) = self.differs(0, read) {
            let from = at / SECTOR * SECTOR;
            let (got, want) = (&read[from..from + 16], &self.bytes[from..from + 16]);
            panic!(
                "{what}: byte {at} differs; the sector holds {got:02x?}..., should hold {want:02x?}..."
            );
        }
    }
}

/// All that can be read at an address.
pub fn read_all(address: &Address, size: usize) -> Vec<u8> {
    let mut client = Client::connect(address).unwrap();
    let mut all = vec![0; size];
    for (index, piece) in all.chunks_mut(1 << 20).enumerate() {
        client
            .read((index as u64) << 20, piece)
            .unwrap_or_else(|e| panic!("reading {address:?}: {e}"));
    }
    all
}

/// What the requests are like.
#[derive(Clone, Copy)]
pub struct Mix {
    /// Out of a hundred.
    pub writes: u8,
    pub unmaps: u8,
    /// Only whole blocks, or any sectors.
    pub whole_blocks: bool,
    /// Whether an unmapped block must read zero from then on.
    pub unmapped_is_zero: bool,
    pub largest: usize,
    /// Pause after each request of a worker.
    pub pause: Duration,
    /// Whether failing requests are counted instead of failing the test.
    pub may_fail: bool,
}

impl Default for Mix {
    fn default() -> Self {
        Self {
            writes: 50,
            unmaps: 0,
            whole_blocks: false,
            unmapped_is_zero: false,
            largest: 128 << 10,
            pause: Duration::ZERO,
            may_fail: false,
        }
    }
}

impl Mix {
    /// Light enough to leave the machine to a rebuild.
    pub fn gentle() -> Self {
        Self { pause: Duration::from_millis(8), largest: 64 << 10, ..Self::default() }
    }
}

/// Verified I/O in the background.
pub struct Load {
    parts: Vec<Arc<Mutex<Image>>>,
    workers: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    pause: AtomicBool,
    requests: AtomicU64,
    errors: Mutex<Vec<String>>,
}

impl Load {
    /// Starts it; each request changes and checks `image`, which `stop` gives back.
    pub fn start(address: &Address, image: Image, mix: Mix) -> Self {
        Self::limited(address, image, mix, u64::MAX)
    }

    fn limited(address: &Address, image: Image, mix: Mix, requests: u64) -> Self {
        let shared = Arc::new(Shared::default());
        let size = (image.len() / WORKERS).next_multiple_of(BLOCK);
        let mut parts = Vec::new();
        let mut workers = Vec::new();
        for (index, bytes) in image.bytes.chunks(size).enumerate() {
            let known = image.known[index * size / SECTOR..][..bytes.len() / SECTOR].to_vec();
            let part = Arc::new(Mutex::new(Image { bytes: bytes.to_vec(), known }));
            parts.push(Arc::clone(&part));
            let shared = Arc::clone(&shared);
            let mut worker =
                Worker { address: address.clone(), start: index * size, mix, rng: Rng::new() };
            workers.push(thread::spawn(move || worker.run(&part, &shared, requests)));
        }
        Self { parts, workers, shared }
    }

    /// Requests that succeeded so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// The texts of the requests that failed.
    pub fn errors(&self) -> Vec<String> {
        self.shared.errors.lock().unwrap().clone()
    }

    /// Waits until `count` more requests have succeeded.
    pub fn go_on(&self, count: u64) {
        let goal = self.requests() + count;
        super::eventually_within(Duration::from_secs(60), "the load goes on", || {
            assert!(!self.workers.iter().any(JoinHandle::is_finished), "the load failed");
            self.requests() >= goal
        });
    }

    /// Does `work` while no request is under way, with what the volume holds then.
    pub fn held<T>(&self, work: impl FnOnce(Image) -> T) -> T {
        self.shared.pause.store(true, Ordering::SeqCst);
        let parts =
            self.parts.iter().map(|part| part.lock().expect("the load failed")).collect::<Vec<_>>();
        let image = join(parts.iter().map(|part| &**part));
        let result = work(image);
        self.shared.pause.store(false, Ordering::SeqCst);
        result
    }

    /// Ends it; what the volume holds.
    pub fn stop(mut self) -> Image {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.join()
    }

    fn join(&mut self) -> Image {
        for worker in self.workers.drain(..) {
            if let Err(panic) = worker.join() {
                std::panic::resume_unwind(panic);
            }
        }
        let parts = self.parts.iter().map(|part| part.lock().unwrap()).collect::<Vec<_>>();
        join(parts.iter().map(|part| &**part))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn join<'a>(parts: impl Iterator<Item = &'a Image>) -> Image {
    let mut image = Image { bytes: Vec::new(), known: Vec::new() };
    for part in parts {
        image.bytes.extend_from_slice(&part.bytes);
        image.known.extend_from_slice(&part.known);
    }
    image
}

/// Does about `requests` verified requests, and then reads everything.
pub fn exercise(address: &Address, image: &mut Image, mix: Mix, requests: u64) {
    let mut load = Load::limited(address, image.clone(), mix, requests / WORKERS as u64);
    *image = load.join();
    image.check("after the requests", address);
}

struct Worker {
    address: Address,
    start: usize,
    mix: Mix,
    rng: Rng,
}

impl Worker {
    fn run(&mut self, part: &Mutex<Image>, shared: &Shared, requests: u64) {
        let mut client = Client::connect(&self.address).unwrap();
        let mut done = 0;
        while done < requests && !shared.stop.load(Ordering::SeqCst) {
            if shared.pause.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(2));
                continue;
            }
            let result = self.request(&mut client, &mut part.lock().unwrap());
            match result {
                Ok(()) => {
                    done += 1;
                    shared.requests.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) if self.mix.may_fail => {
                    shared.errors.lock().unwrap().push(error.to_string());
                    if error.reply.is_none() {
                        return;
                    }
                    thread::sleep(Duration::from_millis(20));
                }
                Err(error) => panic!("a request failed: {error}"),
            }
            thread::sleep(self.mix.pause);
        }
    }

    fn request(&mut self, client: &mut Client, part: &mut Image) -> Result<(), IoError> {
        let unit = if self.mix.whole_blocks || self.rng.bool() { BLOCK } else { SECTOR };
        let most = self.mix.largest.min(part.len()) / unit;
        let length = unit
            * if self.rng.bool() {
                self.rng.usize(1..=most)
            } else {
                self.rng.usize(1..=most.min(4))
            };
        let offset = unit * self.rng.usize(0..=(part.len() - length) / unit);
        let at = (self.start + offset) as u64;
        match self.rng.u8(0..100) {
            kind if kind < self.mix.writes => {
                let mut data = vec![0; length];
                if self.rng.u8(0..10) > 0 {
                    self.rng.fill(&mut data);
                }
                part.mark(offset, length, Known::OnceRead);
                client.write(at, &data)?;
                part.wrote(offset, &data);
            }
            kind if kind < self.mix.writes + self.mix.unmaps => {
                let (first, last) =
                    (offset.next_multiple_of(BLOCK), (offset + length) / BLOCK * BLOCK);
                if first < last {
                    part.mark(first, last - first, Known::No);
                }
                client.unmap(at, length)?;
                if first < last && self.mix.unmapped_is_zero {
                    part.wrote(first, &vec![0; last - first]);
                }
            }
            _ => {
                let mut data = vec![0; length];
                client.read(at, &mut data)?;
                if let Some(byte) = part.differs(offset, &data) {
                    panic!("read of {length} at {at}: byte {} differs", self.start + byte);
                }
            }
        }
        Ok(())
    }
}
