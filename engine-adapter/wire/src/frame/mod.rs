//! The bytes of the data connection: headers to values and back, no sockets.
//!
//! Each message, in both directions, is a header of 26 bytes and a payload of as many bytes as it
//! says. Replies carry the sequence number of their request and come in any order. What requests
//! and replies mean is in [`Type`].
//!
//! **Extension.** A client that knows DBS may send a ping whose payload is a [`Hello`]. Longhorn's
//! own replica sends a ping's payload back as it is; this one answers with the [`Hello`] of its own,
//! which differs. Only to that one the client may send [`Type::Flush`]: it is answered once every
//! write that was acknowledged before it came, on any connection, survives a loss of power.
//!
//! With [`feature::HEAL`] on both sides, a read or write that fails because data in the replica is not
//! what was written is answered with [`Type::Damaged`], on the connections that the client said hello on; it
//! has changed nothing then. [`Type::Heal`] brings what a damaged block held: it is written if its checksum is
//! the one that the replica knows of the block, and changes nothing else.
//!
//! A client whose connection broke may make another one and send again what was not answered, if its first hello
//! named the [`Lane`] that the connection belongs to, and was answered with a [`Standing`]. Each time that a lane
//! breaks it has the next *epoch*. The answer is [`Standing::Ready`] once the connections of earlier epochs are over and their
//! requests have ended, but flushes. Changes are sent again as [`Type::WriteAgain`] and [`Type::UnmapAgain`], with the
//! sequence number that they had: one that was done is answered, and not done again. For that, the replica
//! remembers the last change done in each *place*, the lower [`PLACE_BITS`] of a sequence number. So a client
//! uses a place again only when the request in it has ended on all replicas, and never gives two changes in a row
//! in one place the same number.

use std::fmt;
use zerocopy::byteorder::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First field of every message.
pub const MAGIC: u16 = 0x1b01;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 26;
/// Longest payload in bytes, and most bytes one read may ask for. The protocol has no limit; the
/// longest SCSI command with a 16-bit length, 65,535 sectors of 512 bytes, fits.
pub const PAYLOAD_MAX_BYTES: u32 = 32 << 20;
/// What a full replica's error has to contain for a controller to know it as such. Type 8 is not
/// for replicas: a controller takes it for success.
pub const NO_SPACE_TEXT: &str = "no space left on device";

/// The text of an error for lack of space, with the words by which all sides know it.
#[must_use]
pub fn no_space(text: String) -> String {
    if text.contains(NO_SPACE_TEXT) { text } else { format!("{text}: {NO_SPACE_TEXT}") }
}
/// How the errors of a replica begin and end once a newer process of its directory has the store.
const HANDED_OVER: (&str, &str) = ("the replica `", "` was handed over to a newer process");

/// All that a replica of this directory says once a newer process has the store, as in a live upgrade.
#[must_use]
pub fn handed_over(dir: impl fmt::Display) -> String {
    format!("{}{dir}{}", HANDED_OVER.0, HANDED_OVER.1)
}

/// Whether an error of a replica is that: a controller knows by it that a newer one has the volume. Errors that tell
/// of names, which users choose, begin otherwise.
#[must_use]
pub fn is_handed_over(text: &str) -> bool {
    text.starts_with(HANDED_OVER.0) && text.ends_with(HANDED_OVER.1)
}

/// The error of a read beyond the end of the volume.
pub const UNEXPECTED_EOF_TEXT: &str = "unexpected EOF";

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    /// Request for [`Header::size`] bytes from [`Header::offset`] on. The response carries them.
    Read,
    /// Request to write the payload. The response's size is the number of bytes written.
    Write,
    /// A request succeeded.
    Response,
    /// A request failed: the payload is a text.
    Error,
    /// A read ended early: the payload is what there is.
    Eof,
    /// The server will send nothing more.
    Close,
    /// Asks whether the replica is well.
    Ping,
    /// Request to give up [`Header::size`] bytes. The response's size is the number of bytes freed.
    Unmap,
    /// A controller has no space left: sent to its frontend, never by a replica.
    NoSpace,
    /// Makes acknowledged writes durable: only between the two sides of DBS.
    Flush,
    /// Request, with whole blocks as its payload, to write those again that are damaged and held this.
    /// The response's size is the number of bytes that were. Only between the two sides of DBS.
    Heal,
    /// A request failed since data is damaged: the payload is a [`Damaged`]. Only between the two sides of
    /// DBS.
    Damaged,
    /// A write that may have been done: it was sent on a connection that broke. Only between the two sides of DBS.
    WriteAgain,
    /// The same of an unmap.
    UnmapAgain,
}

