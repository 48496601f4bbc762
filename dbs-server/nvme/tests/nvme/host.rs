//! A host of NVMe over TCP, written from the specification, without anything of the target's: it can say what no host
//! should.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

pub const WRITE: u8 = 1;
pub const READ: u8 = 2;
pub const FLUSH: u8 = 0;
pub const ZEROES: u8 = 8;
pub const DATASET: u8 = 9;
pub const LOG: u8 = 2;
pub const IDENTIFY: u8 = 6;
pub const SET: u8 = 9;
pub const GET: u8 = 10;
pub const EVENT: u8 = 12;
pub const FABRICS: u8 = 0x7f;

/// Any failure of a test is told long before.
const PATIENCE: Duration = Duration::from_secs(300);

/// CRC-32C, bit by bit.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub header_digest: bool,
    pub data_digest: bool,
    /// What data to the host is aligned to, in units of 4 bytes, less one.
    pub alignment: u8,
    pub flow_control: bool,
    pub entries: u16,
    pub keep_alive_ms: u32,
    /// Bytes of data in one PDU, if less than the target takes.
    pub piece_bytes: usize,
    /// Bytes of data in a capsule.
    pub capsule_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            alignment: 0,
            flow_control: true,
            entries: 128,
            keep_alive_ms: 0,
            piece_bytes: usize::MAX,
            capsule_bytes: 16384,
        }
    }
}

/// A PDU that came.
#[derive(Debug)]
pub struct Pdu {
    pub kind: u8,
    pub flags: u8,
    pub header: Vec<u8>,
    pub data: Vec<u8>,
}

impl Pdu {
    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.header[at..at + 2].try_into().unwrap())
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.header[at..at + 4].try_into().unwrap())
    }
}

/// A connection.
pub struct Wire {
    pub stream: TcpStream,
    pub options: Options,
    pub piece_max: usize,
}

