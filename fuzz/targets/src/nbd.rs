//! NBD, the server's side: handshake and transmission on a real store, without sockets.

use crate::input::Input;
use crate::peers::taken;
use crate::sample::{empty, pattern};
use dbs_frontend::Protocol;
use dbs_nbd::handshake::{Handshake, Step, TlsState};
use dbs_nbd::session::Session;
use dbs_nbd::wire::option::{OptionHeader, OptionReplyHeader};
use dbs_nbd::wire::reply::{ReplyHeader, chunk, decode_block_status, decode_error};
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{OPTION_MAX_BYTES, PAYLOAD_MAX_BYTES, cmd, rep};
use dbs_nbd::{Exports, OfflineClient, StoreExports};
use std::sync::Arc;

/// Options and requests of one input.
const MESSAGES_MAX: usize = 32;
/// Longest read carried out: a large one says no more.
const READ_MAX_BYTES: u64 = 256 << 10;

/// A client's bytes to the server, or, if bit 0 of the first byte is set, a server's to the client.
///
/// The input: flags (bit 1: TLS is wanted, bit 2: read-only), and what is received.
pub fn nbd(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    if flags & 1 != 0 {
        return crate::nbd_client::client(flags, input.rest());
    }
    let (_disk, store) = empty();
    store.create_volume("disk", 1 << 20).unwrap();
    let volume = store.volume("disk").unwrap();
    volume.write_at(64 << 10, &pattern(3, 128 << 10), false).unwrap();
    store.create_snapshot("disk", "old", &Default::default()).unwrap();
    volume.write_at(96 << 10, &pattern(4, 8192), false).unwrap();
    let read_only = flags & 4 != 0;
    let exports: Arc<dyn Exports> = Arc::new(StoreExports::new(store, read_only));
    let tls = if flags & 2 != 0 { TlsState::Required } else { TlsState::Off };
    let mut before = vec![0; 1 << 20];
    volume.read_at(0, &mut before).unwrap();
    if let Some(session) = negotiate(Handshake::new(exports, tls), &mut input) {
        let immutable = session.read_only();
        transmit(session, input);
        let mut after = vec![0; 1 << 20];
        volume.read_at(0, &mut after).unwrap();
        assert!(!immutable || before == after, "a read-only export was written");
    }
}

fn negotiate(mut handshake: Handshake, input: &mut Input<'_>) -> Option<Session> {
    handshake.client_flags(u32::from(input.u8())).ok()?;
    for _ in 0..MESSAGES_MAX {
        let header = OptionHeader::decode(input.bytes(OptionHeader::BYTES)).ok()?;
        let mut out = Vec::new();
        let data = input.bytes(header.length as usize);
        if header.length > OPTION_MAX_BYTES {
            handshake.option_too_big(header.option, &mut out);
            continue;
        }
        if data.len() < header.length as usize {
            return None;
        }
        match handshake.option(header.option, data, &mut out) {
            Step::Continue => check_replies(header.option, &out),
            Step::StartTls => handshake.tls_started(),
            Step::Transmit(session) => {
                return Some(session);
            }
            Step::Close => return None,
        }
    }
    None
}

/// The bytes are replies to the option, of which the last and only the last is final.
fn check_replies(option: u32, out: &[u8]) {
    let (mut rest, mut last) = (out, None);
    while let Some((head, after)) = rest.split_at_checked(OptionReplyHeader::BYTES) {
        let header = OptionReplyHeader::decode(head).unwrap();
        assert_eq!(header.option, option);
        assert!(last.is_none_or(|kind| kind != rep::ACK && kind & rep::ERROR_BIT == 0));
        last = Some(header.kind);
        rest = &after[header.length as usize..];
    }
    assert!(rest.is_empty() && last.is_some_and(|kind| kind == rep::ACK || kind >> 31 == 1));
}

fn transmit(session: Session, mut input: Input<'_>) {
    let session = Arc::new(session);
    let length = session.style().request_bytes();
    // First the cutting into requests alone.
    let piece = 1 + usize::from(input.u8());
    let protocol = || OfflineClient::offline(Arc::clone(&session));
    let judge = |request: &<OfflineClient as Protocol>::Request, payload: Option<&[u8]>| {
        format!("{request:?} {:?}", payload.map(<[u8]>::len))
    };
    let mut copy = input;
    let bytes = copy.rest();
    let whole = taken(protocol, bytes, usize::MAX, judge);
    assert!(whole == taken(protocol, bytes, piece, judge), "pieces of {piece} bytes");
    for _ in 0..MESSAGES_MAX {
        let Ok(request) = Request::decode(session.style(), input.bytes(length)) else { return };
        if request.command == cmd::DISC {
            return;
        }
        let admitted = session.admit(&request);
        assert!(admitted.payload_bytes <= PAYLOAD_MAX_BYTES as usize);
        let payload = input.bytes(admitted.payload_bytes.max(admitted.skip_bytes as usize));
        if payload.len() < admitted.payload_bytes {
            return;
        }
        if request.command == cmd::READ && request.length > READ_MAX_BYTES {
            continue;
        }
        let reply = session.run(&admitted, &payload[..admitted.payload_bytes]).parts.concat();
        check_reply(&session, &request, &reply);
    }
}

fn check_reply(session: &Session, request: &Request, reply: &[u8]) {
    let style = session.style();
    let success = if style.chunked() {
        check_chunks(style, request, reply)
    } else {
        let header = ReplyHeader::decode(style, &reply[..ReplyHeader::SIMPLE_BYTES]).unwrap();
        let ReplyHeader::Simple { errno, cookie } = header else { panic!("{header:?}") };
        assert_eq!(cookie, request.cookie);
        let data = reply.len() - ReplyHeader::SIMPLE_BYTES;
        let read = errno == 0 && request.command == cmd::READ;
        assert_eq!(data as u64, if read { request.length } else { 0 });
        errno == 0
    };
    let changes = matches!(request.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
    if success && changes {
        assert!(!session.read_only(), "a write to a read-only export");
        let end = request.offset.checked_add(request.length);
        assert!(end.is_some_and(|end| end <= session.size()), "a write behind the end");
    }
}

/// A reply in chunks is complete; whether it reports success.
fn check_chunks(style: Style, request: &Request, bytes: &[u8]) -> bool {
    let (mut at, mut last, mut content, mut success) = (0, false, 0, true);
    while at < bytes.len() {
        assert!(!last, "a chunk behind the last");
        let head = at + ReplyHeader::bytes(style, &bytes[at..]).unwrap();
        let header = ReplyHeader::decode(style, &bytes[at..head]).unwrap();
        let ReplyHeader::Chunk { done, kind, cookie, length } = header else {
            panic!("{header:?}")
        };
        assert_eq!(cookie, request.cookie);
        at = head + length as usize;
        let payload = &bytes[head..at];
        match kind {
            chunk::NONE => assert!(done && payload.is_empty()),
            chunk::OFFSET_DATA => content += payload.len() as u64 - 8,
            chunk::OFFSET_HOLE => {
                content += u64::from(u32::from_be_bytes(payload[8..].try_into().unwrap()));
            }
            chunk::ERROR => {
                decode_error(payload).unwrap();
                success = false;
            }
            _ => drop(decode_block_status(kind, payload).unwrap()),
        }
        last = done;
    }
    assert!(last, "the last chunk is missing");
    assert!(!success || request.command != cmd::READ || content == request.length);
    success
}
