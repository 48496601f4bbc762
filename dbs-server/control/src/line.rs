//! Lines of JSON, in and out.

use super::{LINE_MAX_BYTES, PART_BYTES, Reply};
use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::Value;
use std::io::{self, BufRead, Read, Write};

/// Reads one line into `line`, which keeps what arrived before an error such as a timeout: call
/// again to go on. Returns whether a whole line is there; `false` is the end of the stream.
///
/// # Errors
/// `Invalid` for a line that is too long or cut off, else what the stream says.
pub fn read_line(stream: &mut impl BufRead, line: &mut Vec<u8>) -> Result<bool> {
    let room = (LINE_MAX_BYTES + 1).saturating_sub(line.len());
    stream
        .by_ref()
        .take(room as u64)
        .read_until(b'\n', line)
        .map_err(|e| Error::io(e, "reading the control connection"))?;
    if line.last() == Some(&b'\n') {
        line.pop();
        return Ok(true);
    }
    if line.len() > LINE_MAX_BYTES {
        return Err(Error::invalid(format!("a line is longer than {LINE_MAX_BYTES} bytes")));
    }
    if line.is_empty() {
        return Ok(false);
    }
    Err(Error::new(ErrorKind::Io, "the control connection ended in the middle of a line"))
}

/// Sends one message.
///
/// # Errors
/// What the stream says.
pub fn send(stream: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(message)
        .map_err(|e| Error::new(ErrorKind::Io, format!("encoding a message: {e}")))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(|e| Error::io(e, "writing to the control connection"))
}

/// Sends a result, in parts if it is long.
///
/// # Errors
/// What the stream says.
pub fn send_result(stream: &mut impl Write, result: Value) -> Result<()> {
    let text = result.to_string();
    if text.len() < PART_BYTES {
        return send(stream, &Reply::Result(result));
    }
    drop(result);
    let mut parts = PartWriter::new(&mut *stream);
    parts.write_all(text.as_bytes()).map_err(|e| Error::io(e, "sending a long result"))?;
    parts.finish()?;
    send(stream, &Reply::Result(Value::Null))
}

/// Sends what is written to it as `part` lines.
pub struct PartWriter<W: Write> {
    stream: W,
    pending: Vec<u8>,
    has_sent: bool,
}

impl<W: Write> PartWriter<W> {
    /// Parts on `stream`.
    pub fn new(stream: W) -> Self {
        Self { stream, pending: Vec::with_capacity(PART_BYTES), has_sent: false }
    }

    /// Sends what is left.
    ///
    /// # Errors
    /// `Io` if the text was no UTF-8, else what the stream says.
    pub fn finish(mut self) -> Result<()> {
        self.send_whole_characters()?;
        if self.pending.is_empty() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Io, "a result is not UTF-8"))
    }

    /// As [`PartWriter::finish`]: the result that is to be sent now. Of a text that fits a line nothing has been sent.
    ///
    /// # Errors
    /// As there.
    pub fn finish_result(self) -> Result<Value> {
        if self.has_sent {
            return self.finish().map(|()| Value::Null);
        }
        serde_json::from_slice(&self.pending)
            .map_err(|e| Error::new(ErrorKind::Io, format!("encoding a result: {e}")))
    }

    /// Sends all but a character that is still incomplete.
    fn send_whole_characters(&mut self) -> Result<()> {
        let whole = match std::str::from_utf8(&self.pending) {
            Ok(text) => text.len(),
            Err(e) => e.valid_up_to(),
        };
        let rest = self.pending.split_off(whole);
        let text = String::from_utf8(std::mem::replace(&mut self.pending, rest))
            .map_err(|_| Error::new(ErrorKind::Io, "a result is not UTF-8"))?;
        self.has_sent |= !text.is_empty();
        if text.is_empty() { Ok(()) } else { send(&mut self.stream, &Reply::Part(text)) }
    }
}

impl<W: Write> Write for PartWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let take = bytes.len().min(PART_BYTES.saturating_sub(self.pending.len()));
        if take == 0 && !bytes.is_empty() {
            self.flush()?;
            if self.pending.len() >= PART_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a result is not UTF-8"));
            }
            return self.write(bytes);
        }
        self.pending.extend_from_slice(&bytes[..take]);
        Ok(take)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send_whole_characters().map_err(io::Error::other)
    }
}