impl Wire {
    pub fn plain(address: SocketAddr, options: Options) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, options, piece_max: usize::MAX }
    }

    pub fn new(address: SocketAddr, options: Options) -> Self {
        let mut this = Self::plain(address, options);
        this.stream.write_all(&this.init()).unwrap();
        let mut answer = [0; 128];
        this.stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], [1, 0, 128, 0, 128, 0, 0, 0]);
        assert_eq!((answer[8], answer[9], answer[10]), (0, 0, 0), "version, alignment");
        assert_eq!(answer[11], this.init()[11], "digests");
        let most = u32::from_le_bytes(answer[12..16].try_into().unwrap()) as usize;
        assert!(most >= 4096 && most.is_multiple_of(4));
        assert!(answer[16..].iter().all(|byte| *byte == 0));
        this.piece_max = most.min(options.piece_bytes);
        this
    }

    pub fn init(&self) -> [u8; 128] {
        let mut init = [0; 128];
        init[..8].copy_from_slice(&[0, 0, 128, 0, 128, 0, 0, 0]);
        init[10] = self.options.alignment;
        init[11] = u8::from(self.options.header_digest) | u8::from(self.options.data_digest) << 1;
        init
    }

    /// The bytes of a PDU, of which `rest` is the header behind its first 8 bytes.
    pub fn pdu(&self, kind: u8, mut flags: u8, rest: &[u8], data: &[u8]) -> Vec<u8> {
        let Options { header_digest, data_digest, .. } = self.options;
        let header = 8 + rest.len();
        let offset = header + if header_digest { 4 } else { 0 };
        let mut length = offset;
        flags |= u8::from(header_digest);
        if !data.is_empty() {
            length += data.len() + if data_digest { 4 } else { 0 };
            flags |= u8::from(data_digest) << 1;
        }
        let place = if data.is_empty() { 0 } else { offset as u8 };
        let mut bytes = vec![kind, flags, header as u8, place];
        bytes.extend((length as u32).to_le_bytes());
        bytes.extend(rest);
        if header_digest {
            bytes.extend(crc32c(&bytes).to_le_bytes());
        }
        bytes.extend(data);
        if data_digest && !data.is_empty() {
            bytes.extend(crc32c(data).to_le_bytes());
        }
        bytes
    }

    pub fn send(&mut self, kind: u8, flags: u8, rest: &[u8], data: &[u8]) {
        let bytes = self.pdu(kind, flags, rest, data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// The next PDU; none at the end of the connection.
    pub fn next(&mut self) -> Option<Pdu> {
        let mut start = [0; 8];
        let mut at = 0;
        while at < 8 {
            match self.stream.read(&mut start[at..]) {
                Ok(0) => {
                    assert_eq!(at, 0, "a PDU ends in its header");
                    return None;
                }
                Ok(count) => at += count,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
        let [kind, flags, header, offset, ..] = start;
        let length = u32::from_le_bytes(start[4..].try_into().unwrap()) as usize;
        let (header, offset) = (usize::from(header), usize::from(offset));
        let expected = [(1, 128), (3, 24), (5, 24), (7, 24), (9, 24)];
        assert!(expected.contains(&(kind, header)), "{start:?}");
        let mut all = start.to_vec();
        all.resize(length, 0);
        self.stream.read_exact(&mut all[8..]).unwrap();
        let (with_header, with_data) = match kind {
            3 => (false, false),
            _ => (self.options.header_digest, self.options.data_digest && kind == 7),
        };
        assert_eq!((flags & 1 != 0, flags & 2 != 0), (with_header, with_data), "{start:?}");
        if with_header {
            assert_eq!(all[header..header + 4], crc32c(&all[..header]).to_le_bytes());
        }
        let mut data = Vec::new();
        if kind == 7 {
            let unit = (usize::from(self.options.alignment) + 1) * 4;
            assert!(offset.is_multiple_of(unit));
            assert!(offset >= header + if with_header { 4 } else { 0 });
            data = all.split_off(offset);
            if with_data {
                let digest = data.split_off(data.len() - 4);
                assert_eq!(digest, crc32c(&data).to_le_bytes());
            }
        } else if kind == 3 {
            data = all.split_off(24);
        } else {
            assert_eq!(length, header + if with_header { 4 } else { 0 });
        }
        all.truncate(header);
        Some(Pdu { kind, flags, header: all, data })
    }

    /// Expects the end of the connection for an error of this kind; returns the field that is wrong.
    pub fn expect_end(&mut self, error: u16) -> u32 {
        let pdu = self.next().expect("the target says why");
        assert_eq!((pdu.kind, pdu.u16(8)), (3, error), "{pdu:?}");
        assert!(self.next().is_none());
        pdu.u32(10)
    }
}

/// A command without its number and its SGL.
#[derive(Debug, Clone)]
pub struct Command {
    pub entry: [u8; 64],
    pub out: Vec<u8>,
    /// Bytes that are to come.
    pub takes: u32,
    /// Data is asked for, however short.
    pub transfer: bool,
}

impl Command {
    pub fn new(opcode: u8, namespace: u32) -> Self {
        let mut entry = [0; 64];
        (entry[0], entry[1]) = (opcode, 0x40);
        entry[4..8].copy_from_slice(&namespace.to_le_bytes());
        Self { entry, out: Vec::new(), takes: 0, transfer: false }
    }

    pub fn dword(mut self, number: usize, value: u32) -> Self {
        self.entry[number * 4..][..4].copy_from_slice(&value.to_le_bytes());
        self
    }

    fn range(self, offset: u64, length: u64) -> Self {
        let (block, count) = (offset / 512, length / 512 - 1);
        self.dword(10, block as u32).dword(11, (block >> 32) as u32).dword(12, count as u32)
    }

    pub fn read(offset: u64, length: u64) -> Self {
        let command = Self::new(READ, 1).range(offset, length);
        Self { takes: length as u32, ..command }
    }

    pub fn write(offset: u64, data: Vec<u8>) -> Self {
        let command = Self::new(WRITE, 1).range(offset, data.len() as u64);
        Self { out: data, ..command }
    }

    pub fn durable(mut self) -> Self {
        self.entry[51] |= 1 << 6;
        self
    }

    pub fn zeroes(offset: u64, length: u64, frees: bool) -> Self {
        let mut command = Self::new(ZEROES, 1).range(offset, length);
        command.entry[51] |= u8::from(frees) << 1;
        command
    }

    pub fn deallocate(ranges: &[(u64, u64)]) -> Self {
        let mut command = Self::new(DATASET, 1).dword(10, ranges.len() as u32 - 1).dword(11, 4);
        for (offset, length) in ranges {
            command.out.extend([0; 4]);
            command.out.extend(((length / 512) as u32).to_le_bytes());
            command.out.extend((offset / 512).to_le_bytes());
        }
        command
    }

    pub fn asked_for(self) -> Self {
        Self { transfer: true, ..self }
    }

    pub fn identify(kind: u32, namespace: u32) -> Self {
        Self { takes: 4096, ..Self::new(IDENTIFY, namespace).dword(10, kind) }
    }

    pub fn log(kind: u32, offset: u64, length: u32) -> Self {
        let dwords = length / 4 - 1;
        let command = Self::new(LOG, 0xffff_ffff).dword(10, kind | dwords << 16);
        let command = command.dword(11, dwords >> 16).dword(12, offset as u32);
        Self { takes: length, ..command.dword(13, (offset >> 32) as u32) }
    }

    pub fn property_get(offset: u32, wide: bool) -> Self {
        let mut command = Self::new(FABRICS, 0).dword(10, u32::from(wide)).dword(11, offset);
        command.entry[4] = 4;
        command
    }

    pub fn property_set(offset: u32, value: u32) -> Self {
        Self::new(FABRICS, 0).dword(11, offset).dword(12, value)
    }

    pub fn connect(host: &str, subsystem: &str, queue: u16, controller: u16, o: Options) -> Self {
        let mut command = Self::new(FABRICS, 0);
        command.entry[4] = 1;
        command.entry[42..44].copy_from_slice(&queue.to_le_bytes());
        command.entry[44..46].copy_from_slice(&(o.entries - 1).to_le_bytes());
        command.entry[46] = u8::from(!o.flow_control) << 2;
        let mut command = command.dword(12, o.keep_alive_ms);
        command.out = vec![0; 1024];
        command.out[..16].copy_from_slice(&[9; 16]);
        command.out[16..18].copy_from_slice(&controller.to_le_bytes());
        command.out[256..256 + subsystem.len()].copy_from_slice(subsystem.as_bytes());
        command.out[512..512 + host.len()].copy_from_slice(host.as_bytes());
        command
    }
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// Type and code, without more.
    pub status: u16,
    pub no_retry: bool,
    pub result: u64,
    pub data: Vec<u8>,
}

impl Done {
    pub fn ok(self) -> Self {
        assert_eq!(self.status, 0, "{self:?}");
        self
    }
}

/// A queue that is connected.
pub struct Queue {
    pub wire: Wire,
    next: u16,
    number: u16,
    /// Data to send when it is asked for, and what has come.
    running: HashMap<u16, (Command, Vec<u8>)>,
    ended: HashMap<u16, Done>,
}

impl Queue {
    pub fn raw(wire: Wire, number: u16) -> Self {
        Self { wire, next: 0, number, running: HashMap::new(), ended: HashMap::new() }
    }

    /// Connects an I/O queue, or the admin queue of a new controller; also the number of the controller.
    pub fn connect(
        address: SocketAddr,
        options: Options,
        (host, subsystem): (&str, &str),
        (queue, controller): (u16, u16),
    ) -> Result<(Self, u16), Done> {
        let mut this = Self::raw(Wire::new(address, options), queue);
        let command = Command::connect(host, subsystem, queue, controller, options);
        let done = this.run(&command);
        if done.status == 0 { Ok((this, done.result as u16)) } else { Err(done) }
    }

    /// Sends a command; its number.
    pub fn submit(&mut self, command: &Command) -> u16 {
        let mut command = command.clone();
        self.next = self.next.wrapping_add(1);
        let id = self.next;
        command.entry[2..4].copy_from_slice(&id.to_le_bytes());
        let fabrics = self.number == 0 || command.entry[0] == FABRICS;
        let most = if fabrics { 8192 } else { self.wire.options.capsule_bytes };
        let inside = !command.out.is_empty() && command.out.len() <= most && !command.transfer;
        let length = command.out.len() as u32 + command.takes;
        command.entry[32..36].copy_from_slice(&length.to_le_bytes());
        command.entry[39] = if inside { 0x01 } else { 0x5a };
        let data = if inside { &command.out[..] } else { &[] };
        self.wire.send(4, 0, &command.entry, data);
        self.running.insert(id, (command, Vec::new()));
        id
    }

    /// Takes PDUs until a command has ended.
    pub fn wait(&mut self, id: u16) -> Done {
        loop {
            if let Some(done) = self.ended.remove(&id) {
                return done;
            }
            let pdu = self.wire.next().expect("the connection lives");
            self.take(&pdu);
        }
    }

    /// Takes PDUs until any command has ended.
    pub fn any(&mut self) -> (u16, Done) {
        loop {
            if let Some(id) = self.ended.keys().next().copied() {
                return (id, self.ended.remove(&id).unwrap());
            }
            let pdu = self.wire.next().expect("the connection lives");
            self.take(&pdu);
        }
    }

    pub fn run(&mut self, command: &Command) -> Done {
        let id = self.submit(command);
        self.wait(id)
    }

    fn take(&mut self, pdu: &Pdu) {
        match pdu.kind {
            5 => {
                let id = pdu.u16(20);
                let (command, data) = self.running.remove(&id).expect("a command under way");
                let status = pdu.u16(22) >> 1;
                if self.wire.options.flow_control {
                    assert!(pdu.u16(16) < self.wire.options.entries);
                }
                if status == 0 {
                    assert_eq!(data.len(), command.takes as usize);
                }
                let result = u64::from(pdu.u32(8)) | u64::from(pdu.u32(12)) << 32;
                let no_retry = status & 1 << 14 != 0;
                self.ended.insert(id, Done { status: status & 0x7ff, no_retry, result, data });
            }
            7 => {
                let id = pdu.u16(8);
                let (_, data) = self.running.get_mut(&id).expect("a command under way");
                assert_eq!(pdu.u32(12) as usize, data.len());
                assert_eq!(pdu.u32(16) as usize, pdu.data.len());
                data.extend(&pdu.data);
                if pdu.flags & 8 != 0 {
                    assert!(pdu.flags & 4 != 0 && !self.wire.options.flow_control);
                    let (command, data) = self.running.remove(&id).unwrap();
                    assert_eq!(data.len(), command.takes as usize);
                    self.ended.insert(id, Done { status: 0, no_retry: false, result: 0, data });
                }
            }
            9 => {
                let (id, tag) = (pdu.u16(8), pdu.u16(10));
                let (offset, length) = (pdu.u32(12) as usize, pdu.u32(16) as usize);
                let (command, _) = &self.running[&id];
                let data = command.out[offset..offset + length].to_vec();
                let mut at = 0;
                while at < length {
                    let count = self.wire.piece_max.min(length - at);
                    let last = at + count == length;
                    let rest = piece(id, tag, offset + at, count);
                    self.wire.send(6, u8::from(last) << 2, &rest, &data[at..at + count]);
                    at += count;
                }
            }
            _ => panic!("{pdu:?}"),
        }
    }
}

/// The rest of the header of a piece of data.
pub fn piece(command: u16, tag: u16, offset: usize, length: usize) -> [u8; 16] {
    let mut rest = [0; 16];
    rest[..2].copy_from_slice(&command.to_le_bytes());
    rest[2..4].copy_from_slice(&tag.to_le_bytes());
    rest[4..8].copy_from_slice(&(offset as u32).to_le_bytes());
    rest[8..12].copy_from_slice(&(length as u32).to_le_bytes());
    rest
}

/// A controller: an admin queue, enabled, and I/O queues.
pub struct Host {
    pub admin: Queue,
    pub queues: Vec<Queue>,
    pub controller: u16,
}

impl Host {
    pub fn admin(address: SocketAddr, options: Options, subsystem: &str) -> Result<Self, Done> {
        Self::named(address, options, (HOST, subsystem))
    }

    pub fn named(address: SocketAddr, options: Options, names: (&str, &str)) -> Result<Self, Done> {
        let admin = Options { entries: 32, ..options };
        let (mut admin, controller) = Queue::connect(address, admin, names, (0, 0xffff))?;
        admin.run(&Command::property_set(0x14, 0x0046_0001)).ok();
        assert_eq!(admin.run(&Command::property_get(0x1c, false)).ok().result, 1, "ready");
        Ok(Self { admin, queues: Vec::new(), controller })
    }

    pub fn with(address: SocketAddr, options: Options, subsystem: &str, queues: u16) -> Self {
        let mut this = Self::admin(address, options, subsystem).unwrap();
        let asked = u32::from(queues - 1);
        let set = Command::new(SET, 0).dword(10, 7).dword(11, asked | asked << 16);
        assert_eq!(this.admin.run(&set).ok().result, u64::from(asked | asked << 16));
        for number in 1..=queues {
            let names = (HOST, subsystem);
            let place = (number, this.controller);
            this.queues.push(Queue::connect(address, options, names, place).unwrap().0);
        }
        this
    }
}
