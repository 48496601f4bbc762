//! What the program which started this process has left open for it: sockets, and the standard output.
#![allow(unsafe_code)]

use nix::sys::socket::{
    AddressFamily, SockType, SockaddrStorage, getsockname, getsockopt, sockopt,
};
use std::env;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The first one; those before it are the standard streams.
const FIRST: RawFd = 3;
/// More is no reasonable wish.
const MOST: RawFd = 256;
static TAKEN: AtomicBool = AtomicBool::new(false);

static OUTPUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

// The standard library opens /dev/null in place of a standard stream that is closed, before `main`: what is written there
// is lost, and nobody is told. So this looks before the library does.
//
// SAFETY: the C library calls the functions of this section once, before `main` and so before there is another thread.
// `look` needs nothing of the standard library that has to be there before.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: asks for flags. A number that is not open is an error.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    OUTPUT_WAS_CLOSED.store(flags < 0, Ordering::Relaxed);
}

/// Whether this process was started with its standard output closed. What is written there is lost.
#[must_use]
pub fn output_was_closed() -> bool {
    OUTPUT_WAS_CLOSED.load(Ordering::Relaxed)
}

/// The sockets that systemd has passed to this process, or another program that does as it does:
/// `sd_listen_fds(3)`. To be called before this process opens anything. The first call takes them: a later
/// one finds none.
///
/// # Errors
/// `InvalidInput` if what was passed is not a stream socket that listens for unix, IPv4 or IPv6 clients.
pub fn inherited_sockets() -> io::Result<Vec<OwnedFd>> {
    let number = |name| env::var(name).ok()?.parse::<RawFd>().ok();
    let ours = number("LISTEN_PID") == RawFd::try_from(std::process::id()).ok();
    let Some(count) = number("LISTEN_FDS").filter(|count| ours && *count > 0) else {
        return Ok(Vec::new());
    };
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    (FIRST..FIRST + count.min(MOST)).map(inherited).collect()
}

/// Takes one of them, if it is what can be served.
fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: asks for flags, and sets one. A number that is not open is an error.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(wrong(number, "it is not open"));
    }
    // SAFETY: it is open, and nobody else in this process has it: see `inherited_sockets`, which does this once.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    if getsockopt(&fd, sockopt::SockType) != Ok(SockType::Stream)
        || getsockopt(&fd, sockopt::AcceptConn) != Ok(true)
    {
        return Err(wrong(number, "it is no stream socket that listens"));
    }
    let family = getsockname::<SockaddrStorage>(fd.as_raw_fd())?;
    match nix::sys::socket::SockaddrLike::family(&family) {
        Some(AddressFamily::Unix | AddressFamily::Inet | AddressFamily::Inet6) => Ok(fd),
        _ => Err(wrong(number, "its clients are neither local nor TCP's")),
    }
}

fn wrong(number: RawFd, what: &str) -> io::Error {
    let text =
        format!("file descriptor {number}, passed as a socket to serve (LISTEN_FDS): {what}");
    io::Error::new(io::ErrorKind::InvalidInput, text)
}
