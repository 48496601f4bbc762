//! The client's side of the handshake.

use super::{Client, ClientOptions, failed};
use crate::export::Failure;
use crate::wire::option::{InfoRequest, MetaRequest, OptionReplyHeader, encode_option};
use crate::wire::request::Style;
use crate::wire::{
    Cursor, GREETING_BYTES, Malformed, OPTION_MAX_BYTES, PAYLOAD_MAX_BYTES, decode_greeting,
    handshake_flag, info, opt, rep,
};
use std::io::{self, Read, Write};

/// Most replies to one option.
const REPLIES_MAX: usize = 1 << 20;
/// Most bytes of all replies to one option.
const REPLIES_MAX_BYTES: usize = 64 << 20;

/// Replies to an option before the last: type and data.
type Replies = Vec<(u32, Vec<u8>)>;

impl<S: Read + Write> Client<S> {
    /// Negotiates on a connected stream and opens the export `name`.
    ///
    /// # Errors
    /// The server's refusal as a [`Failure`] inside, `InvalidData` if it does not speak the
    /// protocol, or an error of the stream.
    pub fn over(stream: S, name: &str, options: &ClientOptions) -> io::Result<Self> {
        let mut client = Self::greet(stream)?;
        if options.extended && client.option(opt::EXTENDED_HEADERS, &[])?.is_ok() {
            client.style = Style::Extended;
        } else if client.option(opt::STRUCTURED_REPLY, &[])?.is_ok() {
            client.style = Style::Structured;
        }
        if client.style.chunked() && !options.contexts.is_empty() {
            client.select_contexts(name, &options.contexts)?;
        }
        client.go(name)?;
        Ok(client)
    }

    /// Lists the exports of a server on a fresh stream: names and descriptions.
    ///
    /// # Errors
    /// See [`Client::over`].
    pub fn list(stream: S) -> io::Result<Vec<(String, String)>> {
        let mut client = Self::greet(stream)?;
        let mut exports = Vec::new();
        for (kind, data) in client.option(opt::LIST, &[])?? {
            if kind == rep::SERVER {
                let mut cursor = Cursor::new(&data);
                let length = cursor.u32()? as usize;
                let name = cursor.string(length)?;
                exports.push((name, String::from_utf8_lossy(cursor.rest()).into_owned()));
            }
        }
        client.option(opt::ABORT, &[])??;
        Ok(exports)
    }

    pub(super) fn greet(mut stream: S) -> io::Result<Self> {
        let mut greeting = [0; GREETING_BYTES];
        stream.read_exact(&mut greeting)?;
        let flags = decode_greeting(&greeting)?;
        if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(Malformed("the server is too old: no fixed newstyle").into());
        }
        let answer = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        stream.write_all(&u32::from(answer).to_be_bytes())?;
        Ok(Self {
            stream,
            style: Style::Simple,
            size: 0,
            flags: 0,
            payload_max: PAYLOAD_MAX_BYTES,
            contexts: Vec::new(),
            cookie: 0,
            broken: false,
        })
    }

    /// Sends an option and collects its replies up to the last; inside, the server's refusal.
    pub(super) fn option(&mut self, option: u32, data: &[u8]) -> io::Result<io::Result<Replies>> {
        self.stream.write_all(&encode_option(option, data))?;
        self.stream.flush()?;
        let mut replies = Vec::new();
        let mut total = 0;
        while replies.len() < REPLIES_MAX && total <= REPLIES_MAX_BYTES {
            let mut header = [0; OptionReplyHeader::BYTES];
            self.stream.read_exact(&mut header)?;
            let header = OptionReplyHeader::decode(&header)?;
            if header.option != option || header.length > OPTION_MAX_BYTES {
                return Err(Malformed("reply to another option, or too long").into());
            }
            let data = self.bytes(u64::from(header.length))?;
            if header.is_error() {
                let message = String::from_utf8_lossy(&data);
                let text = format!("refused by the server ({:#x}): {message}", header.kind);
                return Ok(Err(failed(Failure::invalid(text))));
            }
            if header.kind == rep::ACK {
                return Ok(Ok(replies));
            }
            total += data.len();
            replies.push((header.kind, data));
        }
        Err(Malformed("too many replies to an option").into())
    }

    fn select_contexts(&mut self, name: &str, queries: &[String]) -> io::Result<()> {
        let request = MetaRequest { name: name.to_owned(), queries: queries.to_vec() };
        for (kind, data) in self.option(opt::SET_META_CONTEXT, &request.encode())?? {
            if kind == rep::META_CONTEXT {
                let mut cursor = Cursor::new(&data);
                let id = cursor.u32()?;
                let length = cursor.rest().len();
                self.contexts.push((id, cursor.string(length)?));
            }
        }
        Ok(())
    }

    fn go(&mut self, name: &str) -> io::Result<()> {
        let request = InfoRequest { name: name.to_owned(), wanted: vec![info::BLOCK_SIZE] };
        let mut described = false;
        for (_, data) in self.option(opt::GO, &request.encode())?? {
            let mut cursor = Cursor::new(&data);
            match cursor.u16()? {
                info::EXPORT => {
                    (self.size, self.flags) = (cursor.u64()?, cursor.u16()?);
                    described = true;
                }
                info::BLOCK_SIZE => {
                    let (_, _, maximum) = (cursor.u32()?, cursor.u32()?, cursor.u32()?);
                    self.payload_max = maximum.clamp(4096, PAYLOAD_MAX_BYTES);
                }
                _ => {}
            }
        }
        if described { Ok(()) } else { Err(Malformed("no size of the export").into()) }
    }
}
