//! A client of Longhorn's data connection, as plain as can be: one request at a time. It shares no code with the
//! server under test, so that both cannot agree on a mistake.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

const MAGIC: u16 = 0x1B01;
const READ: u32 = 0;
const WRITE: u32 = 1;
const RESPONSE: u32 = 2;
const UNMAP: u32 = 7;
const HEADER: usize = 26;
/// No request may take longer, not even while a replica is given up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where a data connection is found.
#[derive(Clone, Debug, PartialEq)]
pub enum Address {
    Port(u16),
    Socket(PathBuf),
}

/// Why a request failed: the type of the reply (nothing for a broken connection), and the text.
#[derive(Debug)]
pub struct IoError {
    pub reply: Option<u32>,
    pub text: String,
}

impl std::fmt::Display for IoError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "reply {:?}: {}", self.reply, self.text)
    }
}

trait Stream: Read + Write + Send {}
impl Stream for TcpStream {}
impl Stream for UnixStream {}

/// One connection.
pub struct Client {
    stream: Box<dyn Stream>,
    sequence: u32,
}

impl Client {
    pub fn connect(address: &Address) -> Result<Self, std::io::Error> {
        let stream: Box<dyn Stream> = match address {
            Address::Port(port) => {
                let stream = TcpStream::connect(("127.0.0.1", *port))?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                Box::new(stream)
            }
            Address::Socket(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                Box::new(stream)
            }
        };
        Ok(Self { stream, sequence: 0 })
    }

    pub fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let (size, data) = self.call(READ, offset, buf.len(), &[])?;
        if size as usize != buf.len() || data.len() != buf.len() {
            return Err(IoError {
                reply: Some(RESPONSE),
                text: format!("{size} of {} bytes", buf.len()),
            });
        }
        buf.copy_from_slice(&data);
        Ok(())
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        match self.call(WRITE, offset, data.len(), data)?.0 as usize {
            written if written == data.len() => Ok(()),
            written => Err(IoError {
                reply: Some(RESPONSE),
                text: format!("{written} of {} bytes", data.len()),
            }),
        }
    }

    /// Bytes freed.
    pub fn unmap(&mut self, offset: u64, length: usize) -> Result<u32, IoError> {
        Ok(self.call(UNMAP, offset, length, &[])?.0)
    }

    fn call(
        &mut self,
        kind: u32,
        offset: u64,
        size: usize,
        data: &[u8],
    ) -> Result<(u32, Vec<u8>), IoError> {
        self.sequence = self.sequence.wrapping_add(1);
        let exchanged = self.exchange(kind, offset, u32::try_from(size).unwrap(), data);
        let (reply, size, data) =
            exchanged.map_err(|e| IoError { reply: None, text: e.to_string() })?;
        if reply == RESPONSE {
            return Ok((size, data));
        }
        Err(IoError { reply: Some(reply), text: String::from_utf8_lossy(&data).into_owned() })
    }

    fn exchange(
        &mut self,
        kind: u32,
        offset: u64,
        size: u32,
        data: &[u8],
    ) -> std::io::Result<(u32, u32, Vec<u8>)> {
        let mut message = Vec::with_capacity(HEADER + data.len());
        message.extend_from_slice(&MAGIC.to_le_bytes());
        message.extend_from_slice(&self.sequence.to_le_bytes());
        message.extend_from_slice(&kind.to_le_bytes());
        message.extend_from_slice(&offset.to_le_bytes());
        message.extend_from_slice(&size.to_le_bytes());
        message.extend_from_slice(&u32::try_from(data.len()).unwrap().to_le_bytes());
        message.extend_from_slice(data);
        self.stream.write_all(&message)?;
        let mut header = [0; HEADER];
        self.stream.read_exact(&mut header)?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let magic = u16::from_le_bytes([header[0], header[1]]);
        if magic != MAGIC || word(2) != self.sequence {
            let text =
                format!("reply of magic {magic:#x}, sequence {} after {}", word(2), self.sequence);
            return Err(std::io::Error::other(text));
        }
        let mut payload = vec![0; word(22) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok((word(6), word(18), payload))
    }
}
