//! What compressing the extents of a volume would save, by images of real file systems: docs/decisions/0031-compression.md.
//! Prints Markdown. Nothing of DBS is used but its unit, the extent.

use clap::Parser;
use dbs_benches::Outcome;
use dbs_benches::machine::cpu_time;
use dbs_benches::process::exit;
use dbs_benches::report::Table;
use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const BLOCK: usize = 4096;
const EXTENT: usize = 1 << 20;
const MIB: u64 = 1 << 20;

/// What compressing extents of 1 MiB would save, with LZ4
#[derive(Debug, Parser)]
struct Arguments {
    /// Images of file systems
    #[arg(required = true)]
    images: Vec<PathBuf>,
    /// KiB that are compressed together: what a read of one block has to expand
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(4..=1024))]
    frame: u16,
    /// Looks at one extent of so many
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit("compression", run(&arguments))
}

fn run(arguments: &Arguments) -> Outcome<()> {
    let columns = [
        "image",
        "data, MiB",
        "compressed, MiB",
        "saved",
        "extents",
        "compress",
        "expand",
        "one frame",
    ];
    let title = format!("Extents of 1 MiB in frames of {} KiB, LZ4", arguments.frame);
    let mut table = Table::new(&title, &columns);
    for image in &arguments.images {
        let found = Sums::of_image(image, usize::from(arguments.frame) << 10, arguments.every)
            .map_err(|e| format!("{}: {e}", image.display()))?;
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        let share =
            |part: u64, whole: u64| format!("{:.0} %", 100.0 * part as f64 / whole.max(1) as f64);
        let rate =
            |time: Duration| format!("{:.0} MB/s", found.bytes as f64 / 1e6 / time.as_secs_f64());
        table.row(&[
            &name,
            &(found.data / MIB),
            &(found.kept / MIB),
            &share(found.data.saturating_sub(found.kept), found.data),
            &share(found.compressed, found.extents),
            &rate(found.compressing),
            &rate(found.expanding),
            &format!("{:.0} µs", found.expanding.as_secs_f64() * 1e6 / found.frames.max(1) as f64),
        ]);
    }
    print!("{}", table.finish());
    Ok(())
}

/// What the extents of an image come to.
#[derive(Debug, Default)]
struct Sums {
    extents: u64,
    /// Extents that would be compressed: those of which it saves a quarter.
    compressed: u64,
    /// Bytes of blocks that are not zeros, which is what a file with holes takes now.
    data: u64,
    /// Bytes that it would take.
    kept: u64,
    frames: u64,
    /// Bytes that were compressed and expanded.
    bytes: u64,
    compressing: Duration,
    expanding: Duration,
}

impl Sums {
    fn of_image(path: &Path, frame: usize, every: u64) -> Outcome<Self> {
        let image = File::open(path)?;
        let extents = image.metadata()?.len() / EXTENT as u64;
        let (mut sums, mut extent) = (Self::default(), vec![0; EXTENT]);
        let mut room = Room::new(frame);
        for number in (0..extents).step_by(usize::try_from(every)?) {
            image.read_exact_at(&mut extent, number * EXTENT as u64)?;
            sums.add(&extent, &mut room)?;
        }
        Ok(sums)
    }

    /// Adds one extent. An index of its frames goes before them, in a block of its own.
    fn add(&mut self, extent: &[u8], room: &mut Room) -> Outcome<()> {
        let data = extent.chunks(BLOCK).filter(|block| !is_zero(block)).count() * BLOCK;
        if data == 0 {
            return Ok(());
        }
        let mut length = BLOCK;
        for frame in extent.chunks(room.expanded.len()).filter(|frame| !is_zero(frame)) {
            let begun = cpu_time();
            let compressed = compress_into(frame, &mut room.compressed)?;
            self.compressing += cpu_time() - begun;
            let begun = cpu_time();
            decompress_into(&room.compressed[..compressed], &mut room.expanded)?;
            self.expanding += cpu_time() - begun;
            if room.expanded != frame {
                return Err("a frame came back another one".into());
            }
            self.frames += 1;
            self.bytes += frame.len() as u64;
            length += compressed.min(frame.len());
        }
        let length = length.next_multiple_of(BLOCK);
        let worth = length <= data / 4 * 3;
        self.extents += 1;
        self.compressed += u64::from(worth);
        self.data += data as u64;
        self.kept += if worth { length } else { data } as u64;
        Ok(())
    }
}

/// Buffers for one frame.
struct Room {
    compressed: Vec<u8>,
    expanded: Vec<u8>,
}

impl Room {
    fn new(frame: usize) -> Self {
        Self { compressed: vec![0; get_maximum_output_size(frame)], expanded: vec![0; frame] }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}
