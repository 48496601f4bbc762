//! Many reads of one caller in flight at once.

use super::{Client, Reply, Wanted, failed};
use crate::export::Failure;
use crate::wire::{Malformed, cmd};
use dbs_core::volume::ReadPart;
use std::io::{self, Read, Write};

/// Most requests in flight: their headers fit the socket's buffers, so that they can be sent
/// before replies are read.
const WINDOW: usize = 64;

/// A read whose reply has not come in full.
struct Flying<'a> {
    cookie: u64,
    reply: Reply,
    wanted: Wanted<'a>,
}

impl<S: Read + Write> Client<S> {
    /// Fills the buffers of all `reads`, asking for many at once.
    ///
    /// # Errors
    /// See [`Client::read_at`]; the buffers are then undefined.
    pub fn read_many(&mut self, reads: &mut [ReadPart<'_>]) -> io::Result<()> {
        let longest = self.payload_max as usize;
        let mut ends = reads.iter().map(|read| read.offset.checked_add(read.buf.len() as u64));
        if ends.any(|end| end.is_none()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "range beyond 2^64 bytes"));
        }
        let mut pieces = reads
            .iter_mut()
            .flat_map(|read| read.buf.chunks_mut(longest).zip((read.offset..).step_by(longest)));
        let mut flying: Vec<Flying<'_>> = Vec::with_capacity(WINDOW);
        let mut failure = None;
        loop {
            // After a refusal only what is on its way still comes.
            while failure.is_none() && flying.len() < WINDOW {
                let Some((piece, offset)) = pieces.next() else { break };
                let cookie = self.send(cmd::READ, 0, offset, piece.len() as u64, &[])?;
                let (reply, wanted) = (Reply::new(offset), Wanted::Data(piece));
                flying.push(Flying { cookie, reply, wanted });
            }
            if flying.is_empty() {
                return failure.map_or(Ok(()), |failure| Err(failed(failure)));
            }
            match self.receive_one(&mut flying) {
                Ok(refused) => failure = failure.or(refused),
                Err(error) => {
                    self.broken = true;
                    return Err(error);
                }
            }
        }
    }

    /// Receives a reply, or a part of one; what the server refused it with.
    fn receive_one(&mut self, flying: &mut Vec<Flying<'_>>) -> io::Result<Option<Failure>> {
        self.stream.flush()?;
        let header = self.reply_header()?;
        let index = flying.iter().position(|read| read.cookie == header.cookie());
        let index = index.ok_or(Malformed("reply to no request in flight"))?;
        let read = &mut flying[index];
        let complete = self.receive_chunk(header, &mut read.reply, &mut read.wanted)?;
        Ok(if complete { flying.swap_remove(index).reply.failure } else { None })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::wire::Errno;
    use crate::wire::reply::{FLAG_DONE, ReplyTo};
    use crate::wire::request::{Request, Style};
    use std::collections::VecDeque;

    /// A server past its handshake: takes bytes, gives what it is told to.
    struct Script {
        sent: usize,
        replies: VecDeque<u8>,
    }

    impl Read for Script {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.replies.read(buf)
        }
    }

    impl Write for Script {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.sent += buf.len();
            Ok(buf.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Of a server that takes 1024 bytes a request.
    fn client(replies: Vec<u8>) -> Client<Script> {
        Client {
            stream: Script { sent: 0, replies: replies.into() },
            style: Style::Structured,
            size: 1 << 20,
            flags: 0,
            payload_max: 1024,
            contexts: Vec::new(),
            cookie: 0,
            broken: false,
        }
    }

    fn to(cookie: u64, offset: u64) -> ReplyTo {
        ReplyTo { style: Style::Structured, cookie, offset }
    }

    fn data(cookie: u64, offset: u64, byte: u8) -> Vec<u8> {
        let mut out = to(cookie, offset).data_head(FLAG_DONE, offset, 1024).to_vec();
        out.extend_from_slice(&[byte; 1024]);
        out
    }

    #[test]
    fn replies_come_in_any_order_and_long_reads_are_cut() {
        let replies = [data(3, 9216, 3), data(1, 4096, 1), data(2, 8192, 2)].concat();
        let mut client = client(replies);
        let (mut short, mut long) = ([0; 1024], [0; 2048]);
        client
            .read_many(&mut [
                ReadPart { offset: 4096, buf: &mut short },
                ReadPart { offset: 8192, buf: &mut long },
            ])
            .unwrap();
        assert_eq!(
            (short, &long[..1024], &long[1024..]),
            ([1; 1024], &[2; 1024][..], &[3; 1024][..])
        );
        assert_eq!(client.stream.sent, 3 * Request::COMPACT_BYTES);
        client.read_many(&mut []).unwrap();
    }

    #[test]
    fn after_a_refusal_the_connection_is_in_step() {
        let mut replies = data(2, 1024, 2);
        replies.extend(to(1, 0).error(Errno::Io, "rotten"));
        replies.extend(data(3, 0, 3));
        let mut client = client(replies);
        let mut buf = [0; 2048];
        let error = client.read_many(&mut [ReadPart { offset: 0, buf: &mut buf }]).unwrap_err();
        assert!(error.to_string().contains("rotten"), "{error}");
        client.read_at(0, &mut buf[..1024]).unwrap();
        assert_eq!(buf[0], 3);
    }

    #[test]
    fn a_server_that_lies_ends_the_connection() {
        for replies in [data(9, 0, 0), data(1, 4096, 0), data(1, 0, 0)[..40].to_vec()] {
            let mut client = client(replies);
            let mut buf = [0; 1024];
            client.read_many(&mut [ReadPart { offset: 0, buf: &mut buf }]).unwrap_err();
            assert!(client.broken);
        }
    }

    #[test]
    fn a_range_beyond_all_is_refused() {
        let mut buf = [0; 4096];
        let mut reads = [ReadPart { offset: u64::MAX - 1500, buf: &mut buf }];
        client(Vec::new()).read_many(&mut reads).unwrap_err();
    }
}