impl Type {
    const ALL: [(u32, Self); 14] = [
        (0, Self::Read),
        (1, Self::Write),
        (2, Self::Response),
        (3, Self::Error),
        (4, Self::Eof),
        (5, Self::Close),
        (6, Self::Ping),
        (7, Self::Unmap),
        (8, Self::NoSpace),
        (0x44, Self::Flush),
        (0x45, Self::Heal),
        (0x46, Self::Damaged),
        (0x47, Self::WriteAgain),
        (0x48, Self::UnmapAgain),
    ];

    /// The number on the wire.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Response => 2,
            Self::Error => 3,
            Self::Eof => 4,
            Self::Close => 5,
            Self::Ping => 6,
            Self::Unmap => 7,
            Self::NoSpace => 8,
            Self::Flush => 0x44,
            Self::Heal => 0x45,
            Self::Damaged => 0x46,
            Self::WriteAgain => 0x47,
            Self::UnmapAgain => 0x48,
        }
    }

    /// The type with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.iter().find(|(its, _)| *its == number).map(|(_, found)| *found)
    }
}

/// A header on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct HeaderBytes {
    magic: U16,
    sequence: U32,
    number: U32,
    offset: I64,
    size: U32,
    length: U32,
}

const _: () = assert!(size_of::<HeaderBytes>() == HEADER_BYTES);
const _: () = assert!(std::mem::offset_of!(HeaderBytes, sequence) == 2);
const _: () = assert!(std::mem::offset_of!(HeaderBytes, number) == 6);
const _: () = assert!(std::mem::offset_of!(HeaderBytes, offset) == 10);
const _: () = assert!(std::mem::offset_of!(HeaderBytes, size) == 18);
const _: () = assert!(std::mem::offset_of!(HeaderBytes, length) == 22);

/// What precedes the payload of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Chosen by the client, returned in the reply.
    pub sequence: u32,
    /// Number of the [`Type`]; others are to be skipped.
    pub number: u32,
    /// Byte offset in the volume.
    pub offset: i64,
    /// Bytes that the message is about.
    pub size: u32,
    /// Bytes of payload that follow, at most [`PAYLOAD_MAX_BYTES`].
    pub length: u32,
}

impl Header {
    /// A message without payload.
    #[must_use]
    pub const fn new(kind: Type, sequence: u32, offset: i64, size: u32) -> Self {
        Self { sequence, number: kind.number(), offset, size, length: 0 }
    }

    /// A message with a payload, which its size counts.
    #[must_use]
    pub const fn with_payload(kind: Type, sequence: u32, offset: i64, length: u32) -> Self {
        Self { sequence, number: kind.number(), offset, size: length, length }
    }

    /// Its type, if it is known.
    #[must_use]
    pub fn kind(&self) -> Option<Type> {
        Type::from_number(self.number)
    }

    /// Parses the [`HEADER_BYTES`] of a header.
    ///
    /// # Errors
    /// Another number of bytes, another magic, a payload that is too long.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let bytes = HeaderBytes::read_from_bytes(bytes).map_err(|_| Malformed::Header)?;
        if bytes.magic != MAGIC {
            return Err(Malformed::Magic(bytes.magic.get()));
        }
        if bytes.length > PAYLOAD_MAX_BYTES {
            return Err(Malformed::Length(bytes.length.get()));
        }
        Ok(Self {
            sequence: bytes.sequence.get(),
            number: bytes.number.get(),
            offset: bytes.offset.get(),
            size: bytes.size.get(),
            length: bytes.length.get(),
        })
    }

    /// The bytes of it.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let bytes = HeaderBytes {
            magic: U16::new(MAGIC),
            sequence: U32::new(self.sequence),
            number: U32::new(self.number),
            offset: I64::new(self.offset),
            size: U32::new(self.size),
            length: U32::new(self.length),
        };
        zerocopy::transmute!(bytes)
    }
}

