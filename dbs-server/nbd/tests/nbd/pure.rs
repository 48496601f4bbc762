//! The handshake and the transmission phase as pure functions: whatever a client sends, the bytes
//! it gets are well-formed and complete.

use crate::support::{DIFF, Disk, Disks, disk};
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::handshake::{Handshake, Step, TlsState};
use dbs_nbd::session::Session;
use dbs_nbd::wire::option::{InfoRequest, MetaRequest, OptionReplyHeader};
use dbs_nbd::wire::reply::{ReplyHeader, chunk, decode_block_status, decode_error};
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{PAYLOAD_MAX_BYTES, cmd, cmd_flag, opt, rep};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const SIZE: u64 = 1 << 20;

fn disks() -> Arc<Disks> {
    let disks = BTreeMap::from([("disk".to_owned(), disk(SIZE))]);
    Arc::new(Disks(Arc::new(Mutex::new(disks))))
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), Just("disk".to_owned()), "[a-z@]{0,9}"]
}

fn option() -> impl Strategy<Value = (u32, Vec<u8>)> {
    let query = prop_oneof![
        Just("base:".to_owned()),
        Just(BASE_ALLOCATION.to_owned()),
        Just("dbs:".to_owned()),
        Just(DIFF.to_owned()),
        "[a-z:]{0,9}",
    ];
    let meta = (name(), proptest::collection::vec(query, 0..70))
        .prop_map(|(name, queries)| MetaRequest { name, queries }.encode());
    let info = (name(), any::<Vec<u16>>())
        .prop_map(|(name, wanted)| InfoRequest { name, wanted }.encode());
    prop_oneof![
        (0u32..14, any::<Vec<u8>>()),
        (0u32..14, Just(Vec::new())),
        (6u32..8, info),
        (9u32..11, meta),
    ]
}

/// Checks that `out` is replies to `option`, of which the last and only the last is final.
fn check_replies(option: u32, out: &[u8]) {
    let (mut at, mut last) = (0, None);
    while at < out.len() {
        let header = OptionReplyHeader::decode(&out[at..at + OptionReplyHeader::BYTES]).unwrap();
        assert_eq!(header.option, option);
        assert!(last.is_none_or(|kind| kind != rep::ACK && kind & rep::ERROR_BIT == 0));
        last = Some(header.kind);
        at += OptionReplyHeader::BYTES + header.length as usize;
    }
    assert_eq!(at, out.len());
    assert!(last.is_some_and(|kind| kind == rep::ACK || kind & rep::ERROR_BIT != 0));
}

fn style() -> impl Strategy<Value = Style> {
    prop_oneof![Just(Style::Simple), Just(Style::Structured), Just(Style::Extended)]
}

fn request() -> impl Strategy<Value = Request> {
    let sector = |max: u64| (0..max / 512).prop_map(|sector| sector * 512);
    let number = move || prop_oneof![sector(SIZE), sector(SIZE / 8), 0..SIZE, any::<u64>()];
    let flags = prop_oneof![Just(0), 0u16..64, any::<u16>()];
    (flags, 0u16..10, any::<u64>(), number(), number()).prop_map(
        |(flags, command, cookie, offset, length)| Request {
            flags,
            command,
            cookie,
            offset,
            length,
        },
    )
}

/// Checks a reply in chunks; returns whether it reports success.
fn check_chunks(style: Style, request: &Request, bytes: &[u8], contexts: usize) -> bool {
    let (mut at, mut last, mut content, mut statuses, mut success) = (0, false, 0, 0, true);
    while at < bytes.len() {
        assert!(!last);
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
                content += u64::from(u32::from_be_bytes(payload[8..].try_into().unwrap()))
            }
            chunk::ERROR => {
                decode_error(payload).unwrap();
                success = false;
            }
            _ => {
                decode_block_status(kind, payload).unwrap();
                statuses += 1;
            }
        }
        last = done;
    }
    assert!(last);
    if success && request.command == cmd::READ {
        assert_eq!(content, request.length);
    }
    if success && request.command == cmd::BLOCK_STATUS && request.flags & cmd_flag::PAYLOAD_LEN == 0
    {
        assert_eq!(statuses, contexts);
    }
    success
}

