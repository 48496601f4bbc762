//! The registers of a controller, which a host of Fabrics reads and sets as properties.
//!
//! After "Controller Properties" of the NVM Express Base Specification.

/// Entries of a queue.
pub const ENTRIES_MAX: u16 = 128;
/// The version of the specification: 1.4.
pub const VERSION: u32 = 0x0001_0400;

/// Entries, queues that are contiguous, 15 s to become ready, the NVM command set, pages of 4 KiB.
const CAPABILITIES: u64 = (ENTRIES_MAX as u64 - 1) | 1 << 16 | 30 << 24 | 1 << 37;
const ENABLE: u32 = 1;
const READY: u32 = 1;
const FATAL: u32 = 1 << 1;
/// What shutting down begins and ends with in the status.
const SHUTTING_DOWN: u32 = 1 << 2;
const SHUT_DOWN: u32 = 2 << 2;

mod offset {
    pub const CAPABILITIES: u32 = 0x00;
    pub const VERSION: u32 = 0x08;
    pub const CONFIGURATION: u32 = 0x14;
    pub const STATUS: u32 = 0x1c;
}

/// The registers.
#[derive(Debug, Default)]
pub struct Registers {
    configuration: u32,
    status: u32,
}

/// What setting a property begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begins {
    /// Nothing.
    Nothing,
    /// The controller is disabled: its I/O queues end.
    Reset,
    /// It is shut down: what it has done becomes durable.
    Shutdown,
}

impl Registers {
    /// A property of so many bytes, if there is one.
    pub fn get(&self, offset: u32, bytes: u8) -> Option<u64> {
        match (offset, bytes) {
            (offset::CAPABILITIES, 8) => Some(CAPABILITIES),
            (offset::VERSION, 4) => Some(VERSION.into()),
            (offset::CONFIGURATION, 4) => Some(self.configuration.into()),
            (offset::STATUS, 4) => Some(self.status.into()),
            _ => None,
        }
    }

    /// Sets a property, if it is one that can be set.
    pub fn set(&mut self, offset: u32, bytes: u8, value: u64) -> Option<Begins> {
        if (offset, bytes) != (offset::CONFIGURATION, 4) {
            return None;
        }
        let value = value as u32;
        let before = std::mem::replace(&mut self.configuration, value);
        let (was, is) = (before & ENABLE != 0, value & ENABLE != 0);
        if was && !is {
            self.status = 0;
            return Some(Begins::Reset);
        }
        if is && !was {
            // Command set, size of pages, arbitration: there is one of each.
            self.status = if value & 0x3ff0 == 0 { READY } else { FATAL };
        }
        let shuts = value >> 14 & 3 != 0;
        if shuts && before >> 14 & 3 == 0 {
            self.status |= SHUTTING_DOWN;
            return Some(Begins::Shutdown);
        }
        Some(Begins::Nothing)
    }

    /// What was done is durable, as shutting down asked for; or it cannot be made so.
    pub fn shut_down(&mut self, durable: bool) {
        if self.status & SHUTTING_DOWN != 0 {
            let failed = if durable { 0 } else { FATAL };
            self.status = self.status & !SHUTTING_DOWN | SHUT_DOWN | failed;
        }
    }

    /// Whether commands may be sent.
    pub fn is_ready(&self) -> bool {
        self.status & READY != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(registers: &Registers) -> u64 {
        registers.get(0x1c, 4).unwrap()
    }

    #[test]
    fn a_controller_becomes_ready_is_shut_down_and_is_reset() {
        let mut registers = Registers::default();
        assert_eq!(status(&registers), 0);
        assert_eq!(registers.set(0x14, 4, 0x0046_0001), Some(Begins::Nothing));
        assert_eq!((status(&registers), registers.get(0x14, 4)), (1, Some(0x0046_0001)));
        assert_eq!(registers.set(0x14, 4, 0x0046_4001), Some(Begins::Shutdown));
        assert_eq!(status(&registers), 1 | 1 << 2);
        // Once.
        assert_eq!(registers.set(0x14, 4, 0x0046_4001), Some(Begins::Nothing));
        registers.shut_down(true);
        assert_eq!(status(&registers), 1 | 2 << 2);
        assert_eq!(registers.set(0x14, 4, 0x0046_0000), Some(Begins::Reset));
        assert_eq!((status(&registers), registers.is_ready()), (0, false));
    }

    #[test]
    fn what_there_is_not_is_neither_read_nor_set() {
        let mut registers = Registers::default();
        assert_eq!(registers.set(0x14, 4, 1 << 7 | 1), Some(Begins::Nothing));
        assert_eq!((status(&registers), registers.is_ready()), (2, false), "pages of 8 KiB");
        for (offset, bytes) in [(0x1c, 4), (0x00, 8), (0x14, 8), (0x20, 4)] {
            assert_eq!(registers.set(offset, bytes, 1), None, "{offset:#x}");
        }
        for (offset, bytes) in [(0x00, 4), (0x08, 8), (0x04, 4), (u32::MAX, 4)] {
            assert_eq!(registers.get(offset, bytes), None, "{offset:#x}");
        }
    }
}
