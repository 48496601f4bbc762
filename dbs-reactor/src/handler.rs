//! What a server implements, and what it can start.

use super::batch::Batch;
use super::buffer::{Buf, Buffers};
use super::epoll::Epoll;
use super::shared::Payload;
#[cfg(feature = "simulated")]
use super::simulated::{Clock, Simulated};
use super::targets::{File, Segment, Socket, Watch};
use super::ublk::{UblkQueue, UblkRequest};
use super::uring::Uring;
use nix::sys::eventfd::EventFd;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a thread does its I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Driver {
    /// `io_uring` where the kernel allows it, else `epoll`.
    #[default]
    Auto,
    /// One `io_uring` for everything.
    Uring,
    /// `epoll` for sockets, and threads that read and write files.
    Epoll,
}

/// Settings of a reactor.
#[derive(Debug, Clone)]
pub struct Options {
    /// How to do I/O.
    pub driver: Driver,
    /// Bytes of memory for buffers, which count only once they have been used; what does not fit
    /// comes from the heap, which costs a large buffer more than its I/O.
    pub buffer_bytes: usize,
    /// How long to look for the next completion before sleeping, while they come quickly; zero
    /// never does.
    pub spin: Duration,
    /// Threads that read and write files with [`Driver::Epoll`].
    pub file_threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            driver: Driver::Auto,
            buffer_bytes: 64 << 20,
            spin: Duration::ZERO,
            file_threads: 16,
        }
    }
}

/// A server, as its reactor sees it. Methods are called when an operation with that tag has ended
/// and must not block: everything else on the thread waits for them.
///
/// # Panics
/// A panic in a method ends the process: the kernel may be using memory that must not go away.
pub trait Handler {
    /// What other threads send.
    type Message: Send + 'static;

    /// Another thread sent something.
    fn message(&mut self, io: &mut Io, message: Self::Message);

    /// [`Io::receive`]: bytes have come, none at the end of the stream. They are gone when the
    /// method returns.
    fn received(&mut self, io: &mut Io, tag: u64, data: io::Result<&[u8]>) {
        let _ = (io, tag, data);
    }

    /// [`Io::fill`]: the buffer is full, or the stream ended before (`UnexpectedEof`).
    fn filled(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        let _ = (io, tag, buf, result);
    }

    /// [`Io::send`]: all of the batch is sent, or the peer is gone.
    fn sent(&mut self, io: &mut Io, tag: u64, batch: Batch, result: io::Result<()>) {
        let _ = (io, tag, batch, result);
    }

    /// [`Io::read`] or [`Io::write`]: all segments are complete, or the first failure.
    fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        let _ = (io, tag, buf, result);
    }

    /// [`Io::sync`]: the file is synced, or what of it is durable nobody knows.
    fn synced(&mut self, io: &mut Io, tag: u64, result: io::Result<()>) {
        let _ = (io, tag, result);
    }

    /// [`Io::watch`]: the event has happened, once or more often; or it is no longer watched, and why. May also be told
    /// once more after [`Io::unwatch`].
    fn signalled(&mut self, io: &mut Io, tag: u64, result: io::Result<()>) {
        let _ = (io, tag, result);
    }

    /// [`Io::fetch`] or [`Io::commit`]: a user of the device has made a request, to be answered with
    /// [`Io::commit`]; or the tag is not with the kernel any more, `ENODEV` if the device was
    /// stopped.
    fn fetched(
        &mut self,
        io: &mut Io,
        queue: UblkQueue,
        tag: u16,
        request: io::Result<UblkRequest>,
    ) {
        let _ = (io, queue, tag, request);
    }

    /// Everything that had happened has been told: the moment to start what was put off so that
    /// it goes together, such as a batch of replies.
    fn turn(&mut self, io: &mut Io) {
        let _ = io;
    }

    /// The time of [`Io::wake_at`] has come.
    fn tick(&mut self, io: &mut Io) {
        let _ = io;
    }

    /// The time of [`Io::remind_in`] has come.
    fn reminded(&mut self, io: &mut Io) {
        let _ = io;
    }
}

/// Starts operations, for the handler that it is handed to.
pub struct Io {
    pub(crate) backend: Backend,
    buffers: Buffers,
    pub(crate) deadline: Option<Instant>,
    pub(crate) reminder: Option<Instant>,
    pub(crate) stopping: bool,
}

/// A driver in use.
pub(crate) enum Backend {
    Uring(Box<Uring>),
    Epoll(Box<Epoll>),
    #[cfg(feature = "simulated")]
    Simulated(Box<Simulated>),
}

/// Calls the method of whichever driver is in use.
macro_rules! backend {
    ($io:expr, $driver:ident => $call:expr) => {
        match &mut $io.backend {
            Backend::Uring($driver) => $call,
            Backend::Epoll($driver) => $call,
            #[cfg(feature = "simulated")]
            Backend::Simulated($driver) => $call,
        }
    };
}
pub(crate) use backend;

