//! The beginning of a connection, on a thread of its own: what both sides agree on, and the command that connects it to
//! a queue of a controller.
//!
//! After "Connect Command" and "Authentication Send Command" of the NVM Express Base Specification (NVMe over Fabrics).

use super::auth::Authentication;
use super::command::{Command, ENTRY_BYTES, Status, completion, opcode};
use super::controller::Host;
use super::identify::ADMIN_CAPSULE_MAX_BYTES;
use super::registers::ENTRIES_MAX;
use super::wire::{
    COMMON_BYTES, DIGEST_BYTES, Fatal, Framing, INIT_BYTES, fatal, is_intact, kind, put, u16_at,
};
use dbs_frontend::Socket;
use std::io::{self, Read};
use std::time::{Duration, Instant};

/// Bytes of what a host says of itself.
const DATA_BYTES: usize = 1024;
/// What a host must have room for: the longest message, a challenge of 64 bytes.
const MESSAGE_MIN_BYTES: usize = 16 + 64;
/// Longest name of a host or a subsystem.
const NAME_MAX_BYTES: usize = 223;
/// The types of the commands.
const CONNECT: u8 = 0x01;
const AUTHENTICATION_SEND: u8 = 0x05;
const AUTHENTICATION_RECEIVE: u8 = 0x06;
/// What they are for: protocols of NVMe.
const SECURITY_PROTOCOL: [u8; 3] = [1, 1, 0xe9];
/// Said with the number of a controller: the host is to prove who it is.
const IS_ASKED_TO_PROVE: u64 = 1 << 17;
/// The number of a controller that is to be made.
const NEW: u16 = 0xffff;

/// What a host asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Who it is.
    pub host: Host,
    /// The subsystem.
    pub subsystem: String,
    /// The controller of an I/O queue.
    pub controller: u16,
    /// The queue; 0 is the admin queue of a new controller.
    pub queue: u16,
    /// Entries of the queue.
    pub entries: u16,
    /// Whether the host wants to know which entries are free.
    pub flow_control: bool,
    /// How long it may be silent.
    pub keep_alive_ms: u32,
}

/// Why a host is refused, and the field that is wrong: an offset, and whether that is one of the data.
pub type Refused = (Status, u64);

/// A wrong field of the data.
pub fn wrong_data(offset: u64) -> Refused {
    (Status::CONNECT_PARAMETERS, offset | 1 << 16)
}

/// A connection at its beginning.
pub struct Connecting<'a> {
    socket: &'a Socket,
    deadline: Instant,
    framing: Framing,
    command: u16,
    flow_control: bool,
    /// Commands that have come, and entries of the queue.
    commands: u16,
    entries: u16,
}

impl<'a> Connecting<'a> {
    /// Initializes a connection, for which there is so much time.
    ///
    /// # Errors
    /// The host is gone, silent, or speaks something else.
    pub fn begin(socket: &'a Socket, patience: Duration) -> io::Result<Self> {
        socket.set_write_timeout(Some(patience))?;
        let deadline = Instant::now() + patience;
        let framing = Framing::default();
        let (command, commands, entries, flow_control) = (0, 0, u16::MAX, true);
        let mut this = Self { socket, deadline, framing, command, flow_control, commands, entries };
        let mut pdu = [0; INIT_BYTES];
        this.read(&mut pdu[..COMMON_BYTES])?;
        // The rest is zeros still, which is right: what is wrong by now is in these, and no more may come.
        if let Err(fatal) = Framing::of(&pdu) {
            return this.fails(Fatal { header: pdu[..COMMON_BYTES].to_vec(), ..fatal });
        }
        this.read(&mut pdu[COMMON_BYTES..])?;
        match Framing::of(&pdu) {
            Ok(framing) => this.framing = framing,
            Err(fatal) => return this.fails(fatal),
        }
        socket.send_all(&this.framing.answer())?;
        Ok(this)
    }

    /// What was agreed on.
    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// Commands that have come.
    pub fn commands(&self) -> u16 {
        self.commands
    }

