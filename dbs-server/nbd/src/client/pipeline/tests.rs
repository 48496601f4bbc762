#![allow(clippy::unwrap_used)]

use super::*;
use crate::wire::Errno;
use crate::wire::reply::{FLAG_DONE, ReplyTo};
use crate::wire::request::{Request, Style};
use std::collections::VecDeque;

const BLOCK: usize = 4096;

/// A server past its handshake: takes bytes, gives what it is told to.
struct Script {
    sent: Vec<u8>,
    replies: VecDeque<u8>,
}

impl Read for Script {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.replies.read(buf)
    }
}

impl Write for Script {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.sent.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn pipeline(style: Style, replies: Vec<u8>) -> Pipeline<Script> {
    let stream = Buffered::new(Script { sent: Vec::new(), replies: replies.into() });
    let client = Client {
        stream,
        style,
        size: 1 << 20,
        flags: 0,
        payload_max: 1 << 20,
        contexts: Vec::new(),
        cookie: 0,
        broken: false,
    };
    Pipeline::new(client, 4, BLOCK).unwrap()
}

fn to(style: Style, cookie: u64, offset: u64) -> ReplyTo {
    ReplyTo { style, cookie, offset }
}

/// A chunk of content for the request with this cookie.
fn data(cookie: u64, offset: u64, bytes: &[u8], flags: u16) -> Vec<u8> {
    let to = to(Style::Structured, cookie, offset);
    let mut out = to.data_head(flags, offset, bytes.len()).to_vec();
    out.extend_from_slice(bytes);
    out
}

fn start_reads(pipeline: &mut Pipeline<Script>) {
    for slot in 0..4 {
        pipeline.start(slot, Action::Read, (slot * BLOCK) as u64, BLOCK as u32).unwrap();
    }
}

#[test]
fn replies_come_in_any_order_and_interleaved() {
    let half = BLOCK / 2;
    let at = |slot: u64| slot * BLOCK as u64;
    let mut replies = data(3, at(2), &[3; BLOCK], FLAG_DONE);
    replies.extend(data(1, at(0), &[1; BLOCK / 2], 0));
    replies.extend(data(2, at(1), &[2; BLOCK], FLAG_DONE));
    replies.extend(data(1, at(0) + half as u64, &[9; BLOCK / 2], FLAG_DONE));
    replies.extend(data(4, at(3), &[4; BLOCK], FLAG_DONE));
    let mut pipeline = pipeline(Style::Structured, replies);
    start_reads(&mut pipeline);
    assert!(pipeline.client.stream.get_ref().sent.is_empty(), "sent together");
    let mut done = Vec::new();
    while done.len() < 4 {
        pipeline.finish(&mut done).unwrap();
    }
    assert_eq!(done, [2, 1, 0, 3]);
    assert_eq!(pipeline.client.stream.get_ref().sent.len(), 4 * Request::COMPACT_BYTES);
    let first = pipeline.buffer(0).unwrap();
    assert!(first[..half].iter().all(|b| *b == 1) && first[half..].iter().all(|b| *b == 9));
    for slot in 1..4 {
        assert!(pipeline.buffer(slot).unwrap().iter().all(|b| *b == slot as u8 + 1));
    }
    pipeline.finish(&mut done).unwrap();
    assert_eq!(done.len(), 4, "nothing in flight: nothing to wait for");
}

#[test]
fn writes_flushes_and_refusals() {
    let mut replies = to(Style::Simple, 2, 0).done().to_vec();
    replies.extend(to(Style::Simple, 1, 0).error(Errno::NoSpace, ""));
    let mut pipeline = pipeline(Style::Simple, replies);
    pipeline.buffer(0).unwrap().fill(7);
    pipeline.start(0, Action::Write, 0, BLOCK as u32).unwrap();
    pipeline.start(1, Action::Flush, 4096, 0).unwrap();
    assert!(pipeline.buffer(0).is_err() && pipeline.buffer(4).is_err());
    assert!(pipeline.start(2, Action::Write, 0, BLOCK as u32 + 1).is_err());
    let mut done = Vec::new();
    let error = pipeline.finish(&mut done).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert_eq!(done, [1, 0], "both are idle again");
    // The connection goes on after a refusal.
    pipeline.start(0, Action::Write, 0, BLOCK as u32).unwrap();
    pipeline.finish(&mut done).unwrap_err();
    assert!(pipeline.start(1, Action::Flush, 0, 0).is_err(), "not after its end");
}

#[test]
fn a_server_that_lies_ends_the_connection() {
    let block = [0; BLOCK];
    for replies in [
        data(9, 0, &block, FLAG_DONE),
        data(1, 4096, &block, FLAG_DONE),
        data(1, 0, &block[1..], FLAG_DONE),
        [data(1, 0, &block, 0), data(1, 0, &block, FLAG_DONE)].concat(),
        to(Style::Structured, 1, 0).done().to_vec(),
        vec![7; 64],
    ] {
        let mut pipeline = pipeline(Style::Structured, replies);
        start_reads(&mut pipeline);
        let error = pipeline.finish(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        assert!(pipeline.client.broken);
    }
}

#[test]
fn depth_and_length_have_limits() {
    for (depth, length) in [(0, BLOCK), (DEPTH_MAX + 1, BLOCK), (1, (1 << 20) + 1)] {
        let client = pipeline(Style::Simple, Vec::new()).client;
        assert!(Pipeline::new(client, depth, length).is_err(), "{depth} {length}");
    }
}
