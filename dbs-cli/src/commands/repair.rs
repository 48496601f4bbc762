//! Repairing a damaged store.

use crate::confirm::confirm;
use crate::context::Context;
use crate::exit;
use crate::output::{print, print_json};
use clap::Args;
use dbs_core::info::{LostRange, RepairKind, RepairReport, Severity};
use dbs_core::store::RepairOptions;
use dbs_core::{Error, Result, Store, TailPlace, format_size};
use jiff::Zoned;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Lost ranges printed; far more of them are in the JSON.
const RANGES_PRINTED: usize = 100;

/// Repair the metadata of a damaged store, or undo a repair.
///
/// Prints the plan, asks, saves the present metadata in a file, and mends what can be mended without a
/// guess. Content that is lost is listed; reading it fails from then on.
#[derive(Debug, Args)]
pub struct Repair {
    /// Print the plan and change nothing. The exit codes are those of `dbs check`
    #[arg(long)]
    dry_run: bool,
    /// File to save the present metadata in; by default STORE.metadata-TIME
    #[arg(long, value_name = "FILE", conflicts_with = "dry_run")]
    save: Option<PathBuf>,
    /// Go back to the state before the first commit group of the journal that cannot be read.
    /// Everything written since is lost
    #[arg(long)]
    lose_journal: bool,
    /// Undo a repair: put back the metadata that it saved in this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dry_run", "save", "lose_journal"])]
    undo: Option<PathBuf>,
    /// With --undo: go on even if the store was written since the repair. Those writes are lost, and
    /// volumes may show content of other volumes
    #[arg(long, requires = "undo")]
    force: bool,
}

impl Repair {
    pub fn run(self, context: &Context) -> Result<ExitCode> {
        let path = context.store()?;
        let driver = context.driver();
        if let Some(saved) = &self.undo {
            // Before anybody is asked.
            File::open(saved).map_err(|error| unreadable(saved, error))?;
            let what = format!(
                "Put back the metadata of {} from {}?{}",
                path.display(),
                saved.display(),
                if self.force {
                    " Everything written since is lost, and volumes show newer content where the \
                     store has used space again."
                } else {
                    ""
                }
            );
            confirm(context, &what)?;
            Store::undo_repair(path, saved, driver, self.force)?;
            let text = format!("put back the metadata from {}", saved.display());
            context.done(&serde_json::Value::Null, &text)?;
            return Ok(ExitCode::SUCCESS);
        }
        let options =
            RepairOptions { lose_journal: self.lose_journal, tail: TailPlace::Auto, driver };
        let plan = Store::plan_repair(path, &options)?;
        let report = plan.report();
        if !context.json {
            print(&describe(report))?;
        }
        if report.steps.is_empty() || self.dry_run {
            if context.json {
                print_json(report)?;
            }
            return Ok(ExitCode::from(code(report)));
        }
        if report.steps.iter().any(|step| step.kind == RepairKind::Refused) {
            return Err(Error::corrupt(
                "the store cannot be repaired this way: see the lines that begin with `refused`",
            ));
        }
        let save = match self.save {
            Some(save) => save,
            None => beside(path)?,
        };
        let what = match plan.saves() {
            true => format!("Save the metadata in {} and repair?", save.display()),
            false => "Repair? No metadata is written over, and none is saved.".to_owned(),
        };
        confirm(context, &what)?;
        let report = plan.carry_out(&save)?;
        let text = match &report.saved {
            Some(saved) => format!("repaired; the metadata from before the repair is in {saved}"),
            None => "repaired".to_owned(),
        };
        context.done(&report, &text)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Write the metadata of a dump over the metadata of a store, or into a new file.
///
/// Of a damaged store the data must still be in its place. Its present metadata is saved in a file
/// first. A new file gets the volumes and snapshots without their data.
#[derive(Debug, Args)]
pub struct RestoreMetadata {
    /// A file with the output of `dbs dump`
    dump: PathBuf,
    /// File to save the present metadata in, if there is any; by default STORE.metadata-TIME
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

impl RestoreMetadata {
    pub fn run(self, context: &Context) -> Result<()> {
        let path = context.store()?;
        let dump = std::fs::read(&self.dump).map_err(|error| unreadable(&self.dump, error))?;
        let save = match self.save {
            Some(save) => save,
            None => beside(path)?,
        };
        let (from, to) = (self.dump.display(), path.display());
        let what = if path.exists() {
            let save = save.display();
            format!(
                "Save the metadata of {to} in {save}, and write the metadata of {from} over it?"
            )
        } else {
            format!("Make {to}, with the metadata of {from} and no data?")
        };
        if !context.yes {
            // Before anything is made.
            confirm(context, &what)?;
        }
        let plan = Store::plan_restore(path, &dump, context.driver())?;
        if !context.json && !context.quiet {
            print(&describe(plan.report()))?;
        }
        let report = plan.carry_out(&save)?;
        let text = match &report.saved {
            Some(saved) => format!("restored; the metadata from before is in {saved}"),
            None => "restored".to_owned(),
        };
        context.done(&report, &text)
    }
}

fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => Error::not_found(format!("no file `{}`", path.display())),
        _ => Error::io(error, format!("cannot read `{}`", path.display())),
    }
}

/// The exit code for what is found.
fn code(report: &RepairReport) -> u8 {
    match report.findings.iter().map(|finding| finding.severity).max() {
        None | Some(Severity::Note) => 0,
        Some(Severity::Leak) => exit::FINDINGS,
        Some(Severity::Corrupt) => exit::CORRUPT,
    }
}

/// Where the metadata is saved if nobody says where.
fn beside(path: &Path) -> Result<PathBuf> {
    let metadata = std::fs::metadata(path);
    if metadata.is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        return Err(Error::invalid(
            "the store is a device: name a file for its present metadata with --save FILE",
        ));
    }
    let mut name = path.as_os_str().to_owned();
    name.push(Zoned::now().strftime(".metadata-%Y-%m-%dT%H%M%S").to_string());
    Ok(name.into())
}

fn describe(report: &RepairReport) -> String {
    if report.steps.is_empty() {
        return "nothing to repair\n".to_owned();
    }
    let mut text = String::new();
    for step in &report.steps {
        let kind = match step.kind {
            RepairKind::Mended => "mend",
            RepairKind::Freed => "free",
            RepairKind::Renamed => "rename",
            RepairKind::Lost => "lost",
            RepairKind::Refused => "refused",
        };
        let index = step.index.map(|index| format!(" {index}")).unwrap_or_default();
        text += &format!("{kind}: {}{index}: {}\n", step.region, step.message);
    }
    for LostRange { volume, snapshot, offset, length } in report.lost.iter().take(RANGES_PRINTED) {
        let snapshot = snapshot.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
        let size = format_size(*length);
        text += &format!("unreadable: {volume}{snapshot}: {size} from byte {offset}\n");
    }
    let unprinted = report.lost.len().saturating_sub(RANGES_PRINTED) as u64;
    if unprinted > 0 {
        text += &format!("unreadable: {unprinted} more ranges: see --json\n");
    }
    if report.lost_more > 0 {
        text += &format!("unreadable: {} more ranges, which are not listed\n", report.lost_more);
    }
    text
}
