//! The kernel's requests. Each is answered by the thread that took it: as many run at once as there
//! are threads, each with one buffer, and no more memory is in flight.

use crate::node::{Kind, Node, look};
use crate::view::{Entry, Result, View, extended, file_type, gone};
use dbs_core::ErrorKind;
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::volume::Observer;
use fuser::{
    Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of the largest read.
pub const READ_MAX_BYTES: usize = 1 << 20;
/// Requests that the kernel sends without anybody waiting for them, read-ahead above all.
const BACKGROUND_MAX: u16 = 64;
/// Open files and directories with memory of their own; bounds that, with [`TEXT_MAX_BYTES`].
const HANDLES_MAX: usize = 1024;
/// Bytes of all texts and listings that are open.
const TEXT_MAX_BYTES: usize = 64 << 20;
/// Files without memory of their own.
const NO_HANDLE: FileHandle = FileHandle(0);
/// Bytes of a name at most: escaped, one of 255 bytes has three times as many and an ending.
const NAME_MAX: u32 = 1024;
/// In front of the names of extended attributes.
const PREFIX: &str = "user.dbs.";

thread_local! {
    static BUFFER: RefCell<Option<AlignedBuf>> = const { RefCell::new(None) };
}

/// A view as the kernel asks for it.
pub struct Tree {
    view: Arc<View>,
    handles: Mutex<Handles>,
    next: AtomicU64,
}

#[derive(Default)]
struct Handles {
    open: HashMap<u64, Arc<Handle>>,
    bytes: usize,
}

/// What an open file or directory shows until it is closed.
enum Handle {
    Text(Vec<u8>),
    Listing(Vec<Entry>),
}

impl Handle {
    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Listing(entries) => entries.iter().map(|e| e.name.len() + 64).sum(),
        }
    }
}

impl Tree {
    /// The tree of a view.
    pub fn new(view: Arc<View>) -> Self {
        Self { view, handles: Mutex::default(), next: AtomicU64::new(NO_HANDLE.0 + 1) }
    }

    fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, handle: Handle) -> Result<FileHandle> {
        let bytes = handle.bytes();
        let mut handles = self.handles();
        if handles.open.len() >= HANDLES_MAX || handles.bytes + bytes > TEXT_MAX_BYTES {
            return Err(Errno::ENFILE);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        handles.bytes += bytes;
        handles.open.insert(number, Arc::new(handle));
        Ok(FileHandle(number))
    }

    fn handle(&self, handle: FileHandle) -> Result<Arc<Handle>> {
        self.handles().open.get(&handle.0).cloned().ok_or(Errno::EBADF)
    }

    fn close(&self, handle: FileHandle) {
        let mut handles = self.handles();
        let closed = handles.open.remove(&handle.0);
        handles.bytes -= closed.as_ref().map_or(0, |closed| closed.bytes());
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Result<(u64, Arc<Node>)> {
        let parent = self.view.node(parent)?;
        Ok(self.view.nodes.find(self.view.child(&parent.kind, name)?))
    }

    /// How a file is opened: with what handle, and what the kernel may keep of it.
    fn open_file(&self, number: INodeNo) -> Result<(FileHandle, FopenFlags)> {
        let node = self.view.node(number)?;
        match &node.kind {
            Kind::Snapshot(image) | Kind::Head(image) => {
                let (seen, mark) = look(&self.view.store, image).map_err(gone)?;
                if seen.incomplete {
                    return Err(Errno::ESTALE);
                }
                // The first one to open it after it may have changed lets the kernel drop what it has.
                let flags = match node.keeps(mark) || !self.view.options.live {
                    true => FopenFlags::FOPEN_KEEP_CACHE,
                    false if seen.settled => FopenFlags::empty(),
                    false => FopenFlags::FOPEN_DIRECT_IO,
                };
                Ok((NO_HANDLE, flags))
            }
            Kind::StoreJson | Kind::Info(_) | Kind::Map(_) => {
                let text = self.view.text(&node.kind)?;
                node.note_text(text.len());
                Ok((self.keep(Handle::Text(text))?, FopenFlags::FOPEN_DIRECT_IO))
            }
            Kind::Latest(_) => Err(Errno::ELOOP),
            _ => Err(Errno::EISDIR),
        }
    }

    /// Sends a part of a listing, `add` being given each entry and the place behind it; it says
    /// whether there was no room for it.
    fn list(
        &self,
        handle: FileHandle,
        offset: u64,
        mut add: impl FnMut(u64, &Entry, &Arc<Node>, u64) -> bool,
    ) -> Result<()> {
        let handle = self.handle(handle)?;
        let Handle::Listing(entries) = &*handle else { return Err(Errno::EBADF) };
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, entry) in entries.iter().enumerate().skip(skip) {
            let (number, node) = self.view.nodes.find(entry.kind.clone());
            if add(number, entry, &node, index as u64 + 1) {
                break;
            }
        }
        Ok(())
    }
}