impl Io {
    pub(crate) fn new(options: &Options, waker: &Arc<EventFd>) -> io::Result<Self> {
        let buffers = Buffers::new(options.buffer_bytes)?;
        let uring = || Uring::new(Arc::clone(waker)).map(Box::new);
        let epoll = || Epoll::new(Arc::clone(waker), options.file_threads).map(Box::new);
        let backend = match options.driver {
            Driver::Uring => Backend::Uring(uring()?),
            Driver::Epoll => Backend::Epoll(epoll()?),
            Driver::Auto => match uring() {
                Ok(uring) => Backend::Uring(uring),
                Err(_) => Backend::Epoll(epoll()?),
            },
        };
        Ok(Self { backend, buffers, deadline: None, reminder: None, stopping: false })
    }

    #[cfg(feature = "simulated")]
    pub(crate) fn simulated(options: &Options, clock: Clock) -> io::Result<Self> {
        let buffers = Buffers::new(options.buffer_bytes)?;
        let backend = Backend::Simulated(Box::new(Simulated::new(clock)));
        Ok(Self { backend, buffers, deadline: None, reminder: None, stopping: false })
    }

    /// The time.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Instant {
        #[cfg(feature = "simulated")]
        if let Backend::Simulated(driver) = &self.backend {
            return driver.now();
        }
        Instant::now()
    }

    /// A connection of a simulation, by the name that it has there; of no use elsewhere.
    #[cfg(feature = "simulated")]
    pub fn add_simulated(&mut self, name: u64) -> Socket {
        match &mut self.backend {
            Backend::Simulated(driver) => Socket(driver.link(name)),
            _ => Socket::nowhere(),
        }
    }

    /// Name of the driver in use: `io_uring` or `epoll`.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        match &self.backend {
            Backend::Uring(_) => "io_uring",
            Backend::Epoll(_) => "epoll",
            #[cfg(feature = "simulated")]
            Backend::Simulated(_) => "simulated",
        }
    }

    /// Memory for operations.
    #[must_use]
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Takes over a connected stream socket, in blocking mode.
    pub fn add_socket(&mut self, socket: OwnedFd) -> Socket {
        Socket(backend!(self, driver => driver.add(socket)))
    }

    /// Takes over a file or block device.
    pub fn add_file(&mut self, file: OwnedFd) -> File {
        File(backend!(self, driver => driver.add(file)))
    }

    /// Receives what comes next, whatever it is; ends in [`Handler::received`]. One at a time for
    /// each socket, together with [`Io::fill`]. A socket that waits holds no memory.
    pub fn receive(&mut self, socket: Socket, tag: u64) {
        backend!(self, driver => driver.receive(socket.0, tag));
    }

    /// Receives into `buf` from `start` until it is full; ends in [`Handler::filled`].
    pub fn fill(&mut self, socket: Socket, buf: Buf, start: usize, tag: u64) {
        backend!(self, driver => driver.fill(socket.0, buf, start, tag));
    }

    /// Sends a batch; ends in [`Handler::sent`]. One at a time for each socket.
    pub fn send(&mut self, socket: Socket, batch: Batch, tag: u64) {
        backend!(self, driver => driver.send(socket.0, batch, tag));
    }

    /// Bytes of the batch on its way that are known to be sent, a MiB late at most. Looks at all
    /// that is in flight: for once in a while.
    pub fn sent_so_far(&mut self, socket: Socket) -> usize {
        backend!(self, driver => driver.sent(socket.0))
    }

    /// Reads all segments into `buf`, in any order; ends in [`Handler::moved`].
    pub fn read(&mut self, file: File, segments: &[Segment], buf: Buf, tag: u64) {
        backend!(self, driver => driver.read(file.0, segments, buf, tag));
    }

    /// Writes all segments out of `payload`, in any order; ends in [`Handler::moved`], with a buffer of
    /// no bytes if it is shared.
    pub fn write(
        &mut self,
        file: File,
        segments: &[Segment],
        payload: impl Into<Payload>,
        tag: u64,
    ) {
        let payload = payload.into();
        backend!(self, driver => driver.write(file.0, segments, payload, tag));
    }

    /// Hands what was started over to the kernel now, and not when the turn ends: for a handler that starts many
    /// operations in a turn, of which the first are to be at work while the others are still being made.
    pub fn hand_over(&mut self) {
        if let Backend::Uring(driver) = &mut self.backend {
            driver.hand_over();
        }
    }

    /// Makes durable what has been written to a file and was complete before this call; ends in
    /// [`Handler::synced`].
    pub fn sync(&mut self, file: File, tag: u64) {
        backend!(self, driver => driver.sync(file.0, tag));
    }

    /// Watches an eventfd; each time that somebody has added to it ends in [`Handler::signalled`], and so does a count that
    /// it has already. The count is left as it is: nothing is read. What is watched does not keep the thread from
    /// ending.
    pub fn watch(&mut self, event: File, tag: u64) -> Watch {
        Watch(backend!(self, driver => driver.watch(event.0, tag)))
    }

    /// Watches an event no longer.
    pub fn unwatch(&mut self, watch: Watch) {
        backend!(self, driver => driver.unwatch(watch.0));
    }

    /// Takes over a queue of a ublk device, of which `device` is the character device. All its tags
    /// must be fetched on this thread.
    ///
    /// # Errors
    /// `Unsupported` without `io_uring`; the kernel does not show the queue.
    pub fn add_ublk_queue(
        &mut self,
        device: OwnedFd,
        queue: u16,
        depth: u16,
    ) -> io::Result<UblkQueue> {
        match &mut self.backend {
            Backend::Uring(driver) => driver.add_queue(device, queue, depth),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Hands a tag to the kernel for the first time; ends in [`Handler::fetched`] when there is a
    /// request for it. Tags that wait do not keep the thread from ending.
    pub fn fetch(&mut self, queue: UblkQueue, tag: u16) {
        if let Backend::Uring(driver) = &mut self.backend {
            driver.fetch(queue, tag, None);
        }
    }

    /// Answers the request of a tag, with the bytes read or written or a negative error number, and
    /// hands the tag to the kernel again.
    pub fn commit(&mut self, queue: UblkQueue, tag: u16, result: i32) {
        if let Backend::Uring(driver) = &mut self.backend {
            driver.fetch(queue, tag, Some(result));
        }
    }

    /// Gives a queue up; nothing is told of its tags any more.
    pub fn remove_ublk_queue(&mut self, queue: UblkQueue) {
        if let Backend::Uring(driver) = &mut self.backend {
            driver.remove_queue(queue);
        }
    }

    /// Ends a connection in both directions: what runs on it ends soon. See
    /// [`Io::stop_receiving`].
    pub fn shutdown(&mut self, socket: Socket) {
        self.shutdown_as(socket, nix::sys::socket::Shutdown::Both);
    }

    /// Ends a connection in the direction of this side: what is being received ends soon.
    pub fn stop_receiving(&mut self, socket: Socket) {
        self.shutdown_as(socket, nix::sys::socket::Shutdown::Read);
    }

    /// Whether the peer has closed the connection, or its sending side: a look at a socket that is not
    /// being received from. Whatever it sent before may still be there.
    pub fn has_hung_up(&mut self, socket: Socket) -> bool {
        #[cfg(feature = "simulated")]
        if let Backend::Simulated(driver) = &self.backend {
            return driver.has_ended(socket.0);
        }
        backend!(self, driver => driver.targets().get(socket.0))
            .is_some_and(|fd| has_hung_up(fd.as_fd()))
    }

    fn shutdown_as(&mut self, socket: Socket, how: nix::sys::socket::Shutdown) {
        #[cfg(feature = "simulated")]
        if let Backend::Simulated(driver) = &mut self.backend {
            return driver.shutdown(socket.0);
        }
        if let Some(fd) = backend!(self, driver => driver.targets().get(socket.0)) {
            use std::os::fd::AsRawFd;
            // Fails only where the peer was faster.
            let _ = nix::sys::socket::shutdown(fd.as_fd().as_raw_fd(), how);
        }
    }

    /// Closes a socket that nothing runs on.
    pub fn remove(&mut self, socket: Socket) {
        backend!(self, driver => driver.remove(socket.0));
    }

    /// Closes a file that nothing runs on.
    pub fn remove_file(&mut self, file: File) {
        backend!(self, driver => driver.remove(file.0));
    }

    /// Calls [`Handler::tick`] at this time, or never; replaces what was set before.
    pub fn wake_at(&mut self, time: Option<Instant>) {
        self.deadline = time;
    }

    /// Calls [`Handler::reminded`] in so long, or before: when the first of those who asked is to be reminded.
    pub fn remind_in(&mut self, wait: Duration) {
        let time = self.now() + wait;
        self.reminder = Some(self.reminder.map_or(time, |before| before.min(time)));
    }

    /// Ends the thread once no operation runs.
    pub fn stop(&mut self) {
        self.stopping = true;
    }
}

/// Whether the peer of a socket has closed the connection, or its sending side. Whatever it sent before may still be
/// there.
#[must_use]
pub fn has_hung_up(socket: std::os::fd::BorrowedFd<'_>) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let hung_up = PollFlags::from_bits_retain(libc::POLLRDHUP);
    poll(&mut [PollFd::new(socket, hung_up)], PollTimeout::ZERO).is_ok_and(|n| n > 0)
}
