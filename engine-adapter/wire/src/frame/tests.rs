//! Headers, hellos, and any bytes.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

#[test]
fn a_header_has_the_layout_longhorn_uses() {
    let header = Header { sequence: 0x0403_0201, number: 1, offset: 0x1000, size: 5, length: 6 };
    let bytes = header.encode();
    let expected = [
        0x01, 0x1b, // magic
        1, 2, 3, 4, // sequence
        1, 0, 0, 0, // type
        0, 0x10, 0, 0, 0, 0, 0, 0, // offset
        5, 0, 0, 0, // size
        6, 0, 0, 0, // length of the payload
    ];
    assert_eq!(bytes, expected);
    assert_eq!(Header::decode(&bytes), Ok(header));
}

#[test]
fn types_have_their_numbers() {
    for (number, kind) in Type::ALL {
        assert_eq!((kind.number(), Type::from_number(number)), (number, Some(kind)));
    }
    let first: Vec<_> = (0..9).map(|number| Type::from_number(number).unwrap()).collect();
    use Type::{Close, Eof, Error, NoSpace, Ping, Read, Response, Unmap, Write};
    assert_eq!(first, [Read, Write, Response, Error, Eof, Close, Ping, Unmap, NoSpace]);
    assert_eq!((Type::from_number(9), Type::from_number(u32::MAX)), (None, None));
}

#[test]
fn what_is_no_header_is_refused_by_name() {
    let good = Header::new(Type::Read, 1, 0, 4096).encode();
    assert_eq!(Header::decode(&good[..25]), Err(Malformed::Header));
    assert_eq!(Header::decode(&[good.as_slice(), &[0]].concat()), Err(Malformed::Header));
    let mut bad = good;
    bad[0] ^= 1;
    assert_eq!(Header::decode(&bad), Err(Malformed::Magic(0x1b00)));
    assert!(Malformed::Magic(0).to_string().contains("0x0000"));
    for (length, fits) in [(PAYLOAD_MAX_BYTES, true), (PAYLOAD_MAX_BYTES + 1, false)] {
        let bytes = Header::with_payload(Type::Write, 1, 0, length).encode();
        assert_eq!(Header::decode(&bytes).is_ok(), fits, "{length}");
    }
    // What a read or unmap asks for is no concern of the codec.
    let huge = Header::new(Type::Unmap, 1, -1, u32::MAX);
    assert_eq!(Header::decode(&huge.encode()), Ok(huge));
}

#[test]
fn a_hello_is_known_and_no_echo_of_the_other_side() {
    let generations = Some(Generations { now: 3, changed: 1 << 60 });
    let (client, server) =
        (Hello::of_client(), Hello { generations, ..Hello::of_server(Some([7; 16])) });
    let lane = Some(Lane { client: 1 << 63, epoch: 5, number: 63, places: 4095 });
    let in_lane = Hello { lane, ..client };
    assert_eq!(Hello::decode(&in_lane.encode()), Some(in_lane));
    for standing in Standing::ALL {
        let answer = Hello { standing: Some(standing), ..server };
        assert_eq!(Hello::decode(&answer.encode()), Some(answer));
    }
    // The third version had no lanes.
    assert_eq!(Hello::decode(&in_lane.encode()[..48]), Some(client));
    assert_eq!(Hello::decode(&client.encode()), Some(client));
    assert_eq!(Hello::decode(&server.encode()), Some(server));
    assert!(!client.server && server.server && client.encode() != server.encode());
    let longer = [server.encode().as_slice(), b"more"].concat();
    assert_eq!(Hello::decode(&longer), Some(server));
    // The first version had no identity.
    assert_eq!(Hello::decode(&server.encode()[..32]), Some(Hello::of_server(Some([7; 16]))));
    assert_eq!(Hello::decode(&server.encode()[..16]), Some(Hello::of_server(None)));
    assert_eq!(Hello::decode(&server.encode()[..15]), None);
    assert_eq!(Hello::decode(b""), None);
    assert_eq!(Hello::decode(&[0; 64]), None);
}

#[test]
fn damage_is_a_place_and_a_text() {
    let text = "byte 8192 of `v@s` is damaged".to_owned();
    let damaged = Damaged { offset: 8192, in_snapshot: true, text };
    let bytes = damaged.encode();
    assert_eq!(bytes[..16], [0, 32, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Damaged::decode(&bytes), Some(damaged.clone()));
    let head = Damaged { in_snapshot: false, text: String::new(), ..damaged };
    assert_eq!(Damaged::decode(&head.encode()), Some(head));
    assert_eq!(Damaged::decode(&bytes[..15]), None);
    // A controller's frontend has no damage to tell of.
    assert!(Hello::of_server(None).has(feature::HEAL) && !Hello::of_frontend().has(feature::HEAL));
}

proptest! {
    #[test]
    fn headers_round_trip(sequence: u32, number: u32, offset: i64, size: u32,
                          length in 0..=PAYLOAD_MAX_BYTES) {
        let header = Header { sequence, number, offset, size, length };
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn any_bytes_give_a_header_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(header) = Header::decode(&bytes) {
            prop_assert_eq!(header.encode().to_vec(), bytes.clone());
        }
        let _ = Hello::decode(&bytes);
        assert_eq!(Damaged::decode(&bytes).is_some(), bytes.len() >= Damaged::BYTES);
    }

    #[test]
    fn any_26_bytes_with_the_magic(mut bytes: [u8; HEADER_BYTES]) {
        bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
        match Header::decode(&bytes) {
            Ok(header) => prop_assert_eq!(header.encode(), bytes),
            Err(Malformed::Length(length)) => prop_assert!(length > PAYLOAD_MAX_BYTES),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
