//! Seeds of what the server speaks.

use super::Seed;
use crate::sample::{End, Sample, empty, open};
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::handshake::{Handshake, Step, TlsState};
use dbs_nbd::session::Session;
use dbs_nbd::wire::option::{InfoRequest, MetaRequest, OptionHeader, encode_option};
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{cmd, cmd_flag, greeting, opt};
use dbs_nbd::{Client, ClientOptions, StoreExports};
use dbs_transfer::{SendOptions, send};
use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::rc::Rc;
use std::sync::Arc;

pub(super) fn seeds(seeds: &mut Vec<Seed>) {
    for (name, style) in [
        ("simple", Style::Simple),
        ("structured", Style::Structured),
        ("extended", Style::Extended),
    ] {
        seeds.push(("nbd", format!("server-{name}"), [vec![0, 3], session(style)].concat()));
        seeds.push((
            "nbd",
            format!("server-read-only-{name}"),
            [vec![4, 3], session(style)].concat(),
        ));
    }
    let tls = [vec![2, 3], encode_option(opt::STARTTLS, &[]), session(Style::Structured)];
    seeds.push(("nbd", "server-tls".to_owned(), tls.concat()));
    let name =
        [vec![0, 1], encode_option(opt::EXPORT_NAME, b"disk"), vec![9], requests(Style::Simple)];
    seeds.push(("nbd", "server-export-name".to_owned(), name.concat()));
    let all: Vec<u8> = (1..12).flat_map(|option| encode_option(option, &[])).collect();
    seeds.push(("nbd", "server-options".to_owned(), [vec![0, 3], all].concat()));
    for (name, flags) in [("structured", 1), ("extended", 3), ("pipelined", 5)] {
        seeds.push(("nbd", format!("client-{name}"), conversation(flags)));
    }
    control(seeds);
    streams(seeds);
}

/// A handshake and what follows it.
fn session(style: Style) -> Vec<u8> {
    let mut bytes = Vec::new();
    match style {
        Style::Simple => {}
        Style::Structured => bytes.extend(encode_option(opt::STRUCTURED_REPLY, &[])),
        Style::Extended => bytes.extend(encode_option(opt::EXTENDED_HEADERS, &[])),
    }
    if style.chunked() {
        let queries = vec![BASE_ALLOCATION.to_owned(), "dbs:diff:old".to_owned()];
        let meta = MetaRequest { name: "disk".into(), queries };
        bytes.extend(encode_option(opt::SET_META_CONTEXT, &meta.encode()));
    }
    let go = InfoRequest { name: "disk".into(), wanted: vec![1, 2, 3] };
    bytes.extend(encode_option(opt::GO, &go.encode()));
    // The size of pieces.
    bytes.push(6);
    bytes.extend(requests(style));
    bytes
}

fn requests(style: Style) -> Vec<u8> {
    let mut bytes = Vec::new();
    let plan = [
        (cmd::READ, 0, 4096, 4096),
        (cmd::READ, cmd_flag::DF, 0, 131_072),
        (cmd::WRITE, cmd_flag::FUA, 8192, 512),
        (cmd::TRIM, 0, 65536, 4096),
        (cmd::WRITE_ZEROES, cmd_flag::NO_HOLE, 65536, 8192),
        (cmd::CACHE, 0, 0, 4096),
        (cmd::BLOCK_STATUS, cmd_flag::REQ_ONE, 0, 1 << 20),
        (cmd::BLOCK_STATUS, 0, 0, 1 << 20),
        (cmd::FLUSH, 0, 0, 0),
        (cmd::READ, 0, 1 << 20, 512),
        (cmd::DISC, 0, 0, 0),
    ];
    for (cookie, (command, mut flags, offset, length)) in (1..).zip(plan) {
        if style == Style::Extended && command == cmd::WRITE {
            flags |= cmd_flag::PAYLOAD_LEN;
        }
        bytes.extend(Request { flags, command, cookie, offset, length }.encode(style));
        if command == cmd::WRITE {
            bytes.extend(vec![0x5a; length as usize]);
        }
    }
    bytes
}

/// A server in the same thread that writes down what it says.
#[derive(Clone)]
struct Recorder(Rc<RefCell<Recorded>>);

