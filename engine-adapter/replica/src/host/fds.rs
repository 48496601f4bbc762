//! Open files passed to another process over a unix socket.

use dbs_core::{Error, ErrorKind, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Most files in one message: the kernel's limit.
pub const MAX: usize = 253;
/// The byte that carries them.
const CARRIER: u8 = b'F';

/// Sends `files` in one message.
///
/// # Errors
/// `Invalid` if there are more than [`MAX`], `Io`.
pub fn send(stream: &UnixStream, files: &[BorrowedFd<'_>]) -> Result<()> {
    if files.len() > MAX {
        return Err(Error::invalid(format!("{} sockets are too many to pass", files.len())));
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Error::invalid("the sockets do not fit into a message"));
    }
    let data = [IoSlice::new(&[CARRIER])];
    match sendmsg(stream, &data, &mut control, SendFlags::NOSIGNAL) {
        Ok(1) => Ok(()),
        Ok(_) => Err(Error::new(ErrorKind::Io, "passing the sockets was cut short")),
        Err(e) => Err(Error::io(e.into(), "passing the sockets")),
    }
}

/// Receives exactly `count` files.
///
/// # Errors
/// `Invalid` if it is another message or number, `Io`, also when the peer is gone.
pub fn receive(stream: &UnixStream, count: usize) -> Result<Vec<OwnedFd>> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = {
        let mut data = [IoSliceMut::new(&mut byte)];
        recvmsg(stream, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC)
            .map_err(|e| Error::io(e.into(), "receiving sockets"))?
    };
    // All that came are taken, so that a wrong message leaves none of them open.
    let files: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Err(Error::new(ErrorKind::Io, "the peer ended before it passed its sockets"));
    }
    if byte[0] != CARRIER || received.flags.contains(ReturnFlags::CTRUNC) || files.len() != count {
        let text = format!("expected {count} sockets, and received {}", files.len());
        return Err(Error::invalid(text));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    /// How often this process has a file open; other tests open others.
    fn times_open(file: &std::path::Path) -> usize {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        open.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == file))
            .count()
    }

    #[test]
    fn files_arrive_in_order_and_wrong_messages_leave_none() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut first, second) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        send(&a, &[null.as_fd(), second.as_fd()]).unwrap();
        let mut received = receive(&b, 2).unwrap();
        first.write_all(b"x").unwrap();
        let mut back = [0];
        UnixStream::from(received.pop().unwrap()).read_exact(&mut back).unwrap();
        assert_eq!(&back, b"x");
        drop(received);

        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().canonicalize().unwrap();
        send(&a, &[file.as_fd()]).unwrap();
        assert_eq!(receive(&b, 2).unwrap_err().kind(), ErrorKind::Invalid);
        (&a).write_all(b"{").unwrap();
        assert_eq!(receive(&b, 0).unwrap_err().kind(), ErrorKind::Invalid);
        drop(a);
        assert_eq!(receive(&b, 0).unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(times_open(&path), 1);
    }

    #[test]
    fn as_many_as_the_kernel_allows() {
        let (a, b) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let many = vec![null.as_fd(); MAX];
        send(&a, &many).unwrap();
        assert_eq!(receive(&b, MAX).unwrap().len(), MAX);
        assert!(send(&a, &vec![null.as_fd(); MAX + 1]).is_err());
    }
}
