//! Memory that requests have used.

use std::time::{Duration, Instant};

/// So long nobody asks for anything before it is given back.
const QUIET: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 10 });

/// Memory that requests have used: the allocator keeps it when they, and their clients, have gone.
#[derive(Default)]
pub(crate) struct Used {
    requests: u64,
    /// When there was a new one, until that memory is given back.
    since: Option<Instant>,
}

impl Used {
    /// Gives it back once nothing was asked for a while. While something is, that would cost more than it gains.
    pub fn look(&mut self, requests: u64, give_back: impl FnOnce()) {
        if requests != self.requests {
            *self = Self { requests, since: Some(Instant::now()) };
        } else if self.since.is_some_and(|since| since.elapsed() >= QUIET) {
            self.since = None;
            give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Used;

    #[test]
    fn memory_is_given_back_once_when_nobody_asks_any_more() {
        let (mut used, mut given) = (Used::default(), 0);
        for (requests, wanted) in [(0, 0), (5, 0), (6, 0), (6, 1), (6, 1), (7, 1), (7, 2)] {
            used.look(requests, || given += 1);
            assert_eq!(given, wanted, "{requests}");
        }
    }
}
