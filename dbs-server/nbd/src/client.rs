//! A small blocking NBD client over any stream: one request at a time, or as a [`Pipeline`] many.
//! It trusts nothing that the server sends; set timeouts on the stream to also survive one that
//! sends nothing.

mod many;
mod negotiate;
mod pipeline;
mod secure;

pub use pipeline::{Buffered, Pipeline};
pub use secure::Secure;

use super::export::{Extent, Failure};
use super::wire::reply::{ReplyHeader, chunk, decode_block_status, decode_error};
use super::wire::request::{Request, Style};
use super::wire::{Cursor, Errno, Malformed, cmd, cmd_flag, flag};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Most chunks of one reply.
const CHUNKS_MAX: usize = 1 << 20;
/// Longest chunk without data to read: the largest block status a server should send.
const CHUNK_MAX_BYTES: u64 = 16 << 20;

/// What to negotiate.
#[derive(Debug, Clone, Default)]
pub struct ClientOptions {
    /// Metadata contexts to select; those the server does not have are left out.
    pub contexts: Vec<String>,
    /// Ask for extended headers (64-bit lengths), which few servers have yet.
    pub extended: bool,
}

/// A connection to one export.
#[derive(Debug)]
pub struct Client<S> {
    stream: S,
    style: Style,
    size: u64,
    flags: u16,
    /// Most bytes of one read or write.
    payload_max: u32,
    contexts: Vec<(u32, String)>,
    cookie: u64,
    /// The stream is out of step; nothing more can be done.
    broken: bool,
}

impl Client<UnixStream> {
    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// See [`Client::over`].
    pub fn connect_unix(path: &Path, name: &str, options: &ClientOptions) -> io::Result<Self> {
        Self::over(UnixStream::connect(path)?, name, options)
    }
}

impl Client<TcpStream> {
    /// Connects over TCP.
    ///
    /// # Errors
    /// See [`Client::over`].
    pub fn connect_tcp(
        address: impl ToSocketAddrs,
        name: &str,
        options: &ClientOptions,
    ) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Self::over(stream, name, options)
    }
}

impl<S: Read + Write> Client<S> {
    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Transmission flags: bits of [`flag`].
    #[must_use]
    pub fn flags(&self) -> u16 {
        self.flags
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.flags & flag::READ_ONLY != 0
    }

