//! Which backups a retention keeps.
//!
//! Each rule keeps the newest backup of each of the last periods that have one. The rules do not know of each other: a
//! backup may be the newest of its day and of its month. Periods are those of UTC.

use crate::lock::Kind;
use crate::pool::Work;
use crate::remove::Removed;
use crate::store::BackupStore;
use dbs_core::{Error, ErrorKind, Result};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Serialize;
use std::collections::HashMap;

/// How many backups of a volume to keep, by each rule. None of a rule that is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// The newest.
    pub last: u32,
    /// The newest of an hour, of so many hours.
    pub hourly: u32,
    /// The newest of a day.
    pub daily: u32,
    /// The newest of a week, which begins on Monday.
    pub weekly: u32,
    /// The newest of a month.
    pub monthly: u32,
    /// The newest of a year.
    pub yearly: u32,
    /// Backups in progress are not kept: nobody will complete them.
    pub in_progress: bool,
}

/// A backup, and why it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Judged {
    /// Backup.
    pub backup: String,
    /// Its snapshot.
    pub snapshot: String,
    /// When it was asked for, RFC 3339.
    pub asked_at: String,
    /// `last`, `hourly`, `daily`, `weekly`, `monthly`, `yearly`, `latest`, `held`, `in progress`, `damaged`, `no time`. If nothing
    /// keeps it, it is to be deleted.
    pub kept_by: Vec<&'static str>,
}

/// What tells the periods of backups apart: of a backup's index and its time.
type Period = fn(usize, Timestamp) -> [i64; 4];

impl Retention {
    /// What keeps each of these backups, which were asked for at these times; of the same time, the later one is the
    /// newer.
    #[must_use]
    pub fn judge(&self, times: &[Timestamp]) -> Vec<Vec<&'static str>> {
        let mut newest: Vec<_> = times.iter().enumerate().collect();
        newest.sort_by_key(|(index, time)| std::cmp::Reverse((**time, *index)));
        let mut kept = vec![Vec::new(); times.len()];
        for (name, count, period) in self.rules() {
            let mut seen = None;
            let mut left = count;
            for (index, time) in &newest {
                let now = Some(period(*index, **time));
                if left > 0 && now != seen {
                    seen = now;
                    left -= 1;
                    kept.get_mut(*index).into_iter().for_each(|by| by.push(name));
                }
            }
        }
        kept
    }

    /// The name of each rule, its count, and the period of a backup.
    fn rules(&self) -> [(&'static str, u32, Period); 6] {
        fn date(time: Timestamp) -> jiff::civil::DateTime {
            TimeZone::UTC.to_datetime(time)
        }
        fn day(time: Timestamp) -> [i64; 4] {
            let at = date(time);
            [at.year().into(), at.month().into(), at.day().into(), 0]
        }
        [
            ("last", self.last, |index, _| [index as i64, 0, 0, 0]),
            ("hourly", self.hourly, |_, time| {
                let [year, month, day, _] = day(time);
                [year, month, day, date(time).hour().into()]
            }),
            ("daily", self.daily, |_, time| day(time)),
            ("weekly", self.weekly, |_, time| {
                let week = date(time).date().iso_week_date();
                [week.year().into(), week.week().into(), 0, 0]
            }),
            ("monthly", self.monthly, |_, time| [day(time)[0], day(time)[1], 0, 0]),
            ("yearly", self.yearly, |_, time| [day(time)[0], 0, 0, 0]),
        ]
    }
}

impl BackupStore {
    /// Judges the backups of a volume, oldest first. What is not complete or cannot be read counts for no rule, and is
    /// kept.
    ///
    /// # Errors
    /// `Invalid` for a retention that keeps nothing; those of reaching the store.
    pub fn judge(&self, volume: &str, retention: &Retention) -> Result<Vec<Judged>> {
        if retention.rules().iter().all(|(_, count, _)| *count == 0) {
            return Err(Error::invalid(
                "the retention keeps no backup at all: say how many to keep",
            ));
        }
        self.begin();
        self.judge_now(volume, retention)
    }

