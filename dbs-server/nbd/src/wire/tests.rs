use super::option::{InfoRequest, MetaRequest, OptionHeader, OptionReplyHeader, encode_option};
use super::reply::{FLAG_DONE, ReplyHeader, ReplyTo, chunk, decode_block_status, decode_error};
use super::request::{Request, Style};
use super::*;
use proptest::prelude::*;

fn style() -> impl Strategy<Value = Style> {
    prop_oneof![Just(Style::Simple), Just(Style::Structured), Just(Style::Extended)]
}

proptest! {
    #[test]
    fn any_bytes_decode_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..300), style in style()) {
        let _ = decode_greeting(&bytes);
        let _ = OptionHeader::decode(&bytes);
        let _ = OptionReplyHeader::decode(&bytes);
        let _ = Request::decode(style, &bytes);
        let _ = ReplyHeader::decode(style, &bytes);
        let _ = decode_block_status(chunk::BLOCK_STATUS, &bytes);
        let _ = decode_block_status(chunk::BLOCK_STATUS_EXT, &bytes);
        let _ = decode_error(&bytes);
        if let Ok(info) = InfoRequest::decode(&bytes) {
            prop_assert_eq!(info.encode(), bytes.clone());
        }
        if let Ok(meta) = MetaRequest::decode(&bytes) {
            prop_assert_eq!(meta.encode(), bytes);
        }
    }

    #[test]
    fn requests_round_trip(
        style in style(), flags: u16, command: u16, cookie: u64, offset: u64, length: u64,
    ) {
        let length = if style == Style::Extended { length } else { length & 0xffff_ffff };
        let request = Request { flags, command, cookie, offset, length };
        let bytes = request.encode(style);
        prop_assert_eq!(bytes.len(), style.request_bytes());
        prop_assert_eq!(Request::decode(style, &bytes), Ok(request));
        prop_assert!(Request::decode(style, &bytes[1..]).is_err());
    }

    #[test]
    fn option_data_round_trips(name in "[^\0]{0,40}", queries in proptest::collection::vec("[^\0]{0,20}", 0..8), wanted: Vec<u16>) {
        let info = InfoRequest { name: name.clone(), wanted };
        prop_assert_eq!(InfoRequest::decode(&info.encode()), Ok(info));
        let meta = MetaRequest { name, queries };
        let bytes = meta.encode();
        for cut in 0..bytes.len() {
            prop_assert!(MetaRequest::decode(&bytes[..cut]).is_err());
        }
        prop_assert_eq!(MetaRequest::decode(&bytes), Ok(meta));
    }

    #[test]
    fn block_status_round_trips(
        extended: bool, id: u32, extents in proptest::collection::vec((1u64..1 << 32, any::<u32>()), 1..50),
    ) {
        let style = if extended { Style::Extended } else { Style::Structured };
        let to = ReplyTo { style, cookie: 7, offset: 512 };
        let bytes = to.block_status(FLAG_DONE, id, &extents);
        let header_bytes = ReplyHeader::bytes(style, &bytes).unwrap();
        let ReplyHeader::Chunk { done, kind, cookie, length } =
            ReplyHeader::decode(style, &bytes[..header_bytes]).unwrap()
        else {
            panic!("not a chunk");
        };
        prop_assert!(done);
        prop_assert_eq!((cookie, length as usize), (7, bytes.len() - header_bytes));
        let (got_id, got) = decode_block_status(kind, &bytes[header_bytes..]).unwrap();
        let expected: Vec<_> = extents.iter().map(|(l, s)| (*l, u64::from(*s))).collect();
        prop_assert_eq!((got_id, got), (id, expected));
    }
}

#[test]
fn layouts_are_the_protocols() {
    assert_eq!(&greeting(), b"NBDMAGICIHAVEOPT\0\x03");
    assert_eq!(encode_option(opt::LIST, b""), b"IHAVEOPT\0\0\0\x03\0\0\0\0");
    let to = ReplyTo { style: Style::Simple, cookie: 0x0102_0304_0506_0708, offset: 0 };
    assert_eq!(to.done()[..], *b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08");
    let to = ReplyTo { style: Style::Structured, ..to };
    assert_eq!(
        to.error(Errno::NoSpace, "full"),
        b"\x66\x8e\x33\xef\0\x01\x80\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0a\0\0\0\x1c\0\x04full"
    );
    let to = ReplyTo { style: Style::Extended, cookie: 1, offset: 4096 };
    assert_eq!(
        to.done()[..],
        *b"\x6e\x8a\x27\x8c\0\x01\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0"
    );
}

#[test]
fn strings_are_bounded() {
    let long = "x".repeat(STRING_MAX_BYTES + 1);
    let request = InfoRequest { name: long, wanted: vec![] };
    assert!(InfoRequest::decode(&request.encode()).is_err());
    assert!(Cursor::new(b"a\0b").string(3).is_err());
    assert!(Cursor::new(b"\xff\xff").string(2).is_err());
    assert_eq!(truncate("aé", 2), "a");
}

#[test]
fn payload_lengths() {
    let write = Request { flags: 0, command: cmd::WRITE, cookie: 0, offset: 0, length: 9 };
    assert_eq!(write.payload_bytes(Style::Structured), 9);
    assert_eq!(write.payload_bytes(Style::Extended), 0);
    let status = Request { flags: cmd_flag::PAYLOAD_LEN, command: cmd::BLOCK_STATUS, ..write };
    assert_eq!(status.payload_bytes(Style::Simple), 0);
    assert_eq!(status.payload_bytes(Style::Extended), 9);
}
