//! The store's interposer, for reactors: their reads and writes go around the store's driver.

use dbs_core::io::interpose::{Access, Interposer};
use dbs_reactor::{Fate, Interpose, Part};
use std::sync::Arc;

/// An interposer as a reactor wants it.
#[derive(Debug)]
pub struct Between(Arc<Interposer>);

impl Between {
    /// For [`dbs_reactor::Options`].
    #[must_use]
    pub fn arc(interposer: Arc<Interposer>) -> Arc<dyn Interpose> {
        Arc::new(Self(interposer))
    }
}

impl Interpose for Between {
    fn begin(&self, offset: u64, part: Part<'_>) -> Fate {
        let access = match part {
            Part::Read(len) => Access::Read(len),
            Part::Write(bytes) => Access::Write(bytes),
            Part::Sync => Access::Flush,
        };
        let fate = self.0.begin(offset, access);
        Fate { delay: fate.delay, errno: fate.errno, len: fate.len, ticket: fate.ticket }
    }

    fn end(&self, ticket: u64, done: bool) {
        self.0.end(ticket, done);
    }
}
