//! Choosing between the two copies of a metadata block.

use super::{FINDINGS_MAX, Loader, faults};
use crate::format::RegionKind;
use crate::format::block::{self, BlockFault};

impl Loader {
    pub(super) fn lose_block(
        &mut self,
        region: RegionKind,
        index: u32,
        copies: [Option<&[u8]>; 2],
    ) {
        let items = self.geometry.items_per_block(region);
        let lost = faults::lost_block(region, index, items);
        let unreadable = copies.iter().any(Option::is_none);
        let what = if unreadable { "damaged, or the device cannot read them" } else { "damaged" };
        self.corrupt(region, Some(index), &format!("both copies are {what}: {lost}"));
        if RegionKind::MARKED.contains(&region) {
            // What the journal says of its items counts.
            let lsns = &mut self.lsns[region.mark()];
            lsns.resize(lsns.len().max(index as usize + 1), 0);
        }
        if self.unread.blocks.len() < FINDINGS_MAX {
            self.unread.blocks.push((region, index));
            self.unread.refused.extend(unreadable.then_some((region, index)));
        }
    }

    /// The newer good copy. If the device cannot read the newer one, the other leads to the same state:
    /// the journal keeps what a block needs until both copies are durable (`docs/format.md`,
    /// "Write-back"), and a group that it does not have any more is missed by its number.
    pub(super) fn choose<'a>(
        &mut self,
        region: RegionKind,
        index: u32,
        copies: [Option<&'a [u8]>; 2],
    ) -> Option<(u64, &'a [u8])> {
        let mut best: Option<(u64, &[u8])> = None;
        let mut chosen = 0;
        let mut seen = [Err(BlockFault::Blank); 2];
        for (copy, bytes) in copies.into_iter().enumerate() {
            let address = self.geometry.block_address(region, index, copy as u32);
            let Some(bytes) = bytes else {
                seen[copy] = Err(BlockFault::Unreadable);
                continue;
            };
            match block::open(bytes, region.block_kind(), &self.uuid, address) {
                Ok(header) => {
                    let lsn = header.lsn.get();
                    seen[copy] = Ok(lsn);
                    if best.is_none_or(|(newest, _)| lsn > newest) {
                        best = Some((lsn, bytes));
                        chosen = copy as u32;
                    }
                }
                Err(fault) => seen[copy] = Err(fault),
            }
        }
        if let [Ok(first), Ok(second)] = seen
            && first == second
        {
            return best;
        }
        // One copy is older, torn or rotten: what a crash leaves, or damage. Both are healed.
        self.dirty.insert((region, index));
        self.trusted.push(((region, index), chosen));
        let (newest, _) = best?;
        // A store that was closed has all of both copies.
        let closed = self.last_session.is_none();
        for (copy, found) in seen.into_iter().enumerate() {
            let what = match found {
                Err(BlockFault::Blank) if !closed => continue,
                Err(fault) => fault.text().to_owned(),
                Ok(lsn) if lsn == newest || !closed => continue,
                Ok(lsn) => format!("as of commit group {lsn}, not {newest}"),
            };
            self.note(region, index, &format!("copy {copy}: {what}; the other copy is good"));
        }
        best
    }
}