impl Filesystem for Tree {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Also bounds reads, as both have pages to go into.
        let _ = config.set_max_write(READ_MAX_BYTES as u32);
        if let Err(most) = config.set_max_readahead(READ_MAX_BYTES as u32) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(BACKGROUND_MAX);
        for wish in [
            InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ] {
            // What an older kernel lacks only costs speed, or mappings of heads.
            let _ = config.add_capabilities(wish);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self
            .find(parent, name)
            .and_then(|(number, node)| Ok((self.view.quick_attributes(number, &node)?, node)));
        match found {
            Ok(((mut attributes, complete), node)) => {
                attributes.ino = INodeNo(self.view.nodes.tell(&node));
                let lifetime = self.view.lifetime();
                let believed = if complete { lifetime } else { Duration::ZERO };
                reply.entry_with_ttls(&believed, &lifetime, &attributes, Generation(0));
            }
            Err(error) => reply.error(error),
        }
    }

    fn forget(&self, _: &Request, number: INodeNo, lookups: u64) {
        self.view.nodes.forget(number.0, lookups);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.view.node(number).and_then(|node| {
            let attributes = self.view.attributes(number.0, &node)?;
            // The size of a map that nobody has opened yet is not to be believed.
            let unknown = matches!(node.kind, Kind::Map(_)) && attributes.size == 0;
            Ok((if unknown { Duration::ZERO } else { self.view.lifetime() }, attributes))
        });
        match found {
            Ok((lifetime, attributes)) => reply.attr(&lifetime, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match self.view.node(number).and_then(|node| self.view.target(&node.kind)) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // Root can tell the kernel that the mount may be written (`mount -o remount,rw`).
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        match self.open_file(number) {
            Ok((handle, flags)) => reply.opened(handle, flags),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if handle != NO_HANDLE {
            return match self.handle(handle).as_deref() {
                Ok(Handle::Text(text)) => reply.data(part(text, offset, size)),
                Ok(Handle::Listing(_)) => reply.error(Errno::EISDIR),
                Err(error) => reply.error(*error),
            };
        }
        let node = match self.view.node(number) {
            Ok(node) => node,
            Err(error) => return reply.error(error),
        };
        let (Kind::Head(image) | Kind::Snapshot(image)) = &node.kind else {
            return reply.error(Errno::EISDIR);
        };
        BUFFER.with_borrow_mut(|buffer| {
            let whole = READ_MAX_BYTES + 2 * BLOCK_BYTES as usize;
            let buffer = buffer.get_or_insert_with(|| AlignedBuf::zeroed(whole));
            match read(image, offset, size as usize, buffer) {
                Ok(bytes) => reply.data(bytes),
                Err(error) => reply.error(error),
            }
        });
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.close(handle);
        reply.ok();
    }

    fn opendir(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let found = self.view.node(number).and_then(|node| self.view.entries(&node.kind));
        match found.and_then(|entries| self.keep(Handle::Listing(entries))) {
            Ok(handle) => reply.opened(handle, FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.list(handle, offset, |number, entry, node, next| {
            reply.add(INodeNo(number), next, file_type(&node.kind), &entry.name)
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listed = self.list(handle, offset, |number, entry, node, next| {
            // Deleted since the listing was made: as if it had been before.
            let Ok((attributes, complete)) = self.view.quick_attributes(number, node) else {
                return false;
            };
            let lifetime = if complete { self.view.lifetime() } else { Duration::ZERO };
            let (number, name) = (INodeNo(number), &entry.name);
            let full = reply.add(number, next, name, &lifetime, &attributes, Generation(0));
            if !full && !entry.is_dots() {
                self.view.nodes.tell(node);
            }
            full
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.close(handle);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let info = self.view.store.info();
        let blocks = info.extent_size / BLOCK_BYTES;
        let free = info.extents_free * blocks;
        let total = info.extents_total * blocks;
        let size = BLOCK_BYTES as u32;
        reply.statfs(total, free, free, info.volumes + info.snapshots, 0, size, NAME_MAX, size);
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = self.view.node(number).and_then(|node| {
            let wanted = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            let wanted = wanted.ok_or(Errno::NO_XATTR)?;
            let found = extended(&node.kind)?.into_iter().find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.into_bytes()).ok_or(Errno::NO_XATTR)
        });
        answer(value, size, reply);
    }

    fn listxattr(&self, _: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let names = self.view.node(number).and_then(|node| extended(&node.kind));
        let names = names.map(|facts| {
            let names = facts.iter().map(|(name, _)| format!("{PREFIX}{name}\0"));
            names.collect::<String>().into_bytes()
        });
        answer(names, size, reply);
    }

    fn lseek(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        match self.view.node(number).and_then(|node| seek(&node, offset, whence)) {
            Ok(offset) => reply.offset(offset),
            Err(error) => reply.error(error),
        }
    }
}

/// Answers with a value, its length, or that there is no room for it.
fn answer(value: Result<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match value {
        Ok(value) if size == 0 => reply.size(u32::try_from(value.len()).unwrap_or(u32::MAX)),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(error),
    }
}

fn part(text: &[u8], offset: u64, size: u32) -> &[u8] {
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
    &text[start..text.len().min(start + size as usize)]
}

/// Reads from an image, whole blocks into `buffer`; less than asked for at its end only.
fn read<'a>(
    image: &Observer,
    offset: u64,
    size: usize,
    buffer: &'a mut AlignedBuf,
) -> Result<&'a [u8]> {
    let size = size.min(READ_MAX_BYTES) as u64;
    // A head that shrinks in between is looked at once more.
    for _ in 0..2 {
        let end = image.size().map_err(gone)?;
        let stop = offset.saturating_add(size).min(end);
        if offset >= stop {
            return Ok(&[]);
        }
        let first = offset - offset % BLOCK_BYTES;
        let whole = (stop.next_multiple_of(BLOCK_BYTES).min(end) - first) as usize;
        match image.read_at(first, &mut buffer[..whole]) {
            Ok(()) => {
                return Ok(&buffer[(offset - first) as usize..(stop - first) as usize]);
            }
            Err(error) if error.kind() == ErrorKind::Invalid => {}
            Err(error) => return Err(gone(error)),
        }
    }
    Err(Errno::EIO)
}

fn seek(node: &Node, offset: i64, whence: i32) -> Result<i64> {
    let (Kind::Head(image) | Kind::Snapshot(image)) = &node.kind else {
        return Err(Errno::EINVAL);
    };
    let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
    if from >= image.size().map_err(gone)? {
        return Err(Errno::ENXIO);
    }
    let found = match whence {
        libc::SEEK_DATA => image.next_data(from).map_err(gone)?.ok_or(Errno::ENXIO)?,
        libc::SEEK_HOLE => image.next_hole(from).map_err(gone)?,
        _ => return Err(Errno::EINVAL),
    };
    i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
}
