//! `dbs backup delete` and `dbs backup prune`.

use super::init::{collect, describe};
use super::{open, url};
use crate::confirm::confirm;
use crate::context::{Context, typed};
use crate::output::{self, Table};
use crate::progress::{Meter, Unit};
use clap::Args;
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Judged, Removed, Retention, Work};
use dbs_control::api::Request;
use dbs_core::info::VolumeInfo;
use dbs_core::{Error, ErrorKind, Result};
use dbs_volume_backup::place::{place, place_of, taken_for};
use serde::Serialize;
use serde_json::json;
use std::collections::HashSet;

/// Delete a backup and the blocks that no other backup needs, or a volume with all its backups.
///
/// In a repository, `dbs backup collect` or `prune` removes the blocks, a day later.
#[derive(Debug, Args)]
pub struct Delete {
    /// The backup or the volume, as `dbs backup list` prints it
    #[arg(value_parser = url)]
    url: Url,
    /// Delete a held backup, which `dbs backup restore --lazy` has made for a volume. Only if that volume is gone, or
    /// complete: else it loses what has not come yet
    #[arg(long)]
    held: bool,
}

impl Delete {
    pub fn run(self, context: &Context) -> Result<()> {
        let volume = self.url.need_volume()?;
        let backups = open(&self.url)?;
        let Some(backup) = &self.url.backup else {
            if self.held {
                return Err(Error::invalid("--held deletes one backup: name it"));
            }
            if backups.volume(volume).is_err_and(|e| e.kind() == ErrorKind::NotFound)
                && !backups.volumes()?.iter().any(|name| name == volume)
            {
                return Err(Error::not_found(format!("no volume {volume} in the backup store")));
            }
            let store = self.url.store();
            confirm(context, &format!("Delete all backups of volume {volume} at {store}?"))?;
            context.stop.on_signals()?;
            let mut meter: Meter = context.meter("deleting backups", Unit::Steps);
            let mut progress = |done, total| meter.update(done, total);
            backups.remove_volume(volume, &mut Work::new(&mut progress))?;
            drop(meter);
            return context
                .done(&json!({ "volume": volume }), &format!("deleted all backups of {volume}"));
        };
        let store = self.url.store();
        confirm(context, &format!("Delete backup {backup} of volume {volume} at {store}?"))?;
        context.stop.on_signals()?;
        let mut meter: Meter = context.meter("deleting blocks", Unit::Steps);
        let mut progress = |done, total| meter.update(done, total);
        let mut work = Work::new(&mut progress);
        let removed = match self.held {
            true => backups.let_go(volume, backup, &mut work)?,
            false => backups.remove(volume, backup, &mut work)?,
        };
        drop(meter);
        if let Some(why) = &removed.kept {
            context.note(&format!("no blocks were deleted: {why}"));
        }
        if !removed.found {
            return Err(Error::not_found(format!("volume {volume} has no backup {backup}")));
        }
        let text = match backups.is_repository() {
            true => format!("deleted backup {backup}; `dbs backup collect` frees its space"),
            false => format!("deleted backup {backup} and {} blocks", removed.blocks),
        };
        context.done(&removed, &text)
    }
}

/// Delete the backups that no rule keeps.
///
/// Each rule keeps the newest backup of each of the last hours, days, weeks, months or years that have
/// one. A backup is kept if any rule keeps it. Times are those at which backups were asked for, in UTC.
/// Backups that are in progress or damaged are kept, and count for no rule. If a volume cannot be pruned, as
/// somebody backs it up, the command goes on with the others, and then ends with the error. In a
/// repository, the command then collects what no backup needs, as `dbs backup collect` does.
#[derive(Debug, Args)]
pub struct Prune {
    /// A volume in a backup store, as `dbs backup list` prints it; or the backup store, for all its volumes
    #[arg(value_parser = url)]
    url: Url,
    /// Keep the newest N backups
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_last: u32,
    /// Keep the newest backup of each of N hours
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_hourly: u32,
    /// Keep the newest backup of each of N days
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_daily: u32,
    /// Keep the newest backup of each of N weeks; a week begins on Monday
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_weekly: u32,
    /// Keep the newest backup of each of N months
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_monthly: u32,
    /// Keep the newest backup of each of N years
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_yearly: u32,
    /// Also delete backups in progress. Those are left by backups that were cut off, and while they are
    /// there no blocks are deleted. The command fails if somebody is backing up the volume
    #[arg(long)]
    in_progress: bool,
    /// Only volumes that this store (--store) backs up there with `dbs backup create VOLUME`; others at the
    /// same place are kept
    #[arg(long)]
    own: bool,
    /// Show what would be kept and deleted, and delete nothing
    #[arg(long)]
    dry_run: bool,
}

