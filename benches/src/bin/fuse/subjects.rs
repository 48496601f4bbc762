//! What is measured: the Rust API, our view, and other programs' files of the same image.

use dbs_benches::Outcome;
use dbs_benches::process::{Process, check_interrupted, output, sleep};
use dbs_benches::server::Dbs;
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, OpenOptions, Store, Volume};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The subject that the others are compared with.
pub const API: &str = "Rust API";
/// Ours.
pub const VIEW: &str = "`dbs mount`";
/// Bytes of a sequential read.
const PIECE: usize = 1 << 20;
const BLOCK: usize = 4096;
const START: Duration = Duration::from_secs(20);

/// The same bytes twice: as a snapshot in a store, and as a raw file.
pub struct Image {
    dir: PathBuf,
    size: u64,
}

impl Image {
    /// Writes both.
    pub fn make(dir: &Path, size: u64) -> Outcome<Self> {
        let image = Self { dir: dir.to_owned(), size };
        let options = InitOptions { size: Some(2 * size + (256 << 20)), ..InitOptions::default() };
        Store::init(&image.store(), &options)?;
        let store = dbs_benches::open(&image.store())?;
        store.create_volume("v", size)?;
        let volume = store.volume("v")?;
        let raw = File::create(image.raw())?;
        let mut random = fastrand::Rng::with_seed(1);
        let mut piece = AlignedBuf::zeroed(PIECE);
        for at in (0..size).step_by(PIECE) {
            check_interrupted()?;
            random.fill(&mut piece);
            volume.write_at(at, &piece, false)?;
            raw.write_all_at(&piece, at)?;
        }
        raw.sync_all()?;
        store.create_snapshot("v", "s", &SnapshotOptions::default())?;
        drop(volume);
        store.close()?;
        Ok(image)
    }

    fn store(&self) -> PathBuf {
        self.dir.join("store.dbs")
    }

    fn raw(&self) -> PathBuf {
        self.dir.join("raw.img")
    }
}

/// Where the bytes come from.
enum Place {
    Volume(Box<Volume>),
    File(PathBuf),
}

/// Something that is measured, served while this lives.
pub struct Subject {
    /// What it is.
    pub name: &'static str,
    place: Place,
    size: u64,
    server: Option<Process>,
    point: Option<PathBuf>,
}

impl Drop for Subject {
    fn drop(&mut self) {
        let Some(point) = &self.point else { return };
        // Each of them unmounts when it ends; what a killed one has left goes here.
        drop(self.server.take());
        let _ = output(Command::new("umount").arg("-l").arg(point));
    }
}

impl Subject {
    /// All that can be measured here, and why others cannot.
    ///
    /// # Errors
    /// Those of the first two, which must be there.
    pub fn start_all(image: &Image, dbs: &Dbs) -> Outcome<(Vec<Self>, Vec<String>)> {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let volume = Store::open(&image.store(), &options)?.volume("v@s")?;
        let place = Place::Volume(Box::new(volume));
        let api = Self { name: API, place, size: image.size, server: None, point: None };
        let mut subjects = vec![api, view(image, dbs)?];
        let mut missing = Vec::new();
        for (start, name) in [
            (storage_daemon as fn(&Image) -> Outcome<Subject>, "`qemu-storage-daemon`"),
            (nbdfuse, "`nbdfuse`"),
        ] {
            match start(image) {
                Ok(subject) => subjects.push(subject),
                Err(error) => missing.push(format!("{name}: {error}")),
            }
        }
        Ok((subjects, missing))
    }

    /// Reads all of it once, as a program does that reads a file: MB a second.
    pub fn sequential(&self) -> Outcome<f64> {
        let mut buf = AlignedBuf::zeroed(PIECE);
        let file = match &self.place {
            Place::Volume(_) => None,
            Place::File(path) => {
                let file = File::open(path)?;
                // What was read before must not help.
                posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
                Some(file)
            }
        };
        let begun = Instant::now();
        for at in (0..self.size).step_by(PIECE) {
            match (&self.place, &file) {
                (Place::Volume(volume), _) => volume.read_at(at, &mut buf)?,
                (Place::File(_), Some(file)) => file.read_exact_at(&mut buf, at)?,
                (Place::File(_), None) => {}
            }
        }
        Ok(self.size as f64 / 1e6 / begun.elapsed().as_secs_f64())
    }

