//! Seeds of what replicas and controllers speak.

use super::Seed;
use longhorn_wire::frame::{Header, Hello, Type};

pub(super) fn seeds(seeds: &mut Vec<Seed>) {
    let mut requests = vec![0, 30];
    let hello = Hello::of_client().encode();
    for (header, payload) in [
        (Header::new(Type::Read, 1, 4096, 4096), &[][..]),
        (Header::with_payload(Type::Write, 2, 8192, 512), &[5; 512][..]),
        (Header::new(Type::Unmap, 3, 0, 65536), &[]),
        (Header::with_payload(Type::Ping, 4, 0, hello.len() as u32), &hello),
        (Header::new(Type::Flush, 5, 0, 0), &[]),
        (Header::new(Type::Read, 6, 1 << 20, 4096), &[]),
        (Header::with_payload(Type::Close, 7, -1, 3), b"abc"),
    ] {
        requests.extend(header.encode());
        requests.extend(payload);
    }
    seeds.push(("dataconn", "requests".to_owned(), requests));
    let mut large = vec![0, 255];
    for sequence in 0..6 {
        large.extend(Header::with_payload(Type::Write, sequence, 0, 20_000).encode());
        // Two of them in full: with more, nothing new.
        if sequence < 2 {
            large.extend([3; 20_000]);
        }
    }
    large.truncate(41_000);
    seeds.push(("dataconn", "large-writes".to_owned(), large));
    let mut replies = vec![1, 30];
    let hello = Hello::of_server(None).encode();
    for (header, payload) in [
        (Header::with_payload(Type::Response, 1, 4096, 512), &[6; 512][..]),
        (Header::new(Type::Response, 2, 8192, 512), &[]),
        (Header::with_payload(Type::Error, 3, 0, 4), b"text"),
        (Header::with_payload(Type::NoSpace, 4, 0, 4), b"full"),
        (Header::with_payload(Type::Response, 5, 0, hello.len() as u32), &hello),
        (Header::with_payload(Type::Eof, 6, 0, 4), b"eof."),
        (Header::new(Type::Close, 0, 0, 0), &[]),
    ] {
        replies.extend(header.encode());
        replies.extend(payload);
    }
    seeds.push(("dataconn", "replies".to_owned(), replies));
    transfers(seeds);
}

fn transfers(seeds: &mut Vec<Seed>) {
    let request = |line: &str, body: &[u8]| {
        let length = body.len();
        let head = format!("{line} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        [head.as_bytes(), body].concat()
    };
    let open = "GET /v1-ssync/open?begin=0&directIO=false&end=8192";
    let whole = [
        vec![255],
        request("GET /v1-ssync/getRecordedMetadata", b""),
        request(open, b""),
        request("POST /v1-ssync/writeData?begin=0&end=4096", &[1; 4096]),
        request("POST /v1-ssync/sendHole?begin=4096&end=8192", b""),
        request("GET /v1-ssync/getChecksum?begin=0&end=4096", b""),
        request("POST /v1-ssync/close?checksum=b90956c775a41001&checksumMethod=crc64", b""),
    ];
    seeds.push(("ssync", "transfer".to_owned(), whole.concat()));
    let chunked = [
        vec![3],
        request(&open.replace("8192", "138"), b""),
        b"POST /v1-ssync/writeData?begin=0&end=4096 HTTP/1.1\r\nHost: x\r\n".to_vec(),
        b"Transfer-Encoding: chunked\r\n\r\n80\r\n".to_vec(),
        vec![2; 128],
        b"\r\na\r\n0123456789\r\n0\r\n\r\n".to_vec(),
        request("POST /v1-ssync/close?checksum=&checksumMethod=", b""),
    ];
    seeds.push(("ssync", "chunked".to_owned(), chunked.concat()));
    let refused = [
        vec![7],
        request("POST /v1-ssync/writeData?begin=0&end=4096", &[1; 64]),
        request("GET /v1-ssync/open?begin=0&directIO=true&end=9000000000", b""),
        request("GET /elsewhere", b""),
    ];
    seeds.push(("ssync", "refused".to_owned(), refused.concat()));
}
