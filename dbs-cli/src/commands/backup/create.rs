//! `dbs backup create`.

use super::{Commands, Pace, open, url};
use crate::context::Context;
use crate::output;
use crate::spec::{self, Spec};
use crate::target::Target;
use clap::Args;
use dbs_backup::codec::Method;
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Created};
use dbs_core::{Error, Result, format_size};
use dbs_volume_backup::{Options, create};

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
        self.options().check()?;
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
        // The same for all: opening one may cost a second.
        let (host, mut backups) = (Commands { context, target }, None);
        for spec in &self.specs {
            match self.one(&host, spec, &mut backups) {
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

    fn one(
        &self,
        host: &Commands<'_>,
        spec: &Spec,
        backups: &mut Option<BackupStore>,
    ) -> Result<Created> {
        let backups = match backups {
            Some(opened) => opened,
            none => none.insert(open(&self.url)?),
        };
        let what = (&*spec.volume, spec.snapshot.as_deref());
        create(host, backups, what, &self.options(), self.pace.pace())
    }

    fn options(&self) -> Options {
        Options {
            name: self.name.clone(),
            to: self.to.clone(),
            full: self.full,
            compression: self.compression,
            block_size: self.block_size,
            labels: self.labels.iter().cloned().collect(),
        }
    }
}
