//! qcow2, versions 2 and 3, as far as an image without another one below it needs: where clusters are, and
//! zlib. All that is read of the file is checked before it is used, as images come from anybody.

use crate::read_to_end_of;
use dbs_core::{Error, Result};
use flate2::{Decompress, FlushDecompress};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

/// What a file begins with.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";

const HEADER_BYTES: usize = 112;
/// Largest first-level table, as other readers of the format have it.
const L1_MAX_BYTES: u64 = 32 << 20;
/// Bytes of unpacked clusters that are kept, as neighbours are mostly read one after the other.
const UNPACKED_MAX_BYTES: usize = 4 << 20;
/// Entries of a second-level table that are looked at together.
const ENTRIES_AT_ONCE: usize = 64;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;

/// Features of version 3 that a reader has to know; the first one says that counts of references are
/// stale, which a reader does not use.
const DIRTY: u64 = 1;
const FEATURES: [(u64, &str); 4] = [
    (1 << 1, "it is marked as corrupt"),
    (1 << 2, "its data is in another file"),
    (1 << 3, "its clusters are not packed with zlib"),
    (1 << 4, "it has extended L2 entries"),
];

/// An image.
pub struct Qcow2 {
    file: File,
    length: u64,
    size: u64,
    cluster_bits: u32,
    version: u32,
    l1: Vec<u64>,
    /// Unpacked clusters by their place in the file, the newest last.
    unpacked: Mutex<VecDeque<(u64, Arc<[u8]>)>>,
}

/// Where a cluster is.
enum Cluster {
    Zeros,
    At(u64),
    /// First byte, and most bytes that it is packed in.
    Packed(u64, usize),
}

impl Qcow2 {
    /// Reads and checks header and first-level table of a file of `length` bytes.
    ///
    /// # Errors
    /// `Invalid`, `Unsupported`, `Io`.
    pub fn open(file: File, length: u64) -> Result<Self> {
        let cannot = |error| Error::io(error, "it cannot be read");
        let mut header = [0; HEADER_BYTES];
        read_to_end_of(&file, 0, &mut header).map_err(cannot)?;
        let header = Header::parse(&header)?;
        let Header { version, cluster_bits, size, l1_entries, l1_offset } = header;
        let covered = 1u128 << (2 * cluster_bits - 3);
        let needed = u128::from(size).div_ceil(covered);
        let bytes = u64::from(l1_entries) * 8;
        if needed > u128::from(l1_entries)
            || bytes > L1_MAX_BYTES
            || l1_offset.checked_add(bytes).is_none_or(|end| end > length)
        {
            return Err(Error::invalid("its first-level table is damaged"));
        }
        let mut table = vec![0; needed as usize * 8];
        file.read_exact_at(&mut table, l1_offset).map_err(cannot)?;
        let l1 = words(&table).collect();
        let unpacked = Mutex::default();
        Ok(Self { file, length, size, cluster_bits, version, l1, unpacked })
    }

