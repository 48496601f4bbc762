//! A disk that counts its syncs: a FUSE file system with one file, behind which another one is.

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use nix::fcntl::{FallocateFlags, fallocate};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

/// Name of the file.
const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);
const TTL: Duration = Duration::ZERO;

/// The file system.
struct Counting {
    behind: File,
    syncs: Arc<AtomicUsize>,
}

/// The disk, as long as it is mounted.
pub struct Disk {
    syncs: Arc<AtomicUsize>,
    _session: BackgroundSession,
}

impl Disk {
    /// Puts a disk in front of a file: the file's name leads there from now on. `None`, with a message, where
    /// nothing can be mounted.
    pub fn before(path: &Path) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !nix::unistd::geteuid().is_root() {
            println!("SKIPPED whether syncs reach the disk: needs /dev/fuse and root");
            return None;
        }
        let (behind, mount) = (path.with_extension("behind"), path.with_extension("mount"));
        fs::create_dir(&mount).unwrap();
        fs::rename(path, &behind).unwrap();
        symlink(mount.join(NAME), path).unwrap();
        let behind = File::options().read(true).write(true).open(behind).unwrap();
        let syncs = Arc::<AtomicUsize>::default();
        let counting = Counting { behind, syncs: Arc::clone(&syncs) };
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("dbs-syncs".to_owned())];
        let session = Session::new(counting, &mount, &config).and_then(Session::spawn).unwrap();
        Some(Self { syncs, _session: session })
    }

    /// A sync reaches the disk before this work has ended.
    pub fn synced(&self, what: &str, work: impl FnOnce()) {
        let before = self.syncs.load(Ordering::SeqCst);
        work();
        assert!(self.syncs.load(Ordering::SeqCst) > before, "{what}: no sync reached the disk");
    }
}

impl Counting {
    fn attributes(&self) -> FileAttr {
        let metadata = self.behind.metadata().unwrap();
        attributes(FILE, metadata.len(), metadata.blocks(), FileType::RegularFile)
    }
}

fn attributes(ino: INodeNo, size: u64, blocks: u64, kind: FileType) -> FileAttr {
    let time = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino,
        size,
        blocks,
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
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Counting {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == NAME {
            true => reply.entry(&TTL, &self.attributes(), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match ino == FILE {
            true => reply.attr(&TTL, &self.attributes()),
            false => reply.attr(&TTL, &attributes(ino, 0, 0, FileType::Directory)),
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
        match size.map_or(Ok(()), |size| self.behind.set_len(size)) {
            Ok(()) => reply.attr(&TTL, &self.attributes()),
            Err(error) => reply.error(error.into()),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
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
        let mut out = vec![0; size as usize];
        match self.behind.read_at(&mut out, offset) {
            Ok(length) => reply.data(&out[..length]),
            Err(error) => reply.error(error.into()),
        }
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
        match self.behind.write_all_at(data, offset) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error.into()),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.syncs.fetch_add(1, Ordering::SeqCst);
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
        let mode = FallocateFlags::from_bits_retain(mode);
        match fallocate(&self.behind, mode, offset.cast_signed(), length.cast_signed()) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(std::io::Error::from(errno).into()),
        }
    }
}
