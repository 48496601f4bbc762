//! The data connection: requests as a server takes them, replies as a controller does.

use crate::input::Input;
use crate::peers::taken;
use dbs_core::format::crc::crc32c;
use dbs_frontend::Charge;
use dbs_reactor::Batch;
use longhorn_controller::path::link::{Link, Reply};
use longhorn_controller::rules::Slot;
use longhorn_data::request::{Connection, Op, Request, beyond_end};
use longhorn_wire::frame::{HEADER_BYTES, Header, Hello, PAYLOAD_MAX_BYTES};

/// Size of the volume, of which ranges are checked.
const SIZE: u64 = 1 << 20;

/// Messages of a connection, from either side, cut into pieces in different ways: the same come out.
///
/// The input: flags (one byte; bit 0: replies to a controller), the size of pieces (one byte), and
/// what is received.
pub fn dataconn(data: &[u8]) {
    let mut input = Input::new(data);
    let replies = input.flag();
    let piece = 1 + usize::from(input.u8());
    let bytes = input.rest();
    if let Some(header) = bytes.get(..HEADER_BYTES)
        && let Ok(decoded) = Header::decode(header)
    {
        assert_eq!(decoded.encode()[..], *header, "another header");
    }
    if replies {
        let link = || Link { slot: Slot::new(0).unwrap(), serial: 1, epoch: 0 };
        let whole = taken(link, bytes, usize::MAX, reply);
        let cut = taken(link, bytes, piece, reply);
        assert_eq!(whole, cut, "pieces of {piece} bytes are taken for something else");
    } else {
        let whole = taken(|| Connection::new(0, 0, String::new()), bytes, usize::MAX, request);
        let cut = taken(|| Connection::new(0, 0, String::new()), bytes, piece, request);
        assert_eq!(whole, cut, "pieces of {piece} bytes are taken for something else");
    }
}

fn request(request: &Request, payload: Option<&[u8]>) -> String {
    let length = payload.map_or(0, <[u8]>::len);
    assert_eq!(length, request.payload_bytes(), "a payload of another length");
    assert!(request.cost_bytes() <= u64::from(PAYLOAD_MAX_BYTES), "a cost beyond the limit");
    if request.op == Op::Write {
        assert_eq!(length as u32, request.size, "a write of what did not come");
    }
    if request.op == Op::Ping {
        let hello = payload.and_then(Hello::decode);
        assert!(hello.is_none_or(|h| Hello::decode(&h.encode()) == Some(h)), "another hello");
    }
    let inside = request.range().is_ok_and(|(at, size)| {
        let inside = at.checked_add(size).is_some_and(|end| end <= SIZE);
        assert_eq!(beyond_end(request, SIZE).is_none(), inside, "a range taken for another");
        inside
    });
    let mut batch = Batch::default();
    match (request.op, inside) {
        (Op::Read, true) => request.reply_bytes(&mut batch, &vec![7; request.size as usize]),
        (Op::Ping, _) => request.reply_hello(&mut batch, Hello::of_frontend()),
        (_, true) => request.reply_done(&mut batch, request.size),
        _ => request.reply_error(&mut batch, "outside"),
    }
    let reply: Vec<u8> = batch.slices().flatten().copied().collect();
    let header = Header::decode(&reply[..HEADER_BYTES]).expect("replies are well-formed");
    assert_eq!(header.length as usize, reply.len() - HEADER_BYTES, "a reply of another length");
    format!("{request:?} {length} {:x}", crc32c(payload.unwrap_or_default()))
}

fn reply(reply: &Reply, payload: Option<&[u8]>) -> String {
    let payload = payload.unwrap_or_default();
    assert_eq!(payload.len(), reply.payload_bytes(), "a payload of another length");
    format!("{reply:?} {} {:x}", payload.len(), crc32c(payload))
}