struct Recorded {
    handshake: Handshake,
    session: Option<Session>,
    flags_seen: bool,
    input: Vec<u8>,
    said: Vec<u8>,
    read: usize,
}

impl Recorded {
    /// Answers all that is complete; returns whether it did anything.
    fn step(&mut self) -> bool {
        if !self.flags_seen {
            return self.take(4).map(|_| self.flags_seen = true).is_some();
        }
        let Some(session) = &self.session else { return self.option() };
        let head = session.style().request_bytes();
        let Some(bytes) = self.input.get(..head) else { return false };
        let request = Request::decode(session.style(), bytes).unwrap();
        let admitted = session.admit(&request);
        let total = head + admitted.payload_bytes;
        let Some(payload) = self.input.get(head..total) else { return false };
        if request.command != cmd::DISC {
            self.said.extend(session.run(&admitted, payload).parts.concat());
        }
        self.take(total).is_some()
    }

    fn option(&mut self) -> bool {
        let Some(head) = self.input.get(..OptionHeader::BYTES) else { return false };
        let header = OptionHeader::decode(head).unwrap();
        let total = OptionHeader::BYTES + header.length as usize;
        let Some(data) = self.input.get(OptionHeader::BYTES..total) else { return false };
        let data = data.to_vec();
        if let Step::Transmit(session) = self.handshake.option(header.option, &data, &mut self.said)
        {
            self.session = Some(session);
        }
        self.take(total).is_some()
    }

    fn take(&mut self, count: usize) -> Option<()> {
        (self.input.len() >= count).then(|| drop(self.input.drain(..count)))
    }
}

impl Read for Recorder {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut inner = self.0.borrow_mut();
        while inner.step() {}
        let at = inner.read;
        let count = (&inner.said[at..]).read(buf)?;
        inner.read += count;
        Ok(count)
    }
}