    /// Whether an earlier error has ended the connection.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// What it goes over: for who looks whether the server has ended it.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// Names of the metadata contexts selected.
    pub fn contexts(&self) -> impl Iterator<Item = &str> {
        self.contexts.iter().map(|(_, name)| name.as_str())
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// The server's as a [`Failure`] inside, or the stream's; the same for all methods below.
    pub fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut at = offset;
        for piece in buf.chunks_mut(self.payload_max as usize) {
            let cookie = self.send(cmd::READ, 0, at, piece.len() as u64, &[])?;
            self.receive(cookie, at, Wanted::Data(piece))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Writes `buf` at `offset`; with `fua` all of it is durable on return.
    ///
    /// # Errors
    /// See [`Client::read_at`].
    pub fn write_at(&mut self, offset: u64, buf: &[u8], fua: bool) -> io::Result<()> {
        let flags = if fua { cmd_flag::FUA } else { 0 };
        let mut at = offset;
        for piece in buf.chunks(self.payload_max as usize) {
            self.command(cmd::WRITE, flags, at, piece.len() as u64, piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Makes the range read as zeros; `flags` are bits of [`cmd_flag`].
    ///
    /// # Errors
    /// See [`Client::read_at`].
    pub fn write_zeroes(&mut self, offset: u64, length: u64, flags: u16) -> io::Result<()> {
        self.ranged(cmd::WRITE_ZEROES, flags, offset, length)
    }

    /// Gives up the content of the range.
    ///
    /// # Errors
    /// See [`Client::read_at`].
    pub fn trim(&mut self, offset: u64, length: u64, fua: bool) -> io::Result<()> {
        self.ranged(cmd::TRIM, if fua { cmd_flag::FUA } else { 0 }, offset, length)
    }

    /// Makes every write that has returned durable.
    ///
    /// # Errors
    /// See [`Client::read_at`].
    pub fn flush(&mut self) -> io::Result<()> {
        self.command(cmd::FLUSH, 0, 0, 0, &[])
    }

    /// Status of the range from `offset` on in a context that was selected: at least one extent,
    /// at most `length` bytes; call again from where it ends.
    ///
    /// # Errors
    /// See [`Client::read_at`]; also a context that was not selected.
    pub fn block_status(
        &mut self,
        context: &str,
        offset: u64,
        length: u64,
    ) -> io::Result<Vec<Extent>> {
        self.status_of(context, offset, length, 0)
    }

    /// As [`Client::block_status`], the first extent alone: that is less work for the server.
    ///
    /// # Errors
    /// See [`Client::block_status`].
    pub fn first_status(
        &mut self,
        context: &str,
        offset: u64,
        length: u64,
    ) -> io::Result<Vec<Extent>> {
        self.status_of(context, offset, length, cmd_flag::REQ_ONE)
    }

    fn status_of(
        &mut self,
        context: &str,
        offset: u64,
        length: u64,
        flags: u16,
    ) -> io::Result<Vec<Extent>> {
        let known = self.contexts.iter().find(|(_, name)| name == context);
        let id = known.map(|(id, _)| *id).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("context `{context}` is not selected"),
            )
        })?;
        let length = length.min(self.effect_max());
        let mut extents = Vec::new();
        let cookie = self.send(cmd::BLOCK_STATUS, flags, offset, length, &[])?;
        self.receive(cookie, offset, Wanted::Status(id, &mut extents))?;
        let mut left = length;
        extents.retain_mut(|extent: &mut Extent| {
            extent.length = extent.length.min(left);
            left -= extent.length;
            extent.length > 0
        });
        if extents.is_empty() {
            return self.protocol("block status without an extent");
        }
        Ok(extents)
    }

    /// Says goodbye; the stream, which the server then ends.
    ///
    /// # Errors
    /// The stream's.
    pub fn disconnect(mut self) -> io::Result<S> {
        self.send(cmd::DISC, 0, 0, 0, &[])?;
        self.stream.flush()?;
        Ok(self.stream)
    }

    /// Longest range of a request without payload.
    fn effect_max(&self) -> u64 {
        if self.style == Style::Extended { u64::MAX } else { 0x8000_0000 }
    }

    fn ranged(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let count = (length - done).min(self.effect_max());
            self.command(command, flags, offset + done, count, &[])?;
            done += count;
        }
        Ok(())
    }

    fn command(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> io::Result<()> {
        let cookie = self.send(command, flags, offset, length, payload)?;
        self.receive(cookie, offset, Wanted::Nothing)
    }

    fn send(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> io::Result<u64> {
        if self.broken {
            return Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "an earlier error ended the connection",
            ));
        }
        if offset.checked_add(length).is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "range beyond 2^64 bytes"));
        }
        let payload_flag = self.style == Style::Extended && !payload.is_empty();
        let flags = if payload_flag { flags | cmd_flag::PAYLOAD_LEN } else { flags };
        self.cookie += 1;
        let request = Request { flags, command, cookie: self.cookie, offset, length };
        let header = request.encode(self.style);
        self.stream
            .write_all(&header)
            .and_then(|()| self.stream.write_all(payload))
            .inspect_err(|_| self.broken = true)?;
        Ok(self.cookie)
    }

    /// Receives all of one reply.
    fn receive(&mut self, cookie: u64, offset: u64, wanted: Wanted<'_>) -> io::Result<()> {
        match self.receive_chunks(cookie, offset, wanted) {
            Ok(None) => Ok(()),
            Ok(Some(failure)) => Err(failed(failure)),
            Err(error) => {
                self.broken = true;
                Err(error)
            }
        }
    }

    /// The outer error is the end of the connection, the inner one the server's.
    fn receive_chunks(
        &mut self,
        cookie: u64,
        offset: u64,
        mut wanted: Wanted<'_>,
    ) -> io::Result<Option<Failure>> {
        self.stream.flush()?;
        let mut reply = Reply::new(offset);
        loop {
            let header = self.reply_header()?;
            if header.cookie() != cookie {
                return Err(Malformed("reply to another request").into());
            }
            if self.receive_chunk(header, &mut reply, &mut wanted)? {
                return Ok(reply.failure);
            }
        }
    }

    /// Receives what follows a header; whether the reply is complete.
    fn receive_chunk(
        &mut self,
        header: ReplyHeader,
        reply: &mut Reply,
        wanted: &mut Wanted<'_>,
    ) -> io::Result<bool> {
        let (done, kind, length) = match header {
            ReplyHeader::Simple { errno, .. } => {
                reply.failure = self.simple(errno, wanted)?;
                return Ok(true);
            }
            ReplyHeader::Chunk { done, kind, length, .. } => (done, kind, length),
        };
        match (kind, &mut *wanted) {
            (chunk::NONE, _) if length == 0 && done => {}
            (chunk::OFFSET_DATA | chunk::OFFSET_HOLE, Wanted::Data(buf)) => {
                reply.covered.push(self.content(kind, length, reply.offset, buf)?);
            }
            (chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT, Wanted::Status(id, extents)) => {
                self.status(kind, length, *id, extents)?;
            }
            _ if kind & chunk::ERROR_BIT != 0 => {
                let (errno, message) = decode_error(&self.bytes(length)?)?;
                reply.failure = Some(Failure::new(errno, message));
            }
            _ => return Err(Malformed("chunk out of place").into()),
        }
        reply.chunks += 1;
        if reply.chunks > CHUNKS_MAX {
            return Err(Malformed("reply of too many chunks").into());
        }
        if done
            && reply.failure.is_none()
            && let Wanted::Data(buf) = wanted
        {
            check_covered(&mut reply.covered, reply.offset, buf.len() as u64)?;
        }
        Ok(done)
    }

    fn reply_header(&mut self) -> io::Result<ReplyHeader> {
        let mut bytes = [0; 32];
        let (start, rest) = bytes.split_at_mut(ReplyHeader::SIMPLE_BYTES);
        self.stream.read_exact(start)?;
        let total = ReplyHeader::bytes(self.style, start)?;
        self.stream.read_exact(&mut rest[..total - ReplyHeader::SIMPLE_BYTES])?;
        Ok(ReplyHeader::decode(self.style, &bytes[..total])?)
    }

    /// Receives the rest of a simple reply.
    fn simple(&mut self, errno: u32, wanted: &mut Wanted<'_>) -> io::Result<Option<Failure>> {
        match wanted {
            Wanted::Data(_) if self.style.chunked() => {
                Err(Malformed("simple reply to a read").into())
            }
            _ if errno != 0 => {
                Ok(Some(Failure::new(Errno::from_wire(errno), "refused by the server")))
            }
            Wanted::Data(buf) => self.stream.read_exact(buf).map(|()| None),
            Wanted::Nothing | Wanted::Status(..) => Ok(None),
        }
    }

    /// Receives a chunk of status and keeps the first that is of context `id`.
    fn status(
        &mut self,
        kind: u16,
        length: u64,
        id: u32,
        extents: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let (got, list) = decode_block_status(kind, &self.bytes(length)?)?;
        if got == id && extents.is_empty() {
            let extent = |(length, flags)| Extent { length, flags: flags as u32 };
            extents.extend(list.into_iter().map(extent));
        }
        Ok(())
    }

    /// Receives a chunk of data or a hole into `buf`, which begins at `offset`; returns its range.
    fn content(
        &mut self,
        kind: u16,
        length: u64,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<(u64, u64)> {
        let fixed = if kind == chunk::OFFSET_DATA { 8 } else { 12 };
        let Some(data) = length.checked_sub(fixed) else {
            return Err(Malformed("short chunk").into());
        };
        let mut head = [0; 12];
        let head = &mut head[..fixed as usize];
        self.stream.read_exact(head)?;
        let mut cursor = Cursor::new(head);
        let from = cursor.u64()?;
        let count = if kind == chunk::OFFSET_DATA { data } else { u64::from(cursor.u32()?) };
        let start = from.checked_sub(offset);
        let end =
            start.and_then(|start| start.checked_add(count)).filter(|end| *end <= buf.len() as u64);
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Malformed("chunk out of range").into());
        };
        if count == 0 || (kind == chunk::OFFSET_HOLE && data != 0) {
            return Err(Malformed("chunk of a wrong length").into());
        }
        let target = &mut buf[start as usize..end as usize];
        if kind == chunk::OFFSET_DATA {
            self.stream.read_exact(target)?;
        } else {
            target.fill(0);
        }
        Ok((from, count))
    }

    fn bytes(&mut self, count: u64) -> io::Result<Vec<u8>> {
        if count > CHUNK_MAX_BYTES {
            return Err(Malformed("message of an absurd length").into());
        }
        let mut bytes = vec![0; count as usize];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn protocol<T>(&mut self, what: &'static str) -> io::Result<T> {
        self.broken = true;
        Err(Malformed(what).into())
    }
}