    /// Bytes of its content.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `InvalidData` if the image is damaged; what reading the file gives.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let mut entries = [0; 8 * ENTRIES_AT_ONCE];
            let wanted = self.clusters(at, rest.len());
            let entries = &mut entries[..8 * wanted];
            self.read_entries(at, entries)?;
            for entry in words(entries) {
                let inside = at & (self.cluster() - 1);
                let count = rest.len().min((self.cluster() - inside) as usize);
                let (part, after) = rest.split_at_mut(count);
                self.read_cluster(entry, inside, part)?;
                (at, rest) = (at + count as u64, after);
            }
        }
        Ok(())
    }

    /// Whether the file has these bytes. What is cut off is no zeros.
    fn is_inside(&self, place: u64, bytes: u64) -> bool {
        place.checked_add(bytes).is_some_and(|end| end <= self.length)
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// How many clusters of a range are looked up together: those in one second-level table, and not too
    /// many.
    fn clusters(&self, at: u64, length: usize) -> usize {
        let first = at >> self.cluster_bits;
        let last = (at + length as u64 - 1) >> self.cluster_bits;
        let per_table = self.cluster() / 8;
        let in_table = per_table - first % per_table;
        (last - first + 1).min(in_table).min(ENTRIES_AT_ONCE as u64) as usize
    }

    /// Entries of the second-level table from the cluster at `at` on.
    fn read_entries(&self, at: u64, entries: &mut [u8]) -> io::Result<()> {
        let (index, per_table) = (at >> self.cluster_bits, self.cluster() / 8);
        let table = self.l1.get((index / per_table) as usize).map_or(0, |entry| entry & OFFSET);
        if table == 0 {
            entries.fill(0);
            return Ok(());
        }
        if !table.is_multiple_of(self.cluster()) || !self.is_inside(table, self.cluster()) {
            return Err(damaged(at, "its second-level table is behind the end of the file"));
        }
        self.file.read_exact_at(entries, table + index % per_table * 8)
    }

    fn read_cluster(&self, entry: u64, inside: u64, buf: &mut [u8]) -> io::Result<()> {
        let needed = buf.len() as u64;
        match self.find(entry) {
            Cluster::Zeros => buf.fill(0),
            Cluster::At(place) => {
                if !place.is_multiple_of(self.cluster()) || !self.is_inside(place, inside + needed)
                {
                    return Err(damaged(place, "a cluster is behind the end of the file"));
                }
                self.file.read_exact_at(buf, place + inside)?;
            }
            Cluster::Packed(place, bytes) => {
                let cluster = self.unpack(place, bytes)?;
                buf.copy_from_slice(&cluster[inside as usize..][..buf.len()]);
            }
        }
        Ok(())
    }

    fn find(&self, entry: u64) -> Cluster {
        if entry & COMPRESSED != 0 {
            // The place takes the lower bits, and the number of further sectors the rest.
            let bits = 62 - (self.cluster_bits - 8);
            let place = entry & ((1 << bits) - 1);
            let sectors = (entry & (COMPRESSED - 1)) >> bits;
            return Cluster::Packed(place, ((sectors + 1) * 512 - place % 512) as usize);
        }
        let place = entry & OFFSET;
        if place == 0 || (self.version >= 3 && entry & ZERO != 0) {
            Cluster::Zeros
        } else {
            Cluster::At(place)
        }
    }

    fn unpack(&self, place: u64, bytes: usize) -> io::Result<Arc<[u8]>> {
        let kept = || self.unpacked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, cluster)) = kept().iter().find(|(at, _)| *at == place) {
            return Ok(Arc::clone(cluster));
        }
        // It counts sectors, the last of which may end behind the file. What is cut off does not unpack.
        let there = self.length.saturating_sub(place).min(bytes as u64) as usize;
        let mut packed = vec![0; there];
        self.file.read_exact_at(&mut packed, place)?;
        let mut cluster = vec![0; self.cluster() as usize];
        let mut inflate = Decompress::new(false);
        let outcome = inflate.decompress(&packed, &mut cluster, FlushDecompress::Finish);
        if outcome.is_err() || inflate.total_out() != self.cluster() {
            return Err(damaged(place, "a packed cluster cannot be unpacked"));
        }
        let cluster: Arc<[u8]> = cluster.into();
        let mut kept = kept();
        while !kept.is_empty() && (kept.len() + 1) * cluster.len() > UNPACKED_MAX_BYTES {
            kept.pop_front();
        }
        kept.push_back((place, Arc::clone(&cluster)));
        Ok(cluster)
    }
}

/// What of a header is used.
struct Header {
    version: u32,
    cluster_bits: u32,
    size: u64,
    l1_entries: u32,
    l1_offset: u64,
}

impl Header {
    fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        let u32_at = |at| u32::from_be_bytes(part(bytes, at));
        let u64_at = |at| u64::from_be_bytes(part(bytes, at));
        let unsupported = |text: &str| Err(Error::unsupported(format!("qcow2: {text}")));
        let version = u32_at(4);
        if !(2..=3).contains(&version) {
            return unsupported(&format!("version {version} is not supported"));
        }
        let features = if version == 3 { u64_at(72) } else { 0 };
        if let Some((_, text)) = FEATURES.iter().find(|(bit, _)| features & bit != 0) {
            return unsupported(&format!("{text}, which is not supported"));
        }
        if features & !DIRTY != 0 {
            return unsupported(&format!("unknown features {features:#x}"));
        }
        if u64_at(8) != 0 {
            return unsupported(
                "it has a backing file of its own; make one image of both (`qemu-img convert`)",
            );
        }
        if u32_at(32) != 0 {
            return unsupported("it is encrypted");
        }
        let cluster_bits = u32_at(20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(Error::invalid(format!("qcow2: clusters of 2^{cluster_bits} bytes")));
        }
        let (size, l1_entries, l1_offset) = (u64_at(24), u32_at(36), u64_at(40));
        Ok(Self { version, cluster_bits, size, l1_entries, l1_offset })
    }
}

fn part<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes.get(at + index).copied().unwrap_or(0))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| word.iter().fold(0, |all, byte| all << 8 | u64::from(*byte)))
}

fn damaged(place: u64, text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the image is damaged at {place}: {text}"))
}
