//! When a replica that does not answer becomes `ERR`. These times count:
//!
//! - *silence*: the time since its last answer to a read, write or discard, or since the first of those
//!   in flight was sent to an idle replica. Pings do not count;
//! - *the oldest request*: of a replica that answers others, one may be lost, and would be waited for
//!   for ever. It may take twice as long, which a queue of requests on a slow disk may need;
//! - *the oldest flush*: a limit of its own. All that a disk has taken is to be made durable, which may
//!   take far longer than a request, and is no sign of trouble. Flushes are no silence either. So it is with
//!   a block that is healed, which is durable when that is answered;
//! - *a ping*: the only sign of life of an idle replica, and no more urgent than a flush, as the same
//!   threads of a replica may be busy with one. The last replica does not become `ERR` for it, as nobody
//!   waits for anything.
//!
//! The last replica gets twice as long for silence and requests: there is nobody to go on with.
//!
//! Time in which the controller itself did not run does not count ([`lost`]): its process was stopped, or
//! its machine paused or starved, and nobody could have been heard meanwhile.

use std::time::Duration;

/// Seconds that may be asked for.
const ALLOWED: std::ops::RangeInclusive<u64> = 8..=30;
/// Used where another number is asked for.
pub const DEFAULT: Duration = Duration::from_secs(8);
/// What a flush may take.
pub const FLUSH_DEFAULT: Duration = Duration::from_secs(60);
/// From a ping's answer to the next ping.
pub const PING_INTERVAL: Duration = Duration::from_secs(2);
/// How requests fail that waited too long.
pub const TEXT: &str = "r/w timeout";
/// How a flush fails that took too long.
pub const FLUSH_TEXT: &str = "flush timeout";
/// Why a replica becomes `ERR` that does not answer a ping.
pub const PING_TEXT: &str = "ping timeout";

/// How late the controller may look at its clock: anything later is time in which it did not run.
const LATE: Duration = Duration::from_millis(100);

/// How long the controller did not run, which looks at its clock now and was to do so at `due`.
#[must_use]
pub fn lost(now: Duration, due: Duration) -> Duration {
    let late = now.saturating_sub(due);
    if late > LATE { late } else { Duration::ZERO }
}

/// The short timeout for a number of seconds that was asked for.
#[must_use]
pub fn short(seconds: i64) -> Duration {
    match u64::try_from(seconds) {
        Ok(seconds) if ALLOWED.contains(&seconds) => Duration::from_secs(seconds),
        _ => DEFAULT,
    }
}

/// The timeout of the last replica.
#[must_use]
pub const fn long(short: Duration) -> Duration {
    short.saturating_mul(2)
}

/// How long a replica may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The short timeout.
    pub short: Duration,
    /// For a flush, for healing a block, and for a ping.
    pub flush: Duration,
}

/// What is waited for of a replica.
#[derive(Debug, Clone, Copy, Default)]
pub struct Waits {
    /// Since when it is silent.
    pub silence: Silence,
    /// When the oldest read, write or discard was sent that it has not answered.
    pub oldest: Option<Duration>,
    /// When the oldest flush was, or the oldest block that is to be healed.
    pub oldest_flush: Option<Duration>,
    /// When a ping was sent that it has not answered.
    pub ping: Option<Duration>,
}

impl Limits {
    /// Why a replica is to become `ERR`, if it is; `alone` if no other replica is connected.
    #[must_use]
    pub fn exceeded(&self, waits: &Waits, now: Duration, alone: bool) -> Option<&'static str> {
        let over = |since: Option<Duration>, limit| {
            since.is_some_and(|since| now.saturating_sub(since) > limit)
        };
        let oldest = if alone { long(long(self.short)) } else { long(self.short) };
        if waits.silence.expired(now, self.short, alone) || over(waits.oldest, oldest) {
            return Some(TEXT);
        }
        if over(waits.oldest_flush, self.flush) {
            return Some(FLUSH_TEXT);
        }
        (!alone && over(waits.ping, self.flush)).then_some(PING_TEXT)
    }
}

/// Since when a replica is silent: of reads, writes and discards.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silence {
    since: Duration,
    in_flight: u32,
}

