//! The client's side of the control socket.

use super::line::{read_line, send};
use super::{
    FILL_METHOD, FILL_STORED_METHOD, LINE_MAX_BYTES, NBD_METHOD, Reply, STORE_METHOD, STORED_METHOD,
};
use crate::api::{Progress, Request};
use dbs_core::{Error, ErrorKind, Result};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, getsockopt, recv, sockopt::PeerCredentials};
use nix::unistd::Uid;
use serde_json::{Value, json};
use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How often the caller is asked whether to go on.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Longest result kept in memory; a dump is not.
const RESULT_MAX_BYTES: usize = 1 << 30;

/// Called with the progress of a command, and with `None` when nothing happened for a while.
/// Returning `false` asks the server to stop it; the answer then says whether it did.
pub type Watch<'a> = dyn FnMut(Option<Progress>) -> bool + 'a;

/// A connection to the server that owns a store.
pub struct Client {
    stream: BufReader<UnixStream>,
    /// A command was to stop: our sending side is closed.
    ended: bool,
}

impl Client {
    /// Connects to a control socket.
    ///
    /// # Errors
    /// `NotFound` if no server listens there, else `Io`.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                Error::not_found(format!("no server listens on {}", path.display()))
            }
            io::ErrorKind::PermissionDenied => Error::read_only(format!(
                "user {} may not use the control socket {}: run this as the user of the server or as \
                 root, or serve the store with --control-group",
                Uid::effective(),
                path.display()
            )),
            _ => Error::io(e, format!("connecting to {}", path.display())),
        })?;
        stream
            .set_read_timeout(Some(WATCH_INTERVAL))
            .map_err(|e| Error::io(e, "setting up the control connection"))?;
        Ok(Self { stream: BufReader::new(stream), ended: false })
    }

    /// As [`Client::connect`], to the server of the store with this key ([`dbs_core::Store::key`]) and
    /// no other: a path may be another server's by now.
    ///
    /// # Errors
    /// As [`Client::connect`]; `Busy` if the server serves another store or does not say which.
    pub fn connect_to(path: &Path, key: &str) -> Result<Self> {
        Self::connect(path)?.of_store(key).map_err(|e| e.context(path.display()))
    }

    /// This connection, if it is to the server of the store with this key.
    ///
    /// # Errors
    /// As [`Client::connect_to`].
    pub fn of_store(mut self, key: &str) -> Result<Self> {
        let answer = self
            .call_extra(STORE_METHOD, &Value::Null, &mut |_| true)
            .map_err(|e| e.context("asking the server which store it serves"))?;
        if answer.get("key").and_then(Value::as_str) == Some(key) {
            return Ok(self);
        }
        Err(Error::busy(format!(
            "the server that answers serves another store, a copy perhaps, and not {key}"
        )))
    }

    /// Whether the server is of one of these users.
    pub fn is_of(&self, users: &[Uid]) -> bool {
        let peer = getsockopt(self.stream.get_ref(), PeerCredentials);
        peer.is_ok_and(|peer| users.contains(&Uid::from_raw(peer.uid())))
    }

    /// The process that listens on the control socket, if it can be seen from here.
    #[must_use]
    pub fn server_process(&self) -> Option<u32> {
        let peer = getsockopt(self.stream.get_ref(), PeerCredentials).ok()?;
        u32::try_from(peer.pid()).ok().filter(|process| *process > 0)
    }

    /// Whether the connection can be used again: neither side has closed it, and the server has said nothing that
    /// nobody asked for.
    pub fn is_alive(&self) -> bool {
        if self.ended {
            return false;
        }
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(self.stream.get_ref().as_raw_fd(), &mut [0], flags) == Err(Errno::EAGAIN)
    }

    /// Runs a command on the served store.
    ///
    /// # Errors
    /// The command's, with its kind; `Io` if the connection fails: the command may then have
    /// succeeded or not.
    pub fn call(&mut self, request: &Request, watch: &mut Watch<'_>) -> Result<Value> {
        let mut text = Vec::new();
        let result = self.call_into(request, &mut text, watch)?;
        if text.is_empty() {
            return Ok(result);
        }
        serde_json::from_slice(&text)
            .map_err(|e| Error::new(ErrorKind::Io, format!("the server's answer: {e}")))
    }

    /// Writes the store's metadata as JSON to `out`.
    ///
    /// # Errors
    /// As [`Client::call`], and those of `out`.
    pub fn dump(&mut self, out: &mut dyn Write, watch: &mut Watch<'_>) -> Result<()> {
        self.call_into(&Request::Dump, out, watch).map(|_| ())
    }

    /// Calls a method beyond [`Request`] whose answer is short.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_extra(
        &mut self,
        method: &str,
        params: &Value,
        watch: &mut Watch<'_>,
    ) -> Result<Value> {
        send(self.stream.get_mut(), &json!({ "method": method, "params": params }))?;
        self.answer(&mut Refused, watch)
    }

    /// Calls a method that takes the connection over: its answer, and the connection behind it.
    ///
    /// # Errors
    /// The server's, or `Io`.
    pub fn into_session(self, method: &str, params: &Value) -> Result<(Value, UnixStream)> {
        // Byte by byte: a larger buffer would swallow what the session begins with.
        let stream = BufReader::with_capacity(1, self.stream.into_inner());
        let mut this = Self { stream, ended: self.ended };
        let answer = this.call_extra(method, params, &mut |_| true)?;
        let stream = this.stream.into_inner();
        stream.set_read_timeout(None).map_err(|e| Error::io(e, "setting up the session"))?;
        Ok((answer, stream))
    }

    /// Turns the connection into an NBD session: the server speaks next.
    ///
    /// # Errors
    /// The server's, or `Io`.
    pub fn into_nbd(self) -> Result<UnixStream> {
        self.into_session(NBD_METHOD, &Value::Null).map(|(_, stream)| stream)
    }

    /// As [`Client::into_nbd`], to fill a volume that is rebuilding.
    ///
    /// # Errors
    /// As [`Client::into_nbd`].
    pub fn into_fill(self) -> Result<UnixStream> {
        self.into_session(FILL_METHOD, &Value::Null).map(|(_, stream)| stream)
    }

    /// As [`Client::into_nbd`], to read snapshots of encrypted volumes as they are stored.
    ///
    /// # Errors
    /// As [`Client::into_nbd`].
    pub fn into_stored(self) -> Result<UnixStream> {
        self.into_session(STORED_METHOD, &Value::Null).map(|(_, stream)| stream)
    }

    /// As [`Client::into_fill`], with what [`Client::into_stored`] reads.
    ///
    /// # Errors
    /// As [`Client::into_nbd`].
    pub fn into_fill_stored(self) -> Result<UnixStream> {
        self.into_session(FILL_STORED_METHOD, &Value::Null).map(|(_, stream)| stream)
    }

    fn call_into(
        &mut self,
        request: &Request,
        out: &mut dyn Write,
        watch: &mut Watch<'_>,
    ) -> Result<Value> {
        let length = serde_json::to_string(request).map_or(0, |text| text.len());
        if length >= LINE_MAX_BYTES {
            return Err(Error::invalid(format!("a request of {length} bytes is too long")));
        }
        send(self.stream.get_mut(), request)?;
        self.answer(&mut Limited { out, left: limit(request) }, watch)
    }

    /// Reads lines until the result; parts go to `parts`.
    fn answer(&mut self, parts: &mut dyn Write, watch: &mut Watch<'_>) -> Result<Value> {
        let mut go_on = true;
        loop {
            let progress = match self.read_reply(&mut go_on, watch)? {
                Reply::Result(result) => return Ok(result),
                Reply::Error(failure) => return Err(failure.into()),
                Reply::Progress(progress) => progress,
                Reply::Part(text) => {
                    parts
                        .write_all(text.as_bytes())
                        .map_err(|e| Error::io(e, "taking the server's answer"))?;
                    continue;
                }
            };
            self.ask(Some(progress), &mut go_on, watch);
        }
    }

    fn read_reply(&mut self, go_on: &mut bool, watch: &mut Watch<'_>) -> Result<Reply> {
        let mut line = Vec::new();
        loop {
            match read_line(&mut self.stream, &mut line) {
                Ok(true) => break,
                Ok(false) => {
                    let text = "the server closed the connection before it answered";
                    return Err(Error::new(ErrorKind::Io, text));
                }
                Err(e) if timed_out(&e) => self.ask(None, go_on, watch),
                Err(e) => return Err(e),
            }
        }
        serde_json::from_slice(&line)
            .map_err(|e| Error::new(ErrorKind::Io, format!("the server's answer: {e}")))
    }

    /// Asks the caller whether to go on; the first no is passed on by closing our sending side.
    fn ask(&mut self, progress: Option<Progress>, go_on: &mut bool, watch: &mut Watch<'_>) {
        if *go_on && !watch(progress) {
            (*go_on, self.ended) = (false, true);
            let _closed_already = self.stream.get_ref().shutdown(Shutdown::Write);
        }
    }
}

fn limit(request: &Request) -> usize {
    if *request == Request::Dump { usize::MAX } else { RESULT_MAX_BYTES }
}

fn timed_out(error: &Error) -> bool {
    std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<io::Error>())
        .is_some_and(|e| matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut))
}

/// Takes so many bytes and no more.
struct Limited<'a> {
    out: &'a mut dyn Write,
    left: usize,
}

impl Write for Limited<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self.left.checked_sub(bytes.len()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "the server's answer is too long")
        })?;
        self.out.write_all(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Where no parts are expected.
struct Refused;

impl Write for Refused {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::new(io::ErrorKind::InvalidData, "an unexpected part"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
