//! Messages of the handshake: options and their replies.

use super::{
    Cursor, Malformed, OPTION_MAGIC, OPTION_REPLY_MAGIC, STRING_MAX_BYTES, info, rep, truncate,
};

/// The fixed part of an option, client to server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option.
    pub option: u32,
    /// Bytes of data that follow.
    pub length: u32,
}

impl OptionHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 16;

    /// Decodes the header.
    ///
    /// # Errors
    /// [`Malformed`] for a wrong magic.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut cursor = Cursor::new(bytes);
        if cursor.u64()? != OPTION_MAGIC {
            return Err(Malformed("option without its magic number"));
        }
        Ok(Self { option: cursor.u32()?, length: cursor.u32()? })
    }
}

/// Encodes an option with its data.
#[must_use]
pub fn encode_option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(OptionHeader::BYTES + data.len());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

/// The fixed part of a reply to an option, server to client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option replied to.
    pub option: u32,
    /// Type of the reply.
    pub kind: u32,
    /// Bytes of data that follow.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 20;

    /// Decodes the header.
    ///
    /// # Errors
    /// [`Malformed`] for a wrong magic.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut cursor = Cursor::new(bytes);
        if cursor.u64()? != OPTION_REPLY_MAGIC {
            return Err(Malformed("option reply without its magic number"));
        }
        Ok(Self { option: cursor.u32()?, kind: cursor.u32()?, length: cursor.u32()? })
    }

    /// Whether the reply is an error.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.kind & rep::ERROR_BIT != 0
    }
}

/// Collects the replies to one option.
#[derive(Debug)]
pub struct OptionReplies<'a> {
    option: u32,
    out: &'a mut Vec<u8>,
}

impl<'a> OptionReplies<'a> {
    /// Replies to `option`, appended to `out`.
    pub fn new(option: u32, out: &'a mut Vec<u8>) -> Self {
        Self { option, out }
    }

    fn push(&mut self, kind: u32, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend(self.option.to_be_bytes());
        self.out.extend(kind.to_be_bytes());
        self.out.extend((length as u32).to_be_bytes());
        for part in parts {
            self.out.extend(*part);
        }
    }

    /// The final reply of success.
    pub fn ack(&mut self) {
        self.push(rep::ACK, &[]);
    }

    /// The final reply of failure, with a text for people.
    pub fn error(&mut self, kind: u32, message: &str) {
        self.push(kind, &[truncate(message, STRING_MAX_BYTES).as_bytes()]);
    }

    /// One export of the list.
    pub fn server(&mut self, name: &str, description: &str) {
        let description = truncate(description, STRING_MAX_BYTES);
        let length = (name.len() as u32).to_be_bytes();
        self.push(rep::SERVER, &[&length, name.as_bytes(), description.as_bytes()]);
    }

    /// Size in bytes and transmission flags of an export.
    pub fn export(&mut self, size: u64, flags: u16) {
        let kind = info::EXPORT.to_be_bytes();
        self.push(rep::INFO, &[&kind, &size.to_be_bytes(), &flags.to_be_bytes()]);
    }

    /// A text about an export: its name or description.
    pub fn text(&mut self, kind: u16, text: &str) {
        let text = truncate(text, STRING_MAX_BYTES);
        self.push(rep::INFO, &[&kind.to_be_bytes(), text.as_bytes()]);
    }

    /// Size constraints in bytes: minimum, preferred, maximum.
    pub fn block_size(&mut self, sizes: [u32; 3]) {
        let [minimum, preferred, maximum] = sizes.map(u32::to_be_bytes);
        self.push(rep::INFO, &[&info::BLOCK_SIZE.to_be_bytes(), &minimum, &preferred, &maximum]);
    }

    /// A metadata context and its id on this connection.
    pub fn meta_context(&mut self, id: u32, name: &str) {
        self.push(rep::META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()]);
    }
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InfoRequest {
    /// Export.
    pub name: String,
    /// Kinds of information wanted.
    pub wanted: Vec<u16>,
}

impl InfoRequest {
    /// Decodes the data.
    ///
    /// # Errors
    /// [`Malformed`] if lengths do not add up or the name is not a string.
    pub fn decode(data: &[u8]) -> Result<Self, Malformed> {
        let mut cursor = Cursor::new(data);
        let length = cursor.u32()? as usize;
        let name = cursor.string(length)?;
        let count = cursor.u16()?;
        let wanted = (0..count).map(|_| cursor.u16()).collect::<Result<_, _>>()?;
        cursor.finish()?;
        Ok(Self { name, wanted })
    }

    /// Encodes the data.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        push_string(&mut out, &self.name);
        out.extend((self.wanted.len() as u16).to_be_bytes());
        out.extend(self.wanted.iter().flat_map(|kind| kind.to_be_bytes()));
        out
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaRequest {
    /// Export.
    pub name: String,
    /// Contexts, or patterns of the lister's.
    pub queries: Vec<String>,
}

impl MetaRequest {
    /// Decodes the data.
    ///
    /// # Errors
    /// [`Malformed`] if lengths do not add up or something is not a string.
    pub fn decode(data: &[u8]) -> Result<Self, Malformed> {
        let mut cursor = Cursor::new(data);
        let length = cursor.u32()? as usize;
        let name = cursor.string(length)?;
        let count = cursor.u32()?;
        let mut queries = Vec::new();
        for _ in 0..count {
            let length = cursor.u32()? as usize;
            queries.push(cursor.string(length)?);
        }
        cursor.finish()?;
        Ok(Self { name, queries })
    }

    /// Encodes the data.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        push_string(&mut out, &self.name);
        out.extend((self.queries.len() as u32).to_be_bytes());
        for query in &self.queries {
            push_string(&mut out, query);
        }
        out
    }
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_be_bytes());
    out.extend(text.as_bytes());
}
