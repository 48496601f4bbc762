//! What the kernel and a ublk server hand each other: numbers and structures of
//! `linux/ublk_cmd.h`, and the types that the rest of the program sees.

use std::mem::offset_of;

/// Bytes of a sector, the unit of the interface.
pub(super) const SECTOR_BYTES: u64 = 512;

/// Numbers of control commands, with the direction in which their memory goes.
pub(super) mod command {
    use super::ControlCommand;
    use nix::{request_code_read, request_code_readwrite};

    const SIZE: usize = size_of::<ControlCommand>();
    pub const DEVICE_INFO: u32 = request_code_read!(b'u', 0x02, SIZE) as u32;
    pub const ADD: u32 = request_code_readwrite!(b'u', 0x04, SIZE) as u32;
    pub const DELETE: u32 = request_code_readwrite!(b'u', 0x05, SIZE) as u32;
    pub const START: u32 = request_code_readwrite!(b'u', 0x06, SIZE) as u32;
    pub const STOP: u32 = request_code_readwrite!(b'u', 0x07, SIZE) as u32;
    pub const SET_PARAMS: u32 = request_code_readwrite!(b'u', 0x08, SIZE) as u32;
    pub const PARAMS: u32 = request_code_read!(b'u', 0x09, SIZE) as u32;
    pub const START_RECOVERY: u32 = request_code_readwrite!(b'u', 0x10, SIZE) as u32;
    pub const END_RECOVERY: u32 = request_code_readwrite!(b'u', 0x11, SIZE) as u32;
    pub const FEATURES: u32 = request_code_read!(b'u', 0x13, SIZE) as u32;
    /// Since Linux 6.16.
    pub const UPDATE_SIZE: u32 = request_code_readwrite!(b'u', 0x15, SIZE) as u32;
}

/// Numbers of commands on a queue.
pub(super) mod io_command {
    use super::IoCommand;
    use nix::request_code_readwrite;

    const SIZE: usize = size_of::<IoCommand>();
    pub const FETCH: u32 = request_code_readwrite!(b'u', 0x20, SIZE) as u32;
    pub const COMMIT_AND_FETCH: u32 = request_code_readwrite!(b'u', 0x21, SIZE) as u32;
}

/// What a device, and the kernel, can do: bits of [`DeviceInfo::flags`].
pub mod feature {
    /// When its server dies, the device waits for another.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// That one is given what the dead one had not answered.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands have numbers as `ioctl` has them.
    pub const IOCTL_ENCODE: u64 = 1 << 6;
    /// Data is copied by reading and writing the character device.
    pub const USER_COPY: u64 = 1 << 7;
    /// The size can be changed while the device is in use (Linux 6.16).
    pub const UPDATE_SIZE: u64 = 1 << 10;
}

/// `struct ublksrv_ctrl_cmd`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ControlCommand {
    pub device: u32,
    pub queue: u16,
    pub len: u16,
    pub addr: u64,
    pub data: u64,
    pub path_len: u16,
    pub pad: u16,
    pub reserved: u32,
}

const _: () = assert!(size_of::<ControlCommand>() == 32);
const _: () = assert!(offset_of!(ControlCommand, data) == 16);

/// `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawInfo {
    pub queues: u16,
    pub depth: u16,
    pub state: u16,
    pub pad0: u16,
    pub max_io_bytes: u32,
    pub id: u32,
    pub pid: i32,
    pub pad1: u32,
    pub flags: u64,
    pub server_flags: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub reserved: [u64; 2],
}

const _: () = assert!(size_of::<RawInfo>() == 64);
const _: () = assert!(offset_of!(RawInfo, flags) == 24 && offset_of!(RawInfo, owner_uid) == 40);

/// `struct ublk_params` as Linux 6.12 has it; later kernels take a shorter one.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawParams {
    pub len: u32,
    pub types: u32,
    pub basic: RawBasic,
    pub discard: RawDiscard,
    pub numbers: RawNumbers,
    pub zoned: [u32; 8],
    pub pad: u32,
}