/// What became of the backups of a volume.
#[derive(Debug, Serialize)]
struct Pruned {
    volume: String,
    backups: Vec<Judged>,
    /// None if nothing was deleted.
    removed: Option<Removed>,
    /// Why nothing, or not all, was deleted of what no rule keeps.
    problem: Option<String>,
}

impl Prune {
    pub fn run(self, context: &Context) -> Result<()> {
        let store = open(&self.url)?;
        if let Some(backup) = &self.url.backup {
            return Err(Error::invalid(format!(
                "{backup} is a backup: name its volume, or use `dbs backup delete`"
            )));
        }
        let mut volumes = match &self.url.volume {
            // An error if it is not there.
            Some(volume) => store.known_backups(volume).map(|_| vec![volume.clone()])?,
            None => store.volumes()?,
        };
        if self.own {
            let own = places(context)?;
            volumes.retain(|volume| own.contains(&place(&self.url, volume)));
            if volumes.is_empty() {
                return Err(Error::not_found(format!(
                    "no volume at {} is one that `dbs backup create VOLUME` backs up from this store",
                    self.url
                )));
            }
        }
        context.stop.on_signals()?;
        let mut failures = Failures::default();
        let judged = volumes.into_iter().map(|volume| self.judge(&store, volume, &mut failures));
        let mut all = judged.collect::<Result<Vec<_>>>()?;
        let doomed: usize = all.iter().map(|pruned| pruned.doomed().len()).sum();
        if !self.dry_run && doomed > 0 {
            confirm(context, &question(&all, &self.url))?;
            for pruned in &mut all {
                let stopped = || Error::new(ErrorKind::Interrupted, "the command was interrupted");
                let pruned_now = match context.stop.asked() {
                    true => Err(stopped()),
                    false => pruned.prune(context, &store, &self.retention()),
                };
                if let Err(error) = pruned_now {
                    failures.add(pruned, error);
                }
            }
        }
        // Of one volume that failed there is nothing to show.
        if all.len() > 1 || failures.last.is_none() {
            self.show(context, &all, &store)?;
        }
        if !self.dry_run && !context.stop.asked() {
            // What became of the backups is not hidden by what becomes of the rest of them.
            match collect(context, &store) {
                Ok(Some(collected)) => context.note(&describe(&collected)),
                Ok(None) => {}
                Err(error) if failures.last.is_none() => return Err(error),
                Err(error) => output::warn(&error.to_string()),
            }
        }
        failures.end(all.len())
    }

    /// What is to become of the backups of a volume. A volume that cannot be judged stops no other from being
    /// pruned.
    ///
    /// # Errors
    /// `Invalid` without a rule.
    fn judge(
        &self,
        store: &BackupStore,
        volume: String,
        failures: &mut Failures,
    ) -> Result<Pruned> {
        let (backups, failed) = match store.judge(&volume, &self.retention()) {
            Ok(backups) => (backups, None),
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error),
            Err(error) => (Vec::new(), Some(error)),
        };
        let mut pruned = Pruned { volume, backups, removed: None, problem: None };
        if let Some(error) = failed {
            failures.add(&mut pruned, error);
        }
        Ok(pruned)
    }

    fn show(&self, context: &Context, all: &[Pruned], store: &BackupStore) -> Result<()> {
        // Some may be kept by now.
        let doomed: usize = all.iter().map(|pruned| pruned.doomed().len()).sum();
        if context.json {
            return output::print_json(&all);
        }
        if self.dry_run {
            output::print(&table(all))?;
        }
        let blocks: u64 = all.iter().filter_map(|p| p.removed.as_ref()).map(|r| r.blocks).sum();
        let kept: usize = all.iter().map(|pruned| pruned.backups.len()).sum::<usize>() - doomed;
        let done = if self.dry_run { "would delete" } else { "deleted" };
        let blocks = match self.dry_run || store.is_repository() {
            true => String::new(),
            false => format!(" and {blocks} blocks"),
        };
        context.done(&(), &format!("{done} {}{blocks}; {} kept", count(doomed), count(kept)))
    }

    fn retention(&self) -> Retention {
        Retention {
            last: self.keep_last,
            hourly: self.keep_hourly,
            daily: self.keep_daily,
            weekly: self.keep_weekly,
            monthly: self.keep_monthly,
            yearly: self.keep_yearly,
            in_progress: self.in_progress,
        }
    }
}

