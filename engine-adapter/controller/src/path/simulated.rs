//! A path whose reactors have no threads: a simulation gives them their turns, has the clock and the network, and
//! says what goes on while somebody waits for them.

use super::reactor::Reactor;
pub use super::shared::Meanwhile;
use super::shared::{Events, Shared};
pub use super::simulated_links::{Anew, Backend, Redial};
use super::{Path, PathOptions, REACTORS_MAX};
use dbs_reactor::{Clock, Io, Left, Simulation};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// A reactor of such a path.
pub struct Lane(Simulation<Reactor>);

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").finish_non_exhaustive()
    }
}

impl Lane {
    /// Whether something has happened that it has not been told.
    pub fn is_ready(&mut self) -> bool {
        self.0.is_ready()
    }

    /// When it is to take a turn though nothing has happened.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.0.due()
    }

    /// Takes a turn; what it has done to its connections.
    pub fn turn(&mut self) -> Vec<Left> {
        self.0.turn()
    }

    /// These bytes have come on a connection.
    pub fn come(&mut self, link: u64, bytes: &[u8]) {
        self.0.come(link, bytes);
    }

    /// The network has taken what was being sent on a connection.
    pub fn taken(&mut self, link: u64) {
        self.0.taken(link);
    }

    /// A connection has ended, or broke.
    pub fn end(&mut self, link: u64, error: Option<io::ErrorKind>) {
        self.0.end(link, error);
    }
}

/// A path as [`Path::new`] makes it, and its reactors.
///
/// # Errors
/// No memory, no descriptor.
pub fn path(
    mut options: PathOptions,
    size: u64,
    events: Arc<dyn Events>,
    clock: &Clock,
    meanwhile: Meanwhile,
) -> io::Result<(Arc<Path>, Vec<Lane>)> {
    options.reactors = options.reactors.clamp(1, REACTORS_MAX);
    let shared = Arc::new(Shared::new(options, size, events, clock.now()));
    shared.meanwhile.get_or_init(|| meanwhile);
    let mut lanes = Vec::new();
    let mut remotes = Vec::new();
    for index in 0..shared.options.reactors {
        let options = &shared.options.reactor;
        let make = |_: &mut Io, remote| Reactor::new(Arc::clone(&shared), index, remote);
        let reactor = Simulation::new(options, clock, make)?;
        remotes.push(reactor.remote());
        lanes.push(Lane(reactor));
    }
    shared.connect(remotes);
    Ok((Arc::new(Path::of(&shared)), lanes))
}
