//! What the threads of a path tell its reactors.

use super::backend::Access;
use super::journal::JournalEntry;
use super::latch::Latch;
use super::local::Asker;
use super::replica::Replica;
use crate::rules::Slot;
use dbs_frontend::Front;
use dbs_reactor::Io;
use longhorn_data::runner::Told;
use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Makes a frontend's part on a reactor; its tags begin at this number.
pub(super) type Make = Box<dyn FnOnce(&mut Io, u64) -> Box<dyn Front> + Send>;

/// What other threads tell a reactor.
pub(super) enum Message {
    /// A replica is to be used once it has a mode.
    Add { replica: Arc<Replica>, access: Access, latch: Arc<Latch> },
    /// Something about requests of replicas in this process.
    Local(Told<Asker>),
    /// A replica has become `ERR`.
    Lost { slot: Slot, serial: u64, why: Arc<str> },
    /// There are connections in place of those that broke, or there will be none: for this reason.
    Back { slot: Slot, serial: u64, epoch: u32, access: Result<Access, String> },
    /// A replica is forgotten.
    Remove { replica: Arc<Replica>, latch: Arc<Latch> },
    /// Replicas are to make durable what they have taken; tell when they have.
    Flush { latch: Arc<Latch> },
    /// Nothing is to begin; tell when nothing is in flight, or nothing but what is being healed.
    Pause { all: bool, latch: Arc<Latch> },
    /// The end of the pause.
    Resume,
    /// Blocks were given back.
    Retry,
    /// Somebody wants to see the journal.
    Journal(Sender<Vec<JournalEntry>>),
    /// A frontend begins.
    Attach { number: usize, make: Make },
    /// Something for a frontend.
    Front { number: usize, message: Box<dyn Any + Send> },
    /// A frontend ends.
    Detach { number: usize, at_once: bool, latch: Arc<Latch> },
    /// The limits of the volume delay nothing of this frontend any more.
    Hurry { number: usize },
    /// Everything ends.
    End,
}
