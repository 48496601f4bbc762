//! Writes that are made ones of whole blocks: for replicas that are being rebuilt, and for those that hold
//! damaged data where a write ends.

use super::super::pending::{Pending, Stage};
use super::Shard;
use crate::rules::sabotage::{Bug, is};
use crate::rules::{FanOut, Widened};
use dbs_reactor::Io;
use longhorn_data::stats::add;

impl Shard {
    /// Reads the next block around a widened write, or writes if there is none left.
    pub(in super::super) fn next_edge(&mut self, io: &mut Io, place: u32, from: usize) {
        let Some(pending) = self.pending.get_mut(place) else { return };
        let Some(widened) = pending.widened else { return };
        let reads = widened.reads();
        let next = (from..reads.len()).find_map(|edge| reads[edge].map(|range| (edge, range)));
        match next {
            Some((edge, (offset, length))) => {
                self.begin_read(io, place, Stage::Edge(edge), (offset, length as u32));
            }
            None => {
                widen(io, pending, &widened);
                self.send_write(io, place);
            }
        }
    }

    /// Makes a write that replicas could not complete for damage one of whole blocks, for those; whether
    /// it goes on.
    pub(in super::super) fn widen_for_damage(
        &mut self,
        io: &mut Io,
        place: u32,
        fan_out: &FanOut,
    ) -> bool {
        let size = self.size();
        let Some(pending) = self.pending.get_mut(place) else { return false };
        let (offset, length) = pending.range;
        let widened = match pending.stage {
            Stage::Change if pending.widened.is_none() && !is(Bug::NoWideningForDamage) => {
                Widened::new(offset, u64::from(length), size)
            }
            _ => None,
        };
        let (Some(widened), Some(payload)) = (widened, pending.resend.take()) else { return false };
        let mut copy = io.buffers().take(payload.len());
        copy.copy_from_slice(&payload);
        pending.payload = Some(copy);
        pending.widened = Some(widened);
        // It is decided on at the end, or if the edges cannot be read either.
        pending.fan_out = Some(*fan_out);
        add(&self.counters().widened, 1);
        self.next_edge(io, place, 0);
        true
    }
}

/// Makes a write one of whole blocks, with what was read around it.
fn widen(io: &Io, pending: &mut Pending, widened: &Widened) {
    let Some(payload) = pending.payload.take() else { return };
    let mut wide = io.buffers().take(widened.length as usize);
    let (before, after) = (widened.before as usize, widened.after as usize);
    wide[before..][..payload.len()].copy_from_slice(&payload);
    let [front, behind] = &pending.edges;
    if let Some(front) = front {
        wide[..before].copy_from_slice(&front[..before]);
    }
    if let Some(last) = behind.as_ref().or(front.as_ref()) {
        let start = wide.len() - after;
        wide[start..].copy_from_slice(&last[last.len() - after..]);
    }
    pending.edges = [None, None];
    pending.range = (widened.offset, widened.length as u32);
    pending.payload = Some(wide);
}