impl Silence {
    /// A request was sent to it.
    pub fn sent(&mut self, now: Duration) {
        if self.in_flight == 0 {
            self.since = now;
        }
        self.in_flight += 1;
    }

    /// It answered a request.
    pub fn answered(&mut self, now: Duration) {
        self.since = now;
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// A request need not be answered any more.
    pub fn withdrawn(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// So much time does not count.
    pub fn excuse(&mut self, lost: Duration) {
        self.since += lost;
    }

    /// Requests that it has not answered.
    #[must_use]
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether it is to become `ERR`; `alone` if no other replica is connected.
    #[must_use]
    pub fn expired(&self, now: Duration, short: Duration, alone: bool) -> bool {
        expired(now, self.since, self.in_flight, short, alone)
    }
}

/// Whether a replica that was last heard of at `last` is to become `ERR`.
#[must_use]
pub fn expired(
    now: Duration,
    last: Duration,
    in_flight: u32,
    short: Duration,
    alone: bool,
) -> bool {
    let limit = if alone { long(short) } else { short };
    in_flight > 0 && now.saturating_sub(last) > limit
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_timeout_is_between_8_and_30_seconds() {
        let asked = [(7, 8), (8, 8), (9, 9), (30, 30), (31, 8), (0, 8), (-5, 8), (i64::MAX, 8)];
        for (asked, used) in asked {
            assert_eq!(short(asked), s(used), "{asked}");
        }
    }

    #[test]
    fn the_last_replica_gets_twice_as_long() {
        for (now, in_flight, alone, gone) in [
            (18, 1, false, false),
            (19, 1, false, true),
            (26, 3, true, false),
            (27, 3, true, true),
            (1000, 0, false, false),
            (5, 1, false, false),
        ] {
            assert_eq!(expired(s(now), s(10), in_flight, s(8), alone), gone, "{now}");
        }
    }

    #[test]
    fn one_request_and_a_flush_have_limits_of_their_own() {
        let limits = Limits { short: s(8), flush: s(60) };
        let mut silence = Silence::default();
        silence.sent(s(99));
        let quiet = Waits { silence: Silence::default(), ..Waits::default() };
        let busy = |oldest| Waits { silence, oldest: Some(s(oldest)), ..Waits::default() };
        let flush = |since| Waits { oldest_flush: Some(s(since)), ..quiet };
        for (waits, alone, why) in [
            (quiet, false, None),
            (busy(84), false, None),
            (busy(83), false, Some(TEXT)),
            (busy(68), true, None),
            (busy(67), true, Some(TEXT)),
            (flush(40), false, None),
            (flush(39), false, Some(FLUSH_TEXT)),
            (flush(39), true, Some(FLUSH_TEXT)),
            (Waits { ping: Some(s(40)), ..quiet }, false, None),
            (Waits { ping: Some(s(39)), ..quiet }, false, Some(PING_TEXT)),
            (Waits { ping: Some(s(39)), ..quiet }, true, None),
        ] {
            assert_eq!(limits.exceeded(&waits, s(100), alone), why, "{waits:?}");
        }
    }

    #[test]
    fn time_in_which_the_controller_did_not_run_is_no_silence() {
        let mut silence = Silence::default();
        silence.sent(s(1));
        assert_eq!(lost(s(2) + LATE, s(2)), Duration::ZERO);
        assert_eq!((lost(s(1), s(2)), lost(s(60), s(2))), (Duration::ZERO, s(58)));
        silence.excuse(lost(s(60), s(2)));
        assert!(!silence.expired(s(67), s(8), false));
        assert!(silence.expired(s(68), s(8), false));
    }

    #[test]
    fn an_idle_time_is_no_silence() {
        let mut silence = Silence::default();
        silence.sent(s(1));
        silence.sent(s(5));
        silence.answered(s(6));
        assert!(!silence.expired(s(14), s(8), false));
        assert!(silence.expired(s(15), s(8), false));
        silence.answered(s(15));
        assert!(!silence.expired(s(100), s(8), false));
        silence.sent(s(100));
        assert!(!silence.expired(s(108), s(8), false));
        assert!(silence.expired(s(109), s(8), false));
        assert_eq!(silence.in_flight(), 1);
    }
}
