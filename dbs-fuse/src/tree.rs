//! What a tree of files is for the session that serves it to the kernel.

use crate::node::{Kind, Node, Nodes};
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::units::BLOCK_BYTES;
use fuser::{Errno, FileAttr, FileType, FopenFlags, INodeNo, Notifier, ReplyData};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

/// What images end in.
pub const RAW: &str = ".raw";
/// Bytes of the largest read.
pub const READ_MAX_BYTES: usize = 1 << 20;
/// Unit of `st_blocks` in bytes.
pub const STAT_BLOCK: u64 = 512;

thread_local! {
    static BUFFER: RefCell<Option<AlignedBuf>> = const { RefCell::new(None) };
}

/// Result of an operation of the kernel.
pub type Result<T> = std::result::Result<T, Errno>;

/// A tree of read-only files. Many threads ask it at once.
#[allow(clippy::missing_errors_doc)]
pub trait Tree: Send + Sync + 'static {
    /// What its nodes are.
    type Kind: Kind;
    /// What an open image has for itself.
    type File: Send + Sync;

    /// What the kernel knows of it.
    fn nodes(&self) -> &Nodes<Self::Kind>;
    /// How long the kernel may believe what it was told of names and attributes.
    fn lifetime(&self) -> Duration;
    /// What has a name in a directory.
    fn child(&self, directory: &Self::Kind, name: &OsStr) -> Result<Self::Kind>;
    /// What is in a directory.
    fn entries(&self, directory: &Self::Kind) -> Result<Vec<Entry<Self::Kind>>>;
    /// Where a link leads.
    fn target(&self, link: &Self::Kind) -> Result<String>;
    /// All attributes, and whether they are to be believed.
    fn attributes(&self, number: u64, node: &Node<Self::Kind>) -> Result<(FileAttr, bool)>;
    /// Attributes as far as they are known without much work, and whether that is all: else they are not to be
    /// believed.
    fn quick_attributes(&self, number: u64, node: &Node<Self::Kind>) -> Result<(FileAttr, bool)>;
    /// Extended attributes: names without `user.dbs.`, and values.
    fn extended(&self, kind: &Self::Kind) -> Result<Vec<(String, String)>>;
    /// Opens a file: with what handle, and what the kernel may keep of it.
    fn open(&self, node: &Node<Self::Kind>) -> Result<Open<Self::File>>;
    /// Answers a read of an image; `file` is what it has for itself.
    fn read(
        &self,
        image: &Self::Kind,
        file: Option<&Self::File>,
        offset: u64,
        size: usize,
        reply: ReplyData,
    );
    /// Where there is data or a hole in an image.
    fn seek(
        &self,
        image: &Self::Kind,
        file: Option<&Self::File>,
        offset: i64,
        whence: i32,
    ) -> Result<i64>;
    /// How much there is of everything.
    fn space(&self) -> Space;
    /// Whether [`Tree::watch`] is to run.
    fn is_watched(&self) -> bool;
    /// Follows what happens to the tree until it is to stop, in a thread of its own.
    fn watch(&self, notifier: &Notifier, stop: &AtomicBool);
    /// The kernel asks nothing any more.
    fn end(&self);
}

/// An opened file.
pub enum Open<F> {
    /// An image without memory of its own.
    Image(FopenFlags),
    /// An image with something for itself.
    File(F, FopenFlags),
    /// A text that was made for whoever opened it.
    Text(Vec<u8>),
}

/// For `statfs`, in blocks.
#[derive(Debug, Default)]
pub struct Space {
    /// All of them.
    pub total: u64,
    /// Those that nobody has.
    pub free: u64,
    /// Files.
    pub files: u64,
}

/// An entry of a directory.
#[derive(Debug, Clone)]
pub struct Entry<K> {
    /// File name.
    pub name: String,
    /// What it is.
    pub kind: K,
}

impl<K> Entry<K> {
    /// An entry.
    pub fn new(name: &str, kind: K) -> Self {
        Self { name: name.to_owned(), kind }
    }

    /// Whether it is the directory itself or the one above. Nothing else is called so: names are
    /// escaped.
    pub fn is_dots(&self) -> bool {
        matches!(self.name.as_str(), "." | "..")
    }
}

/// Whose the files are.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    ids: (u32, u32),
    /// Others may look at them.
    pub allow_other: bool,
}

impl Owner {
    /// The user of this process.
    pub fn new(allow_other: bool) -> Self {
        let ids = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        Self { ids, allow_other }
    }

    /// The attributes of a file of his, `space` being its bytes and blocks.
    pub fn shape(
        self,
        number: u64,
        kind: FileType,
        space: (u64, u64),
        time: SystemTime,
    ) -> FileAttr {
        let (size, blocks) = space;
        let (perm, nlink) = match kind {
            FileType::Directory => (if self.allow_other { 0o555 } else { 0o500 }, 2),
            FileType::Symlink => (0o777, 1),
            _ => (if self.allow_other { 0o444 } else { 0o400 }, 1),
        };
        FileAttr {
            ino: INodeNo(number),
            size,
            blocks,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink,
            uid: self.ids.0,
            gid: self.ids.1,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// Bytes and blocks of a text.
pub fn text_size(bytes: u64) -> (u64, u64) {
    (bytes, bytes.div_ceil(STAT_BLOCK))
}

/// Lends this thread's buffer, which has room for the largest read and the rest of two blocks.
pub fn with_buffer<R>(body: impl FnOnce(&mut AlignedBuf) -> R) -> R {
    BUFFER.with_borrow_mut(|buffer| {
        let whole = READ_MAX_BYTES + 2 * BLOCK_BYTES as usize;
        body(buffer.get_or_insert_with(|| AlignedBuf::zeroed(whole)))
    })
}
