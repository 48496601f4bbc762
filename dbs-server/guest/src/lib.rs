//! A virtual machine as a vhost-user-blk server sees it, without the machine: memory, queues in it, and the driver of a
//! disk. For tests and benchmarks alone.
//!
//! The messages are those of rust-vmm's frontend, so that both sides are not written by the same hands. The queues are
//! driven here, as the driver of Linux does it; and as none would, where a test asks for that.

mod queue;

pub use queue::{Kind, Queue, Request};

use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserInflight, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// Where guest memory begins, for the guest and for the process of its machine.
pub const MEMORY_START: u64 = 0x10_0000;
const USER_START: u64 = 0x7000_0000_0000;

/// What makes writes durable, among the features of the disk.
pub const FLUSH: u64 = 1 << 9;
/// The features that are asked for unless the server has them not.
pub const INDIRECT: u64 = 1 << 28;
/// As above.
pub const EVENT_INDEX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

/// How to be a guest.
#[derive(Debug, Clone)]
pub struct Options {
    /// Queues.
    pub queues: u16,
    /// Places of each; a request takes one with [`INDIRECT`], else three.
    pub places: u16,
    /// Bytes for the data of each request.
    pub data_bytes: u32,
    /// Features to use of the queues, beside those that every guest needs.
    pub features: u64,
    /// Features of the disk not to use.
    pub unused: u64,
    /// Have the requests under way noted.
    pub inflight: bool,
    /// How many more places there are for that in each queue than the queue has.
    pub spare: u16,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: 1,
            places: 128,
            data_bytes: 128 << 10,
            features: INDIRECT | EVENT_INDEX,
            unused: 0,
            inflight: true,
            spare: 0,
        }
    }
}

/// A guest.
pub struct Guest {
    options: Options,
    memory: Arc<GuestMemoryMmap>,
    file: Arc<File>,
    frontend: Frontend,
    /// Where the server tells of changes.
    channel: UnixStream,
    inflight: Option<(VhostUserInflight, File)>,
    features: u64,
    /// Its queues.
    pub queues: Vec<Queue>,
}

