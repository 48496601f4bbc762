//! Random overwrites of more data than the memory for checksums covers: what each costs, in requests of the
//! device and in requests that have to wait for a worker. Counted, not timed: the disk goes on with the
//! others' requests while it moves pages.

use dbs_core::format::{Geometry, RegionKind};
use dbs_core::io::{ReadRequest, Storage, WriteRequest};
use dbs_core::volume::{Request, Start};
use dbs_core::{InitOptions, Store, Volume};
use dbs_sim::SimEnv;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BLOCK: usize = 4096;
/// The data that the least memory covers.
const COVERED: u64 = 256 << 20;
/// Requests in flight.
const DEPTH: usize = 32;
/// Others that are carried out while a worker is woken, and while a batch of pages is moved: some 0.1 and
/// 0.4 ms at 80,000 a second.
const WAKING: usize = 8;
const MOVING: usize = 32;

/// What a run has cost.
#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    requests: usize,
    /// Handed to a worker.
    blocked: usize,
    flushes: usize,
    /// Batches in which pages were read, requests, and pages; then the same of those written.
    read: [usize; 3],
    written: [usize; 3],
}

impl Counts {
    fn since(self, before: Self) -> Self {
        let less = |a: [usize; 3], b: [usize; 3]| std::array::from_fn(|at| a[at] - b[at]);
        Self {
            requests: self.requests - before.requests,
            blocked: self.blocked - before.blocked,
            flushes: self.flushes - before.flushes,
            read: less(self.read, before.read),
            written: less(self.written, before.written),
        }
    }
}

