//! One connection to a replica: replies as they come in, and the bytes of requests.

use super::sabotage::{Bug, is};
use crate::rules::Slot;
use crate::rules::widen::BLOCK;
use dbs_frontend::{Charge, Protocol};
use dbs_reactor::{Batch, SharedBuf};
use longhorn_data::request::Request;
use longhorn_wire::frame::{Damaged, HEADER_BYTES, Header, Type};
use std::io;

/// Longest text of an error that is looked at.
const TEXT_MAX_BYTES: u32 = 64 << 10;

/// A connection.
pub struct Link {
    pub slot: Slot,
    /// Of the replica: a slot is used again.
    pub serial: u64,
    /// How often the connections of this reactor to it had been made anew.
    pub epoch: u32,
}

impl Protocol for Link {
    type Request = Reply;

    fn header_bytes(&self) -> usize {
        HEADER_BYTES
    }

    #[inline]
    fn request(&self, header: &[u8]) -> io::Result<Option<Reply>> {
        let header = Header::decode(header)?;
        let kind = header.kind();
        let payload = match kind {
            // It takes its leave.
            Some(Type::Close) => return Ok(None),
            Some(Type::Response) => header.length,
            Some(Type::Error | Type::NoSpace | Type::Damaged)
                if header.length <= TEXT_MAX_BYTES =>
            {
                header.length
            }
            _ => 0,
        };
        let skip = header.length - payload;
        let Header { sequence, offset, size, .. } = header;
        Ok(Some(Reply { sequence, kind, offset, size, payload, skip }))
    }
}

/// The reply to a request, its payload apart.
#[derive(Debug, Clone, Copy)]
pub struct Reply {
    pub sequence: u32,
    /// Its type, if it is known.
    pub kind: Option<Type>,
    offset: i64,
    pub size: u32,
    payload: u32,
    skip: u32,
}

impl Reply {
    /// That of a replica in this process, with `payload` bytes beside it.
    pub fn local(request: &Request, kind: Type, size: u32, payload: u32) -> Self {
        let (sequence, offset) = (request.sequence(), request.offset());
        Self { sequence, kind: Some(kind), offset, size, payload, skip: 0 }
    }

    /// Whether it can be the reply to this request, of which it repeats the offset. One that is not
    /// shows that bytes were lost or damaged on the way, there or back, and who knows what the replica
    /// was asked then.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, ask: &Ask) -> Result<(), String> {
        if u64::try_from(self.offset) != Ok(ask.offset) {
            let (said, asked) = (self.offset, ask.offset);
            return Err(format!("a reply about offset {said} to a request at {asked}"));
        }
        let Reply { kind, size, payload, .. } = *self;
        let carries = match ask.kind {
            Type::Read => ask.length,
            _ => 0,
        };
        match (kind, ask.kind) {
            (Some(Type::Error | Type::NoSpace), _)
            | (Some(Type::Eof), Type::Read)
            | (Some(Type::Damaged), Type::Read | Type::Write) => Ok(()),
            (Some(Type::Response), _) if payload != carries => {
                Err(format!("{payload} bytes with the reply to a {:?} of {}", ask.kind, ask.length))
            }
            // Some bytes may be freed more than once, in several layers; what is healed is what had to be.
            (Some(Type::Response), Type::Unmap | Type::Heal) => Ok(()),
            (Some(Type::Response), _) if size != ask.length => {
                Err(format!("{size} bytes done of a {:?} of {}", ask.kind, ask.length))
            }
            (Some(Type::Response), _) => Ok(()),
            (kind, _) => Err(format!("a reply of type {kind:?} to a {:?}", ask.kind)),
        }
    }
}

impl Charge for Reply {
    fn payload_bytes(&self) -> usize {
        self.payload as usize
    }

    fn skip_bytes(&self) -> u64 {
        u64::from(self.skip)
    }

    fn cost_bytes(&self) -> u64 {
        0
    }
}

/// The damage that a reply tells of.
///
/// # Errors
/// It cannot be damage that this request has met.
pub(super) fn damage(ask: &Ask, payload: Option<&[u8]>) -> Result<Damaged, String> {
    let Some(damaged) = payload.and_then(Damaged::decode) else {
        return Err("damage without a place".to_owned());
    };
    let (start, end) = (ask.offset - ask.offset % BLOCK, ask.offset + u64::from(ask.length));
    let place = damaged.offset;
    if !place.is_multiple_of(BLOCK) || !(start..end).contains(&place) {
        let Ask { kind, offset, length } = ask;
        return Err(format!("damage at {place} in a {kind:?} of {length} at {offset}"));
    }
    Ok(damaged)
}

/// A request to a replica.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    pub kind: Type,
    pub offset: u64,
    /// Bytes to read, write or unmap.
    pub length: u32,
}

impl Ask {
    /// Whether a replica that does not answer soon is in trouble. Not where it makes something durable: that
    /// may take as long as its disk has work.
    #[inline]
    pub fn is_urgent(&self) -> bool {
        match self.kind {
            Type::Flush => is(Bug::HurryFlush),
            Type::Heal => is(Bug::HurryHealing),
            _ => true,
        }
    }

    /// The same, once more: it may have been done.
    pub fn again(self) -> Self {
        let kind = match self.kind {
            Type::Write => Type::WriteAgain,
            Type::Unmap => Type::UnmapAgain,
            // It changes nothing to do these twice.
            kind => kind,
        };
        Self { kind, ..self }
    }

    /// Adds it to what a connection sends, with the payload if it is a write.
    #[inline]
    pub fn append_to(self, batch: &mut Batch, sequence: u32, payload: Option<SharedBuf>) {
        // Ranges are inside a volume, whose size is an `i64` on the wire as well.
        let mut header = Header::new(self.kind, sequence, self.offset as i64, self.length);
        match payload {
            Some(payload) => {
                header.length = payload.len() as u32;
                batch.push(&header.encode());
                batch.push_shared(payload);
            }
            None => batch.push(&header.encode()),
        }
    }
}