impl Guest {
    /// A new guest whose disk is behind this socket.
    ///
    /// # Errors
    /// What a step of the protocol has met.
    pub fn connect(socket: &Path, options: &Options) -> io::Result<Self> {
        let layout = queue::Layout::new(options);
        let size = layout.bytes() * u64::from(options.queues);
        let file = Arc::new(File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC)?));
        file.set_len(size)?;
        let region = (
            GuestAddress(MEMORY_START),
            size as usize,
            Some(FileOffset::from_arc(file.clone(), 0)),
        );
        let memory = GuestMemoryMmap::from_ranges_with_files([region]).map_err(other)?;
        let memory = Arc::new(memory);
        let mut queues = Vec::new();
        for index in 0..options.queues {
            let start = MEMORY_START + layout.bytes() * u64::from(index);
            queues.push(Queue::new(Arc::clone(&memory), &layout, start, options)?);
        }
        let frontend = Frontend::connect(socket, u64::from(options.queues)).map_err(other)?;
        let (options, channel) = (options.clone(), UnixStream::pair()?.0);
        let (inflight, features) = (None, 0);
        let mut guest =
            Self { options, memory, file, frontend, channel, inflight, features, queues };
        guest.set_up()?;
        Ok(guest)
    }

    /// Connects again, as the process of a machine does whose server was killed: with the memory, the queues and the
    /// notes that there are.
    ///
    /// # Errors
    /// As [`Guest::connect`].
    pub fn reconnect(&mut self, socket: &Path) -> io::Result<()> {
        self.frontend = Frontend::connect(socket, u64::from(self.options.queues)).map_err(other)?;
        self.set_up()
    }

    fn set_up(&mut self) -> io::Result<()> {
        let frontend = &mut self.frontend;
        frontend.set_owner().map_err(other)?;
        let offered = frontend.get_features().map_err(other)?;
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let of_disk = 0xff_ffff & !self.options.unused;
        self.features = offered & (self.options.features | VERSION_1 | protocol | of_disk);
        frontend.set_features(self.features).map_err(other)?;
        let offered = frontend.get_protocol_features().map_err(other)?;
        let mut wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ;
        wanted.set(VhostUserProtocolFeatures::INFLIGHT_SHMFD, self.options.inflight);
        frontend.set_protocol_features(offered & wanted).map_err(other)?;
        frontend.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        if offered.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
            let (channel, theirs) = UnixStream::pair()?;
            self.channel = channel;
            frontend.set_backend_request_fd(&theirs).map_err(other)?;
        }
        if self.options.inflight && offered.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            if self.inflight.is_none() {
                let queues = self.options.queues;
                let places = self.options.places + self.options.spare;
                let asked = VhostUserInflight::new(0, 0, queues, places);
                self.inflight = Some(frontend.get_inflight_fd(&asked).map_err(other)?);
            }
            if let Some((inflight, file)) = &self.inflight {
                frontend.set_inflight_fd(inflight, file.as_raw_fd()).map_err(other)?;
            }
        }
        frontend.set_mem_table(&[region(&self.file, MEMORY_START)?]).map_err(other)?;
        for index in 0..self.queues.len() {
            self.start(index)?;
        }
        Ok(())
    }

    /// Adds memory behind the other, of which all is zero, as plugging it in does; where it begins.
    ///
    /// # Errors
    /// As [`Guest::connect`].
    pub fn grow(&mut self, bytes: u64) -> io::Result<u64> {
        let start = MEMORY_START + self.file.metadata()?.len();
        let file = File::from(memfd_create(c"more", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(bytes)?;
        let regions = [region(&self.file, MEMORY_START)?, region(&file, start)?];
        self.frontend.set_mem_table(&regions).map_err(other)?;
        Ok(start)
    }

    /// Notes requests as under way, in this order, as a server leaves them that was killed after it had taken them.
    ///
    /// # Errors
    /// There are no notes, or they cannot be written.
    pub fn note(&self, index: u64, heads: &[u16]) -> io::Result<()> {
        let (start, _, file) = self.notes(index)?;
        for (counter, head) in (1u64..).zip(heads) {
            let at = start + 16 * u64::from(*head);
            file.write_all_at(&[1], at)?;
            file.write_all_at(&counter.to_le_bytes(), at + 8)?;
        }
        Ok(())
    }

    /// Which requests are noted as under way.
    ///
    /// # Errors
    /// There are no notes, or they cannot be read.
    pub fn noted(&self, index: u64) -> io::Result<Vec<u16>> {
        let (start, places, file) = self.notes(index)?;
        let mut noted = Vec::new();
        for head in 0..places {
            let mut mark = [0];
            file.read_exact_at(&mut mark, start + 16 * u64::from(head))?;
            noted.extend((mark[0] != 0).then_some(head));
        }
        Ok(noted)
    }

    /// Has the notes say no more of which disk they are.
    ///
    /// # Errors
    /// There are no notes, or they cannot be written.
    pub fn forget_disk(&self) -> io::Result<()> {
        let (inflight, file) = self.inflight.as_ref().ok_or_else(|| other("no notes"))?;
        file.write_all_at(&[0; 64], inflight.mmap_size - 64)
    }

    /// Where the notes of a queue begin, and of how many places they are.
    fn notes(&self, index: u64) -> io::Result<(u64, u16, &File)> {
        let (inflight, file) = self.inflight.as_ref().ok_or_else(|| other("no notes"))?;
        let bytes = (16 + 16 * u64::from(inflight.queue_size)).next_multiple_of(64);
        Ok((index * bytes + 16, inflight.queue_size, file))
    }

    /// Has the server serve a queue.
    ///
    /// # Errors
    /// As [`Guest::connect`].
    pub fn start(&mut self, index: usize) -> io::Result<()> {
        let (frontend, queue) = (&mut self.frontend, &self.queues[index]);
        let user = |address: u64| address - MEMORY_START + USER_START;
        let (descriptors, available, used) = queue.places();
        frontend.set_vring_num(index, self.options.places).map_err(other)?;
        frontend.set_vring_base(index, queue.used()).map_err(other)?;
        let config = VringConfigData {
            queue_max_size: self.options.places,
            queue_size: self.options.places,
            flags: 0,
            desc_table_addr: user(descriptors),
            used_ring_addr: user(used),
            avail_ring_addr: user(available),
            log_addr: None,
        };
        frontend.set_vring_addr(index, &config).map_err(other)?;
        frontend.set_vring_call(index, queue.call()).map_err(other)?;
        frontend.set_vring_kick(index, queue.kick_event()).map_err(other)?;
        frontend.set_vring_enable(index, true).map_err(other)
    }

    /// Has the server rest a queue, once nothing of it is under way; what it would take next.
    ///
    /// # Errors
    /// As [`Guest::connect`].
    pub fn stop(&mut self, index: usize) -> io::Result<u32> {
        self.frontend.get_vring_base(index).map_err(other)
    }

    /// Features in use.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Bytes of the disk's configuration.
    ///
    /// # Errors
    /// As [`Guest::connect`].
    pub fn config(&mut self, offset: u32, bytes: u32) -> io::Result<Vec<u8>> {
        let flags = VhostUserConfigFlags::WRITABLE;
        let room = vec![0; bytes as usize];
        let read = self.frontend.get_config(offset, bytes, flags, &room).map_err(other)?;
        Ok(read.1)
    }

    /// Size of the disk in bytes.
    ///
    /// # Errors
    /// As [`Guest::connect`].
    pub fn size(&mut self) -> io::Result<u64> {
        let bytes = self.config(0, 8)?;
        bytes.try_into().map(|bytes| u64::from_le_bytes(bytes) * 512).map_err(|_| other("short"))
    }

    /// Waits until the server tells of a change; the number of the message.
    ///
    /// # Errors
    /// None comes.
    pub fn change(&mut self, patience: Duration) -> io::Result<u32> {
        self.channel.set_read_timeout(Some(patience))?;
        let mut header = [0; 12];
        io::Read::read_exact(&mut self.channel, &mut header)?;
        Ok(u32::from_le_bytes([header[0], header[1], header[2], header[3]]))
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }
}

/// A part of the guest's memory.
fn region(file: &File, start: u64) -> io::Result<VhostUserMemoryRegionInfo> {
    Ok(VhostUserMemoryRegionInfo {
        guest_phys_addr: start,
        memory_size: file.metadata()?.len(),
        userspace_addr: start - MEMORY_START + USER_START,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    })
}

pub(crate) fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(error)
}
