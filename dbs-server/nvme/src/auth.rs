//! In-band authentication of a host: DH-HMAC-CHAP, with the NULL group of Diffie-Hellman.
//!
//! After "Authentication Protocols" of the NVM Express Base Specification: offsets are those of its figures. The host offers hash
//! functions, is challenged, and answers with an HMAC of the challenge; it may challenge the controller in turn. Nothing of what follows on the
//! connection is protected by that.

use super::keys::{Hash, HostKeys};
use super::wire::{put, u16_at, u32_at};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

/// Types of messages: of all protocols, and of this one.
mod kind {
    pub const COMMON: u8 = 0;
    pub const CHAP: u8 = 1;
}

/// Messages.
mod message {
    pub const NEGOTIATE: u8 = 0x00;
    pub const CHALLENGE: u8 = 0x01;
    pub const REPLY: u8 = 0x02;
    pub const SUCCESS1: u8 = 0x03;
    pub const SUCCESS2: u8 = 0x04;
    pub const FAILURE2: u8 = 0xf0;
    pub const FAILURE1: u8 = 0xf1;
}

/// Why authentication failed, as the host is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The host has refused the controller, which it is not told.
    Refused = 0,
    /// The answer is wrong, or the host wants one that there is no key for.
    Failed = 1,
    /// It offers another protocol only.
    Protocol = 2,
    /// It wants TLS with a key from this.
    Concatenation = 3,
    /// It offers no hash function that is known.
    Hash = 4,
    /// It does not offer the NULL group.
    Group = 5,
    /// Lengths or numbers that cannot be.
    Payload = 6,
    /// A message out of order, or an unknown one.
    Message = 7,
}

impl Failure {
    /// For people.
    pub fn why(self) -> &'static str {
        match self {
            Self::Refused => "it refuses the controller: it has another key for that",
            Self::Failed => {
                "its answer is wrong: it has another key, or wants the controller to have one"
            }
            Self::Protocol => "it does not offer DH-HMAC-CHAP",
            Self::Concatenation => "it wants TLS",
            Self::Hash => "it offers no known hash function",
            Self::Group => "it does not offer the NULL group of Diffie-Hellman",
            Self::Payload => "a message of authentication that cannot be",
            Self::Message => "a message of authentication out of order",
        }
    }
}

/// Bytes before hashes in messages.
const HEADER_BYTES: usize = 16;
/// Where protocols are described, and the bytes of each.
const PROTOCOLS: usize = 8;
const PROTOCOL_BYTES: usize = 64;
/// Places for hash functions of a protocol, and for groups.
const PLACES: usize = 30;
/// The first protocol, and the group that is none.
const CHAP_PROTOCOL: u8 = 1;
const NULL_GROUP: u8 = 0;

/// How far it has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The host is to offer something.
    Begun,
    /// It is to fetch the challenge.
    Offered,
    /// It is to answer that.
    Challenged,
    /// It has, and is to fetch that it did well.
    Proven,
    /// It is to say whether the controller did.
    Confirming,
    /// Both are who they say.
    Done,
    /// The host is to fetch why not.
    Failed,
    /// Nothing follows.
    Ended,
}

/// The authentication of one queue of a host, which is tried once.
pub struct Authentication<'a> {
    keys: &'a HostKeys,
    host: &'a str,
    subsystem: &'a str,
    state: State,
    failure: Option<Failure>,
    transaction: u16,
    hash: Hash,
    challenge: Vec<u8>,
    sequence: u32,
    /// The controller's answer.
    answer: Option<hmac::Tag>,
}

impl<'a> Authentication<'a> {
    /// Of a host with these names, and keys.
    pub fn new(keys: &'a HostKeys, host: &'a str, subsystem: &'a str) -> Self {
        let (hash, challenge) = (keys.host.hash(), Vec::new());
        let (state, failure, answer) = (State::Begun, None, None);
        let (transaction, sequence) = (0, 0);
        Self {
            keys,
            host,
            subsystem,
            state,
            failure,
            transaction,
            hash,
            challenge,
            sequence,
            answer,
        }
    }

    /// Whether the host has shown that it has the key.
    pub fn is_proven(&self) -> bool {
        matches!(self.state, State::Proven | State::Confirming | State::Done)
    }

