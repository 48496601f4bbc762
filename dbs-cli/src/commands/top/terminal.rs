//! The terminal as a screen: set up, drawn on, and left as it was, whatever ends the program.

use super::screen::Style;
use dbs_core::{Error, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, raise};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use signal_hook::{flag, low_level::pipe};
use std::io::{self, IsTerminal, Read, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A screen of its own, without a cursor, where a line that is too long does not go on in the next one.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
/// As of every program that panics.
const PANICKED: i32 = 101;
const LEAVE: &str = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l";

/// Whether there is a terminal that can be drawn on.
///
/// # Errors
/// `Invalid`, with what to do.
pub fn check() -> Result<()> {
    let instead = "use `dbs top --once`, with --json for programs";
    if !stdin().is_terminal() || !stdout().is_terminal() {
        return Err(Error::invalid(format!("this is no terminal: {instead}")));
    }
    match std::env::var_os("TERM").filter(|term| !term.is_empty() && term != "dumb") {
        Some(_) => Ok(()),
        None => Err(Error::invalid(format!("this terminal cannot be drawn on (TERM): {instead}"))),
    }
}

/// The terminal, while it is a screen. Dropping it leaves it as it was.
pub struct Terminal {
    before: Termios,
    colour: bool,
    /// Something has happened: a signal, or what another thread says.
    woken: UnixStream,
    waker: UnixStream,
    ended: Arc<AtomicBool>,
    continued: Arc<AtomicBool>,
}

impl Terminal {
    pub fn enter() -> Result<Self> {
        let failed = |e: io::Error| Error::io(e, "setting up the terminal");
        let before = tcgetattr(stdin()).map_err(|e| failed(e.into()))?;
        let (woken, waker) = UnixStream::pair().map_err(failed)?;
        woken.set_nonblocking(true).map_err(failed)?;
        waker.set_nonblocking(true).map_err(failed)?;
        let (ended, continued) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register(signal, Arc::clone(&ended)).map_err(failed)?;
        }
        flag::register(SIGCONT, Arc::clone(&continued)).map_err(failed)?;
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGCONT, SIGWINCH] {
            pipe::register(signal, waker.try_clone().map_err(failed)?).map_err(failed)?;
        }
        // What a panic says is to be read, and a thread that is gone would be waited for.
        let (modes, tell) = (before.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |panic| {
            leave(&modes);
            tell(panic);
            std::process::exit(PANICKED);
        }));
        let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let terminal = Self { before, colour, woken, waker, ended, continued };
        terminal.set_up()?;
        Ok(terminal)
    }

    fn set_up(&self) -> Result<()> {
        let mut modes = self.before.clone();
        modes.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &modes)
            .map_err(|e| Error::io(e.into(), "setting up the terminal"))?;
        write(ENTER)
    }

    /// What another thread writes a byte to when it has something to say.
    pub fn waker(&self) -> Result<UnixStream> {
        self.waker.try_clone().map_err(|e| Error::io(e, "setting up the terminal"))
    }

    /// Columns and lines.
    pub fn size(&self) -> (usize, usize) {
        match tcgetwinsize(stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (size.ws_col.into(), size.ws_row.into())
            }
            _ => (80, 24),
        }
    }

    /// Whether a signal asked for the end.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    pub fn draw(&self, lines: &[(Style, String)]) -> Result<()> {
        let mut text = "\x1b[H".to_owned();
        for (at, (style, line)) in lines.iter().enumerate() {
            text += if at > 0 { "\r\n" } else { "" };
            // In front: behind a line that fills the terminal it would erase the last character.
            text += "\x1b[K";
            text += match style {
                Style::Plain => "",
                Style::Title => "\x1b[1m",
                Style::Heading => "\x1b[7m",
                Style::Alert if self.colour => "\x1b[1;31m",
                Style::Alert => "\x1b[1;7m",
            };
            text += line;
            text += "\x1b[0m";
        }
        write(&(text + "\x1b[1;1H"))
    }

    /// Waits for a key or for something else, at most so long; what was typed.
    ///
    /// # Errors
    /// `Io`, also if the terminal is gone.
    pub fn wait(&mut self, most: Duration) -> Result<Vec<u8>> {
        let keyboard = stdin();
        let mut events = [
            PollFd::new(keyboard.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.woken.as_fd(), PollFlags::POLLIN),
        ];
        let timeout = PollTimeout::try_from(most).unwrap_or(PollTimeout::MAX);
        match poll(&mut events, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(Error::io(e.into(), "waiting for a key")),
        }
        let typed = events[0].any().unwrap_or(false);
        let _emptied = (&self.woken).read(&mut [0; 256]);
        if self.continued.swap(false, Ordering::SeqCst) {
            // A shell has had the terminal meanwhile.
            self.set_up()?;
        }
        let mut bytes = [0; 256];
        let count = if typed { read(&mut bytes)? } else { 0 };
        Ok(bytes[..count].to_vec())
    }

    /// Stops the program, as Ctrl-Z does, until it is continued.
    pub fn suspend(&self) -> Result<()> {
        leave(&self.before);
        // Without a shell that could continue it, the kernel stops nobody, and tells of nothing.
        raise(Signal::SIGTSTP).map_err(|e| Error::io(e.into(), "stopping"))?;
        self.continued.store(false, Ordering::SeqCst);
        self.set_up()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        leave(&self.before);
    }
}

fn leave(modes: &Termios) {
    // Nowhere to report failures to.
    let _ = write(LEAVE);
    let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
}

fn write(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::io(e, "drawing on the terminal"))
}

fn read(bytes: &mut [u8]) -> Result<usize> {
    match nix::unistd::read(stdin(), bytes) {
        Ok(0) => Err(Error::io(io::ErrorKind::UnexpectedEof.into(), "reading from the terminal")),
        Ok(count) => Ok(count),
        Err(nix::errno::Errno::EINTR) => Ok(0),
        Err(e) => Err(Error::io(e.into(), "reading from the terminal")),
    }
}
