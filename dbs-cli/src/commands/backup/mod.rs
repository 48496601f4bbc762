//! `dbs backup`: backups in Longhorn's layout or in a repository, of stores that are idle or served.

mod create;
mod delete;
mod init;
mod key;
mod lazy;
mod mount;
mod show;

use crate::backups::{open, secret, variable};
use crate::context::Context;
use crate::exit;
use crate::output;
use crate::progress::Unit;
use crate::spec;
use crate::target::Target;
use clap::Args;
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Restored, Verified, Work};
use dbs_control::api::Request;
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_transfer::StoreAccess;
use dbs_volume_backup::{Host, Wanted, restore};
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::process::ExitCode;

pub use create::Create;
pub use delete::{Delete, Prune};
pub use init::{Collect, Init};
pub use key::KeyCommand;
pub use mount::Mount;
pub use show::{List, Show};

/// Bad blocks that are printed.
const SHOWN: usize = 20;

/// How much at once.
#[derive(Debug, Args)]
pub struct Pace {
    /// Send and read at most this many bytes a second; 0 means no limit
    #[arg(long, value_parser = spec::size, value_name = "SIZE")]
    rate: Option<u64>,
    /// Blocks in flight at once; each takes memory for about twelve blocks
    #[arg(long, default_value_t = 4, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
}

impl Pace {
    fn pace(&self) -> dbs_volume_backup::Pace {
        let rate = self.rate.and_then(NonZeroU64::new);
        dbs_volume_backup::Pace { workers: self.parallel.into(), rate }
    }

    fn work<'a>(&self, progress: &'a mut dyn FnMut(u64, u64) -> bool) -> Work<'a> {
        self.pace().work(progress)
    }
}

/// Parses a URL, for clap.
fn url(text: &str) -> std::result::Result<Url, String> {
    Url::parse(text).map_err(|e| e.to_string())
}

/// Make a volume from a backup.
///
/// Until everything is restored, the volume is incomplete: no client can open it.
#[derive(Debug, Args)]
pub struct Restore {
    /// The backup, as `dbs backup list` prints it
    #[arg(value_parser = url)]
    url: Url,
    /// Name of the new volume; by default that of the volume that was backed up
    volume: Option<String>,
    /// Continue a restore that was cut off: blocks that are right already are not read again. With the URL
    /// that --lazy has printed: bring all of that backup into the store now
    #[arg(long)]
    resume: bool,
    /// Make a volume that can be used at once. Blocks come from the backup store when they are read, until a
    /// server of the store has brought all of them (`dbs serve --backing-backup`), or --resume has. Until
    /// then the volume needs the backup store. The store must be idle
    #[arg(long, conflicts_with_all = ["resume", "rate", "parallel"])]
    lazy: bool,
    #[command(flatten)]
    pace: Pace,
}

impl Restore {
    pub fn run(self, context: &Context) -> Result<()> {
        let (from, backup) = self.url.need_backup()?;
        let name = self.volume.clone().unwrap_or_else(|| from.to_owned());
        context.stop.on_signals()?;
        if self.lazy {
            return lazy::begin(context, &self.url, &name);
        }
        let (value, restored) = context.with(true, |target| {
            if self.resume && lazy::is_begun(target, &self.url, self.volume.as_deref())? {
                let volume = lazy::finish(context, target, &self.url, self.pace.pace())?;
                let Some(volume) = volume else { return Ok((Value::Null, None)) };
                let show = Request::VolumeShow { volume, usage: true };
                return Ok((target.call(context, &show)?, None));
            }
            let (host, backups) = (Commands { context, target }, open(&self.url)?);
            let wanted = Wanted { volume: from, backup, name: &name, resume: self.resume };
            let restored = restore(&host, &backups, wanted, self.pace.pace())?;
            let show = Request::VolumeShow { volume: name.clone(), usage: true };
            Ok((target.call(context, &show)?, Some(restored)))
        })?;
        let Some(Restored { data, downloaded, .. }) = restored else {
            let text = match value["name"].as_str() {
                Some(name) => format!("all of volume {name} is in the store"),
                None => {
                    format!("no volume rests on {} any more, and nothing of it is left", self.url)
                }
            };
            return context.done(&value, &text);
        };
        let (data, downloaded) = (format_size(data), format_size(downloaded));
        context.done(&value, &format!("restored volume {name}, {data} written, {downloaded} read"))
    }
}

/// A command and its store, as backups and restores use them.
struct Commands<'a> {
    context: &'a Context,
    target: &'a Target,
}

impl Host for Commands<'_> {
    fn store(&self) -> Result<&(dyn StoreAccess + Sync)> {
        self.target.access()
    }

    fn call(&self, request: &Request) -> Result<Value> {
        self.target.call(self.context, request)
    }

    fn clean_up(&self, request: &Request) -> Result<()> {
        self.target.clean_up(self.context, request)
    }

    fn check_same(&self, spec: &str, uuid: &str) -> Result<()> {
        self.target.check_same(spec, uuid)
    }

    fn note(&self, text: &str) {
        self.context.note(text);
    }

    fn warn(&self, text: &str) {
        output::warn(text);
    }

    fn meter(&self, label: &str) -> dbs_volume_backup::Meter<'_> {
        let mut meter = self.context.meter(label, Unit::Bytes);
        Box::new(move |done, total| meter.update(done, total))
    }
}

