//! Who uses the replica's store for long: told when the store is about to go, and waited for.

use dbs_core::{Error, ErrorKind, Result};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Told to those that begin when there is to be none any more.
const CLOSED: u64 = u64::MAX;
/// Between two looks whether they have ended.
const PAUSE: Duration = Duration::from_millis(5);

/// The uses of an agent's store.
#[derive(Debug, Clone, Default)]
pub struct Uses(watch::Sender<u64>);

/// One of them, as long as it is there. To be had before the store is asked for, so that whoever has the store
/// is told.
#[derive(Debug, Clone)]
pub struct Use {
    ends: watch::Receiver<u64>,
    begun: u64,
}

impl Uses {
    /// Begins to use the store.
    #[must_use]
    pub fn begin(&self) -> Use {
        let ends = self.0.subscribe();
        // Of one that is closed it is over at once.
        let begun = (*ends.borrow()).min(CLOSED - 1);
        Use { ends, begun }
    }

    /// Ends all that there are.
    pub fn tell(&self) {
        self.0.send_modify(|ends| *ends = ends.saturating_add(1));
    }

    /// Ends all that there are and that will be.
    pub fn close(&self) {
        self.0.send_replace(CLOSED);
    }

    /// Waits until there are none. Blocks.
    pub fn wait(&self, until: Instant) {
        while self.0.receiver_count() > 0 && Instant::now() < until {
            sleep(PAUSE);
        }
    }
}

impl Use {
    /// Waits until it is to end.
    pub async fn ended(&mut self) {
        let begun = self.begun;
        // Without an agent it is to end, too.
        let _ = self.ends.wait_for(|ends| *ends != begun).await;
    }

    /// Whether it may go on.
    ///
    /// # Errors
    /// `Interrupted` if it is to end.
    pub fn check(&self) -> Result<()> {
        if *self.ends.borrow() == self.begun { Ok(()) } else { Err(interrupted()) }
    }
}

/// The error of what the end of the process, or of its ownership of the store, has ended.
pub fn interrupted() -> Error {
    Error::new(ErrorKind::Interrupted, "the replica was stopped, or gave up its store")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_end_when_they_are_told_and_after_the_end_at_once() {
        let uses = Uses::default();
        let first = uses.begin();
        first.check().unwrap();
        uses.tell();
        assert!(first.check().is_err());
        let second = uses.begin();
        second.check().unwrap();
        drop(first);
        let begun = Instant::now();
        uses.wait(begun + Duration::from_millis(50));
        assert!(begun.elapsed() >= Duration::from_millis(50), "the second is there");
        uses.close();
        uses.tell();
        assert!(second.check().is_err() && uses.begin().check().is_err());
        drop(second);
        uses.wait(Instant::now() + Duration::from_secs(60));
    }
}
