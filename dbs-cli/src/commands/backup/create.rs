//! `dbs backup create`.

use super::volume::SnapshotSource;
use super::{Pace, open, place, place_of, url};
use crate::commands::taken::{remove, take, taken_at};
use crate::context::Context;
use crate::output;
use crate::progress::Unit;
use crate::spec::{self, SnapshotSpec, Spec};
use crate::target::Target;
use clap::Args;
use dbs_backup::codec::Method;
use dbs_backup::url::Url;
use dbs_backup::{CreateOptions, Created};
use dbs_core::info::SnapshotInfo;
use dbs_core::{Error, Result, format_size};
use dbs_transfer::is_received;

/// How the labels begin that a backup has from `dbs`.
const OWN_LABELS: &str = "dbs-";
/// The sizes of blocks that Longhorn's manager allows.
const BLOCK_SIZES: [u64; 2] = [2 << 20, 16 << 20];
/// The label of snapshots that this command takes: where their backups are.
const TAKEN_FOR: &str = "dbs-backup";
/// How the names of these begin.
const TAKEN_AS: &str = "backup";

/// Where the backups are that this store took a snapshot for. A received one was taken by another store, whose backups
/// are not ours.
pub(super) fn taken_for(snapshot: &SnapshotInfo) -> Option<&str> {
    snapshot.labels.get(TAKEN_FOR).filter(|_| !is_received(snapshot)).map(String::as_str)
}

/// Back up volumes or snapshots.
///
/// The first backup of a volume reads all its data, later backups only what changed since the last one.
/// Blocks that are in the backup store already are not written again. If a backup was cut off, run the
/// command again: it finds the blocks that were written. If one of several backups fails, the command
/// goes on with the others, and then ends with the error.
#[derive(Debug, Args)]
pub struct Create {
    /// VOLUME@SNAPSHOT: keep the snapshot until the next backup, which needs the difference to it. Or
    /// VOLUME: the command takes a snapshot, and once the backup is complete deletes the one that it took
    /// for the backup before
    #[arg(required = true, value_name = "VOLUME[@SNAPSHOT]")]
    specs: Vec<Spec>,
    /// The backup store, behind all volumes and options: s3://BUCKET@REGION/PATH, vfs:///PATH,
    /// nfs://HOST:/PATH, cifs://HOST/SHARE, azblob://CONTAINER/PATH
    #[arg(value_parser = url)]
    url: Url,
    /// Name of the backup; by default a random one
    #[arg(long)]
    name: Option<String>,
    /// Name of the volume in the backup store; by default its name here
    #[arg(long, value_name = "VOLUME")]
    to: Option<String>,
    /// Read everything, and write every block again. This mends damaged blocks in the backup store
    #[arg(long)]
    full: bool,
    /// How blocks are compressed: lz4, gzip or none. The first backup of a volume decides for all later
    /// ones; in a repository, lz4 or none for each backup
    #[arg(long, default_value = "lz4", value_name = "METHOD")]
    compression: Method,
    /// Size of blocks: 2MiB, which is the default, or 16MiB. A size other than that of the last backup makes a
    /// full backup. A repository has its own size
    #[arg(long, value_parser = spec::size, value_name = "SIZE")]
    block_size: Option<u64>,
    /// A label; can be repeated
    #[arg(long = "label", value_parser = spec::label, value_name = "KEY=VALUE")]
    labels: Vec<(String, String)>,
    #[command(flatten)]
    pace: Pace,
}