/// A disk that keeps metadata alone, and counts.
#[derive(Default)]
struct Disk {
    size: u64,
    blocks: Mutex<HashMap<u64, Box<[u8]>>>,
    /// Where the pages of checksums are, once that is known, and the data.
    pages: Mutex<(u64, u64)>,
    counts: Mutex<Counts>,
    /// Goes on with other requests.
    others: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl Disk {
    fn is_page(&self, offset: u64) -> bool {
        let (pages, data) = *self.pages.lock().unwrap();
        (pages..data).contains(&offset)
    }

    fn is_data(&self, offset: u64) -> bool {
        let (_, data) = *self.pages.lock().unwrap();
        data > 0 && offset >= data
    }

    /// Counts the pages of a batch, and lets the others go on meanwhile.
    fn moves(
        &self,
        batch: impl Iterator<Item = (u64, usize)>,
        of: fn(&mut Counts) -> &mut [usize; 3],
    ) {
        let pages: Vec<_> = batch.filter(|(offset, _)| self.is_page(*offset)).collect();
        if pages.is_empty() {
            return;
        }
        let mut counts = self.counts.lock().unwrap();
        let [batches, requests, count] = of(&mut counts);
        *batches += 1;
        *requests += pages.len();
        *count += pages.iter().map(|(_, len)| len / BLOCK).sum::<usize>();
        drop(counts);
        let others = self.others.lock().unwrap().clone();
        if let Some(others) = others {
            others();
        }
    }
}

impl Storage for Disk {
    fn size_bytes(&self) -> u64 {
        self.size
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> io::Result<()> {
        self.moves(requests.iter().map(|r| (r.offset, r.buf.len())), |counts| &mut counts.read);
        let blocks = self.blocks.lock().unwrap();
        for request in requests {
            for (index, part) in request.buf.chunks_mut(BLOCK).enumerate() {
                match blocks.get(&(request.offset / BLOCK as u64 + index as u64)) {
                    Some(block) => part.copy_from_slice(&block[..part.len()]),
                    None if self.is_data(request.offset) => part.fill(7),
                    None => part.fill(0),
                }
            }
        }
        Ok(())
    }

    fn write_many(&self, requests: &[WriteRequest<'_>]) -> io::Result<()> {
        self.moves(requests.iter().map(|r| (r.offset, r.buf.len())), |counts| &mut counts.written);
        let mut blocks = self.blocks.lock().unwrap();
        for request in requests.iter().filter(|request| !self.is_data(request.offset)) {
            for (index, part) in request.buf.chunks(BLOCK).enumerate() {
                let mut block = part.to_vec();
                block.resize(BLOCK, 0);
                blocks.insert(request.offset / BLOCK as u64 + index as u64, block.into());
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.counts.lock().unwrap().flushes += 1;
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_size(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn driver(&self) -> &'static str {
        "counting"
    }
}

/// A client with so many requests in flight, and the reactor that carries them out.
struct Traffic {
    volume: Volume,
    rng: fastrand::Rng,
    blocks: u64,
    /// Requests on their way, each with its lane: of as many blocks in a row as there are requests, the one
    /// that is its own, so that none is in the way of another.
    flying: VecDeque<(u64, Request)>,
    idle: Vec<(u64, Request)>,
    /// At workers: their blocks, and when the workers are awake.
    waiting: VecDeque<(u64, usize)>,
    counts: Counts,
}

impl Traffic {
    /// One request ends, and the next one begins.
    fn tick(&mut self) {
        self.end_one();
        while let Some((lane, mut request)) = self.idle.pop() {
            let block = self.rng.u64(0..self.blocks / DEPTH as u64) * DEPTH as u64 + lane;
            let offset = block * BLOCK as u64;
            let start = self.volume.start_write(offset, BLOCK as u64, &mut request);
            if start.unwrap() == Start::Io {
                request.seal(&[7; BLOCK]);
                self.flying.push_back((block, request));
            } else {
                self.hand_over(block);
            }
        }
    }

    /// The oldest request on its way ends.
    fn end_one(&mut self) {
        let Some((block, mut request)) = self.flying.pop_front() else { return };
        let _ = request.finish_write(Ok(())).unwrap();
        self.ended(block);
    }

    /// A request ends, and makes place for another.
    fn ended(&mut self, block: u64) {
        self.counts.requests += 1;
        self.idle.push((block % DEPTH as u64, Request::new()));
    }

    fn hand_over(&mut self, block: u64) {
        self.counts.blocked += 1;
        self.waiting.push_back((block, self.counts.requests + WAKING));
    }

    /// The block of the worker whose turn it is.
    fn due(&mut self) -> Option<u64> {
        let (block, when) = *self.waiting.front()?;
        if when > self.counts.requests && !self.flying.is_empty() {
            return None;
        }
        self.waiting.pop_front();
        Some(block)
    }
}

/// A store with checksums that has a volume of this size, all of it written, and little memory for them.
fn full(size: u64) -> (Arc<Disk>, Volume) {
    let disk = Arc::new(Disk { size: size + (1 << 30), ..Disk::default() });
    let init = InitOptions { size: Some(disk.size), checksums: true, ..InitOptions::default() };
    Store::init_on(&*disk, &init, &SimEnv::new(1)).unwrap();
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let store = Store::open_on(storage, None, Arc::new(SimEnv::new(1)), false).unwrap();
    let geometry = Geometry::plan(disk.size, &init).unwrap();
    let [pages, data] =
        [RegionKind::Sums, RegionKind::Data].map(|kind| geometry.region(kind).offset);
    assert!(pages < data);
    *disk.pages.lock().unwrap() = (pages, data);
    store.create_volume("v", size).unwrap();
    let volume = store.volume("v").unwrap();
    let whole = vec![7; 1 << 20];
    (0..size >> 20).for_each(|at| volume.write_at(at << 20, &whole, false).unwrap());
    store.close_checksums(Duration::ZERO).unwrap();
    store.set_checksum_cache(0);
    store.crowd_checksums(false).unwrap();
    (disk, volume)
}

/// What overwrites cost once memory is full, over so many times what it covers.
fn run(times: u64) -> Counts {
    let (disk, volume) = full(times * COVERED);
    let traffic = Traffic {
        volume: volume.clone(),
        rng: fastrand::Rng::with_seed(times),
        blocks: times * COVERED / BLOCK as u64,
        flying: VecDeque::new(),
        idle: (0..DEPTH as u64).map(|lane| (lane, Request::new())).collect(),
        waiting: VecDeque::new(),
        counts: Counts::default(),
    };
    let traffic = Arc::new(Mutex::new(traffic));
    let others = Arc::clone(&traffic);
    *disk.others.lock().unwrap() =
        Some(Arc::new(move || (0..MOVING).for_each(|_| others.lock().unwrap().tick())));
    let counts = || {
        let Counts { requests, blocked, .. } = traffic.lock().unwrap().counts;
        Counts { requests, blocked, ..*disk.counts.lock().unwrap() }
    };
    let mut before = None;
    for end in [60_000, 120_000] {
        while counts().requests < end {
            let due = traffic.lock().unwrap().due();
            let Some(block) = due else {
                traffic.lock().unwrap().tick();
                continue;
            };
            let offset = block * BLOCK as u64;
            volume.write_at(offset, &[7; BLOCK], false).unwrap();
            traffic.lock().unwrap().ended(block);
        }
        before.get_or_insert_with(counts);
    }
    *disk.others.lock().unwrap() = None;
    let counts = counts().since(before.unwrap());
    let each = |count: usize| count as f64 / counts.requests as f64;
    println!(
        "{times} times: {counts:?}; each: {:.4} blocked, {:.4} requests for pages, {:.1} a page",
        each(counts.blocked),
        each(counts.read[1] + counts.written[1]),
        counts.requests as f64 / counts.written[2] as f64,
    );
    counts
}

/// How many of each 10,000 requests are handed to a worker, and how many for pages each 10,000 cost.
fn costs(counts: &Counts) -> [usize; 2] {
    let pages = counts.read[1] + counts.written[1];
    [counts.blocked, pages].map(|count| count * 10_000 / counts.requests)
}

/// One request in each batch of pages makes room, and those to a page that is being written wait for it.
#[test]
fn an_overwrite_beyond_the_memory_for_checksums_costs_a_tenth_of_a_page() {
    for (times, most) in [(4, [40, 250]), (16, [100, 1250])] {
        let costs = costs(&run(times));
        assert!(costs[0] <= most[0] && costs[1] <= most[1], "{times} times: {costs:?}");
    }
}
