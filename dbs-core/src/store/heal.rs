//! A data block that its checksum does not fit, or that the device cannot read, is written again from a
//! copy.

use super::Inner;
use super::unreadable::is_unreadable;
use crate::error::{Error, Result};
use crate::format::sums;
use crate::io::buffer::AlignedBuf;
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;

impl Inner {
    /// Writes a block of the device again that is not what it is known to hold, or that cannot be read,
    /// from a copy of that; whether it had to be. Nobody else writes the block meanwhile: in a store
    /// without checksums the caller sees to that. Its group of checksums stays as it is on the
    /// device: what is written is what a page says already, so that whatever a crash leaves of
    /// the write is either that or still known as damage.
    ///
    /// # Errors
    /// `Damaged`: the copy differs from what the block held, nothing is known of it though it can be read,
    /// or the storage did not take it. `Io`, `ReadOnly`, `Poisoned`.
    pub(crate) fn heal_block(&self, address: u64, copy: &[u8]) -> Result<bool> {
        self.check_writable()?;
        if !self.has_sums {
            return self.heal_held(address, copy);
        }
        if sabotage::is(Bug::HealOpensPage) {
            self.claim(address, 1)?;
        } else {
            self.claim_to_read(address)?;
        }
        let healed = self.heal_held(address, copy);
        if let Some(sums) = &mut self.meta().sums {
            sums.unclaim(address, 1);
            sums.counters.healed += u64::from(matches!(healed, Ok(true)));
        }
        self.wake();
        healed
    }

    /// Heals a block that nobody else writes. What cannot be read, and has no known checksum, becomes the
    /// copy whatever that is: there is nothing else left of it.
    fn heal_held(&self, address: u64, copy: &[u8]) -> Result<bool> {
        // While the block is claimed its page is in memory, and its sum stays.
        let known = self.meta().sums.as_mut().and_then(|sums| sums.known(address));
        let mut held = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        // `None`: it cannot be read.
        let mut read = || match self.storage.read_at(address, &mut held) {
            Ok(()) => Ok(Some(sums::sum(&held))),
            Err(error) if is_unreadable(&error) => Ok(None),
            Err(error) => Err(Error::io(error, "reading the block failed")),
        };
        match (read()?, known) {
            (Some(found), Some(known)) if found == known => return Ok(false),
            (Some(_), None) if self.has_sums => {
                return Err(Error::damaged("the checksum of the block is not known any more"));
            }
            (Some(_), None) => return Ok(false),
            (_, Some(known)) if sums::sum(copy) != known => {
                return Err(Error::damaged("the copy differs from what the block held"));
            }
            (_, Some(_)) | (None, None) => {}
        }
        let mut aligned = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        aligned.copy_from_slice(copy);
        let written = self.storage.write_at(address, &aligned);
        written.map_err(|error| Error::io(error, "writing the block failed"))?;
        // Somebody may open the group next, and from then on nothing would tell what a crash left.
        self.flush_storage()?;
        if read()? == Some(sums::sum(copy)) {
            return Ok(true);
        }
        Err(Error::damaged("the device does not keep what is written to the block"))
    }
}
