//! A disk of the tests': one file in a FUSE file system, below the real server with any driver. It remembers
//! all that was written, punched and synced, in the order in which the kernel was answered ([`outage`]s are
//! made of that), and it fails, shortens and delays what it is asked for, by [`Rule`]s.
#![allow(dead_code, reason = "each test uses some of it")]

pub mod outage;
pub mod rules;

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use nix::mount::{MntFlags, umount2};
use rules::{Asked, Operation, Rule};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

/// Name of the file.
const NAME: &str = "disk";
const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const FILE: INodeNo = INodeNo(2);
const TTL: Duration = Duration::ZERO;
const FALLOC_KEEP_SIZE: i32 = 1;
const FALLOC_PUNCH_HOLE: i32 = 2;
const FALLOC_ZERO_RANGE: i32 = 16;

/// What a disk holds: a file, or what a test puts in its place.
pub trait Content: Send {
    fn size(&self) -> usize;
    fn set_size(&mut self, size: usize);
    fn read(&mut self, offset: u64, buf: &mut [u8]);
    fn write(&mut self, offset: u64, data: &[u8]);
    /// The range reads as zeros from now on.
    fn zero(&mut self, offset: u64, length: usize);
    fn sync(&mut self);
}

/// Sparse, as a store may be larger than memory.
impl Content for File {
    fn size(&self) -> usize {
        self.metadata().unwrap().len() as usize
    }

    fn set_size(&mut self, size: usize) {
        self.set_len(size as u64).unwrap();
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) {
        self.read_exact_at(buf, offset).unwrap();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.write_all_at(data, offset).unwrap();
    }

    fn zero(&mut self, offset: u64, length: usize) {
        for at in (0..length).step_by(BLOCK) {
            self.write(offset + at as u64, &[0; BLOCK][..BLOCK.min(length - at)]);
        }
    }

    fn sync(&mut self) {}
}

/// Something that was done to the disk.
#[derive(Debug)]
struct Event {
    /// Things that had been done when it was asked for.
    begun: usize,
    what: What,
}

#[derive(Debug)]
enum What {
    Write {
        offset: usize,
        data: Vec<u8>,
    },
    Punch {
        offset: usize,
        length: usize,
    },
    Size(usize),
    /// Of what had been done when it was asked for.
    Sync,
}

struct State {
    content: Box<dyn Content>,
    log: Vec<Event>,
    /// Nothing is recorded.
    forgets: bool,
    /// Syncs are answered and not done.
    lies: bool,
    rules: Vec<Rule>,
    random: fastrand::Rng,
    hits: u64,
}

impl State {
    fn note(&mut self, begun: usize, what: What) {
        if !self.forgets {
            self.log.push(Event { begun, what });
        }
    }

    fn resize(&mut self, begun: usize, size: usize) {
        self.content.set_size(size);
        self.note(begun, What::Size(size));
    }

    fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        let behind = (self.content.size() as u64).saturating_sub(offset);
        let mut content = vec![0; (length as u64).min(behind) as usize];
        self.content.read(offset, &mut content);
        content
    }

    fn write(&mut self, begun: usize, offset: usize, data: Vec<u8>) {
        let end = offset + data.len();
        if end > self.content.size() {
            self.resize(begun, end);
        }
        self.content.write(offset as u64, &data);
        self.note(begun, What::Write { offset, data });
    }

    fn punch(&mut self, begun: usize, offset: usize, length: usize) {
        let end = (offset + length).min(self.content.size());
        self.content.zero(offset as u64, end.saturating_sub(offset));
        self.note(begun, What::Punch { offset, length });
    }
}

/// The disk. Cloning gives another handle.
#[derive(Clone)]
pub struct Disk {
    state: Arc<Mutex<State>>,
}

/// Where it is mounted, until this is dropped: whoever uses it goes first.
pub struct Mounted {
    point: PathBuf,
    session: Option<BackgroundSession>,
}

impl Mounted {
    /// The file that is the disk.
    pub fn file(&self) -> PathBuf {
        self.point.join(NAME)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The kernel may still close the files of a server that was killed: an unmount that is not lazy would
        // fail then, and the disk with its record would stay in memory as long as the test runs.
        if umount2(&self.point, MntFlags::MNT_DETACH).is_ok()
            && let Some(session) = self.session.take()
        {
            // It may say that the connection was aborted.
            let _ = session.join();
        }
    }
}

impl Disk {
    /// An empty one, mounted in this directory, with a link to its file.
    pub fn at(directory: &Path, link: &Path) -> (Self, Mounted) {
        let content = tempfile::tempfile().unwrap();
        let (disk, mounted) = Self::mount(Box::new(content), directory.join("mount"));
        std::os::unix::fs::symlink(mounted.file(), link).unwrap();
        (disk, mounted)
    }

