use super::*;
use dbs_core::Error;
use std::sync::Mutex;

/// A layer in memory; the last block may be short.
pub struct Memory {
    pub size: u64,
    pub blocks: Mutex<Vec<(State, Vec<u8>)>>,
    /// Runs handed out at once at most, however many are asked for.
    pub stingy: usize,
}

impl Memory {
    pub fn new(size: u64) -> Self {
        let blocks = (0..size.div_ceil(BLOCK))
            .map(|block| (State::Absent, vec![0; BLOCK.min(size - block * BLOCK) as usize]))
            .collect();
        Self { size, blocks: Mutex::new(blocks), stingy: 3 }
    }

    fn each(&self, offset: u64, length: u64, mut change: impl FnMut(u64, &mut (State, Vec<u8>))) {
        assert!(offset.is_multiple_of(BLOCK) && offset + length <= self.size);
        assert!(length.is_multiple_of(BLOCK) || offset + length == self.size);
        let mut blocks = self.blocks.lock().unwrap();
        for block in offset / BLOCK..(offset + length).div_ceil(BLOCK) {
            change(block, &mut blocks[block as usize]);
        }
    }
}

impl Layer for Memory {
    fn size(&self) -> u64 {
        self.size
    }

    fn map(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Run>> {
        let mut runs: Vec<Run> = Vec::new();
        let end = offset + length;
        let blocks = self.blocks.lock().unwrap();
        for block in offset / BLOCK..end.div_ceil(BLOCK) {
            let state = blocks[block as usize].0;
            let length = BLOCK.min(end - block * BLOCK);
            let full = runs.len() == limit.min(self.stingy);
            match runs.last_mut() {
                Some(last) if last.state == state => last.length += length,
                _ if full => break,
                _ => runs.push(Run { offset: block * BLOCK, length, state }),
            }
        }
        Ok(runs)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        if offset + buf.len() as u64 > self.size {
            return Err(Error::invalid("outside"));
        }
        let length = buf.len() as u64;
        self.each(offset, length, |block, (_, bytes)| {
            let at = (block * BLOCK - offset) as usize;
            let length = bytes.len().min(buf.len() - at);
            buf[at..at + length].copy_from_slice(&bytes[..length]);
        });
        Ok(())
    }
}

impl LayerMut for Memory {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.each(offset, data.len() as u64, |block, entry| {
            let at = (block * BLOCK - offset) as usize;
            let length = entry.1.len();
            *entry = (State::Data, data[at..at + length].to_vec());
        });
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.each(offset, length, |_, (state, bytes)| {
            *state = State::Zero;
            bytes.fill(0);
        });
        Ok(())
    }

    fn clear(&self, offset: u64, length: u64) -> Result<()> {
        self.each(offset, length, |_, (state, bytes)| {
            *state = State::Absent;
            bytes.fill(0);
        });
        Ok(())
    }
}

fn parts(layer: &dyn Layer, range: Range<u64>) -> Vec<Part> {
    let mut cursor = Cursor::new(layer, range);
    std::iter::from_fn(|| cursor.next_part().unwrap()).collect()
}

#[test]
fn gaps_and_windows_cover_a_range() {
    let layer = Memory::new(4 * WINDOW + 512);
    layer.write_at(WINDOW / 2, &vec![1; WINDOW as usize]).unwrap();
    layer.zero(WINDOW * 3, BLOCK).unwrap();
    layer.write_at(WINDOW * 3 + 5 * BLOCK, &[2; BLOCK as usize]).unwrap();
    layer.write_at(4 * WINDOW, &[3; 512]).unwrap();
    let (mut at, mut windows) = (BLOCK, Vec::new());
    for part in parts(&layer, BLOCK..layer.size()) {
        let span = match part {
            Part::Gap(span) => span,
            Part::Window(window) => {
                windows.push((window.span.clone(), window.runs.len()));
                window.span
            }
        };
        assert_eq!(span.start, at);
        at = span.end;
    }
    assert_eq!(at, layer.size());
    let expected = [
        (WINDOW / 2..WINDOW, 1),
        (WINDOW..WINDOW * 3 / 2, 1),
        (WINDOW * 3..WINDOW * 3 + 6 * BLOCK, 3),
        (4 * WINDOW..4 * WINDOW + 512, 1),
    ];
    assert_eq!(windows, expected);
}

#[test]
fn digests_tell_states_and_bytes_apart() {
    let layer = Memory::new(4 * BLOCK);
    layer.write_at(0, &[0; BLOCK as usize]).unwrap();
    layer.zero(BLOCK, BLOCK).unwrap();
    layer.write_at(3 * BLOCK, &[1; BLOCK as usize]).unwrap();
    let content = Window::at(&layer, 0..4 * BLOCK).unwrap().read(&layer).unwrap();
    let digests = content.digests();
    let each: Vec<_> = digests.chunks(DIGEST).collect();
    assert_eq!(each.len(), 4);
    for (i, one) in each.iter().enumerate() {
        assert!(each.iter().skip(i + 1).all(|other| other != one), "block {i}");
    }
    assert_eq!(each[1], 1_u128.to_le_bytes());
    assert_eq!(each[2], 0_u128.to_le_bytes());
    assert_eq!(each[0], &blake3::hash(&[0; 4096]).as_bytes()[..16]);
}

#[test]
fn the_digest_of_a_map_tells_zeros_from_absent_blocks() {
    let (one, other) = (Memory::new(1 << 20), Memory::new(1 << 20));
    for layer in [&one, &other] {
        layer.write_at(8 * BLOCK, &[1; 3 * BLOCK as usize]).unwrap();
    }
    let same = map_digest(&one).unwrap();
    assert_eq!(map_digest(&other).unwrap(), same);
    other.write_at(8 * BLOCK, &[2; BLOCK as usize]).unwrap();
    assert_eq!(map_digest(&other).unwrap(), same);
    other.zero(0, BLOCK).unwrap();
    assert_ne!(map_digest(&other).unwrap(), same);
}