    /// Deletes the backups that nothing keeps, of those that were judged. They are judged again while nobody creates or
    /// deletes any: what was completed meanwhile, or is the newest by now, stays, and says why. None if nothing is left
    /// to delete.
    ///
    /// # Errors
    /// As [`BackupStore::remove_some`]. If the facts of the volume cannot be read, nothing is deleted.
    pub fn prune(
        &self,
        volume: &str,
        retention: &Retention,
        judged: &mut [Judged],
        work: &mut Work<'_>,
    ) -> Result<Option<Removed>> {
        self.begin();
        self.check_name("volume", volume)?;
        // A repository needs no lock: what is deleted can be judged again at any time.
        let lock = match &self.repository {
            Some(_) => None,
            None => Some(self.lock(volume, Kind::Deletion)?),
        };
        self.volume(volume)?;
        let now = self.judge_now(volume, retention)?;
        let mut doomed = Vec::new();
        for judged in judged.iter_mut().filter(|judged| judged.kept_by.is_empty()) {
            if let Some(now) = now.iter().find(|now| now.backup == judged.backup) {
                judged.kept_by.clone_from(&now.kept_by);
            }
            if judged.kept_by.is_empty() {
                doomed.push(judged.backup.as_str());
            }
        }
        match lock {
            _ if doomed.is_empty() => Ok(None),
            Some(lock) => self.remove_locked(volume, &doomed, &lock, work).map(Some),
            None => self.remove_some(volume, &doomed, work).map(Some),
        }
    }