    /// Mounted on a new directory.
    pub fn mount(content: Box<dyn Content>, point: PathBuf) -> (Self, Mounted) {
        let state = State {
            content,
            log: Vec::new(),
            forgets: false,
            lies: false,
            rules: Vec::new(),
            random: fastrand::Rng::with_seed(1),
            hits: 0,
        };
        let disk = Self { state: Arc::new(Mutex::new(state)) };
        std::fs::create_dir(&point).unwrap();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("dbs-tests".to_owned())];
        let session = Session::new(disk.clone(), &point, &config).and_then(Session::spawn);
        (disk, Mounted { point, session: Some(session.unwrap()) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panics here fails the test by what it does not answer.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Things done to it so far.
    pub fn len(&self) -> usize {
        self.state().log.len()
    }

    /// Where syncs are in the record, from one thing on.
    pub fn syncs_from(&self, first: usize) -> Vec<usize> {
        let state = self.state();
        let syncs = state.log.iter().enumerate().skip(first);
        syncs.filter(|(_, event)| matches!(event.what, What::Sync)).map(|(at, _)| at).collect()
    }

    /// From now on syncs are answered and not done.
    pub fn lie(&self) {
        self.state().lies = true;
    }

    /// From now on nothing is recorded: there are no outages to be made of it.
    pub fn forget(&self) {
        self.state().forgets = true;
    }

    /// From now on these rules hold, and no others.
    pub fn set_rules(&self, rules: &[Rule]) {
        self.state().rules = rules.to_vec();
    }

    /// How often rules have had an effect.
    pub fn hits(&self) -> u64 {
        self.state().hits
    }

    /// What it holds now.
    pub fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        self.state().read(offset, length)
    }

    fn asked(&self, operation: Operation, offset: u64, length: usize) -> Asked {
        let mut state = self.state();
        let State { rules, random, hits, log, .. } = &mut *state;
        let mut asked = Asked { begun: log.len(), delay: Duration::ZERO, error: None, length };
        for rule in rules {
            *hits += u64::from(rule.apply((operation, offset), &mut asked, random));
        }
        asked
    }

    /// Does what was asked for when its time has come; whoever asks beside it does not wait.
    fn answer(
        &self,
        asked: Asked,
        answer: impl FnOnce(Result<&mut State, Errno>) + Send + 'static,
    ) {
        let disk = self.clone();
        let due = move || match asked.error {
            Some(error) => answer(Err(error)),
            None => answer(Ok(&mut disk.state())),
        };
        if asked.delay.is_zero() {
            due();
        } else {
            thread::spawn(move || {
                thread::sleep(asked.delay);
                due();
            });
        }
    }

    fn attributes(&self) -> FileAttr {
        let size = self.state().content.size() as u64;
        attributes(FILE, size, FileType::RegularFile)
    }
}

fn attributes(ino: INodeNo, size: u64, kind: FileType) -> FileAttr {
    let time = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino,
        size,
        blocks: size.div_ceil(512),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK as u32,
        flags: 0,
    }
}

impl Filesystem for Disk {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == NAME {
            true => reply.entry(&TTL, &self.attributes(), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match ino == FILE {
            true => reply.attr(&TTL, &self.attributes()),
            false => reply.attr(&TTL, &attributes(ino, 0, FileType::Directory)),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size {
            let mut state = self.state();
            let begun = state.log.len();
            state.resize(begun, size as usize);
        }
        reply.attr(&TTL, &self.attributes());
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Each write comes here as it is, whether or not the page cache would have it, and beside others.
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let asked = self.asked(Operation::Read, offset, size as usize);
        let length = asked.length;
        self.answer(asked, move |state| match state {
            Ok(state) => reply.data(&state.read(offset, length)),
            Err(error) => reply.error(error),
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let asked = self.asked(Operation::Write, offset, data.len());
        let (begun, data) = (asked.begun, data[..asked.length].to_vec());
        self.answer(asked, move |state| match state {
            Ok(state) => {
                let length = data.len() as u32;
                state.write(begun, offset as usize, data);
                reply.written(length);
            }
            Err(error) => reply.error(error),
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let asked = self.asked(Operation::Sync, 0, 0);
        let begun = asked.begun;
        self.answer(asked, move |state| match state {
            Ok(state) => {
                state.content.sync();
                if !state.lies {
                    state.note(begun, What::Sync);
                }
                reply.ok();
            }
            Err(error) => reply.error(error),
        });
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let punches = mode & (FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE) != 0;
        let operation = if punches { Operation::Punch } else { Operation::Allocate };
        let asked = self.asked(operation, offset, length as usize);
        let (begun, offset, length) = (asked.begun, offset as usize, length as usize);
        self.answer(asked, move |state| match state {
            Ok(state) => {
                if punches {
                    state.punch(begun, offset, length);
                } else if mode & FALLOC_KEEP_SIZE == 0 && offset + length > state.content.size() {
                    state.resize(begun, offset + length);
                }
                reply.ok();
            }
            Err(error) => reply.error(error),
        });
    }
}