/// The other side does not speak this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// Not the bytes of a header.
    Header,
    /// Another magic.
    Magic(u16),
    /// A payload longer than [`PAYLOAD_MAX_BYTES`].
    Length(u32),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => write!(f, "a header of other than {HEADER_BYTES} bytes"),
            Self::Magic(magic) => {
                write!(f, "magic {magic:#06x} instead of {MAGIC:#06x}: no Longhorn data connection")
            }
            Self::Length(length) => {
                write!(f, "a payload of {length} bytes; at most {PAYLOAD_MAX_BYTES} are accepted")
            }
        }
    }
}

impl std::error::Error for Malformed {}

impl From<Malformed> for std::io::Error {
    fn from(malformed: Malformed) -> Self {
        Self::new(std::io::ErrorKind::InvalidData, malformed)
    }
}

/// Features of a [`Hello`].
pub mod feature {
    /// [`super::Type::Flush`] is known.
    pub const FLUSH: u32 = 1;
    /// [`super::Type::Heal`] and [`super::Type::Damaged`] are known.
    pub const HEAL: u32 = 2;
}

/// Bits of a sequence number that say the place of its request.
pub const PLACE_BITS: u32 = 12;

/// A share of a client's connections that breaks and is made anew on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lane {
    /// Who the client is: a number by chance, other than 0, that it says to nobody else.
    pub client: u64,
    /// How often the connections were made anew.
    pub epoch: u32,
    /// Which of the client's lanes this is.
    pub number: u16,
    /// How many places its requests have.
    pub places: u16,
}

/// What a server says to the [`Lane`] of a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Requests may be sent. Nothing that was sent in an earlier epoch runs any more.
    Ready,
    /// Something of it does: the hello is to be said again.
    Busy,
    /// The connection leads on from none: the replica was closed since, or is another process, or has a newer
    /// connection of this lane, or did not understand what came on the last one.
    Unknown,
}

impl Standing {
    const ALL: [Self; 3] = [Self::Ready, Self::Busy, Self::Unknown];

    const fn number(self) -> u16 {
        match self {
            Self::Ready => 1,
            Self::Busy => 2,
            Self::Unknown => 3,
        }
    }
}

/// What both sides of DBS say of themselves in a ping and in its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Whether a server says it.
    pub server: bool,
    /// Bits of [`feature`]; unknown ones are to be ignored.
    pub features: u32,
    /// Which replica says it, wherever it listens: the same for each process of its directory.
    pub identity: Option<[u8; 16]>,
    /// Whose changes it has.
    pub generations: Option<Generations>,
    /// What a client's connection belongs to.
    pub lane: Option<Lane>,
    /// What a server makes of that.
    pub standing: Option<Standing>,
}

/// Generations of a replica's content. Each session, from one close of the replica to the next, gives it a new one
/// with its first change; so does the loss of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generations {
    /// The present one.
    pub now: u64,
    /// The one that it has once it is changed in this session.
    pub changed: u64,
}

/// A [`Hello`] on the wire.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct HelloBytes {
    magic: [u8; 8],
    version: U32,
    features: U32,
    /// Zeros if there is none.
    identity: [u8; 16],
    /// Likewise: the present one, and that of this session.
    generations: [U64; 2],
    /// Of a client's lane; zeros if there is none.
    client: U64,
    epoch: U32,
    lane: U16,
    /// Of a client: its places. Of a server: its standing.
    word: U16,
}

const _: () = assert!(size_of::<HelloBytes>() == Hello::BYTES);
// What replicas look at that know no lanes.
const _: () = assert!(Hello::BYTES <= 64);

impl Hello {
    /// Bytes of it.
    pub const BYTES: usize = 64;
    const CLIENT: [u8; 8] = *b"DBShello";
    const SERVER: [u8; 8] = *b"DBSready";
    const VERSION: u32 = 1;
    /// Bytes of the first version's.
    const FIRST_BYTES: usize = 16;

    /// What a client of this version says.
    #[must_use]
    pub fn of_client() -> Self {
        let features = feature::FLUSH | feature::HEAL;
        Self { features, ..Self::of(false) }
    }