const _: () = assert!(size_of::<RawParams>() == 112);
const _: () = assert!(offset_of!(RawParams, discard) == 40);
const _: () = assert!(offset_of!(RawParams, numbers) == 60 && offset_of!(RawParams, zoned) == 76);

/// `struct ublk_param_basic`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawBasic {
    pub attributes: u32,
    pub logical_shift: u8,
    pub physical_shift: u8,
    pub io_opt_shift: u8,
    pub io_min_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub sectors: u64,
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawDiscard {
    pub alignment: u32,
    pub granularity: u32,
    pub max_discard_sectors: u32,
    pub max_zeroes_sectors: u32,
    pub max_segments: u16,
    pub reserved: u16,
}

/// `struct ublk_param_devt`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawNumbers {
    pub char_major: u32,
    pub char_minor: u32,
    pub disk_major: u32,
    pub disk_minor: u32,
}

const ATTRIBUTE_READ_ONLY: u32 = 1 << 0;
const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;
const ATTRIBUTE_FUA: u32 = 1 << 3;
const TYPE_BASIC: u32 = 1 << 0;
const TYPE_DISCARD: u32 = 1 << 1;
pub(super) const TYPE_NUMBERS: u32 = 1 << 2;

/// `struct ublksrv_io_cmd`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct IoCommand {
    pub queue: u16,
    pub tag: u16,
    pub result: i32,
    pub addr: u64,
}

/// `struct ublksrv_io_desc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RawRequest {
    pub op_flags: u32,
    pub sectors: u32,
    pub start_sector: u64,
    pub addr: u64,
}

const _: () = assert!(size_of::<IoCommand>() == 16 && size_of::<RawRequest>() == 24);

impl IoCommand {
    pub fn bytes(self) -> [u8; 16] {
        // SAFETY: of this size, and without padding.
        unsafe { std::mem::transmute(self) }
    }
}

impl ControlCommand {
    /// As the command part of a long submission.
    pub fn bytes(self) -> [u8; 80] {
        // SAFETY: of this size, and without padding.
        let command: [u8; 32] = unsafe { std::mem::transmute(self) };
        let mut bytes = [0; 80];
        bytes[..32].copy_from_slice(&command);
        bytes
    }
}

/// A device to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDevice {
    /// Its number; `None` lets the kernel choose.
    pub id: Option<u32>,
    /// Queues; the kernel makes no more of them than there are processors.
    pub queues: u16,
    /// Requests of a queue at a time, at most [`DEPTH_MAX`](super::DEPTH_MAX).
    pub depth: u16,
    /// Bytes of one request at most.
    pub max_io_bytes: u32,
    /// Bits of [`feature`].
    pub flags: u64,
    /// Kept by the kernel for the server, which knows its device by it.
    pub mark: u64,
}

/// A device, as the kernel sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number.
    pub id: u32,
    /// Queues.
    pub queues: u16,
    /// Requests of a queue at a time.
    pub depth: u16,
    /// Bytes of one request at most.
    pub max_io_bytes: u32,
    /// Whether it is served.
    pub state: DeviceState,
    /// The process that serves it, or did.
    pub pid: i32,
    /// Bits of [`feature`].
    pub flags: u64,
    /// What its server gave it to be known by.
    pub mark: u64,
}

/// Whether a device is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceState {
    /// There is no block device: not started, or stopped.
    Dead,
    /// Served.
    Live,
    /// Its server is gone, requests wait for the next.
    Quiesced,
    /// Its server is gone, requests fail.
    Failing,
    /// A state of a later kernel.
    Other(u16),
}

impl NewDevice {
    pub(super) fn raw(&self) -> RawInfo {
        RawInfo {
            queues: self.queues,
            depth: self.depth,
            max_io_bytes: self.max_io_bytes,
            id: self.id.unwrap_or(u32::MAX),
            flags: self.flags,
            server_flags: self.mark,
            ..RawInfo::default()
        }
    }
}

