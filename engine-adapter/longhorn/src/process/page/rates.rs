//! What went through the volume, second by second.

use dbs_frontend::Times;
use dbs_web::{History, Sample, rate};
use longhorn_controller::path::{PathKind, PathStats, ReplicaStats};
use std::time::Duration;

/// Figures of a second: reads and writes, bytes read and written, all of these by the second; nanoseconds within which
/// 50 and 99 of 100 reads were answered, and writes; requests that are not answered yet.
const FIGURES: usize = 9;

/// What was counted last, and what came of it.
#[derive(Default)]
pub(super) struct Rates {
    turn: u64,
    before: Option<(Duration, PathStats)>,
    history: History<FIGURES>,
}

impl Rates {
    /// Takes the counts of a moment in.
    pub fn take(&mut self, at: Duration, now: PathStats) {
        self.turn += 1;
        if let Some((then, before)) = &self.before {
            self.history.push(self.turn, at, figures(before, &now, at.saturating_sub(*then)));
        }
        self.before = Some((at, now));
    }

    /// How often counts were taken.
    pub const fn turn(&self) -> u64 {
        self.turn
    }

    pub fn since(&self, turn: u64) -> Vec<Sample<FIGURES>> {
        self.history.since(turn)
    }

    /// The replicas, when the counts were taken.
    pub fn replicas(&self) -> &[ReplicaStats] {
        self.before.as_ref().map_or(&[], |(_, stats)| &stats.replicas)
    }
}

fn figures(before: &PathStats, now: &PathStats, over: Duration) -> [u64; FIGURES] {
    let [read, write] = [PathKind::Read as usize, PathKind::Write as usize];
    let more = |now: &[u64; 4], before: &[u64; 4], kind: usize| {
        rate(now[kind].saturating_sub(before[kind]), over)
    };
    let took = |kind: usize| {
        let times = Times::since(&now.latency[kind].counted(), &before.latency[kind].counted());
        [50, 99].map(|percent| times.percentile(percent).unwrap_or(0))
    };
    let ([read_50, read_99], [write_50, write_99]) = (took(read), took(write));
    [
        more(&now.requests, &before.requests, read),
        more(&now.requests, &before.requests, write),
        more(&now.bytes, &before.bytes, read),
        more(&now.bytes, &before.bytes, write),
        read_50,
        read_99,
        write_50,
        write_99,
        now.in_flight,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_what_came_between_two_looks() {
        let stats = |requests: u64, latency: &[(u64, u64)]| {
            let mut times = Times::default();
            times.add(latency);
            PathStats {
                requests: [requests, 10 * requests, 0, 0],
                bytes: [4096 * requests, 0, 0, 0],
                latency: [Times::default(), times],
                in_flight: 3,
                ..PathStats::default()
            }
        };
        let mut rates = Rates::default();
        rates.take(Duration::from_secs(1), stats(5, &[(1000, 50)]));
        assert!(rates.since(0).is_empty(), "one look tells no rate");
        rates.take(Duration::from_secs(3), stats(25, &[(1000, 140), (9000, 10)]));
        assert_eq!(rates.turn(), 2);
        let shown = serde_json::to_value(rates.since(0)).unwrap();
        let row = [3000, 10, 100, 40_960, 0, 0, 0, 1000, 9000, 3];
        assert_eq!(shown, serde_json::json!([row]));
        assert!(rates.since(2).is_empty());
    }
}
