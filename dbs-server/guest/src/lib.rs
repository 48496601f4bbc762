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
    /// Features to use of the disk and its queues, beside those that every guest needs.
    pub features: u64,
    /// Have the requests under way noted.
    pub inflight: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: 1,
            places: 128,
            data_bytes: 128 << 10,
            features: INDIRECT | EVENT_INDEX,
            inflight: true,
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
        // All of the disk's own.
        self.features = offered & (self.options.features | VERSION_1 | protocol | 0xff_ffff);
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
                let (queues, places) = (self.options.queues, self.options.places);
                let asked = VhostUserInflight::new(0, 0, queues, places);
                self.inflight = Some(frontend.get_inflight_fd(&asked).map_err(other)?);
            }
            if let Some((inflight, file)) = &self.inflight {
                frontend.set_inflight_fd(inflight, file.as_raw_fd()).map_err(other)?;
            }
        }
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: MEMORY_START,
            memory_size: self.file.metadata()?.len(),
            userspace_addr: USER_START,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        frontend.set_mem_table(&[region]).map_err(other)?;
        for index in 0..self.queues.len() {
            self.start(index)?;
        }
        Ok(())
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

pub(crate) fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(error)
}