impl From<&RawInfo> for DeviceInfo {
    fn from(raw: &RawInfo) -> Self {
        let state = match raw.state {
            0 => DeviceState::Dead,
            1 => DeviceState::Live,
            2 => DeviceState::Quiesced,
            3 => DeviceState::Failing,
            other => DeviceState::Other(other),
        };
        Self {
            id: raw.id,
            queues: raw.queues,
            depth: raw.depth,
            max_io_bytes: raw.max_io_bytes,
            state,
            pid: raw.pid,
            flags: raw.flags,
            mark: raw.server_flags,
        }
    }
}

/// What a block device tells its users of itself. Block sizes are powers of two, all in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// Size, a multiple of 512.
    pub size: u64,
    /// Requests are multiples of this.
    pub logical_block: u32,
    /// Requests that are multiples of this cost least.
    pub physical_block: u32,
    /// Smallest request worth making.
    pub io_min: u32,
    /// Best size of a request.
    pub io_opt: u32,
    /// One request at most.
    pub max_io: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// What is written is durable after a flush only; a write may ask to be flushed by itself
    /// (FUA).
    pub volatile_cache: bool,
    /// Whether content can be given up and zeroed.
    pub discard: Option<Discard>,
}

/// Limits of giving up and zeroing content, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Discard {
    /// Smallest unit that can be given up.
    pub granularity: u32,
    /// One request to give up at most.
    pub max_discard: u64,
    /// One request to zero at most.
    pub max_zeroes: u64,
}

/// Device numbers, major and minor, as the kernel gave them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    /// Of the character device that its server opens.
    pub character: (u32, u32),
    /// Of the block device; zeros before it is started.
    pub block: (u32, u32),
}

impl From<&RawNumbers> for Numbers {
    fn from(raw: &RawNumbers) -> Self {
        Self {
            character: (raw.char_major, raw.char_minor),
            block: (raw.disk_major, raw.disk_minor),
        }
    }
}

impl Params {
    pub(super) fn raw(&self) -> RawParams {
        let shift = |bytes: u32| bytes.max(1).trailing_zeros() as u8;
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
        let mut attributes = 0;
        if self.read_only {
            attributes |= ATTRIBUTE_READ_ONLY;
        }
        if self.volatile_cache {
            attributes |= ATTRIBUTE_VOLATILE_CACHE | ATTRIBUTE_FUA;
        }
        let basic = RawBasic {
            attributes,
            logical_shift: shift(self.logical_block),
            physical_shift: shift(self.physical_block),
            io_opt_shift: shift(self.io_opt),
            io_min_shift: shift(self.io_min),
            max_sectors: sectors(u64::from(self.max_io)),
            sectors: self.size / SECTOR_BYTES,
            ..RawBasic::default()
        };
        let len = size_of::<RawParams>() as u32;
        let mut raw = RawParams { len, types: TYPE_BASIC, basic, ..RawParams::default() };
        if let Some(discard) = &self.discard {
            raw.types |= TYPE_DISCARD;
            raw.discard = RawDiscard {
                granularity: discard.granularity,
                max_discard_sectors: sectors(discard.max_discard),
                max_zeroes_sectors: sectors(discard.max_zeroes),
                max_segments: 1,
                ..RawDiscard::default()
            };
        }
        raw
    }