    /// Takes a command, and the data with it unless that is damaged.
    fn command(&mut self) -> io::Result<(Command, Option<Vec<u8>>)> {
        let mut header = [0; super::wire::COMMAND_BYTES + DIGEST_BYTES];
        self.read(&mut header[..COMMON_BYTES])?;
        let head = self.framing.head(&header[..COMMON_BYTES], ADMIN_CAPSULE_MAX_BYTES);
        let head = match head {
            Ok(head) if head.kind == kind::CAPSULE_CMD => head,
            Ok(_) => {
                let why = "something else than a command that begins a connection";
                let start = &header[..COMMON_BYTES];
                return self.fails(Fatal::new(fatal::SEQUENCE, 0, why, start));
            }
            Err(fatal) => return self.fails(fatal),
        };
        self.read(&mut header[COMMON_BYTES..head.header_bytes])?;
        if let Err(fatal) = head.check(&header[..head.header_bytes]) {
            return self.fails(fatal);
        }
        let mut data = vec![0; head.payload_bytes()];
        self.read(&mut data)?;
        let digest = data.split_off(head.data_bytes);
        let mut entry = [0; ENTRY_BYTES];
        put(&mut entry, 0, &header[COMMON_BYTES..][..ENTRY_BYTES]);
        let command = Command(entry);
        self.command = command.id();
        self.commands = self.commands.saturating_add(1);
        let intact = !head.data_digest || is_intact(&data, &digest);
        Ok((command, intact.then_some(data)))
    }

    /// Takes the command that connects to a queue; `None` if it was refused.
    ///
    /// # Errors
    /// As [`Connecting::begin`].
    pub fn asked(&mut self) -> io::Result<Option<Asked>> {
        let (command, data) = self.command()?;
        let damaged = || Err((Status::TRANSPORT, 0));
        match data.map_or_else(damaged, |data| decode(&command, &data)) {
            Ok(asked) => {
                (self.flow_control, self.entries) = (asked.flow_control, asked.entries);
                Ok(Some(asked))
            }
            Err(refused) => self.refuse(refused).map(|()| None),
        }
    }

    /// Tells the host that it is connected to a controller.
    ///
    /// # Errors
    /// It is gone.
    pub fn accept(&self, controller: u16) -> io::Result<()> {
        self.answer(Status::SUCCESS, controller.into())
    }

    /// Tells the host that it will be, once it has proven who it is, and lets it do that. What it connects to is taken
    /// with `join` when it has; whether that is so, and the host is satisfied, too.
    ///
    /// # Errors
    /// As [`Connecting::begin`].
    pub fn accept_proven(
        &mut self,
        controller: u16,
        authentication: &mut Authentication<'_>,
        join: &mut dyn FnMut() -> Result<(), Refused>,
    ) -> io::Result<bool> {
        self.answer(Status::SUCCESS, u64::from(controller) | IS_ASKED_TO_PROVE)?;
        while !authentication.has_ended() {
            let (command, data) = self.command()?;
            let kind = command.fabrics_type();
            let is_its = command.opcode() == opcode::FABRICS
                && [AUTHENTICATION_SEND, AUTHENTICATION_RECEIVE].contains(&kind);
            let answered = match data {
                _ if !is_its => Err((Status::AUTHENTICATION, 0)),
                _ if command.0[41..44] != SECURITY_PROTOCOL => Err((Status::INVALID_FIELD, 0)),
                None => Err((Status::TRANSPORT, 0)),
                Some(data) if kind == AUTHENTICATION_SEND => {
                    let was_proven = authentication.is_proven();
                    take_message(&command, &data, authentication)
                        .map_err(|status| (status, 0))
                        .and_then(|()| {
                            if authentication.is_proven() && !was_proven { join() } else { Ok(()) }
                        })
                }
                Some(data) => match give_message(&command, &data, authentication) {
                    Ok(message) => {
                        self.answer_data(&message)?;
                        continue;
                    }
                    Err(status) => Err((status, 0)),
                },
            };
            match answered {
                Ok(()) => self.answer(Status::SUCCESS, 0)?,
                Err(refused) => return self.refuse(refused).map(|()| false),
            }
        }
        Ok(authentication.is_done())
    }

    /// Tells the host that it is not.
    ///
    /// # Errors
    /// It is gone.
    pub fn refuse(&self, (status, result): Refused) -> io::Result<()> {
        self.answer(status, result)
    }

