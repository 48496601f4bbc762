//! The thread that accepts connections, for all services of a server; and its clock.

use super::server::{Service, Shared};
use dbs_server::frontend::{Listener, lock};
use dbs_server::log;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Rest after an accept that failed, for lack of descriptors mostly.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Connections accepted from one socket before the others have their turn.
const ACCEPTS_PER_TURN: usize = 64;

/// What the thread is told.
enum Command {
    Add(Arc<Service>, Vec<Listener>),
    /// Close the listeners of this service, then say so.
    Remove(u64, mpsc::Sender<()>),
    Stop,
}

/// The thread, as others see it.
pub(super) struct Acceptor {
    commands: mpsc::Sender<Command>,
    waker: Arc<EventFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Acceptor {
    pub fn start(shared: Arc<Shared>) -> io::Result<Self> {
        let (commands, received) = mpsc::channel();
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let waker = Arc::new(EventFd::from_flags(flags)?);
        let woken = Arc::clone(&waker);
        let spawned = thread::Builder::new().name("data-accept".into()).spawn(move || {
            Accepting { shared, services: Vec::new(), failing: false }.run(&received, &woken)
        })?;
        Ok(Self { commands, waker, thread: Mutex::new(Some(spawned)) })
    }

    pub fn add(&self, service: Arc<Service>, listeners: Vec<Listener>) {
        if !listeners.is_empty() {
            self.send(Command::Add(service, listeners));
        }
    }

    /// Closes the listeners of a service; returns when that is done.
    pub fn remove(&self, service: u64) {
        let (done, removed) = mpsc::channel();
        self.send(Command::Remove(service, done));
        // An error: the thread is gone, and all listeners with it.
        let _ = removed.recv();
    }

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
    shared: Arc<Shared>,
    services: Vec<(Arc<Service>, Vec<Listener>)>,
    /// The last accept failed, which has been said.
    failing: bool,
}

impl Accepting {
    fn run(&mut self, commands: &mpsc::Receiver<Command>, woken: &EventFd) {
        let interval = self.shared.options.commit_interval.max(Duration::from_millis(1));
        let mut due = Instant::now() + interval;
        loop {
            for command in commands.try_iter() {
                match command {
                    Command::Add(service, listeners) => self.services.push((service, listeners)),
                    Command::Remove(id, done) => {
                        self.services.retain(|(service, _)| service.id != id);
                        // An error: nobody waits.
                        let _ = done.send(());
                    }
                    Command::Stop => return,
                }
            }
            let ready = self.wait(woken, due.saturating_duration_since(Instant::now()));
            let mut failure = None;
            for (service, listener) in &ready {
                if let Err(error) = self.accept(service, listener) {
                    failure = Some(error);
                }
            }
            let accepted = !ready.is_empty() && failure.is_none();
            if let Some(error) = failure {
                if !std::mem::replace(&mut self.failing, true) {
                    log::error("data", &[("accept", &error)]);
                }
                thread::sleep(ACCEPT_RETRY);
            }
            if accepted {
                self.failing = false;
            }
            if Instant::now() >= due {
                due = Instant::now() + interval;
                self.shared.commit_due();
            }
        }
    }

    /// Waits for connections; returns who has some.
    fn wait(&self, woken: &EventFd, timeout: Duration) -> Vec<(&Arc<Service>, &Listener)> {
        let all = self.services.iter().flat_map(|(service, listeners)| {
            listeners.iter().map(move |listener| (service, listener))
        });
        let all: Vec<_> = all.collect();
        let listening = all.iter().map(|(_, listener)| listener.as_fd());
        let watched = std::iter::once(woken.as_fd()).chain(listening);
        let mut fds: Vec<_> = watched.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // Rounded up: a poll of 0 ms would be a busy one.
        let millis = timeout.as_micros().div_ceil(1000);
        match poll(&mut fds, PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                log::error("data", &[("accept", &error)]);
                thread::sleep(ACCEPT_RETRY);
            }
        }
        // Fails if it was not that.
        let _ = woken.read();
        let ready: Vec<bool> = fds.iter().skip(1).map(|fd| fd.any() == Some(true)).collect();
        all.into_iter().zip(ready).filter(|(_, ready)| *ready).map(|(one, _)| one).collect()
    }

    fn accept(&self, service: &Arc<Service>, listener: &Listener) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_TURN {
            match listener.accept() {
                Ok((socket, peer)) => self.shared.adopt(service, socket, peer),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
