//! The thread of a reactor, and how others reach it.
#![allow(unsafe_code)]

use super::done::Done;
use super::handler::{Backend, Handler, Io, Options, backend};
#[cfg(feature = "simulated")]
use super::simulated::{Clock, Left, Simulated};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A sleep longer than this counts as one of this length when the next ones are foreseen.
const SLEEP_COUNTED_MAX: Duration = Duration::from_millis(1);
/// Completions handled before messages, the clock and [`Handler::turn`] have theirs again: sockets
/// that always have more must not keep everything else out.
const COMPLETIONS_PER_TURN: usize = 1024;

/// Sends messages to a reactor's handler, from any thread.
pub struct Remote<M> {
    inbox: Arc<Inbox<M>>,
}

struct Inbox<M> {
    messages: Mutex<Vec<M>>,
    /// Set while there are messages, so that looking costs no lock.
    some: AtomicBool,
    /// The thread sleeps, or is about to.
    asleep: AtomicBool,
    waker: Arc<EventFd>,
}

impl<M> Clone for Remote<M> {
    fn clone(&self) -> Self {
        Self { inbox: Arc::clone(&self.inbox) }
    }
}

impl<M> Remote<M> {
    /// Hands a message over. It is dropped if the reactor has ended.
    pub fn send(&self, message: M) {
        let inbox = &self.inbox;
        inbox.messages().push(message);
        inbox.some.store(true, Ordering::SeqCst);
        if inbox.asleep.swap(false, Ordering::SeqCst) {
            // Full only if it is woken already.
            let _ = inbox.waker.write(1);
        }
    }
}

impl<M> Inbox<M> {
    fn new() -> io::Result<Arc<Self>> {
        let waker = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Arc::new(Self {
            messages: Mutex::default(),
            some: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            waker: Arc::new(waker),
        }))
    }

    fn messages(&self) -> MutexGuard<'_, Vec<M>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running reactor.
pub struct Thread<M> {
    remote: Remote<M>,
    driver: &'static str,
    thread: JoinHandle<()>,
}

impl<M> Thread<M> {
    /// A way to send messages to the handler.
    #[must_use]
    pub fn remote(&self) -> Remote<M> {
        self.remote.clone()
    }

    /// Name of the driver in use: `io_uring` or `epoll`.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        self.driver
    }

    /// Waits until the handler has called [`Io::stop`] and nothing runs any more.
    pub fn join(self) {
        // A panic there has been reported already.
        let _ = self.thread.join();
    }
}

/// Starts a thread with the handler that `make` returns there; it is given the thread's own
/// [`Remote`], to hand to others.
///
/// # Errors
/// No thread, no memory, or a driver asked for by name that cannot be had.
///
/// # Panics
/// The thread does, which ends the process, if the kernel no longer lets it wait.
pub fn spawn<H: Handler + 'static>(
    name: &str,
    options: &Options,
    make: impl FnOnce(&mut Io, Remote<H::Message>) -> H + Send + 'static,
) -> io::Result<Thread<H::Message>> {
    let inbox = Inbox::new()?;
    let remote = Remote { inbox: Arc::clone(&inbox) };
    let options = options.clone();
    let own = remote.clone();
    let (started, starting) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        // Made here: a ring belongs to the thread that uses it.
        let mut io = match Io::new(&options, &inbox.waker) {
            Ok(io) => io,
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let handler = make(&mut io, own);
        let _ = started.send(Ok(io.driver()));
        let _guard = AbortOnPanic;
        let mut turns =
            Turns { io, handler, inbox, spin: Spin::new(options.spin), batch: Vec::new() };
        if let Err(error) = turns.run() {
            panic!("the reactor can no longer wait for its operations: {error}");
        }
    })?;
    let gone = || Err(io::Error::other("the reactor thread ended at once"));
    let driver = starting.recv().unwrap_or_else(|_| gone())?;
    Ok(Thread { remote, driver, thread })
}

/// A reactor without a thread, which takes its turns when it is told to: for measuring what they
/// cost. Nothing of it is ever given back, as the kernel may be using it.
#[cfg(feature = "testing")]
pub struct Local<H: Handler> {
    turns: std::mem::ManuallyDrop<Turns<H>>,
}

