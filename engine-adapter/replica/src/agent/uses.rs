//! Who uses the replica's store for long: told when the store is about to go, and waited for.

use dbs_core::{Error, ErrorKind, Result};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long is waited for uses that have been told.
const PATIENCE: Duration = Duration::from_secs(2);
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
        let begun = *ends.borrow();
        Use { ends, begun }
    }

    /// Ends all that there are, and waits for them a moment. Blocks.
    pub fn end_all(&self) {
        self.0.send_modify(|ends| *ends += 1);
        let until = Instant::now() + PATIENCE;
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