    pub(super) fn from_raw(raw: &RawParams) -> Self {
        let bytes = |shift: u8| 1u32.checked_shl(shift.into()).unwrap_or(0);
        let basic = &raw.basic;
        let discard = &raw.discard;
        let has_discard = raw.types & TYPE_DISCARD != 0;
        Self {
            size: basic.sectors.saturating_mul(SECTOR_BYTES),
            logical_block: bytes(basic.logical_shift),
            physical_block: bytes(basic.physical_shift),
            io_min: bytes(basic.io_min_shift),
            io_opt: bytes(basic.io_opt_shift),
            max_io: basic.max_sectors.saturating_mul(SECTOR_BYTES as u32),
            read_only: basic.attributes & ATTRIBUTE_READ_ONLY != 0,
            volatile_cache: basic.attributes & ATTRIBUTE_VOLATILE_CACHE != 0,
            discard: has_discard.then(|| Discard {
                granularity: discard.granularity,
                max_discard: u64::from(discard.max_discard_sectors) * SECTOR_BYTES,
                max_zeroes: u64::from(discard.max_zeroes_sectors) * SECTOR_BYTES,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers as a C compiler makes them of Debian's header for Linux 6.12 on x86.
    #[test]
    fn commands_have_the_kernels_numbers() {
        assert_eq!(command::DEVICE_INFO, 0x8020_7502);
        assert_eq!(command::ADD, 0xc020_7504);
        assert_eq!(command::DELETE, 0xc020_7505);
        assert_eq!(command::START, 0xc020_7506);
        assert_eq!(command::STOP, 0xc020_7507);
        assert_eq!(command::SET_PARAMS, 0xc020_7508);
        assert_eq!(command::PARAMS, 0x8020_7509);
        assert_eq!(command::START_RECOVERY, 0xc020_7510);
        assert_eq!(command::END_RECOVERY, 0xc020_7511);
        assert_eq!(command::FEATURES, 0x8020_7513);
        assert_eq!(command::UPDATE_SIZE, 0xc020_7515);
        assert_eq!(io_command::FETCH, 0xc010_7520);
        assert_eq!(io_command::COMMIT_AND_FETCH, 0xc010_7521);
    }

    #[test]
    fn commands_lie_in_their_submission_as_the_kernel_reads_them() {
        let command = IoCommand { queue: 0x0201, tag: 0x0403, result: -19, addr: 0 };
        let bytes = command.bytes();
        assert_eq!(bytes[..4], [1, 2, 3, 4]);
        assert_eq!(bytes[4..8], (-19i32).to_le_bytes());
        let command = ControlCommand { device: 7, queue: 0xffff, len: 64, ..Default::default() };
        let bytes = ControlCommand { addr: 0x1122, data: 0x33, ..command }.bytes();
        assert_eq!(bytes[..8], [7, 0, 0, 0, 0xff, 0xff, 64, 0]);
        assert_eq!((bytes[8], bytes[9], bytes[16]), (0x22, 0x11, 0x33));
        assert!(bytes[17..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn parameters_go_there_and_back() {
        let discard = Discard { granularity: 4096, max_discard: 1 << 30, max_zeroes: 1 << 29 };
        let params = Params {
            size: 5 << 30,
            logical_block: 512,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 65536,
            max_io: 1 << 20,
            read_only: false,
            volatile_cache: true,
            discard: Some(discard),
        };
        let raw = params.raw();
        assert_eq!((raw.len, raw.types, raw.basic.attributes), (112, 3, 0b1100));
        assert_eq!((raw.basic.logical_shift, raw.basic.physical_shift), (9, 12));
        assert_eq!((raw.basic.max_sectors, raw.basic.sectors), (2048, 10 << 20));
        assert_eq!((raw.discard.max_segments, raw.discard.max_discard_sectors), (1, 1 << 21));
        assert_eq!(Params::from_raw(&raw), params);
        let params = Params { read_only: true, volatile_cache: false, discard: None, ..params };
        assert_eq!((params.raw().types, params.raw().basic.attributes), (1, 1));
        assert_eq!(Params::from_raw(&params.raw()), params);
    }

    #[test]
    fn a_device_that_may_have_any_number_says_so() {
        let flags = feature::USER_COPY | feature::USER_RECOVERY;
        let new =
            NewDevice { id: None, queues: 2, depth: 64, max_io_bytes: 1 << 20, flags, mark: 99 };
        let raw = RawInfo { state: 2, ..new.raw() };
        assert_eq!(raw.id, u32::MAX);
        let info = DeviceInfo::from(&raw);
        assert_eq!((info.queues, info.depth, info.flags, info.mark), (2, 64, flags, 99));
        assert_eq!(info.state, DeviceState::Quiesced);
        assert_eq!(DeviceInfo::from(&RawInfo { state: 9, ..raw }).state, DeviceState::Other(9));
    }
}