impl Create {
    pub fn run(self, context: &Context) -> Result<()> {
        self.check()?;
        context.stop.on_signals()?;
        let writes = self.specs.iter().any(|spec| spec.snapshot.is_none());
        let (created, failed) = context.with(writes, |target| Ok(self.each(context, target)))?;
        let text: Vec<_> = created.iter().map(|(_, text)| text.as_str()).collect();
        let mut values: Vec<_> = created.iter().map(|(created, _)| created).collect();
        match values.pop() {
            Some(only) if self.specs.len() == 1 => context.done(only, &text.join("\n"))?,
            Some(last) => {
                values.push(last);
                context.done(&values, &text.join("\n"))?;
            }
            None => {}
        }
        match failed {
            Some(error) if self.specs.len() > 1 => Err(error.context(format!(
                "{} of {} backups failed",
                self.specs.len() - created.len(),
                self.specs.len()
            ))),
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn check(&self) -> Result<()> {
        if self.block_size.is_some_and(|size| !BLOCK_SIZES.contains(&size)) {
            return Err(Error::invalid("a size of blocks is 2MiB or 16MiB"));
        }
        if let Some((key, _)) = self.labels.iter().find(|(key, _)| key.starts_with(OWN_LABELS)) {
            return Err(Error::invalid(format!(
                "label `{key}`: labels that begin with `{OWN_LABELS}` are those of `dbs` itself"
            )));
        }
        if self.specs.len() > 1 && (self.name.is_some() || self.to.is_some()) {
            return Err(Error::invalid(
                "--name and --to are for one backup: run the command for each",
            ));
        }
        Ok(())
    }

    /// What was backed up, and what to say of it; and the last error.
    fn each(&self, context: &Context, target: &Target) -> (Vec<(Created, String)>, Option<Error>) {
        let (mut all, mut failed) = (Vec::new(), None);
        for spec in &self.specs {
            match self.one(context, target, spec) {
                Ok(created) => {
                    let (read, wrote) = (format_size(created.read), format_size(created.uploaded));
                    let url = &created.url;
                    let text = format!("backed up {spec}, {read} read, {wrote} written\n{url}");
                    all.push((created, text));
                }
                Err(error) => {
                    let error = error.context(format!("backing up {spec}"));
                    if let Some(before) = failed.replace(error) {
                        output::warn(&before.to_string());
                    }
                    if context.stop.asked() {
                        break;
                    }
                }
            }
        }
        (all, failed)
    }

    fn one(&self, context: &Context, target: &Target, spec: &Spec) -> Result<Created> {
        let volume = spec.volume.clone();
        if let Some(snapshot) = spec.snapshot.clone() {
            return self.snapshot(context, target, &SnapshotSpec { volume, snapshot });
        }
        let place = place(&self.url, self.name_there(&volume));
        // Before the snapshot, which would not be found again by such a place.
        if place_of(&place).as_ref() != Some(&place) {
            return Err(Error::invalid(format!(
                "`{}` cannot be the name of a volume in a backup store, which has two or more letters, digits, `.`, `_` and `-`: \
                 give it another one there with --to",
                self.name_there(&volume)
            )));
        }
        let taken = take(context, target, &volume, TAKEN_AS, (TAKEN_FOR, &place))?;
        let created = self.snapshot(context, target, &taken);
        // The next backup needs the difference to the snapshot of the last complete one, and to no other.
        let useless = |other: &SnapshotInfo| match &created {
            Ok(_) => other.name != taken.snapshot,
            Err(_) => other.name == taken.snapshot,
        };
        // What became of the backup is not hidden by what becomes of snapshots.
        let snapshots = target.access()?.snapshots(&volume).unwrap_or_else(|error| {
            output::warn(&format!("snapshots that no backup needs are kept: {error}"));
            Vec::new()
        });
        let of_here = |label: &str| place_of(label).as_ref() == Some(&place);
        let labels: Vec<_> = snapshots.iter().filter_map(taken_for).collect();
        let is_first = created.is_ok() && labels.iter().filter(|l| of_here(l)).count() == 1;
        if let Some(other) = labels.iter().find(|l| is_first && !of_here(l)) {
            context.note(&format!(
                "this is the first backup of {volume} to {place}. Snapshots that were taken for backups to {other} stay, \
                 and take space: delete them if you no longer back up to there"
            ));
        }
        for snapshot in snapshots {
            // One with another name is its user's.
            let is_ours = !snapshot.user_created && taken_at(&snapshot.name, TAKEN_AS).is_some();
            if is_ours && taken_for(&snapshot).is_some_and(of_here) && useless(&snapshot) {
                let spec = SnapshotSpec { volume: volume.clone(), snapshot: snapshot.name };
                if let Err(error) = remove(context, target, &spec) {
                    output::warn(&format!("snapshot {spec} is kept: {error}"));
                }
            }
        }
        created
    }

    /// What the volume is called in the backup store.
    fn name_there<'a>(&'a self, volume: &'a str) -> &'a str {
        self.to.as_deref().unwrap_or(volume)
    }

    fn snapshot(&self, context: &Context, target: &Target, spec: &SnapshotSpec) -> Result<Created> {
        let source = SnapshotSource::open(target.access()?, spec)?;
        let backups = open(&self.url)?;
        let mut labels = source.labels();
        labels.extend(self.labels.iter().cloned());
        let options = CreateOptions {
            volume: self.name_there(&spec.volume).to_owned(),
            snapshot: spec.snapshot.clone(),
            backup: self.name.clone(),
            method: self.compression,
            block_size: self.block_size,
            full: self.full,
            labels,
            ..CreateOptions::default()
        };
        let creation = backups.create(&source, options)?;
        let mut meter = context.meter(&format!("backing up {spec}"), Unit::Bytes);
        creation.run(&mut self.pace.work(&mut |done, total| meter.update(done, total)))
    }
}