/// Negotiates `options` and GO, of which some may fail, and says whether the session answers
/// block status.
fn selects_contexts(options: &[(u32, Vec<u8>)], tls_at: Option<usize>) -> bool {
    let mut handshake = Handshake::new(disks(), TlsState::Off);
    for (index, (option, data)) in options.iter().enumerate() {
        if tls_at == Some(index) {
            handshake.tls_started();
        }
        handshake.option(*option, data, &mut Vec::new());
    }
    let go = InfoRequest { name: "disk".into(), wanted: vec![] }.encode();
    let Step::Transmit(session) = handshake.option(opt::GO, &go, &mut Vec::new()) else {
        panic!("no session");
    };
    let request =
        Request { flags: 0, command: cmd::BLOCK_STATUS, cookie: 1, offset: 0, length: SIZE };
    let reply = session.run(&session.admit(&request), &[]).parts.concat();
    session.style().chunked() && check_chunks(session.style(), &request, &reply, 1)
}

#[test]
fn contexts_hold_for_one_export_until_the_next_selection() {
    let set = |name: &str, query: &str| {
        let queries = vec![query.to_owned()];
        (opt::SET_META_CONTEXT, MetaRequest { name: name.into(), queries }.encode())
    };
    let structured = (opt::STRUCTURED_REPLY, vec![]);
    let select = set("disk", BASE_ALLOCATION);
    let selected = [structured.clone(), select.clone()];
    assert!(selects_contexts(&selected, None));
    assert!(!selects_contexts(std::slice::from_ref(&select), None));
    assert!(!selects_contexts(&[structured.clone(), set("", BASE_ALLOCATION)], None));
    assert!(!selects_contexts(&[structured.clone(), set("disk", "base:")], None));
    for over in
        [set("absent", BASE_ALLOCATION), (opt::SET_META_CONTEXT, vec![1]), set("disk", "x:y")]
    {
        assert!(!selects_contexts(&[structured.clone(), select.clone(), over], None));
    }
    // What was negotiated before TLS does not count.
    let abort = (opt::LIST, vec![]);
    let options = [structured.clone(), select.clone(), abort];
    assert!(!selects_contexts(&options, Some(2)));
    assert!(!selects_contexts(&[structured.clone(), select.clone(), structured], Some(2)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn any_options_are_answered(options in proptest::collection::vec(option(), 0..12), tls: bool) {
        let tls = if tls { TlsState::Required } else { TlsState::Off };
        let mut handshake = Handshake::new(disks(), tls);
        for (option, data) in options {
            let mut out = Vec::new();
            let step = handshake.option(option, &data, &mut out);
            match step {
                Step::Close | Step::Transmit(_) if option == opt::EXPORT_NAME => break,
                Step::Transmit(_) => {
                    prop_assert_ne!(tls, TlsState::Required);
                    check_replies(option, &out);
                    break;
                }
                Step::Close => {
                    check_replies(option, &out);
                    break;
                }
                Step::StartTls | Step::Continue => check_replies(option, &out),
            }
        }
    }

    #[test]
    fn any_requests_are_answered(style in style(), read_only: bool, requests in proptest::collection::vec(request(), 1..20)) {
        let mut disk = Disk::new("disk", SIZE);
        disk.read_only = read_only;
        let disk = Arc::new(disk);
        let contexts = if style.chunked() { vec![BASE_ALLOCATION.into(), DIFF.into()] } else { vec![] };
        let count = contexts.len();
        let session = Session::new(disk.clone(), style, contexts);
        for request in requests.into_iter().filter(|request| request.command != cmd::DISC) {
            let request = Request::decode(style, &request.encode(style)).unwrap();
            let admitted = session.admit(&request);
            prop_assert!(admitted.payload_bytes <= PAYLOAD_MAX_BYTES as usize);
            let payload = vec![7; admitted.payload_bytes];
            let reply = session.run(&admitted, &payload).parts.concat();
            let success = if style.chunked() {
                check_chunks(style, &request, &reply, count)
            } else {
                let header = ReplyHeader::decode(style, &reply[..16]).unwrap();
                let ReplyHeader::Simple { errno, cookie } = header else { panic!("{header:?}") };
                prop_assert_eq!(cookie, request.cookie);
                let read = errno == 0 && request.command == cmd::READ;
                prop_assert_eq!(reply.len() as u64 - 16, if read { request.length } else { 0 });
                errno == 0
            };
            if success && matches!(request.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES) {
                prop_assert!(!read_only);
                prop_assert!(request.offset + request.length <= SIZE);
            }
        }
        prop_assert!(!read_only || disk.content().iter().all(|byte| *byte == 0));
    }
}