    /// Whether both sides are satisfied.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Whether nothing follows.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, State::Done | State::Ended)
    }

    /// Why it failed, for people.
    pub fn failure(&self) -> Option<&'static str> {
        self.failure.map(Failure::why)
    }

    /// Takes a message of the host.
    pub fn take(&mut self, message: &[u8]) {
        match self.step(message) {
            Ok(state) => self.state = state,
            Err(failure) => {
                self.failure = Some(failure);
                self.state = State::Failed;
            }
        }
    }

    fn step(&mut self, message: &[u8]) -> Result<State, Failure> {
        if message.len() < PROTOCOLS {
            return Err(Failure::Payload);
        }
        let transaction = u16_at(message, 4);
        let begins = self.state == State::Begun;
        if begins {
            self.transaction = transaction;
        } else if self.transaction != transaction {
            return Err(Failure::Payload);
        }
        match (self.state, message[0], message[1]) {
            (State::Begun, kind::COMMON, message::NEGOTIATE) => self.negotiate(message),
            (State::Challenged, kind::CHAP, message::REPLY) => self.reply(message),
            (State::Confirming, kind::CHAP, message::SUCCESS2) => Ok(State::Done),
            (State::Challenged | State::Confirming, kind::COMMON, message::FAILURE2) => {
                self.failure = Some(Failure::Refused);
                Ok(State::Ended)
            }
            _ => Err(Failure::Message),
        }
    }

    /// What the host offers, and what is chosen of that: the hash function that suits its key, if it offers that.
    fn negotiate(&mut self, message: &[u8]) -> Result<State, Failure> {
        if message[6] != 0 {
            return Err(Failure::Concatenation);
        }
        let count = usize::from(message[7]);
        let protocols = message.get(PROTOCOLS..PROTOCOLS + count * PROTOCOL_BYTES);
        let mut protocols = protocols.ok_or(Failure::Payload)?.chunks_exact(PROTOCOL_BYTES);
        let protocol = protocols.find(|protocol| protocol[0] == CHAP_PROTOCOL);
        let protocol = protocol.ok_or(Failure::Protocol)?;
        let (hashes, groups) = (usize::from(protocol[2]), usize::from(protocol[3]));
        if hashes > PLACES || groups > PLACES {
            return Err(Failure::Payload);
        }
        let hashes = &protocol[4..][..hashes];
        let wanted = self.hash.number();
        let known = hashes.iter().find(|number| **number == wanted).copied();
        let known = known.and_then(Hash::of).or_else(|| hashes.iter().copied().find_map(Hash::of));
        self.hash = known.ok_or(Failure::Hash)?;
        if !protocol[4 + PLACES..][..groups].contains(&NULL_GROUP) {
            return Err(Failure::Group);
        }
        let mut random = vec![0; self.hash.bytes() + 4];
        SystemRandom::new().fill(&mut random).map_err(|_| Failure::Failed)?;
        self.sequence = u32_at(&random.split_off(self.hash.bytes()), 0).max(1);
        self.challenge = random;
        Ok(State::Offered)
    }

    /// The host's answer, and maybe a challenge.
    fn reply(&mut self, message: &[u8]) -> Result<State, Failure> {
        let bytes = self.hash.bytes();
        if message.len() < HEADER_BYTES + bytes {
            return Err(Failure::Payload);
        }
        // Of the NULL group there is no public value.
        if usize::from(message[6]) != bytes || u16_at(message, 10) != 0 {
            return Err(Failure::Payload);
        }
        let (answer, rest) = message[HEADER_BYTES..].split_at(bytes);
        let text = self.text(
            &self.challenge,
            self.sequence,
            [b"HostHost", self.host.as_bytes(), self.subsystem.as_bytes()],
        );
        // It takes the same time wherever they differ.
        hmac::verify(&self.keys.host.of(self.host, self.hash), &text, answer)
            .map_err(|_| Failure::Failed)?;
        match message[8] {
            0 => {}
            1 => {
                let challenge = rest.get(..bytes).ok_or(Failure::Payload)?;
                let sequence = u32_at(message, 12);
                // With 0, the challenge is for a key of TLS.
                if sequence == 0 {
                    return Err(Failure::Payload);
                }
                // A challenge of ours that comes back would be answered by us.
                let key = self.keys.controller.as_ref().filter(|_| challenge != self.challenge);
                let key = key.ok_or(Failure::Failed)?.of(self.subsystem, self.hash);
                let names = [&b"Controller"[..], self.subsystem.as_bytes(), self.host.as_bytes()];
                self.answer = Some(hmac::sign(&key, &self.text(challenge, sequence, names)));
            }
            _ => return Err(Failure::Payload),
        }
        Ok(State::Proven)
    }

    /// What is authenticated of a challenge, to who says that it is the first of two.
    fn text(&self, challenge: &[u8], sequence: u32, [role, one, other]: [&[u8]; 3]) -> Vec<u8> {
        let (sequence, transaction) = (sequence.to_le_bytes(), self.transaction.to_le_bytes());
        // No TLS between the numbers and the names.
        [challenge, &sequence, &transaction, &[0], role, one, &[0], other].concat()
    }

    /// The message that the host is to fetch now, if there is one.
    pub fn give(&mut self) -> Option<Vec<u8>> {
        let mut message = vec![0; HEADER_BYTES];
        let (kind, id, next) = match self.state {
            State::Offered => {
                message[6] = self.hash.bytes() as u8;
                (message[8], message[9]) = (self.hash.number(), NULL_GROUP);
                put(&mut message, 12, &self.sequence.to_le_bytes());
                message.extend_from_slice(&self.challenge);
                (kind::CHAP, message::CHALLENGE, State::Challenged)
            }
            State::Proven => {
                message[6] = self.hash.bytes() as u8;
                let answer = self.answer.as_ref().map(AsRef::as_ref);
                message[8] = u8::from(answer.is_some());
                message.extend_from_slice(answer.unwrap_or_default());
                let next = if answer.is_some() { State::Confirming } else { State::Done };
                (kind::CHAP, message::SUCCESS1, next)
            }
            State::Failed => {
                let failure = self.failure.unwrap_or(Failure::Failed);
                (message[6], message[7]) = (1, failure as u8);
                message.truncate(PROTOCOLS);
                (kind::COMMON, message::FAILURE1, State::Ended)
            }
            _ => return None,
        };
        (message[0], message[1]) = (kind, id);
        put(&mut message, 4, &self.transaction.to_le_bytes());
        self.state = next;
        Some(message)
    }
}
