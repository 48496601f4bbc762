//! A thread that accepts connections, for all services of a server; and its clock.

use super::listen::Listener;
use super::pool::lock;
use super::socket::Socket;
use dbs_service::log;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Rest after an accept that failed, for lack of descriptors mostly.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Connections accepted from one socket before the others have their turn.
const ACCEPTS_PER_TURN: usize = 64;

/// Takes a connection, and who it is from.
type Adopt = Box<dyn Fn(Socket, String) + Send>;

/// What is to be done again and again, and how often.
struct Clock {
    interval: Duration,
    strike: Box<dyn Fn() + Send>,
}

/// Whose connections are accepted.
struct Service {
    id: u64,
    listeners: Vec<Listener>,
    adopt: Adopt,
}

/// What the thread is told.
enum Command {
    Add(Service),
    /// Close the listeners of this service, then say so.
    Remove(u64, mpsc::Sender<()>),
    Stop,
}

/// A thread that accepts connections, as others see it.
pub struct Acceptor {
    commands: mpsc::Sender<Command>,
    waker: Arc<EventFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Acceptor {
    /// A thread, called after the event that its failures are logged as; `strike` is called there
    /// every `interval`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        event: &'static str,
        interval: Duration,
        strike: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let (commands, received) = mpsc::channel();
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let waker = Arc::new(EventFd::from_flags(flags)?);
        let woken = Arc::clone(&waker);
        let clock =
            Clock { interval: interval.max(Duration::from_millis(1)), strike: Box::new(strike) };
        let spawned = thread::Builder::new().name(format!("{event}-accept")).spawn(move || {
            Accepting { event, clock, services: Vec::new(), failing: false }.run(&received, &woken);
        })?;
        Ok(Self { commands, waker, thread: Mutex::new(Some(spawned)) })
    }

    /// Accepts on these listeners for a service; `adopt` is called with each connection, and nobody is accepted
    /// while it blocks.
    pub fn add(
        &self,
        id: u64,
        listeners: Vec<Listener>,
        adopt: impl Fn(Socket, String) + Send + 'static,
    ) {
        if !listeners.is_empty() {
            self.send(Command::Add(Service { id, listeners, adopt: Box::new(adopt) }));
        }
    }

    /// Closes the listeners of a service; returns when that is done.
    pub fn remove(&self, service: u64) {
        let (done, removed) = mpsc::channel();
        self.send(Command::Remove(service, done));
        // An error: the thread is gone, and all listeners with it.
        let _ = removed.recv();
    }

    /// Ends the thread and closes all listeners.
    pub fn stop(&self) {
        self.send(Command::Stop);
        if let Some(thread) = lock(&self.thread).take() {
            // A panic there has been reported already.
            let _ = thread.join();
        }
    }

    fn send(&self, command: Command) {
        // An error: the thread has ended.
        let _ = self.commands.send(command);
        // Full only if it is woken already.
        let _ = self.waker.write(1);
    }
}

/// The thread's own state.
struct Accepting {
    event: &'static str,
    clock: Clock,
    services: Vec<Service>,
    /// The last accept failed, which has been said.
    failing: bool,
}

impl Accepting {
    fn run(&mut self, commands: &mpsc::Receiver<Command>, woken: &EventFd) {
        let mut due = Instant::now() + self.clock.interval;
        loop {
            for command in commands.try_iter() {
                match command {
                    Command::Add(service) => self.services.push(service),
                    Command::Remove(id, done) => {
                        self.services.retain(|service| service.id != id);
                        // An error: nobody waits.
                        let _ = done.send(());
                    }
                    Command::Stop => return,
                }
            }
            let ready = self.wait(woken, due.saturating_duration_since(Instant::now()));
            let mut failure = None;
            for (service, listener) in &ready {
                if let Err(error) = accept(service, listener) {
                    failure = Some(error);
                }
            }
            let accepted = !ready.is_empty() && failure.is_none();
            if let Some(error) = failure {
                if !std::mem::replace(&mut self.failing, true) {
                    log::error(self.event, &[("accept", &error)]);
                }
                thread::sleep(ACCEPT_RETRY);
            }
            if accepted {
                self.failing = false;
            }
            if Instant::now() >= due {
                due = Instant::now() + self.clock.interval;
                (self.clock.strike)();
            }
        }
    }

    /// Waits for connections; returns who has some.
    fn wait(&self, woken: &EventFd, timeout: Duration) -> Vec<(&Service, &Listener)> {
        let all = self
            .services
            .iter()
            .flat_map(|service| service.listeners.iter().map(move |listener| (service, listener)));
        let all: Vec<_> = all.collect();
        let listening = all.iter().map(|(_, listener)| listener.as_fd());
        let watched = std::iter::once(woken.as_fd()).chain(listening);
        let mut fds: Vec<_> = watched.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // Rounded up: a poll of 0 ms would be a busy one.
        let millis = timeout.as_micros().div_ceil(1000);
        match poll(&mut fds, PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                log::error(self.event, &[("accept", &error)]);
                thread::sleep(ACCEPT_RETRY);
            }
        }
        // Fails if it was not that.
        let _ = woken.read();
        let ready: Vec<bool> = fds.iter().skip(1).map(|fd| fd.any() == Some(true)).collect();
        all.into_iter().zip(ready).filter(|(_, ready)| *ready).map(|(one, _)| one).collect()
    }
}

/// Lets the process open as many files as it may. A server does it first: connections, sockets and queues of machines
/// are files, and what finds none left fails: a call of a replica, an accept, a lock.
pub fn raise_descriptors() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        log::warn("descriptors", &[("error", &error)]);
    }
}

/// How many connections one frontend may have: half of the files that the process may have open, so that commands,
/// calls and what else serves the rest find some left.
#[must_use]
pub fn half_of_descriptors() -> usize {
    let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft / 2);
    usize::try_from(most).unwrap_or(usize::MAX)
}

fn accept(service: &Service, listener: &Listener) -> io::Result<()> {
    for _ in 0..ACCEPTS_PER_TURN {
        match listener.accept() {
            Ok((socket, peer)) => (service.adopt)(socket, peer),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
