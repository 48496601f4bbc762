//! Messages of the vhost-user protocol, and the open files that come with them.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

const HEADER_BYTES: usize = 12;
/// Bytes of a payload at most: more than any message has that is answered here.
const PAYLOAD_MAX_BYTES: u32 = 4096;
/// Open files that come with a message at most.
const FILES_MAX: usize = 8;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// The requests of a virtual machine's process, by their numbers.
pub mod request {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
}
/// What this side tells on the channel that it is given for that: the configuration has changed.
const CONFIG_CHANGED: u32 = 2;

/// A message.
pub struct Message {
    /// What it asks for.
    pub request: u32,
    /// It is to be answered though it asks for nothing.
    pub need_reply: bool,
    /// What is behind its header.
    pub payload: Payload,
    /// The files that came with it.
    pub files: Vec<OwnedFd>,
}

/// Fields of a message, read one behind the other.
pub struct Payload {
    bytes: Vec<u8>,
    at: usize,
}

impl Payload {
    /// The next 64 bits.
    pub fn u64(&mut self) -> io::Result<u64> {
        let field = self.bytes.get(self.at..self.at + 8).and_then(|bytes| bytes.try_into().ok());
        self.at += 8;
        field.map(u64::from_le_bytes).ok_or_else(|| invalid("a message is too short"))
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> io::Result<u32> {
        let field = self.bytes.get(self.at..self.at + 4).and_then(|bytes| bytes.try_into().ok());
        self.at += 4;
        field.map(u32::from_le_bytes).ok_or_else(|| invalid("a message is too short"))
    }

    /// The next 16 bits.
    pub fn u16(&mut self) -> io::Result<u16> {
        let field = self.bytes.get(self.at..self.at + 2).and_then(|bytes| bytes.try_into().ok());
        self.at += 2;
        field.map(u16::from_le_bytes).ok_or_else(|| invalid("a message is too short"))
    }
}

/// What a client has done that ends its connection.
pub fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// Waits for the next message; `None` at the end of the connection.
///
/// # Errors
/// The connection is lost, or what came is no message.
pub fn receive(socket: &UnixStream) -> io::Result<Option<Message>> {
    let mut header = [0; HEADER_BYTES];
    let mut files = Vec::new();
    let count = receive_with(socket, &mut header, &mut files)?;
    if count == 0 {
        return Ok(None);
    }
    (&*socket).read_exact(header.get_mut(count..).unwrap_or_default())?;
    let [r0, r1, r2, r3, f0, f1, f2, f3, s0, s1, s2, s3] = header;
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    let size = u32::from_le_bytes([s0, s1, s2, s3]);
    if flags & VERSION_MASK != VERSION || flags & REPLY != 0 || size > PAYLOAD_MAX_BYTES {
        return Err(invalid("what came is no request of vhost-user"));
    }
    let mut bytes = vec![0; size as usize];
    (&*socket).read_exact(&mut bytes)?;
    let (request, need_reply) = (u32::from_le_bytes([r0, r1, r2, r3]), flags & NEED_REPLY != 0);
    Ok(Some(Message { request, need_reply, payload: Payload { bytes, at: 0 }, files }))
}

/// Receives some bytes, and the files that come with the first of them.
fn receive_with(
    socket: &UnixStream,
    bytes: &mut [u8],
    files: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        let mut pieces = [IoSliceMut::new(bytes)];
        match recvmsg(socket, &mut pieces, &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    // There is room for one more, where the space is aligned.
    if received.flags.contains(ReturnFlags::CTRUNC) || files.len() > FILES_MAX {
        return Err(invalid("more files came with a message than belong to one"));
    }
    Ok(received.bytes)
}

/// Answers a request.
///
/// # Errors
/// The connection is lost.
pub fn reply(
    socket: &UnixStream,
    request: u32,
    payload: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send(socket, request, VERSION | REPLY, payload, file, SendFlags::NOSIGNAL)
}

/// Tells a client that its disk has another size. It takes what is sent, or is told nothing.
///
/// # Errors
/// The channel is lost, or full.
pub fn config_changed(channel: &UnixStream) -> io::Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    send(channel, CONFIG_CHANGED, VERSION, &[], None, flags)
}

fn send(
    socket: &UnixStream,
    request: u32,
    flags: u32,
    payload: &[u8],
    file: Option<BorrowedFd<'_>>,
    how: SendFlags,
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    for field in [request, flags, payload.len() as u32] {
        bytes.extend_from_slice(&field.to_le_bytes());
    }
    bytes.extend_from_slice(payload);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    // Small beside the socket's buffer: it goes as a whole, or the peer reads nothing and is given up.
    match sendmsg(socket.as_fd(), &[IoSlice::new(&bytes)], &mut control, how)? {
        sent if sent == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}
