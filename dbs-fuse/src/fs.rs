//! The kernel's requests. Each is answered by the thread that took it: as many run at once as there
//! are threads, each with one buffer, and no more memory is in flight.

use crate::node::{Kind as _, Node};
use crate::tree::{Entry, Open, READ_MAX_BYTES, Result, Tree};
use dbs_core::units::BLOCK_BYTES;
use fuser::{
    Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

/// A tree as the kernel asks for it.
pub struct Served<T: Tree> {
    tree: Arc<T>,
    handles: Mutex<Handles<T>>,
    next: AtomicU64,
}

struct Handles<T: Tree> {
    open: HashMap<u64, Arc<Handle<T>>>,
    bytes: usize,
}

/// What an open file or directory shows until it is closed.
enum Handle<T: Tree> {
    File(T::File),
    Text(Vec<u8>),
    Listing(Vec<Entry<T::Kind>>),
}

impl<T: Tree> Handle<T> {
    fn bytes(&self) -> usize {
        match self {
            Self::File(_) => 0,
            Self::Text(text) => text.len(),
            Self::Listing(entries) => entries.iter().map(|e| e.name.len() + 64).sum(),
        }
    }
}

impl<T: Tree> Served<T> {
    /// A tree that nobody has opened anything of.
    pub fn new(tree: Arc<T>) -> Self {
        let handles = Mutex::new(Handles { open: HashMap::new(), bytes: 0 });
        Self { tree, handles, next: AtomicU64::new(NO_HANDLE.0 + 1) }
    }

    fn handles(&self) -> MutexGuard<'_, Handles<T>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, handle: Handle<T>) -> Result<FileHandle> {
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

    fn handle(&self, handle: FileHandle) -> Result<Arc<Handle<T>>> {
        self.handles().open.get(&handle.0).cloned().ok_or(Errno::EBADF)
    }

    fn close(&self, handle: FileHandle) {
        let mut handles = self.handles();
        let closed = handles.open.remove(&handle.0);
        handles.bytes -= closed.as_ref().map_or(0, |closed| closed.bytes());
        // What it held is let go without the lock.
        drop(handles);
        drop(closed);
    }

    /// The node of a number.
    fn node(&self, number: INodeNo) -> Result<Arc<Node<T::Kind>>> {
        self.tree.nodes().get(number.0).ok_or(Errno::ESTALE)
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Result<(u64, Arc<Node<T::Kind>>)> {
        let parent = self.node(parent)?;
        Ok(self.tree.nodes().find(self.tree.child(&parent.kind, name)?))
    }

    /// How long the kernel may believe attributes.
    fn believed(&self, complete: bool) -> Duration {
        if complete { self.tree.lifetime() } else { Duration::ZERO }
    }

    /// Calls `body` with an image and what its handle has.
    fn with_image<R>(
        &self,
        number: INodeNo,
        handle: FileHandle,
        body: impl FnOnce(&T::Kind, Option<&T::File>) -> R,
    ) -> Result<R> {
        let node = self.node(number)?;
        if handle == NO_HANDLE {
            return Ok(body(&node.kind, None));
        }
        match &*self.handle(handle)? {
            Handle::File(file) => Ok(body(&node.kind, Some(file))),
            Handle::Text(_) | Handle::Listing(_) => Err(Errno::EINVAL),
        }
    }

    /// Sends a part of a listing, `add` being given each entry and the place behind it; it says
    /// whether there was no room for it.
    fn list(
        &self,
        handle: FileHandle,
        offset: u64,
        mut add: impl FnMut(u64, &Entry<T::Kind>, &Arc<Node<T::Kind>>, u64) -> bool,
    ) -> Result<()> {
        let handle = self.handle(handle)?;
        let Handle::Listing(entries) = &*handle else { return Err(Errno::EBADF) };
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, entry) in entries.iter().enumerate().skip(skip) {
            let (number, node) = self.tree.nodes().find(entry.kind.clone());
            if add(number, entry, &node, index as u64 + 1) {
                break;
            }
        }
        Ok(())
    }
}

impl<T: Tree> Filesystem for Served<T> {
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
            .and_then(|(number, node)| Ok((self.tree.quick_attributes(number, &node)?, node)));
        match found {
            Ok(((mut attributes, complete), node)) => {
                attributes.ino = INodeNo(self.tree.nodes().tell(&node));
                let lifetime = self.tree.lifetime();
                let believed = self.believed(complete);
                reply.entry_with_ttls(&believed, &lifetime, &attributes, Generation(0));
            }
            Err(error) => reply.error(error),
        }
    }

    fn forget(&self, _: &Request, number: INodeNo, lookups: u64) {
        self.tree.nodes().forget(number.0, lookups);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.node(number).and_then(|node| self.tree.attributes(number.0, &node));
        match found {
            Ok((attributes, complete)) => reply.attr(&self.believed(complete), &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match self.node(number).and_then(|node| self.tree.target(&node.kind)) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // Root can tell the kernel that the mount may be written (`mount -o remount,rw`).
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let opened = self.node(number).and_then(|node| match self.tree.open(&node)? {
            Open::Image(flags) => Ok((NO_HANDLE, flags)),
            Open::File(file, flags) => Ok((self.keep(Handle::File(file))?, flags)),
            Open::Text(text) => Ok((self.keep(Handle::Text(text))?, FopenFlags::FOPEN_DIRECT_IO)),
        });
        match opened {
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
        let handle = match handle {
            NO_HANDLE => None,
            handle => match self.handle(handle) {
                Ok(handle) => Some(handle),
                Err(error) => return reply.error(error),
            },
        };
        let file = match handle.as_deref() {
            Some(Handle::Text(text)) => return reply.data(part(text, offset, size)),
            Some(Handle::Listing(_)) => return reply.error(Errno::EISDIR),
            Some(Handle::File(file)) => Some(file),
            None => None,
        };
        match self.node(number) {
            Ok(node) => {
                let size = READ_MAX_BYTES.min(size as usize);
                self.tree.read(&node.kind, file, offset, size, reply);
            }
            Err(error) => reply.error(error),
        }
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
        let found = self.node(number).and_then(|node| self.tree.entries(&node.kind));
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
            reply.add(INodeNo(number), next, node.kind.file_type(), &entry.name)
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
            let Ok((attributes, complete)) = self.tree.quick_attributes(number, node) else {
                return false;
            };
            let lifetime = self.believed(complete);
            let (number, name) = (INodeNo(number), &entry.name);
            let full = reply.add(number, next, name, &lifetime, &attributes, Generation(0));
            if !full && !entry.is_dots() {
                self.tree.nodes().tell(node);
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
        let (space, size) = (self.tree.space(), BLOCK_BYTES as u32);
        reply.statfs(space.total, space.free, space.free, space.files, 0, size, NAME_MAX, size);
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = self.node(number).and_then(|node| {
            let wanted = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            let wanted = wanted.ok_or(Errno::NO_XATTR)?;
            let found =
                self.tree.extended(&node.kind)?.into_iter().find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.into_bytes()).ok_or(Errno::NO_XATTR)
        });
        answer(value, size, reply);
    }

    fn listxattr(&self, _: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let names = self.node(number).and_then(|node| self.tree.extended(&node.kind));
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
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let found = self
            .with_image(number, handle, |image, file| self.tree.seek(image, file, offset, whence));
        match found.flatten() {
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