    fn judge_now(&self, volume: &str, retention: &Retention) -> Result<Vec<Judged>> {
        let (mut timed, mut others) = (Vec::new(), Vec::new());
        for backup in self.backups(volume)? {
            let config = match self.facts(volume, &backup) {
                // Deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error)
                    if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) =>
                {
                    let kept_by = vec!["damaged"];
                    let (snapshot, asked_at) = Default::default();
                    others.push(Judged { backup, snapshot, asked_at, kept_by });
                    continue;
                }
                config => config?,
            };
            let asked_at = config.snapshot_created_at.clone();
            let judged = |kept_by| Judged {
                backup,
                snapshot: config.snapshot_name.clone(),
                asked_at,
                kept_by,
            };
            match config.snapshot_created_at.parse::<Timestamp>() {
                _ if config.held_for().is_some() => others.push(judged(vec!["held"])),
                _ if config.is_in_progress() => {
                    let kept = if retention.in_progress { vec![] } else { vec!["in progress"] };
                    others.push(judged(kept));
                }
                Err(_) => others.push(judged(vec!["no time"])),
                Ok(time) => timed.push((time, judged(vec![]))),
            }
        }
        // The last one that was completed is kept: a clock that was wrong then must not have it deleted at once. That it
        // is not known is no reason not to judge.
        let last = self.volume(volume).ok().map(|config| config.last_backup_name);
        let timed = self.in_order(volume, timed, last.as_deref())?;
        let times: Vec<_> = timed.iter().map(|(time, _)| *time).collect();
        for ((_, judged), mut kept_by) in timed.into_iter().zip(retention.judge(&times)) {
            if kept_by.is_empty() && last.as_ref() == Some(&judged.backup) {
                kept_by.push("latest");
            }
            others.push(Judged { kept_by, ..judged });
        }
        Ok(others)
    }

    /// Oldest first. Of backups of one second, the one is newer whose facts were written later; if that is not known
    /// either, the last one of the volume is.
    fn in_order(
        &self,
        volume: &str,
        mut timed: Vec<(Timestamp, Judged)>,
        last: Option<&str>,
    ) -> Result<Vec<(Timestamp, Judged)>> {
        timed.sort_by_key(|(time, _)| *time);
        for same in timed.chunk_by_mut(|(one, _), (other, _)| one == other) {
            if same.len() == 1 {
                continue;
            }
            let mut written = HashMap::new();
            for (_, judged) in same.iter() {
                let modified = match self.modified(volume, Some(&judged.backup)) {
                    Err(error) if error.kind() == ErrorKind::NotFound => None,
                    modified => Some(modified?),
                };
                written.insert(judged.backup.clone(), modified);
            }
            same.sort_by_key(|(_, judged)| {
                (written.get(&judged.backup).copied(), last == Some(judged.backup.as_str()))
            });
        }
        Ok(timed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use jiff::ToSpan;

    fn kept(retention: &Retention, times: &[&str]) -> Vec<String> {
        let times: Vec<Timestamp> = times.iter().map(|time| time.parse().unwrap()).collect();
        retention.judge(&times).into_iter().map(|by| by.join(" ")).collect()
    }

    #[test]
    fn each_rule_keeps_the_newest_of_its_periods() {
        let times = [
            "2024-12-29T23:00:00Z", // a Sunday
            "2024-12-30T01:00:00Z", // ISO week 1 of 2025
            "2025-01-01T05:00:00Z",
            "2025-01-01T05:30:00Z",
            "2025-01-08T00:00:00Z",
        ];
        let of = |retention: Retention| kept(&retention, &times);
        let none = Retention::default();
        assert_eq!(of(Retention { last: 2, ..none }), ["", "", "", "last", "last"]);
        assert_eq!(of(Retention { hourly: 3, ..none }), ["", "hourly", "", "hourly", "hourly"]);
        assert_eq!(of(Retention { daily: 2, ..none }), ["", "", "", "daily", "daily"]);
        assert_eq!(of(Retention { weekly: 9, ..none }), ["weekly", "", "", "weekly", "weekly"]);
        assert_eq!(of(Retention { monthly: 9, ..none }), ["", "monthly", "", "", "monthly"]);
        assert_eq!(of(Retention { yearly: 1, ..none }), ["", "", "", "", "yearly"]);
        let both = Retention { last: 1, daily: 2, yearly: 2, ..none };
        assert_eq!(of(both), ["", "yearly", "", "daily", "last daily yearly"]);
    }

    #[test]
    fn of_one_second_the_later_one_is_newer() {
        let times = ["2025-01-01T05:00:00Z"; 3];
        let retention = Retention { last: 1, daily: 1, ..Default::default() };
        assert_eq!(kept(&retention, &times), ["", "", "last daily"]);
    }

    #[test]
    fn years_of_nightly_backups() {
        let first: Timestamp = "2020-01-01T01:00:00Z".parse().unwrap();
        let times: Vec<_> = (0..1500).map(|day| first + (day * 24).hours()).collect();
        let retention =
            Retention { last: 3, daily: 7, weekly: 4, monthly: 12, ..Default::default() };
        let kept = retention.judge(&times);
        for (rule, count) in [("last", 3), ("daily", 7), ("weekly", 4), ("monthly", 12)] {
            assert_eq!(kept.iter().filter(|by| by.contains(&rule)).count(), count, "{rule}");
        }
        // What is kept is kept the next day as well, as long as a rule has a place for it: nothing waits in vain.
        let mut left: Vec<Timestamp> = Vec::new();
        for (day, time) in times.iter().enumerate() {
            left.push(*time);
            let kept = retention.judge(&left);
            left = left
                .into_iter()
                .zip(kept)
                .filter(|(_, by)| !by.is_empty())
                .map(|(t, _)| t)
                .collect();
            let whole = retention.judge(&times[..=day]);
            let whole = times.iter().zip(whole).filter(|(_, by)| !by.is_empty()).map(|(t, _)| *t);
            assert_eq!(left, whole.collect::<Vec<_>>(), "day {day}");
        }
    }
}