    fn answer(&self, status: Status, result: u64) -> io::Result<()> {
        let head = if self.flow_control { self.commands % self.entries.max(1) } else { u16::MAX };
        let completion = completion(result, head, self.command, status);
        self.socket.send_all(&self.framing.response(&completion))
    }

    fn answer_data(&self, data: &[u8]) -> io::Result<()> {
        let done = !self.flow_control;
        let mut bytes = self.framing.data(self.command, data.len(), done);
        bytes.extend_from_slice(data);
        bytes.extend(self.framing.behind(data).into_iter().flatten());
        self.socket.send_all(&bytes)?;
        if done { Ok(()) } else { self.answer(Status::SUCCESS, 0) }
    }

    fn fails<T>(&self, fatal: Fatal) -> io::Result<T> {
        if fatal.status != 0 {
            // Who is gone need not know.
            let _ = self.socket.send_all(&fatal.pdu());
        }
        Err(fatal.into())
    }

    fn read(&self, mut bytes: &mut [u8]) -> io::Result<()> {
        let mut socket = self.socket;
        while !bytes.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(Some(left))?;
            match socket.read(bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// A message of authentication from the host.
fn take_message(
    command: &Command,
    data: &[u8],
    authentication: &mut Authentication<'_>,
) -> Result<(), Status> {
    command.check()?;
    let length = command.dword(11) as usize;
    if length == 0 || length != data.len() {
        return Err(Status::INVALID_FIELD);
    }
    command.source(length, data.len())?;
    authentication.take(data);
    Ok(())
}

/// A message for the host, as long as it asks for, with zeros behind it.
fn give_message(
    command: &Command,
    data: &[u8],
    authentication: &mut Authentication<'_>,
) -> Result<Vec<u8>, Status> {
    command.check()?;
    let length = command.dword(11) as usize;
    if !data.is_empty() || !(MESSAGE_MIN_BYTES..=ADMIN_CAPSULE_MAX_BYTES).contains(&length) {
        return Err(Status::INVALID_FIELD);
    }
    command.takes(length as u64)?;
    let mut message = authentication.give().ok_or(Status::SEQUENCE)?;
    message.resize(length, 0);
    Ok(message)
}

/// What a command asks for.
fn decode(command: &Command, data: &[u8]) -> Result<Asked, Refused> {
    let wrong = |offset| Err((Status::CONNECT_PARAMETERS, offset));
    if command.opcode() != opcode::FABRICS || command.fabrics_type() != CONNECT {
        return Err((Status::SEQUENCE, 0));
    }
    // Its data is always in the capsule.
    if command.0[39] != 0x01 {
        return Err((Status::SGL_TYPE, 0));
    }
    command.source(DATA_BYTES, data.len()).map_err(|status| (status, 0))?;
    if u16_at(&command.0, 40) != 0 {
        return Err((Status::CONNECT_FORMAT, 0));
    }
    let (queue, size) = (u16_at(&command.0, 42), u16_at(&command.0, 44));
    if size == 0 || size >= ENTRIES_MAX {
        return wrong(44);
    }
    let controller = u16_at(data, 16);
    if queue == 0 && controller != NEW {
        return Err(wrong_data(16));
    }
    let name = name_at(data, 512).ok_or_else(|| wrong_data(512))?;
    let subsystem = name_at(data, 256).ok_or_else(|| wrong_data(256))?;
    let mut id = [0; 16];
    id.copy_from_slice(&data[..16]);
    Ok(Asked {
        host: Host { name, id },
        subsystem,
        controller,
        queue,
        entries: size + 1,
        flow_control: command.0[46] & 1 << 2 == 0,
        keep_alive_ms: command.dword(12),
    })
}

/// A name, which ends with a zero: printable, as it is logged.
fn name_at(data: &[u8], at: usize) -> Option<String> {
    let field = &data[at..][..256];
    let end = field.iter().position(|byte| *byte == 0)?;
    let name = std::str::from_utf8(&field[..end]).ok()?;
    let good = name.starts_with("nqn.") && !name.chars().any(char::is_control);
    (good && end <= NAME_MAX_BYTES).then(|| name.to_owned())
}
