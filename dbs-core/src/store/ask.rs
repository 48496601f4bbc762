//! Comparing what was read with its checksums, page after page, whatever is to be done about a doubt.

use super::Inner;
use crate::meta::sums::{Doubt, Sums};
use crate::units::BLOCK_BYTES;
use std::ops::Range;

impl Inner {
    /// Asks the sums about blocks from `address` on, of which `found` is what was read, loading pages
    /// that they lack. Each block that is in doubt is for `settle`: its address, its bytes among those of
    /// all, and its sum as found.
    pub(super) fn ask_sums<E>(
        &self,
        address: u64,
        found: &mut [u32],
        mut ask: impl FnMut(&mut Sums, u64, &mut [u32]) -> std::result::Result<(), Doubt>,
        mut settle: impl FnMut(u64, Range<usize>, u32) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let mut first = 0;
        while first < found.len() {
            let at = address + first as u64 * BLOCK_BYTES;
            let asked = match &mut self.meta().sums {
                Some(sums) => ask(sums, at, &mut found[first..]),
                None => Ok(()),
            };
            match asked {
                Ok(()) => break,
                Err(Doubt::Page(page)) => self.load_page(page),
                Err(Doubt::Block(block)) => {
                    let index = first + block;
                    let start = index * BLOCK_BYTES as usize;
                    let bytes = start..start + BLOCK_BYTES as usize;
                    settle(address + start as u64, bytes, found[index])?;
                    first = index + 1;
                }
            }
        }
        Ok(())
    }
}
