//! NVMe over TCP: what hosts send to the target, on an admin queue and an I/O queue.
//!
//! As `vhost`, the server here has threads and a socket.

use crate::input::Input;
use crate::sample::{empty, pattern};
use dbs_core::Store;
use dbs_frontend::{DiskOptions, Listen};
use dbs_nvme::{Keys, NvmeOptions, NvmeTcp};
use dbs_reactor::Driver;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Steps of one input.
const STEPS_MAX: usize = 64;
const PATIENCE: Duration = Duration::from_secs(10);
/// Steps that are no commands: bytes as they are, and a piece of data.
pub(crate) const RAW: u8 = 0x7f;
pub(crate) const DATA: u8 = 0x7e;
/// The commands of Fabrics.
pub(crate) const FABRICS: u8 = 0x7d;
/// A message of authentication.
pub(crate) const PROOF: u8 = 0x7c;
/// A step on the I/O queue.
pub(crate) const IO: u8 = 0x80;

const SNAPSHOT: u8 = 1;
const HEADER_DIGEST: u8 = 2;
const DATA_DIGEST: u8 = 4;
const NO_FLOW_CONTROL: u8 = 8;
const DISCOVERY: u8 = 16;
/// Nothing is agreed on before the first step.
const STRANGER: u8 = 32;
/// Hosts are to prove who they are, which this one cannot.
const KEYED: u8 = 64;

/// Of 32 zeros.
const KEY: &str = "nqn.h DHHC-1:00:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoZ:";