#[cfg(feature = "testing")]
impl<H: Handler> Local<H> {
    /// A reactor as [`spawn`] makes it.
    ///
    /// # Errors
    /// As [`spawn`].
    pub fn new(
        options: &Options,
        make: impl FnOnce(&mut Io, Remote<H::Message>) -> H,
    ) -> io::Result<Self> {
        let inbox = Inbox::new()?;
        let mut io = Io::new(options, &inbox.waker)?;
        let handler = make(&mut io, Remote { inbox: Arc::clone(&inbox) });
        let spin = Spin::new(options.spin);
        let turns = Turns { io, handler, inbox, spin, batch: Vec::new() };
        Ok(Self { turns: std::mem::ManuallyDrop::new(turns) })
    }

    /// Hands the handler a message.
    pub fn message(&mut self, message: H::Message) {
        let Turns { io, handler, .. } = &mut *self.turns;
        handler.message(io, message);
        handler.turn(io);
    }

    /// Waits until something has happened and lets the handler do what there is to do.
    ///
    /// # Errors
    /// The driver cannot wait.
    pub fn turn(&mut self) -> io::Result<()> {
        self.turns.wait()?;
        self.turns.turn();
        Ok(())
    }
}

/// A reactor without a thread and without a kernel, which takes its turns when it is told to: on a clock and with
/// connections that a simulation has.
#[cfg(feature = "simulated")]
pub struct Simulation<H: Handler> {
    turns: Turns<H>,
}

#[cfg(feature = "simulated")]
impl<H: Handler> Simulation<H> {
    /// A reactor by this clock.
    ///
    /// # Errors
    /// No memory, no descriptor.
    pub fn new(
        options: &Options,
        clock: &Clock,
        make: impl FnOnce(&mut Io, Remote<H::Message>) -> H,
    ) -> io::Result<Self> {
        let inbox = Inbox::new()?;
        let mut io = Io::simulated(options, clock.clone())?;
        let handler = make(&mut io, Remote { inbox: Arc::clone(&inbox) });
        let spin = Spin::new(Duration::ZERO);
        Ok(Self { turns: Turns { io, handler, inbox, spin, batch: Vec::new() } })
    }

    /// A way to send messages to the handler.
    #[must_use]
    pub fn remote(&self) -> Remote<H::Message> {
        Remote { inbox: Arc::clone(&self.turns.inbox) }
    }

    /// Whether something has happened that the handler has not been told.
    #[must_use]
    pub fn is_ready(&mut self) -> bool {
        self.turns.inbox.some.load(Ordering::SeqCst)
            || backend!(self.turns.io, driver => driver.is_ready())
    }

    /// When it is to take a turn though nothing has happened.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        [self.turns.io.deadline, self.turns.io.reminder].into_iter().flatten().min()
    }

    /// Lets the handler do what there is to do; what it has done to its connections.
    pub fn turn(&mut self) -> Vec<Left> {
        self.turns.turn();
        self.driver().map(Simulated::take_left).unwrap_or_default()
    }

    /// These bytes have come on a connection.
    pub fn come(&mut self, name: u64, bytes: &[u8]) {
        self.driver().into_iter().for_each(|driver| driver.come(name, bytes));
    }

    /// The network has taken what was being sent on a connection.
    pub fn taken(&mut self, name: u64) {
        self.driver().into_iter().for_each(|driver| driver.taken(name));
    }

    /// The other side has ended a connection, or it broke.
    pub fn end(&mut self, name: u64, error: Option<io::ErrorKind>) {
        self.driver().into_iter().for_each(|driver| driver.end(name, error));
    }

    fn driver(&mut self) -> Option<&mut Simulated> {
        match &mut self.turns.io.backend {
            Backend::Simulated(driver) => Some(driver),
            _ => None,
        }
    }
}

/// Ends the process if its thread panics: requests may be in the kernel, whose memory must not go
/// away, and nobody would answer them.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// The loop of a reactor.
struct Turns<H: Handler> {
    io: Io,
    handler: H,
    inbox: Arc<Inbox<H::Message>>,
    spin: Spin,
    /// Messages being handled; reused.
    batch: Vec<H::Message>,
}