/// What went wrong with some of the volumes.
#[derive(Default)]
struct Failures {
    volumes: usize,
    last: Option<Error>,
}

impl Failures {
    /// Tells of the error before this one: the last is the command's.
    fn add(&mut self, pruned: &mut Pruned, error: Error) {
        pruned.problem = Some(error.to_string());
        self.volumes += 1;
        let error = error.context(format!("pruning {}", pruned.volume));
        if let Some(before) = self.last.replace(error) {
            output::warn(&before.to_string());
        }
    }

    fn end(self, volumes: usize) -> Result<()> {
        match self.last {
            None => Ok(()),
            Some(error) if volumes == 1 => Err(error),
            Some(error) => {
                let failed = self.volumes;
                Err(error.context(format!("{failed} of {volumes} volumes could not be pruned")))
            }
        }
    }
}

impl Pruned {
    /// The backups that no rule keeps; none of a volume that failed, as they are there still.
    fn doomed(&self) -> Vec<&str> {
        if self.problem.is_some() {
            return Vec::new();
        }
        let doomed = self.backups.iter().filter(|backup| backup.kept_by.is_empty());
        doomed.map(|backup| backup.backup.as_str()).collect()
    }

    fn prune(
        &mut self,
        context: &Context,
        store: &BackupStore,
        retention: &Retention,
    ) -> Result<()> {
        if self.doomed().is_empty() {
            return Ok(());
        }
        let mut meter = context.meter(&format!("deleting blocks of {}", self.volume), Unit::Steps);
        let mut progress = |done, total| meter.update(done, total);
        let mut work = Work::new(&mut progress);
        self.removed = store.prune(&self.volume, retention, &mut self.backups, &mut work)?;
        drop(meter);
        if let Some(why) = self.removed.as_ref().and_then(|removed| removed.kept.as_ref()) {
            context.note(&format!("no blocks of volume {} were deleted: {why}", self.volume));
        }
        Ok(())
    }
}

/// Volumes that a question names.
const NAMED: usize = 8;

/// What is asked before anything is deleted.
fn question(all: &[Pruned], url: &Url) -> String {
    let doomed: usize = all.iter().map(|pruned| pruned.doomed().len()).sum();
    let affected = all.iter().filter(|pruned| !pruned.doomed().is_empty());
    let volumes: Vec<_> = affected.map(|pruned| pruned.volume.as_str()).collect();
    let named = volumes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
    let more = match volumes.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("Delete {} of {named}{more} at {}?", count(doomed), url.store())
}

/// Where this store backs volumes up with `dbs backup create VOLUME`: the snapshots say so that it keeps for that.
fn places(context: &Context) -> Result<HashSet<String>> {
    context.with(false, |target| {
        let all = target.call(context, &Request::VolumeList { usage: false })?;
        let mut places = HashSet::new();
        for volume in typed::<Vec<VolumeInfo>>(all)? {
            let snapshots = target.access()?.snapshots(&volume.name)?;
            places.extend(snapshots.iter().filter_map(taken_for).filter_map(place_of));
        }
        Ok(places)
    })
}

fn count(backups: usize) -> String {
    format!("{backups} backup{}", if backups == 1 { "" } else { "s" })
}

fn table(all: &[Pruned]) -> String {
    let mut table = Table::new(&["VOLUME", "BACKUP", "SNAPSHOT", "ASKED FOR", "KEPT BY"]);
    for pruned in all {
        for backup in &pruned.backups {
            let kept_by = match backup.kept_by.as_slice() {
                [] => "nothing: delete".to_owned(),
                rules => rules.join(", "),
            };
            table.row(vec![
                pruned.volume.clone(),
                backup.backup.clone(),
                backup.snapshot.clone(),
                backup.asked_at.clone(),
                kept_by,
            ]);
        }
    }
    table.text()
}