/// Two connections, and then their end.
///
/// The input: flags (as above), and steps: a byte, with bit 7 for the I/O queue, and then
/// 127: bytes as they are (a byte of length before them); 126: a piece of data (tag, command, offset and length in
/// blocks, whether it is the last); 125: a command of Fabrics; 124: a message of authentication (a byte of length before it; with 0
/// the target's is fetched); else a command's opcode. Behind that a command has
/// what its doublewords from the tenth on begin with (a byte of length before it), where its data is (0: nowhere, 1: in
/// its capsule, else: asked for), and how many blocks of 16 bytes it is (16 bits).
pub fn nvme(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let (_disk, store) = empty();
    store.create_volume("v", 1 << 20).unwrap();
    let content = pattern(5, 256 << 10);
    store.volume("v").unwrap().write_at(0, &content, false).unwrap();
    store.create_snapshot("v", "s", &Default::default()).unwrap();
    let mut nvme = NvmeOptions::at(&["tcp:0".parse().unwrap()]);
    if flags & KEYED != 0 {
        nvme.keys = Some(Arc::new(Keys::parse(KEY).unwrap()));
    }
    let server = NvmeTcp::start(store.clone(), &nvme, options()).unwrap();
    let Listen::Tcp(host, port) = &server.addresses()[0] else { panic!("no TCP") };
    let address = SocketAddr::new(host.parse().unwrap(), *port);
    let uuid = match flags & SNAPSHOT {
        0 => store.volume_info("v").unwrap().uuid,
        _ => store.snapshot_info("v", "s").unwrap().uuid,
    };
    let subsystem = match flags & DISCOVERY {
        0 => format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"),
        _ => "nqn.2014-08.org.nvmexpress.discovery".to_owned(),
    };
    talk(address, flags, &subsystem, &mut input);
    let begin = Instant::now();
    while !server.clients().is_empty() {
        if begin.elapsed() > PATIENCE {
            // Stopping it would wait for ever.
            std::mem::forget(server);
            panic!("the connections have not ended");
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    drop(server);
    check(&store, flags, &content);
}

fn check(store: &Store, flags: u8, content: &[u8]) {
    assert!(store.holders().is_empty(), "a volume stays open");
    for (spec, immutable) in [("v@s", true), ("v", flags & (SNAPSHOT | DISCOVERY | KEYED) != 0)] {
        let mut now = vec![0; content.len()];
        store.volume(spec).unwrap().read_at(0, &mut now).unwrap();
        assert!(!immutable || now == content, "{spec} was written");
    }
}

fn talk(address: SocketAddr, flags: u8, subsystem: &str, input: &mut Input<'_>) {
    let mut queues = Vec::new();
    let mut controller = 0xffff;
    for number in 0..if flags & DISCOVERY == 0 { 2 } else { 1 } {
        let mut queue = Queue::connect(address, flags);
        if flags & STRANGER == 0 {
            controller = queue.begin(subsystem, number, controller);
        }
        queues.push(queue);
    }
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        let step = input.u8();
        let index = usize::from(step >> 7).min(queues.len() - 1);
        queues[index].step(step & !IO, input);
    }
    // The I/O queue first: what it has under way ends before the controller.
    queues.into_iter().rev().for_each(Queue::end);
}

struct Queue {
    socket: TcpStream,
    flags: u8,
    next: u16,
}

impl Queue {
    fn connect(address: SocketAddr, flags: u8) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { socket, flags, next: 0 }
    }

    /// The server may have ended it, or take nothing more.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Connects the queue; returns the number of its controller.
    fn begin(&mut self, subsystem: &str, number: u16, controller: u16) -> u16 {
        let digests = u8::from(self.has(HEADER_DIGEST)) | u8::from(self.has(DATA_DIGEST)) << 1;
        let mut init = [0; 128];
        (init[2], init[4], init[11]) = (128, 128, digests);
        self.send(&init);
        self.socket.read_exact(&mut init).unwrap();
        let mut data = vec![0; 1024];
        data[16..18].copy_from_slice(&controller.to_le_bytes());
        data[256..256 + subsystem.len()].copy_from_slice(subsystem.as_bytes());
        data[512..517].copy_from_slice(b"nqn.h");
        let mut fields = vec![0; 16];
        fields[2..4].copy_from_slice(&number.to_le_bytes());
        fields[4] = 31;
        fields[6] = u8::from(self.has(NO_FLOW_CONTROL)) << 2;
        self.command(0x7f, 1, &fields, (1, &data));
        let controller = self.answer();
        if number == 0 && !self.has(KEYED) {
            // It is enabled.
            self.command(0x7f, 0, &[0, 0, 0, 0, 0x14, 0, 0, 0, 1, 0, 0x46, 0], (0, &[]));
            self.answer();
        }
        controller
    }

    /// The number in an answer without data.
    fn answer(&mut self) -> u16 {
        let mut answer = vec![0; if self.has(HEADER_DIGEST) { 28 } else { 24 }];
        self.socket.read_exact(&mut answer).unwrap();
        assert_eq!((answer[0], answer[22], answer[23]), (5, 0, 0), "it is refused");
        u16::from_le_bytes([answer[8], answer[9]])
    }

    fn step(&mut self, step: u8, input: &mut Input<'_>) {
        match step {
            RAW => {
                let length = input.u8().into();
                self.send(input.bytes(length));
            }
            DATA => {
                let (tag, command) = (input.u8(), input.u8());
                let (offset, length) = (u32::from(input.u8()) * 512, usize::from(input.u8()) * 512);
                let mut header = vec![command, 0, tag, 0];
                header.extend(offset.to_le_bytes());
                header.extend((length as u32).to_le_bytes());
                header.extend([0; 4]);
                let last = input.u8() & 1;
                self.pdu(6, last << 2, &header, &pattern(7, length));
            }
            PROOF => {
                let length = usize::from(input.u8());
                let message = input.bytes(length);
                let mut fields = vec![0, 1, 1, 0xe9];
                let (kind, place, data) =
                    if length == 0 { (6, 2, &[0; 4096][..]) } else { (5, 1, message) };
                fields.extend((data.len() as u32).to_le_bytes());
                self.command(0x7f, kind, &fields, (place, data));
            }
            opcode => {
                let opcode = if opcode == FABRICS { 0x7f } else { opcode };
                let length = input.u8().min(24).into();
                let fields = input.bytes(length);
                let place = input.u8();
                let data = pattern(9, usize::from(input.u16()) * 16);
                // Which of Fabrics it is, else the only namespace.
                let namespace = if opcode == 0x7f { place >> 4 } else { 1 };
                self.command(opcode, namespace, fields, (place & 15, &data));
            }
        }
    }

    fn command(&mut self, opcode: u8, namespace: u8, fields: &[u8], (place, data): (u8, &[u8])) {
        self.next += 1;
        let mut entry = [0; 64];
        (entry[0], entry[1], entry[4]) = (opcode, 0x40, namespace);
        entry[2..4].copy_from_slice(&self.next.to_le_bytes());
        entry[32..36].copy_from_slice(&(data.len() as u32).to_le_bytes());
        entry[39] = if place == 1 { 0x01 } else { 0x5a };
        entry[40..40 + fields.len()].copy_from_slice(fields);
        self.pdu(4, 0, &entry, if place == 1 { data } else { &[] });
    }

    fn pdu(&mut self, kind: u8, flags: u8, rest: &[u8], data: &[u8]) {
        let (with_header, with_data) = (self.has(HEADER_DIGEST), self.has(DATA_DIGEST));
        let offset = 8 + rest.len() + if with_header { 4 } else { 0 };
        let behind = if with_data && !data.is_empty() { 4 } else { 0 };
        let flags = flags | u8::from(with_header) | u8::from(behind > 0) << 1;
        let place = if data.is_empty() { 0 } else { offset as u8 };
        let mut bytes = vec![kind, flags, 8 + rest.len() as u8, place];
        bytes.extend(((offset + data.len() + behind) as u32).to_le_bytes());
        bytes.extend(rest);
        if with_header {
            bytes.extend(crc32c(&bytes).to_le_bytes());
        }
        bytes.extend(data);
        if behind > 0 {
            bytes.extend(crc32c(data).to_le_bytes());
        }
        self.send(&bytes);
    }

    /// Sends no more, and looks at all that came: PDUs of a target, of which the last may be cut off where the connection
    /// was ended.
    fn end(mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut found = Vec::new();
        if let Err(error) = self.socket.read_to_end(&mut found) {
            assert_ne!(error.kind(), ErrorKind::WouldBlock, "the server neither answers nor ends");
        }
        let mut rest = &found[..];
        while let Some(start) = rest.get(..8) {
            let header = if start[0] == 1 { 128 } else { 24 };
            let known = [1, 3, 5, 7, 9].contains(&start[0]);
            let length = u32::from_le_bytes(start[4..8].try_into().unwrap()) as usize;
            assert!(known && usize::from(start[2]) == header, "{start:?}");
            assert!((header..=(1 << 20) + 64).contains(&length), "{start:?}");
            let Some(behind) = rest.get(length..) else { break };
            if start[1] & 1 != 0 {
                let digest = crc32c(&rest[..header]).to_le_bytes();
                assert_eq!(rest[header..header + 4], digest, "a digest");
            }
            rest = behind;
        }
    }
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn options() -> DiskOptions {
    let reactor = dbs_reactor::Options {
        driver: Driver::Epoll,
        buffer_bytes: 1 << 20,
        file_threads: 1,
        ..Default::default()
    };
    let next = AtomicU64::new(1);
    DiskOptions {
        reactors: 1,
        reactor,
        workers: 1,
        access: Box::new(|_, _| Some(false)),
        number: Box::new(move || next.fetch_add(1, Ordering::Relaxed)),
        read_only: false,
    }
}