    /// What a server of this version says, of the replica that it is.
    #[must_use]
    pub fn of_server(identity: Option<[u8; 16]>) -> Self {
        let features = feature::FLUSH | feature::HEAL;
        Self { features, identity, ..Self::of(true) }
    }

    /// What a volume's controller says to its clients: it heals by itself.
    #[must_use]
    pub fn of_frontend() -> Self {
        Self { features: feature::FLUSH, ..Self::of(true) }
    }

    const fn of(server: bool) -> Self {
        let (identity, generations, lane, standing) = (None, None, None, None);
        Self { server, features: 0, identity, generations, lane, standing }
    }

    /// Whether it has this bit of [`feature`].
    #[must_use]
    pub fn has(&self, feature: u32) -> bool {
        self.features & feature != 0
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let none = Lane { client: 0, epoch: 0, number: 0, places: 0 };
        let lane = self.lane.unwrap_or(none);
        let bytes = HelloBytes {
            magic: if self.server { Self::SERVER } else { Self::CLIENT },
            version: U32::new(Self::VERSION),
            features: U32::new(self.features),
            identity: self.identity.unwrap_or_default(),
            generations: self
                .generations
                .map_or([0; 2], |generations| [generations.now, generations.changed])
                .map(U64::new),
            client: U64::new(lane.client),
            epoch: U32::new(lane.epoch),
            lane: U16::new(lane.number),
            word: U16::new(self.standing.map_or(lane.places, Standing::number)),
        };
        zerocopy::transmute!(bytes)
    }

    /// The hello in a payload; `None` if there is none. Newer versions may append to it; the first one had no
    /// identity, the second no generations, the third no lanes.
    #[must_use]
    pub fn decode(payload: &[u8]) -> Option<Self> {
        let mut whole = [0; Self::BYTES];
        let length = payload.len().min(Self::BYTES);
        if length < Self::FIRST_BYTES {
            return None;
        }
        whole[..length].copy_from_slice(&payload[..length]);
        let bytes: HelloBytes = zerocopy::transmute!(whole);
        let server = bytes.magic == Self::SERVER;
        let known = server || bytes.magic == Self::CLIENT;
        let identity = Some(bytes.identity).filter(|identity| *identity != [0; 16]);
        let [now, changed] = bytes.generations.map(U64::get);
        let generations = (now != 0 && changed != 0).then_some(Generations { now, changed });
        let (client, word) = (bytes.client.get(), bytes.word.get());
        let (epoch, number) = (bytes.epoch.get(), bytes.lane.get());
        let lane = Lane { client, epoch, number, places: word };
        let lane = (!server && client != 0).then_some(lane);
        let its = |standing: &Standing| server && standing.number() == word;
        let standing = Standing::ALL.into_iter().find(its);
        let features = bytes.features.get();
        known.then_some(Self { server, features, identity, generations, lane, standing })
    }
}

/// Bits of [`Damaged`] on the wire.
const IN_SNAPSHOT: u32 = 1;

/// What a replica says of damage that a request met first; more may follow it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damaged {
    /// First byte of the damaged block in the volume.
    pub offset: u64,
    /// A snapshot holds the block.
    pub in_snapshot: bool,
    /// The whole story.
    pub text: String,
}

/// What precedes the text of a [`Damaged`] on the wire.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct DamagedBytes {
    offset: U64,
    flags: U32,
    reserved: U32,
}

const _: () = assert!(size_of::<DamagedBytes>() == Damaged::BYTES);

impl Damaged {
    /// Bytes of it before its text.
    pub const BYTES: usize = 16;

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let bytes = DamagedBytes {
            offset: U64::new(self.offset),
            flags: U32::new(if self.in_snapshot { IN_SNAPSHOT } else { 0 }),
            reserved: U32::ZERO,
        };
        [bytes.as_bytes(), self.text.as_bytes()].concat()
    }

    /// What a payload says; `None` if it is too short. Unknown bits are ignored.
    #[must_use]
    pub fn decode(payload: &[u8]) -> Option<Self> {
        let (bytes, text) = DamagedBytes::read_from_prefix(payload).ok()?;
        Some(Self {
            offset: bytes.offset.get(),
            in_snapshot: bytes.flags.get() & IN_SNAPSHOT != 0,
            text: String::from_utf8_lossy(text).into_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