/// Check whether a backup can be restored: exit code 4 for damage, 10 if there is nothing to verify.
///
/// The command checks that all blocks of the backup are there, and with --data that each block has its
/// content. A full backup of the same snapshot (`dbs backup create --full`) mends damaged blocks. In a
/// repository, --mend has any next backup do that.
#[derive(Debug, Args)]
pub struct Verify {
    /// The backup, as `dbs backup list` prints it; or a volume, for all its backups
    #[arg(value_parser = url)]
    url: Url,
    /// Read all blocks and compare them with their checksums
    #[arg(long)]
    data: bool,
    /// In a repository: have the next backup of each volume write again what is damaged here, as far as the
    /// volume still has it
    #[arg(long, requires = "data")]
    mend: bool,
    #[command(flatten)]
    pace: Pace,
}

impl Verify {
    pub fn run(self, context: &Context) -> Result<ExitCode> {
        let volume = self.url.need_volume()?;
        context.stop.on_signals()?;
        let backups = open(&self.url)?;
        if self.mend && !backups.is_repository() {
            // Says what does.
            backups.mend()?;
        }
        let names = match &self.url.backup {
            Some(backup) => vec![backup.clone()],
            None => {
                // Without the facts of the volume, none of its backups can be restored.
                backups.volume(volume)?;
                backups.backups(volume)?
            }
        };
        let found = self.verify(context, &backups, volume, names);
        let is_stopped = found.as_ref().is_err_and(|error| error.kind() == ErrorKind::Interrupted);
        if self.mend && !is_stopped {
            // What was found before something else went wrong counts, too.
            let packs = backups.mend();
            if found.is_ok() || packs.as_ref().is_ok_and(|packs| *packs > 0) {
                context.note(&format!(
                    "{} packs are damaged: the next backups write again what the volumes still have of them",
                    packs?
                ));
            }
        }
        let (all, bad) = found?;
        if bad {
            return Ok(ExitCode::from(exit::CORRUPT));
        }
        if all.iter().all(|one| one["verified"].is_null()) {
            let text = format!("volume {volume} has no complete backup: nothing was verified");
            return Err(Error::not_found(text));
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Verifies backups, and says what was found: of each, and whether something is wrong.
    fn verify(
        &self,
        context: &Context,
        backups: &BackupStore,
        volume: &str,
        names: Vec<String>,
    ) -> Result<(Vec<Value>, bool)> {
        let (mut all, mut bad, mut text) = (Vec::new(), false, String::new());
        for name in names {
            let mut meter = context.meter(&format!("verifying {name}"), Unit::Bytes);
            let mut progress = |done, total| meter.update(done, total);
            let found =
                backups.verify(volume, &name, self.data, &mut self.pace.work(&mut progress));
            drop(meter);
            let problem = match &found {
                Ok(verified) => {
                    bad |= !verified.bad.is_empty();
                    text += &describe(&name, verified, self.data);
                    None
                }
                Err(error) if self.url.backup.is_none() && is_finding(error.kind()) => {
                    bad |= match error.kind() {
                        ErrorKind::Corrupt => true,
                        // The single files of Longhorn's first versions are none of ours.
                        ErrorKind::Unsupported => {
                            !backups.backup(volume, &name).is_ok_and(|b| b.is_single_file())
                        }
                        _ => false,
                    };
                    text += &format!("{name}: {error}\n");
                    Some(error.to_string())
                }
                Err(_) => None,
            };
            if problem.is_none() {
                all.push(json!({ "backup": name, "verified": found?, "problem": null }));
            } else {
                all.push(json!({ "backup": name, "verified": null, "problem": problem }));
            }
        }
        if context.json {
            output::print_json(&all)?
        } else {
            output::print(&text)?
        }
        Ok((all, bad))
    }
}

/// What is said of one backup while others are looked at.
fn is_finding(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Busy | ErrorKind::Unsupported
    )
}

fn describe(name: &str, verified: &Verified, data: bool) -> String {
    let mut text = String::new();
    for block in verified.bad.iter().take(SHOWN) {
        text += &format!("{name}: block {} at {}: {}\n", block.block, block.offset, block.problem);
    }
    if verified.bad.len() > SHOWN {
        text += &format!("{name}: {} further bad blocks\n", verified.bad.len() - SHOWN);
    }
    for pack in &verified.damaged_packs {
        text += &format!("{name}: {pack} is damaged\n");
    }
    let verdict = match verified.bad.len() {
        0 if !verified.damaged_packs.is_empty() => {
            "nothing is missing: what is damaged is in other packs, too, until you --mend it"
                .to_owned()
        }
        0 if data => "nothing is missing or damaged".to_owned(),
        0 => "nothing is missing; --data also reads the blocks".to_owned(),
        bad => format!("{bad} are MISSING OR DAMAGED"),
    };
    text + &format!(
        "{name}: {} blocks, {} different: {verdict}\n",
        verified.blocks, verified.different
    )
}