/// What a reply is to bring.
enum Wanted<'a> {
    Nothing,
    Data(&'a mut [u8]),
    Status(u32, &'a mut Vec<Extent>),
}

/// What has come of a reply.
#[derive(Debug)]
struct Reply {
    /// Offset of the request.
    offset: u64,
    /// Ranges of content.
    covered: Vec<(u64, u64)>,
    failure: Option<Failure>,
    chunks: usize,
}

impl Reply {
    fn new(offset: u64) -> Self {
        Self { offset, covered: Vec::new(), failure: None, chunks: 0 }
    }

    /// Starts over, for another request.
    fn reset(&mut self, offset: u64) {
        self.covered.clear();
        (self.offset, self.failure, self.chunks) = (offset, None, 0);
    }
}

/// Checks that the chunks of a read are all of it, each byte once.
fn check_covered(ranges: &mut [(u64, u64)], offset: u64, length: u64) -> Result<(), Malformed> {
    ranges.sort_unstable();
    let mut at = offset;
    for &mut (start, count) in ranges {
        if start != at {
            return Err(Malformed("read with overlapping or missing chunks"));
        }
        at += count;
    }
    if at == offset + length { Ok(()) } else { Err(Malformed("read with missing chunks")) }
}

fn failed(failure: Failure) -> io::Error {
    let kind = match failure.errno {
        Errno::Perm => io::ErrorKind::PermissionDenied,
        Errno::Invalid | Errno::Overflow => io::ErrorKind::InvalidInput,
        Errno::NoSpace => io::ErrorKind::StorageFull,
        Errno::NotSupported => io::ErrorKind::Unsupported,
        Errno::Shutdown => io::ErrorKind::ConnectionAborted,
        Errno::Io => io::ErrorKind::Other,
    };
    io::Error::new(kind, failure)
}
