//! Many requests in flight on one connection, in one thread.

use super::{Client, Reply, Wanted, failed};
use crate::wire::reply::ReplyHeader;
use crate::wire::{Malformed, cmd};
use dbs_core::io::queue::{Action, DEPTH_MAX};
use std::io::{self, BufRead, BufReader, Read, Write};

/// Bytes received at once, so that small replies share a system call.
const INPUT_BYTES: usize = 256 << 10;
/// Payloads from this size on are sent without a copy.
const LARGE_BYTES: usize = 32 << 10;

/// A stream that collects small writes until [`Write::flush`], and reads ahead.
#[derive(Debug)]
pub struct Buffered<S> {
    input: BufReader<S>,
    output: Vec<u8>,
}

impl<S: Read + Write> Buffered<S> {
    /// Buffers for `stream`.
    pub fn new(stream: S) -> Self {
        Self { input: BufReader::with_capacity(INPUT_BYTES, stream), output: Vec::new() }
    }

    /// The stream itself.
    pub fn get_ref(&self) -> &S {
        self.input.get_ref()
    }

    /// Bytes that can be read without waiting.
    fn available(&self) -> usize {
        self.input.buffer().len()
    }
}

impl<S: Read> Read for Buffered<S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.input.read(buf)
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> io::Result<()> {
        // Most of what is asked for is here already.
        if let Some(ready) = self.input.buffer().get(..buf.len()) {
            buf.copy_from_slice(ready);
            self.input.consume(buf.len());
            return Ok(());
        }
        self.input.read_exact(buf)
    }
}

impl<S: Read + Write> Write for Buffered<S> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if buf.len() < LARGE_BYTES {
            self.output.extend_from_slice(buf);
            return Ok(buf.len());
        }
        self.flush()?;
        self.input.get_mut().write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.output.is_empty() {
            self.input.get_mut().write_all(&self.output)?;
            self.output.clear();
        }
        self.input.get_mut().flush()
    }
}

/// A connection with a fixed number of slots: each a buffer, and at most one request in flight.
///
/// Requests are sent before replies are read. That cannot block both sides for ever as long as
/// only reads, or only writes and flushes, are in flight: the small half of either fits the
/// socket's buffers.
#[derive(Debug)]
pub struct Pipeline<S> {
    client: Client<Buffered<S>>,
    slots: Vec<Slot>,
    in_flight: usize,
}

#[derive(Debug)]
struct Slot {
    buf: Vec<u8>,
    reply: Reply,
    pending: Option<Pending>,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    cookie: u64,
    /// Bytes of content the reply is to bring.
    wanted: usize,
}

impl<S: Read + Write> Pipeline<S> {
    /// A pipeline of `depth` requests (1 to [`DEPTH_MAX`]) of at most `length` bytes each.
    ///
    /// # Errors
    /// `InvalidInput` for another depth, or more bytes than the server takes at once.
    pub fn new(client: Client<Buffered<S>>, depth: usize, length: usize) -> io::Result<Self> {
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if !(1..=DEPTH_MAX).contains(&depth) {
            return refuse(format!("a connection takes 1 to {DEPTH_MAX} requests at once"));
        }
        if length > client.payload_max as usize {
            let max = client.payload_max;
            return refuse(format!("the server takes at most {max} bytes a request"));
        }
        let slot = |_| Slot { buf: vec![0; length], reply: Reply::new(0), pending: None };
        Ok(Self { client, slots: (0..depth).map(slot).collect(), in_flight: 0 })
    }

    /// The buffer of a slot that is idle.
    ///
    /// # Errors
    /// `ResourceBusy` while its request is in flight, `NotFound` for a slot that does not exist.
    pub fn buffer(&mut self, slot: usize) -> io::Result<&mut [u8]> {
        Ok(&mut self.idle(slot)?.buf)
    }

    /// Queues a request of an idle slot for `length` bytes from `offset`; it is sent by the next
    /// [`Pipeline::finish`].
    ///
    /// # Errors
    /// As [`Pipeline::buffer`], `InvalidInput` if the buffer is shorter, or the connection's.
    pub fn start(
        &mut self,
        slot: usize,
        action: Action,
        offset: u64,
        length: u32,
    ) -> io::Result<()> {
        self.idle(slot)?;
        let place = &mut self.slots[slot];
        let Some(part) = place.buf.get(..length as usize) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "longer than the buffer"));
        };
        let (command, payload, wanted) = match action {
            Action::Read => (cmd::READ, &[][..], part.len()),
            Action::Write => (cmd::WRITE, part, 0),
            Action::Flush => (cmd::FLUSH, &[][..], 0),
        };
        let (offset, length) = if action == Action::Flush { (0, 0) } else { (offset, length) };
        let cookie = self.client.send(command, 0, offset, u64::from(length), payload)?;
        place.reply.reset(offset);
        place.pending = Some(Pending { cookie, wanted });
        self.in_flight += 1;
        Ok(())
    }

    /// Sends what was started, waits for at least one complete reply if anything is in flight,
    /// and appends the slots that are idle again to `done`.
    ///
    /// # Errors
    /// The first refusal of a request, as a [`Failure`](crate::Failure) inside; the
    /// connection's, which then can do nothing more.
    pub fn finish(&mut self, done: &mut Vec<usize>) -> io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        let mut failure = None;
        let result = self.receive(done, &mut failure);
        if result.is_err() {
            self.client.broken = true;
        }
        result.and(failure.map_or(Ok(()), Err))
    }

    fn receive(
        &mut self,
        done: &mut Vec<usize>,
        failure: &mut Option<io::Error>,
    ) -> io::Result<()> {
        self.client.stream.flush()?;
        loop {
            let header = self.client.reply_header()?;
            let cookie = header.cookie();
            let is_its = |slot: &Slot| slot.pending.is_some_and(|p| p.cookie == cookie);
            let Some(index) = self.slots.iter().position(is_its) else {
                return Err(Malformed("reply to no request in flight").into());
            };
            let Some(wanted) = self.receive_chunk(index, header)? else { continue };
            self.in_flight -= 1;
            done.push(index);
            if let Some(refused) = self.slots[index].reply.failure.take() {
                failure.get_or_insert_with(|| failed(refused));
            }
            // Others whose whole reply has come too, but nobody is waited for.
            let next = ReplyHeader::SIMPLE_BYTES + wanted;
            if self.in_flight == 0 || self.client.stream.available() < next {
                return Ok(());
            }
        }
    }

    /// Receives what follows a header; the bytes of content asked for if the reply is complete.
    fn receive_chunk(&mut self, index: usize, header: ReplyHeader) -> io::Result<Option<usize>> {
        let slot = &mut self.slots[index];
        let Some(Pending { wanted, .. }) = slot.pending else { return Ok(None) };
        let mut content = match wanted {
            0 => Wanted::Nothing,
            length => Wanted::Data(&mut slot.buf[..length]),
        };
        let complete = self.client.receive_chunk(header, &mut slot.reply, &mut content)?;
        if complete {
            slot.pending = None;
        }
        Ok(complete.then_some(wanted))
    }

    fn idle(&mut self, slot: usize) -> io::Result<&mut Slot> {
        match self.slots.get_mut(slot) {
            Some(slot) if slot.pending.is_none() => Ok(slot),
            Some(_) => Err(io::Error::new(io::ErrorKind::ResourceBusy, "the slot is in flight")),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "no such slot")),
        }
    }
}

#[cfg(test)]
mod tests;
