//! A disk that remembers: one file in a FUSE file system, with all that was written, punched and synced
//! in the order in which the kernel was answered. What a power cut leaves of it at any moment is made of
//! that.

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// Name of the file.
pub const NAME: &str = "disk";
const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const FILE: INodeNo = INodeNo(2);
const TTL: Duration = Duration::ZERO;
const FALLOC_KEEP_SIZE: i32 = 1;
const FALLOC_PUNCH_HOLE: i32 = 2;

/// What was done to the disk.
#[derive(Debug, Clone)]
enum Event {
    Write { offset: usize, data: Vec<u8> },
    Punch { offset: usize, length: usize },
    Size(usize),
    Sync,
}

struct State {
    /// What the disk holds now: sparse, as a store may be larger than memory.
    content: File,
    log: Vec<Event>,
    /// Syncs are answered and not done.
    lies: bool,
}

impl Default for State {
    fn default() -> Self {
        Self { content: tempfile::tempfile().unwrap(), log: Vec::new(), lies: false }
    }
}

impl State {
    fn size(&self) -> usize {
        self.content.metadata().unwrap().len() as usize
    }

    fn resize(&mut self, size: usize) {
        self.content.set_len(size as u64).unwrap();
        self.log.push(Event::Size(size));
    }
}

/// The disk. Cloning gives another handle.
#[derive(Clone, Default)]
pub struct Disk {
    state: Arc<Mutex<State>>,
}

impl Disk {
    /// Mounts it on an empty directory.
    pub fn mount(&self, point: &Path) -> BackgroundSession {
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("dbs-powercut".to_owned())];
        Session::new(self.clone(), point, &config).and_then(Session::spawn).unwrap()
    }

    /// Things done to it so far.
    pub fn len(&self) -> usize {
        self.state.lock().unwrap().log.len()
    }

    /// Syncs among them, from one of them on.
    pub fn syncs_from(&self, first: usize) -> usize {
        let state = self.state.lock().unwrap();
        state.log[first..].iter().filter(|event| matches!(event, Event::Sync)).count()
    }

    /// From now on syncs are answered and not done.
    pub fn lie(&self) {
        self.state.lock().unwrap().lies = true;
    }

    /// What a power cut leaves before the thing of this number is done: all that was synced, and any part of
    /// what came after, torn at sectors before the byte `data`, at blocks behind it.
    pub fn image(&self, cut: usize, data: usize, rng: &mut fastrand::Rng) -> Vec<u8> {
        let state = self.state.lock().unwrap();
        let synced = state.log[..cut].iter().rposition(|event| matches!(event, Event::Sync));
        let synced = synced.unwrap_or(0);
        // All, none, or each for itself.
        let chance = [256, 0, 128, 240, 16][rng.usize(0..5)];
        let mut bytes = Vec::new();
        for (at, event) in state.log[..cut].iter().enumerate() {
            let mut keeps = |_: usize| at < synced || rng.u16(0..256) < chance;
            match event {
                Event::Sync => {}
                Event::Size(size) => {
                    if at < synced || keeps(0) || *size > bytes.len() {
                        bytes.resize(*size, 0);
                    }
                }
                Event::Write { offset, data: written } => {
                    let unit = if *offset < data { SECTOR } else { BLOCK };
                    for (part, at) in written.chunks(unit).zip((*offset..).step_by(unit)) {
                        if keeps(at) && at + part.len() <= bytes.len() {
                            bytes[at..at + part.len()].copy_from_slice(part);
                        }
                    }
                }
                Event::Punch { offset, length } => {
                    for at in (*offset..offset + length).step_by(BLOCK) {
                        let end = (at + BLOCK).min(offset + length).min(bytes.len());
                        if keeps(at) && at < end {
                            bytes[at..end].fill(0);
                        }
                    }
                }
            }
        }
        bytes
    }

    fn attributes(&self) -> FileAttr {
        let size = self.state.lock().unwrap().size() as u64;
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
            self.state.lock().unwrap().resize(size as usize);
        }
        reply.attr(&TTL, &self.attributes());
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Each write comes here as it is, whether or not the page cache would have it.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
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
        let state = self.state.lock().unwrap();
        let behind = (state.size() as u64).saturating_sub(offset);
        let mut content = vec![0; u64::from(size).min(behind) as usize];
        state.content.read_exact_at(&mut content, offset).unwrap();
        reply.data(&content);
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
        let mut state = self.state.lock().unwrap();
        let end = offset as usize + data.len();
        if end > state.size() {
            state.resize(end);
        }
        state.content.write_all_at(data, offset).unwrap();
        let offset = offset as usize;
        state.log.push(Event::Write { offset, data: data.to_vec() });
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = self.state.lock().unwrap();
        if !state.lies {
            state.log.push(Event::Sync);
        }
        reply.ok();
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
        let mut state = self.state.lock().unwrap();
        let (offset, length) = (offset as usize, length as usize);
        if mode & FALLOC_PUNCH_HOLE != 0 {
            let end = (offset + length).min(state.size());
            let zeros = [0; BLOCK];
            for at in (offset..end).step_by(BLOCK) {
                state.content.write_all_at(&zeros[..BLOCK.min(end - at)], at as u64).unwrap();
            }
            state.log.push(Event::Punch { offset, length });
        } else if mode & FALLOC_KEEP_SIZE == 0 && offset + length > state.size() {
            state.resize(offset + length);
        }
        reply.ok();
    }
}
