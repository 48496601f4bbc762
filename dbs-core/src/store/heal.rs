//! A data block that its checksum does not fit is written again from a copy that it fits.

use super::Inner;
use crate::error::{Error, Result};
use crate::format::sums;
use crate::io::buffer::AlignedBuf;
use crate::sabotage::{self, Bug};
use crate::units::BLOCK_BYTES;

impl Inner {
    /// Writes a block of the device again that is not what it is known to hold, from a copy of that;
    /// whether it had to be. Nobody else writes the block meanwhile. Its group stays as it is on the
    /// device: what is written is what a page says already, so that whatever a crash leaves of
    /// the write is either that or still known as damage.
    ///
    /// # Errors
    /// `Damaged`: the copy differs from what the block held, nothing is known of it, or the storage did not
    /// take it. `Io`, `ReadOnly`, `Poisoned`.
    pub(crate) fn heal_block(&self, address: u64, copy: &[u8]) -> Result<bool> {
        self.check_writable()?;
        if sabotage::is(Bug::HealOpensPage) {
            self.claim(address, 1)?;
        } else {
            self.claim_to_read(address)?;
        }
        let healed = self.heal_claimed(address, copy);
        if let Some(sums) = &mut self.meta().sums {
            sums.unclaim(address, 1);
            sums.counters.healed += u64::from(matches!(healed, Ok(true)));
        }
        self.wake();
        healed
    }

    fn heal_claimed(&self, address: u64, copy: &[u8]) -> Result<bool> {
        // While the block is claimed its page is in memory, and its sum stays.
        let known = self.meta().sums.as_mut().and_then(|sums| sums.known(address));
        let known = known
            .ok_or_else(|| Error::damaged("the checksum of the block is not known any more"))?;
        let mut held = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        let mut is_right = || -> Result<bool> {
            let read = self.storage.read_at(address, &mut held);
            read.map_err(|error| Error::io(error, "reading the block failed"))?;
            Ok(sums::sum(&held) == known)
        };
        if is_right()? {
            return Ok(false);
        }
        if sums::sum(copy) != known {
            return Err(Error::damaged("the copy differs from what the block held"));
        }
        let mut aligned = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        aligned.copy_from_slice(copy);
        let written = self.storage.write_at(address, &aligned);
        written.map_err(|error| Error::io(error, "writing the block failed"))?;
        // Somebody may open the group next, and from then on nothing would tell what a crash left.
        self.flush_storage()?;
        match is_right()? {
            true => Ok(true),
            false => Err(Error::damaged("the device does not keep what is written to the block")),
        }
    }
}
