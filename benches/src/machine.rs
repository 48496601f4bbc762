//! Facts about the machine and this process, as far as the system tells.

use crate::Outcome;
use crate::report::{mib, spread, time};
use dbs_core::io::buffer::AlignedBuf;
use std::fs::{File, OpenOptions, read_to_string};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// Flushes timed to characterise a directory's medium.
const FLUSHES: usize = 100;

/// The machine, the kernel, the medium of `dir` and the time, as Markdown lines.
///
/// # Errors
/// If the directory cannot be written.
pub fn describe(dir: &Path, command: &str) -> Outcome<String> {
    let cpuinfo = read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = field(&cpuinfo, "model name").unwrap_or("unknown CPU");
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let meminfo = read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = field(&meminfo, "MemTotal").and_then(kib).unwrap_or(0);
    let kernel = read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let now = jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string();
    let [p50, _, max] = flush_times(dir)?;
    Ok(format!(
        "- machine: {cpus} CPUs ({model}), {} of memory\n- kernel: Linux {}\n- medium: {}; a 4 KiB \
         write and fdatasync takes {} (median of {FLUSHES}), at most {}\n- date: {now}\n- command: \
         `{command}`\n",
        mib(memory),
        kernel.trim(),
        file_system(dir),
        time(p50),
        time(max),
    ))
}

/// Resident bytes of this process: now, and at most so far.
#[must_use]
pub fn resident() -> [u64; 2] {
    resident_of("self")
}

/// The same of the process with this id.
pub(crate) fn resident_of(id: &str) -> [u64; 2] {
    let status = read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    ["VmRSS", "VmHWM"].map(|name| field(&status, name).and_then(kib).unwrap_or(0))
}

/// Time this thread has been on a CPU: on a busy machine, less than has passed.
#[must_use]
pub fn cpu_time() -> Duration {
    let stat = read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = stat.split(' ').next().and_then(|word| word.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

/// Bytes the file system has allocated to a file.
///
/// # Errors
/// If it is not there.
pub fn allocated(path: &Path) -> Outcome<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(path)?.blocks() * 512)
}

/// Makes the next read of a file come from its medium.
///
/// # Errors
/// If it cannot be flushed.
pub fn forget_cached(path: &Path) -> Outcome<()> {
    let file = File::options().read(true).write(true).open(path)?;
    file.sync_all()?;
    nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    Ok(())
}

/// How long it takes to read a range past the page cache, 1 MiB after the other; through the
/// cache where that is impossible.
pub fn read_time(path: &Path, offset: u64, length: u64) -> Outcome<Duration> {
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    let file = direct.or_else(|_| File::open(path))?;
    let mut buffer = AlignedBuf::zeroed(1 << 20);
    let begun = Instant::now();
    let mut at = offset;
    while at < offset + length {
        let count = (offset + length - at).min(1 << 20) as usize;
        file.read_exact_at(&mut buffer[..count], at)?;
        at += count as u64;
    }
    Ok(begun.elapsed())
}

fn flush_times(dir: &Path) -> Outcome<[Duration; 3]> {
    let file = tempfile::tempfile_in(dir)?;
    let mut times = Vec::new();
    for index in 0..FLUSHES {
        let begun = Instant::now();
        file.write_all_at(&[index as u8; 4096], index as u64 * 4096)?;
        file.sync_data()?;
        times.push(begun.elapsed());
    }
    Ok(spread(times))
}

fn file_system(dir: &Path) -> String {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mounts = read_to_string("/proc/self/mounts").unwrap_or_default();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let holding = fields.filter(|f| f.len() > 2 && dir.starts_with(f[1]));
    let nearest = holding.max_by_key(|f| f[1].len());
    nearest.map_or("unknown".to_owned(), |f| format!("{} on {}", f[2], f[0]))
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim())
}

fn kib(text: &str) -> Option<u64> {
    Some(text.strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}
