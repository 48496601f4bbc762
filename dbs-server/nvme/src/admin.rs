//! Commands of an admin queue: what is answered to each, without anything else being done.

use super::command::{Command, Status, TRANSFER_MAX_BYTES, opcode};
use super::controller::{Changed, Controller, Disk, Shows};
use super::identify::{self, Described, IDENTIFY_BYTES, Shape};
use super::registers::Begins;

/// The properties of a controller, as commands of Fabrics.
mod fabrics {
    pub const PROPERTY_SET: u8 = 0x00;
    pub const PROPERTY_GET: u8 = 0x04;
}

/// Features.
mod feature {
    pub const WRITE_CACHE: u8 = 0x06;
    pub const QUEUES: u8 = 0x07;
    pub const EVENTS: u8 = 0x0b;
    pub const KEEP_ALIVE: u8 = 0x0f;
}

/// Logs.
mod log {
    pub const ERRORS: u8 = 0x01;
    pub const HEALTH: u8 = 0x02;
    pub const FIRMWARE: u8 = 0x03;
    pub const CHANGED: u8 = 0x04;
    pub const EFFECTS: u8 = 0x05;
    pub const ACCESS: u8 = 0x0c;
    pub const DISCOVERY: u8 = 0x70;
}

/// What is answered.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// It is done, with this result.
    Done(u64),
    /// Data.
    Data(Vec<u8>),
    /// Nothing before there is an event.
    Wait,
    /// It is done; the I/O queues end.
    Reset,
    /// It is done; what was written becomes durable.
    Shutdown,
}

/// Which subsystems there are for a host, and a number that changes with them; `None` if it is this one still.
pub type Subsystems<'a> = &'a dyn Fn(&Controller, u64) -> Option<(u64, Vec<String>)>;

/// Answers a command.
///
/// # Errors
/// It cannot be done.
pub fn answer(
    controller: &Controller,
    subsystems: Subsystems<'_>,
    command: &Command,
) -> Result<Reply, Status> {
    if command.opcode() == opcode::FABRICS {
        return property(controller, command);
    }
    command.check()?;
    if !controller.is_ready() {
        return Err(Status::SEQUENCE);
    }
    match command.opcode() {
        opcode::IDENTIFY => identify(controller, command),
        opcode::GET_LOG_PAGE => log_page(controller, subsystems, command),
        opcode::SET_FEATURES => set_feature(controller, command),
        opcode::GET_FEATURES => get_feature(controller, command),
        opcode::ASYNC_EVENT_REQUEST => {
            controller.wait_for_event(command.id()).map(|()| Reply::Wait)
        }
        opcode::KEEP_ALIVE => Ok(Reply::Done(0)),
        // It was not aborted: what is under way ends by itself.
        opcode::ABORT => Ok(Reply::Done(1)),
        _ => Err(Status::INVALID_OPCODE),
    }
}

fn property(controller: &Controller, command: &Command) -> Result<Reply, Status> {
    let bytes = if command.dword(10) & 7 == 0 { 4 } else { 8 };
    let (offset, value) = (command.dword(11), command.qword(12));
    match command.fabrics_type() {
        fabrics::PROPERTY_GET => {
            let value = controller.property(offset, bytes);
            value.map(Reply::Done).ok_or(Status::INVALID_FIELD)
        }
        fabrics::PROPERTY_SET => {
            let begins = controller.set_property(offset, bytes, value);
            Ok(match begins.ok_or(Status::INVALID_FIELD)? {
                Begins::Nothing => Reply::Done(0),
                Begins::Reset => Reply::Reset,
                Begins::Shutdown => Reply::Shutdown,
            })
        }
        // Connected it is, and authenticated, if that is asked for: once for each connection.
        _ => Err(Status::INVALID_FIELD),
    }
}

fn identify(controller: &Controller, command: &Command) -> Result<Reply, Status> {
    let (kind, namespace) = (command.dword(10) & 0xff, command.namespace());
    let disk = controller.disk();
    let data = match (kind, disk) {
        (1, disk) => {
            let subsystem = controller.subsystem();
            let uuid = disk.map(|disk| disk.opened.uuid.as_str());
            let number = controller.number;
            let paths = disk.is_some_and(|disk| disk.paths);
            identify::controller(&Described { number, subsystem: &subsystem, uuid, paths })
        }
        (0 | 3, Some(_)) if namespace != super::command::NAMESPACE => {
            return Err(Status::INVALID_NAMESPACE);
        }
        (0, Some(Disk { opened, paths, .. })) => identify::namespace(&Shape {
            size: opened.disk.size(),
            read_only: opened.read_only,
            whole: opened.whole_blocks,
            zeroes_freed: opened.zeroes_freed,
            paths: *paths,
        }),
        (3, Some(disk)) => identify::descriptors(&disk.opened.uuid),
        (2, Some(_)) if namespace < 0xffff_fffe => identify::namespaces(namespace),
        (2, Some(_)) => return Err(Status::INVALID_NAMESPACE),
        // Of the NVM command set.
        (6, Some(_)) if command.dword(11) >> 24 == 0 => identify::limits(),
        _ => return Err(Status::INVALID_FIELD),
    };
    command.takes(IDENTIFY_BYTES as u64)?;
    Ok(Reply::Data(data))
}

