//! A host's side of DH-HMAC-CHAP, written from the specification, without anything of the target's: it can say what no host
//! should.

use super::host::{Command, Done, FABRICS, Queue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;

/// Why the target ends authentication.
pub const FAILED: u8 = 1;
pub const PROTOCOL: u8 = 2;
pub const CONCATENATION: u8 = 3;
pub const HASH: u8 = 4;
pub const GROUP: u8 = 5;
pub const PAYLOAD: u8 = 6;
pub const MESSAGE: u8 = 7;

/// CRC-32 of zlib, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn algorithm(hash: u8) -> (hmac::Algorithm, usize) {
    match hash {
        1 => (hmac::HMAC_SHA256, 32),
        2 => (hmac::HMAC_SHA384, 48),
        3 => (hmac::HMAC_SHA512, 64),
        _ => panic!("hash {hash}"),
    }
}

/// A key: with which hash a name is mixed in, and its bytes.
#[derive(Debug, Clone)]
pub struct Secret {
    kind: u8,
    bytes: Vec<u8>,
}

impl Secret {
    pub fn new(kind: u8, length: usize, seed: u64) -> Self {
        Self { kind, bytes: super::noise(seed, length) }
    }

    /// As `nvme gen-dhchap-key` prints it.
    pub fn text(&self) -> String {
        let crc = crc32(&self.bytes).to_le_bytes();
        format!("DHHC-1:{:02}:{}:", self.kind, STANDARD.encode([&self.bytes[..], &crc].concat()))
    }

    fn answers(&self, hash: u8, parts: &[&[u8]], name: &str) -> Vec<u8> {
        let mut key = self.bytes.clone();
        if self.kind > 0 {
            let mixed = hmac::Key::new(algorithm(self.kind).0, &key);
            key =
                hmac::sign(&mixed, format!("{name}NVMe-over-Fabrics").as_bytes()).as_ref().to_vec();
        }
        let key = hmac::Key::new(algorithm(hash).0, &key);
        hmac::sign(&key, &parts.concat()).as_ref().to_vec()
    }
}

/// A host that proves who it is.
#[derive(Debug, Clone)]
pub struct Prover<'a> {
    pub host: &'a str,
    pub subsystem: &'a str,
    pub secret: &'a Secret,
    /// With which the controller is to prove who it is.
    pub controller: Option<&'a Secret>,
    pub hashes: &'a [u8],
    pub groups: &'a [u8],
    pub transaction: u16,
}

const OUR_CHALLENGE: [u8; 64] = [0x5a; 64];
const OUR_SEQUENCE: u32 = 0x0102_0304;

impl<'a> Prover<'a> {
    pub fn new(host: &'a str, subsystem: &'a str, secret: &'a Secret) -> Self {
        let (hashes, groups) = (&[1, 2, 3], &[0, 1, 2, 3, 4, 5]);
        Self { host, subsystem, secret, controller: None, hashes, groups, transaction: 0x1234 }
    }

    fn begin(&self, kind: u8, id: u8) -> Vec<u8> {
        let mut message = vec![0; 16];
        (message[0], message[1]) = (kind, id);
        message[4..6].copy_from_slice(&self.transaction.to_le_bytes());
        message
    }

    pub fn negotiate(&self) -> Vec<u8> {
        let mut message = self.begin(0, 0);
        message.resize(8 + 64, 0);
        (message[7], message[8]) = (1, 1);
        (message[10], message[11]) = (self.hashes.len() as u8, self.groups.len() as u8);
        message[12..12 + self.hashes.len()].copy_from_slice(self.hashes);
        message[42..42 + self.groups.len()].copy_from_slice(self.groups);
        message
    }

    /// The answer to a challenge.
    pub fn reply(&self, challenge: &[u8]) -> Vec<u8> {
        let hash = challenge[8];
        let (_, length) = algorithm(hash);
        assert_eq!(challenge[..2], [1, 1]);
        assert_eq!((usize::from(challenge[6]), challenge[9]), (length, 0));
        assert_eq!(challenge[10..12], [0, 0], "no value of a group");
        let parts = [
            &challenge[16..16 + length],
            &challenge[12..16],
            &self.transaction.to_le_bytes(),
            b"\0HostHost",
            self.host.as_bytes(),
            b"\0",
            self.subsystem.as_bytes(),
        ];
        let mut message = self.begin(1, 2);
        message[6] = length as u8;
        message.extend(self.secret.answers(hash, &parts, self.host));
        // As Linux has it: the place is there, whether it is used or not.
        message.resize(16 + 2 * length, 0);
        if self.controller.is_some() {
            message[8] = 1;
            message[12..16].copy_from_slice(&OUR_SEQUENCE.to_le_bytes());
            message[16 + length..].copy_from_slice(&OUR_CHALLENGE[..length]);
        }
        message
    }

    /// Whether the controller has proven who it is, as far as it was asked to.
    fn is_satisfied(&self, hash: u8, success: &[u8]) -> bool {
        let (_, length) = algorithm(hash);
        assert_eq!((success[..2].to_vec(), usize::from(success[6])), (vec![1, 3], length));
        let Some(secret) = self.controller else {
            assert_eq!(success[8], 0);
            return true;
        };
        assert_eq!(success[8], 1);
        let parts = [
            &OUR_CHALLENGE[..length],
            &OUR_SEQUENCE.to_le_bytes(),
            &self.transaction.to_le_bytes(),
            b"\0Controller",
            self.subsystem.as_bytes(),
            b"\0",
            self.host.as_bytes(),
        ];
        secret.answers(hash, &parts, self.subsystem) == success[16..16 + length]
    }

    /// Does all of it; else why not, as the target says.
    pub fn prove(&self, queue: &mut Queue) -> Result<(), u8> {
        send(queue, &self.negotiate()).ok();
        let challenge = self.fetch(queue)?;
        send(queue, &self.reply(&challenge)).ok();
        let success = self.fetch(queue)?;
        if !self.is_satisfied(challenge[8], &success) {
            let mut failure = self.begin(0, 0xf0);
            (failure[6], failure[7]) = (1, FAILED);
            send(queue, &failure).ok();
            return Err(0);
        }
        if self.controller.is_some() {
            send(queue, &self.begin(1, 4)).ok();
        }
        Ok(())
    }

    /// The next message; an error if it says that all was in vain, which is the end of the connection.
    pub fn fetch(&self, queue: &mut Queue) -> Result<Vec<u8>, u8> {
        let message = receive(queue, 4096).ok().data;
        assert_eq!(message[4..6], self.transaction.to_le_bytes());
        if message[..2] == [0, 0xf1] {
            assert_eq!(message[6], 1);
            assert!(queue.wire.next().is_none());
            return Err(message[7]);
        }
        Ok(message)
    }
}

fn command(kind: u8, length: usize) -> Command {
    let mut command = Command::new(FABRICS, 0).dword(11, length as u32);
    command.entry[4] = kind;
    command.entry[41..44].copy_from_slice(&[1, 1, 0xe9]);
    command
}

pub fn sending(message: &[u8]) -> Command {
    Command { out: message.to_vec(), ..command(5, message.len()) }
}

pub fn receiving(length: usize) -> Command {
    Command { takes: length as u32, ..command(6, length) }
}

pub fn send(queue: &mut Queue, message: &[u8]) -> Done {
    queue.run(&sending(message))
}

pub fn receive(queue: &mut Queue, length: usize) -> Done {
    queue.run(&receiving(length))
}