    /// Readers that read random blocks, past the page cache: reads a second, of all together.
    pub fn random(&self, readers: usize, time: Duration) -> Outcome<f64> {
        let end = Instant::now() + time;
        let counts: Vec<Outcome<u64>> = thread::scope(|scope| {
            let start = |seed| scope.spawn(move || self.read_until(end, seed));
            let threads: Vec<_> = (0..readers as u64).map(start).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, Outcome<u64>>| {
                thread.join().unwrap_or_else(|_| Err("a reader panicked".into()))
            };
            threads.into_iter().map(join).collect()
        });
        let all: Outcome<Vec<u64>> = counts.into_iter().collect();
        Ok(all?.iter().sum::<u64>() as f64 / time.as_secs_f64())
    }

    fn read_until(&self, end: Instant, seed: u64) -> Outcome<u64> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut buf = AlignedBuf::zeroed(BLOCK);
        let file = match &self.place {
            Place::Volume(_) => None,
            Place::File(path) => {
                Some(File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?)
            }
        };
        let mut count = 0;
        while Instant::now() < end {
            let at = random.u64(..self.size / BLOCK as u64) * BLOCK as u64;
            match (&self.place, &file) {
                (Place::Volume(volume), _) => volume.read_at(at, &mut buf)?,
                (Place::File(_), Some(file)) => file.read_exact_at(&mut buf, at)?,
                (Place::File(_), None) => {}
            }
            count += 1;
        }
        Ok(count)
    }
}

fn view(image: &Image, dbs: &Dbs) -> Outcome<Subject> {
    let point = image.dir.join("view");
    fs::create_dir(&point)?;
    let mut command = dbs.command();
    command.args(["mount", "-f"]).arg(image.store()).arg(&point);
    let file = point.join("volumes/v/snapshots/s.raw");
    start(VIEW, image, command, point, file)
}

fn storage_daemon(image: &Image) -> Outcome<Subject> {
    let point = image.dir.join("daemon.img");
    File::create(&point)?;
    let mut command = Command::new("qemu-storage-daemon");
    let raw = image.raw();
    command
        .arg("--blockdev")
        .arg(format!(
            "driver=file,node-name=f,filename={},cache.direct=on,read-only=on,locking=off",
            raw.display()
        ))
        .args(["--blockdev", "driver=raw,node-name=r,file=f,read-only=on"])
        .arg("--export")
        .arg(format!("type=fuse,id=e,node-name=r,mountpoint={},writable=off", point.display()));
    start("`qemu-storage-daemon`, FUSE export", image, command, point.clone(), point)
}

fn nbdfuse(image: &Image) -> Outcome<Subject> {
    let point = image.dir.join("nbd");
    fs::create_dir(&point)?;
    let mut command = Command::new("nbdfuse");
    command.arg("-r").arg(point.join("image"));
    command.args(["--command", "nbdkit", "-s", "--exit-with-parent", "-r", "file"]);
    command.arg(image.raw());
    start("`nbdfuse`, nbdkit", image, command, point.clone(), point.join("image"))
}

/// Starts a server, and waits until its file has its size.
fn start(
    name: &'static str,
    image: &Image,
    command: Command,
    point: PathBuf,
    file: PathBuf,
) -> Outcome<Subject> {
    let log = image.dir.join(format!("{}.log", point.file_name().unwrap_or_default().display()));
    let server = Process::start(name, command, &log)?;
    let place = Place::File(file.clone());
    let subject =
        Subject { name, place, size: image.size, server: Some(server), point: Some(point) };
    let end = Instant::now() + START;
    while !fs::metadata(&file).is_ok_and(|meta| meta.len() == image.size) {
        if Instant::now() > end {
            let said = fs::read_to_string(&log).unwrap_or_default();
            return Err(format!("does not mount: {}", said.trim().replace('\n', " / ")).into());
        }
        sleep(Duration::from_millis(20))?;
    }
    Ok(subject)
}