fn log_page(
    controller: &Controller,
    subsystems: Subsystems<'_>,
    command: &Command,
) -> Result<Reply, Status> {
    let dwords = u64::from(command.dword(10) >> 16) | u64::from(command.dword(11) & 0xffff) << 16;
    let length = (dwords + 1) * 4;
    let offset = command.qword(12);
    if length > TRANSFER_MAX_BYTES || !offset.is_multiple_of(4) {
        return Err(Status::INVALID_FIELD);
    }
    command.takes(length)?;
    let length = length as usize;
    // The host keeps what it was told of for another time.
    let seen = command.dword(10) & 1 << 15 == 0;
    let log = match ((command.dword(10) & 0xff) as u8, &controller.shows) {
        (log::DISCOVERY, Shows::Discovery(address)) => {
            controller.changes(Changed::Shown, seen);
            // There may be many: a list is made when something has changed, not for each read.
            let known = controller.found(None).0;
            let now = if offset == 0 { subsystems(controller, known) } else { None };
            let (generation, found) = controller.found(now);
            let range = (offset, length);
            return Ok(Reply::Data(identify::discovery(generation, &found, *address, range)));
        }
        (log::ERRORS, _) => vec![0; 64],
        (log::HEALTH, Shows::Disk(_)) => identify::health(),
        (log::FIRMWARE, Shows::Disk(_)) => vec![0; 512],
        (log::EFFECTS, Shows::Disk(_)) => identify::effects(),
        (log::ACCESS, Shows::Disk(Disk { paths: true, .. })) => {
            controller.changes(Changed::Access, seen);
            let (changes, accessible) = controller.access();
            identify::access(changes, accessible, command.dword(10) & 1 << 8 != 0)
        }
        (log::CHANGED, Shows::Disk(_)) => {
            if controller.changes(Changed::Shown, seen) {
                identify::namespaces(0)
            } else {
                vec![0; 4096]
            }
        }
        _ => return Err(Status::INVALID_LOG_PAGE),
    };
    let mut data = vec![0; length];
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let from = log.get(offset..).ok_or(Status::INVALID_FIELD)?;
    data.iter_mut().zip(from).for_each(|(place, byte)| *place = *byte);
    Ok(Reply::Data(data))
}

fn set_feature(controller: &Controller, command: &Command) -> Result<Reply, Status> {
    let value = command.dword(11);
    match command.dword(10) as u8 {
        feature::QUEUES if let Some(disk) = controller.disk() => {
            let (submission, completion) = (value as u16, (value >> 16) as u16);
            if submission == u16::MAX || completion == u16::MAX {
                return Err(Status::INVALID_FIELD);
            }
            let granted = |asked: u16| u64::from(asked.min(disk.queues_max - 1));
            Ok(Reply::Done(granted(submission) | granted(completion) << 16))
        }
        feature::EVENTS => {
            controller.want(value);
            Ok(Reply::Done(0))
        }
        feature::KEEP_ALIVE => {
            controller.set_keep_alive(value);
            Ok(Reply::Done(0))
        }
        // It is on, and stays so.
        feature::WRITE_CACHE if value & 1 == 1 => Ok(Reply::Done(0)),
        feature::WRITE_CACHE => Err(Status::NOT_CHANGEABLE),
        _ => Err(Status::INVALID_FIELD),
    }
}

fn get_feature(controller: &Controller, command: &Command) -> Result<Reply, Status> {
    let queues = controller.disk().map(|disk| u64::from(disk.queues_max - 1));
    match command.dword(10) as u8 {
        feature::QUEUES if let Some(queues) = queues => Ok(Reply::Done(queues | queues << 16)),
        feature::EVENTS => Ok(Reply::Done(controller.wanted().into())),
        feature::KEEP_ALIVE => Ok(Reply::Done(controller.keep_alive_ms().into())),
        feature::WRITE_CACHE => Ok(Reply::Done(1)),
        _ => Err(Status::INVALID_FIELD),
    }
}