impl<H: Handler> Turns<H> {
    fn run(&mut self) -> io::Result<()> {
        loop {
            self.turn();
            if self.io.stopping && backend!(self.io, driver => driver.in_flight()) == 0 {
                // What was started last, and is not waited for, is to reach the kernel.
                return backend!(self.io, driver => driver.poll());
            }
            self.wait()?;
        }
    }

    fn turn(&mut self) {
        self.messages();
        self.completions();
        self.time();
        self.handler.turn(&mut self.io);
    }

    fn messages(&mut self) {
        if !self.inbox.some.swap(false, Ordering::SeqCst) {
            return;
        }
        std::mem::swap(&mut *self.inbox.messages(), &mut self.batch);
        for message in self.batch.drain(..) {
            self.handler.message(&mut self.io, message);
        }
    }

    fn completions(&mut self) {
        let Self { io, handler, .. } = self;
        for _ in 0..COMPLETIONS_PER_TURN {
            let Some(done) = backend!(io, driver => driver.next()) else { return };
            match done {
                Done::Received { tag, result: Ok(bytes) } => {
                    // SAFETY: the driver keeps these bytes as they are until `release`.
                    let data = unsafe { std::slice::from_raw_parts(bytes.ptr, bytes.len) };
                    handler.received(io, tag, Ok(data));
                    backend!(io, driver => driver.release(&bytes));
                }
                Done::Received { tag, result: Err(error) } => handler.received(io, tag, Err(error)),
                Done::Filled { tag, buf, result } => handler.filled(io, tag, buf, result),
                Done::Sent { tag, batch, result } => handler.sent(io, tag, batch, result),
                Done::Moved { tag, buf, result } => handler.moved(io, tag, buf, result),
                Done::Synced { tag, result } => handler.synced(io, tag, result),
                Done::Fetched { queue, tag, result } => handler.fetched(io, queue, tag, result),
                Done::Signalled { tag, result } => handler.signalled(io, tag, result),
                Done::Woken => {}
            }
        }
    }

    fn time(&mut self) {
        if self.io.deadline.is_none() && self.io.reminder.is_none() {
            return;
        }
        let now = self.io.now();
        let is_due = |time: &mut Option<Instant>| time.take_if(|time| *time <= now).is_some();
        let Io { deadline, reminder, .. } = &mut self.io;
        let (ticks, reminds) = (is_due(deadline), is_due(reminder));
        if ticks {
            self.handler.tick(&mut self.io);
        }
        if reminds {
            self.handler.reminded(&mut self.io);
        }
    }

    /// Hands over what was started and waits for something to happen.
    fn wait(&mut self) -> io::Result<()> {
        let Self { io, inbox, spin, .. } = self;
        if spin.worthwhile() {
            let begun = Instant::now();
            while begun.elapsed() < spin.limit {
                backend!(io, driver => driver.poll())?;
                if inbox.some.load(Ordering::SeqCst) || backend!(io, driver => driver.is_ready()) {
                    spin.waited(begun.elapsed());
                    return Ok(());
                }
            }
        }
        inbox.asleep.store(true, Ordering::SeqCst);
        let result = if inbox.some.load(Ordering::SeqCst) {
            backend!(io, driver => driver.poll())
        } else {
            let begun = Instant::now();
            let next = [io.deadline, io.reminder].into_iter().flatten().min();
            let timeout = next.map(|deadline| deadline.saturating_duration_since(begun));
            let result = backend!(io, driver => driver.wait(timeout));
            if !spin.limit.is_zero() {
                spin.waited(begun.elapsed());
            }
            result
        };
        inbox.asleep.store(false, Ordering::SeqCst);
        result
    }
}

/// Foresees whether the next completion comes soon.
struct Spin {
    limit: Duration,
    recent: Duration,
}

impl Spin {
    fn new(limit: Duration) -> Self {
        Self { limit, recent: SLEEP_COUNTED_MAX }
    }

    fn worthwhile(&self) -> bool {
        self.recent < self.limit
    }

    fn waited(&mut self, time: Duration) {
        self.recent = (self.recent * 7 + time.min(SLEEP_COUNTED_MAX)) / 8;
    }
}