impl Write for Recorder {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().input.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a server says to the client of the target with these flags and this plan.
fn conversation(flags: u8) -> Vec<u8> {
    let (_disk, store) = empty();
    store.create_volume("disk", 1 << 20).unwrap();
    let exports = Arc::new(StoreExports::new(store, false));
    let recorder = Recorder(Rc::new(RefCell::new(Recorded {
        handshake: Handshake::new(exports, TlsState::Off),
        session: None,
        flags_seen: false,
        input: Vec::new(),
        said: greeting().to_vec(),
        read: 0,
    })));
    let plan = [0u8, 2, 3, 4, 5, 6, 0x80, 8, 9, 0x82, 16, 24, 0x80, 0x81, 1, 0];
    let options = ClientOptions {
        contexts: vec!["base:allocation".to_owned(), "dbs:x".to_owned()],
        extended: flags & 2 != 0,
    };
    let mut client = Client::over(recorder.clone(), "disk", &options).unwrap();
    // The same requests as the target's, more or less: cookies count up alike.
    for step in plan {
        let at = u64::from(step >> 3) << 12;
        if flags & 4 != 0 {
            let mut small = [0; 4096];
            match step % 3 {
                0 => client.read_at(u64::from(step >> 2) << 12, &mut small).unwrap(),
                1 => client.write_at(u64::from(step >> 2) << 12, &small, false).unwrap(),
                _ => client.flush().unwrap(),
            }
            continue;
        }
        match step % 7 {
            0 | 1 => client.read_at(at, &mut [0; 8192]).unwrap(),
            2 => client.write_at(at, &[1; 4096], true).unwrap(),
            3 => client.trim(at, 4096, false).unwrap(),
            4 => client.write_zeroes(at, 4096, 0).unwrap(),
            5 => client.flush().unwrap(),
            _ => drop(client.block_status("base:allocation", at, 65536).unwrap()),
        }
    }
    let said = std::mem::take(&mut recorder.0.borrow_mut().said);
    [vec![flags], plan.to_vec(), said].concat()
}

fn control(seeds: &mut Vec<Seed>) {
    let lines = [
        (
            "looking",
            r#"{"method":"info"}
{"method":"check"}
{"method":"volume.list","params":{"usage":true}}
{"method":"volume.show","params":{"volume":"alpha"}}
{"method":"volume.map","params":{"volume":"alpha","offset":4096,"length":131072}}
{"method":"volume.diff","params":{"volume":"alpha","from":"two"}}
{"method":"volume.du","params":{"volume":"copy","snapshot":"x"}}
{"method":"volume.children","params":{"volume":"alpha"}}
{"method":"snapshot.list","params":{"volume":"alpha","usage":true}}
{"method":"snapshot.show","params":{"volume":"alpha","snapshot":"two"}}
{"method":"dump"}
{"method":"device.list"}
"#,
        ),
        (
            "volumes",
            r#"{"method":"volume.create","params":{"volume":"new","size":65536}}
{"method":"volume.rename","params":{"volume":"new","new":"newer"}}
{"method":"volume.resize","params":{"volume":"alpha","size":4096,"shrink":true}}
{"method":"volume.clone","params":{"volume":"copy","snapshot":"x","new":"again"}}
{"method":"volume.flatten","params":{"volume":"again"}}
{"method":"volume.delete","params":{"volume":"newer"}}
{"method":"volume.trim"}
{"method":"volume.release","params":{"volume":"alpha"}}
{"method":"grow","params":{"size":6291456}}
{"method":"vacuum"}
{"method":"work","params":{"steps":100}}
{"method":"flush"}
"#,
        ),
        (
            "snapshots",
            r#"{"method":"snapshot.create","params":{"volume":"alpha","snapshot":"s","labels":{"a":"b"},"system":true}}
{"method":"snapshot.label","params":{"volume":"alpha","snapshot":"s","set":{"c":"d"},"remove":["a"]}}
{"method":"snapshot.protect","params":{"volume":"alpha","snapshot":"s"}}
{"method":"snapshot.unprotect","params":{"volume":"alpha","snapshot":"s"}}
{"method":"snapshot.rename","params":{"volume":"alpha","snapshot":"s","new":"t"}}
{"method":"snapshot.rollback","params":{"volume":"alpha","snapshot":"t"}}
{"method":"snapshot.delete","params":{"volume":"alpha","snapshot":"t"}}
"#,
        ),
        (
            "replies",
            r#"{"progress":{"done":3,"total":20}}
{"part":"text"}
{"result":{"name":"demo"}}
{"error":{"kind":"not_found","message":"no volume other"}}
"#,
        ),
    ];
    for (name, text) in lines {
        seeds.push(("control", name.to_owned(), [b"\xff", text.as_bytes()].concat()));
    }
}

fn streams(seeds: &mut Vec<Seed>) {
    let disk = Arc::new(Sample::get(End::Closed).disk());
    let store = open(&disk, None, 5, false).unwrap();
    store.create_volume("small", 16_896).unwrap();
    let small = store.volume("small").unwrap();
    small.write_at(0, &[7; 512], false).unwrap();
    let plain = Default::default();
    store.create_snapshot("small", "a", &plain).unwrap();
    small.write_at(16_384, &[8; 512], false).unwrap();
    small.discard(0, 4096).unwrap();
    store.create_snapshot("small", "b", &plain).unwrap();
    for (name, volume, snapshot, base, resume) in [
        ("whole", "small", "b", None, None),
        ("difference", "small", "b", Some("a"), None),
        ("resumed", "small", "b", None, Some(512)),
    ] {
        let uuid = store.snapshot_info(volume, snapshot).unwrap().uuid;
        let options = SendOptions {
            volume: volume.into(),
            snapshot: snapshot.into(),
            base: base.map(Into::into),
            resume: resume.map(|at: u64| format!("{uuid}:{at}").parse().unwrap()),
            more: false,
        };
        let mut bytes = vec![1];
        send(&store, &options, &mut bytes, &mut |_, _| true).unwrap();
        seeds.push(("stream", name.to_owned(), bytes));
    }
    // A difference to a snapshot of the store that receives it.
    let copy = store.volume("copy").unwrap();
    copy.write_at(0, &[9; 512], false).unwrap();
    store.create_snapshot("copy", "y", &plain).unwrap();
    let base = store.snapshot_info("copy", "x").unwrap();
    let options = SendOptions {
        volume: "copy".into(),
        snapshot: "y".into(),
        base: Some(base.name),
        ..SendOptions::default()
    };
    let mut bytes = vec![1];
    send(&store, &options, &mut bytes, &mut |_, _| true).unwrap();
    seeds.push(("stream", "difference-to-ours".to_owned(), bytes));
}
