//! Which store this is: its uuid, and the file or device it is on.

use super::Store;
use crate::error::{Error, Result};
use crate::format::Superblock;
use crate::format::geometry::SUPERBLOCK_SECOND;
use crate::io::{in_use, lock};
use crate::units::BLOCK_BYTES;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

impl Store {
    /// Gives the store another uuid: this one, or a random one. That is for a copy of a store, which
    /// has the uuid of what it was copied from. Volumes and snapshots keep theirs, by which a
    /// difference finds what it was made against.
    ///
    /// Metadata, journal and tail stay marked with the uuid the store was made with: only the
    /// superblock changes, so that a crash leaves the one uuid or the other.
    ///
    /// # Errors
    /// `Invalid` for a uuid of zeros, `ReadOnly`, `Io`.
    pub fn set_uuid(&self, uuid: Option<[u8; 16]>) -> Result<()> {
        self.inner.check_writable()?;
        if uuid == Some([0; 16]) {
            return Err(Error::invalid("a uuid of zeros identifies nothing"));
        }
        let _step = self.inner.steps.take();
        // While it waited, the store may have been closed.
        self.inner.check_writable()?;
        self.inner.look_for_command()?;
        let uuid = uuid.unwrap_or_else(|| as_uuid(self.inner.env.random()));
        let given = Some(uuid).filter(|uuid| *uuid != self.inner.meta().uuid);
        self.inner.update_superblock(|superblock| superblock.given = given)?;
        self.inner.meta().given = given;
        Ok(())
    }

    /// Tells this store from every other that is open on this machine, copies of it included: its
    /// uuid, and which file or device it is. `None` on storage that is neither.
    #[must_use]
    pub fn key(&self) -> Option<String> {
        let place = self.inner.place.get()?;
        Some(key(&self.inner.meta().identity(), place))
    }
}

/// [`Store::key`] of the store at `path`, without locking it.
///
/// # Errors
/// As [`peek_uuid`].
pub fn peek_key(path: &Path) -> Result<String> {
    let (file, uuid) = peek(path)?;
    let metadata = file.metadata().map_err(|error| cannot_read(error, path))?;
    Ok(key(&uuid, &lock::place_of(&metadata)))
}

/// Which file or device is at `path`: what [`peek_key`] ends with.
///
/// # Errors
/// `NotFound`, `Io`.
pub fn peek_place(path: &Path) -> Result<String> {
    let metadata = std::fs::metadata(path).map_err(|error| cannot_read(error, path))?;
    Ok(lock::place_of(&metadata))
}

/// Whether two paths lead to the same bytes: to one file or device, or to a loop device and the file behind
/// it.
///
/// # Errors
/// `NotFound`, `Io`.
pub fn is_same_place(one: &Path, other: &Path) -> Result<bool> {
    let places = |path: &Path| {
        let metadata = std::fs::metadata(path).map_err(|error| cannot_read(error, path))?;
        let behind = in_use::backing_file(&metadata).and_then(|file| std::fs::metadata(file).ok());
        let places = std::iter::once(metadata).chain(behind);
        Ok(places.map(|metadata| lock::place_of(&metadata)).collect::<Vec<_>>())
    };
    let others = places(other)?;
    Ok(places(one)?.iter().any(|place| others.contains(place)))
}

/// The uuid of the store at `path`, without locking it.
///
/// # Errors
/// `NotFound`, or what the superblock cannot be read for.
pub fn peek_uuid(path: &Path) -> Result<[u8; 16]> {
    peek(path).map(|(_, uuid)| uuid)
}

fn peek(path: &Path) -> Result<(File, [u8; 16])> {
    let file = File::open(path).map_err(|error| cannot_read(error, path))?;
    let mut first = Err(Error::invalid("not a DBS store"));
    for address in [0, SUPERBLOCK_SECOND] {
        let mut block = [0; BLOCK_BYTES as usize];
        let decoded = file
            .read_exact_at(&mut block, address)
            .map_err(|_| Error::invalid("not a DBS store: too short"))
            .and_then(|()| Superblock::decode(&block, address));
        match decoded {
            Ok(superblock) => return Ok((file, superblock.identity())),
            Err(error) if address == 0 => first = Err(error.context(path.display())),
            Err(_) => {}
        }
    }
    first
}

fn cannot_read(error: std::io::Error, path: &Path) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            Error::not_found(format!("no store at `{}`", path.display()))
        }
        _ => Error::io(error, format!("cannot read `{}`", path.display())),
    }
}

fn key(uuid: &[u8; 16], place: &str) -> String {
    format!("{}-{place}", uuid_text(uuid))
}

/// Random bytes as a version 4 uuid.
pub(super) fn as_uuid(mut random: [u8; 16]) -> [u8; 16] {
    random[6] = random[6] & 0x0f | 0x40;
    random[8] = random[8] & 0x3f | 0x80;
    random
}

/// A uuid as text.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// A uuid from its text, with or without dashes.
///
/// # Errors
/// `Invalid` if it is none.
pub fn parse_uuid(text: &str) -> Result<[u8; 16]> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let digits: Option<Vec<u8>> = text.bytes().filter(|byte| *byte != b'-').map(digit).collect();
    let digits: Option<[u8; 32]> = digits.and_then(|digits| digits.try_into().ok());
    let digits = digits.ok_or_else(|| Error::invalid(format!("{text:?} is no uuid")))?;
    Ok(std::array::from_fn(|at| digits[2 * at] << 4 | digits[2 * at + 1]))
}
