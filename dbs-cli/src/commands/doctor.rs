//! `dbs doctor`: what is wrong with a store, its server, its devices and this machine, and what to do.

use crate::context::{Context, typed};
use crate::exit;
use crate::output::{print, print_json, printable};
use crate::target::Target;
use clap::Args;
use dbs_client::any_store::AnyStore;
use dbs_control::api::Request;
use dbs_control::store_key;
use dbs_core::info::{CheckReport, Severity, StoreInfo, VolumeInfo};
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_ublk::preflight::preflight;
use dbs_ublk::{State, list};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde::Serialize;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;

/// Less than this part of the space free is told.
const FREE_PART: u64 = 20;

/// Look at the store, its server, its devices and this machine: what is wrong, and what to do.
///
/// What harms most comes first. Nothing is changed. Exit code 0 if nothing is wrong, 4 if the store or data in it
/// is damaged, else 3. Notes do not count.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Do not check the metadata, which takes long in large stores
    #[arg(long)]
    no_check: bool,
}

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Grade {
    /// The store or data in it is damaged.
    Damage,
    /// Something does not work.
    Problem,
    /// Something will not work, or is worse than it could be.
    Warning,
    /// Good to know.
    Note,
}

/// One thing that was found.
#[derive(Debug, Serialize)]
struct Finding {
    grade: Grade,
    /// What it is about: `store`, `space`, `volumes`, `metadata`, `devices` or `machine`.
    about: &'static str,
    found: String,
    /// What to do.
    remedy: String,
}

/// What was looked at, and all that was found.
#[derive(Debug, Default, Serialize)]
struct Diagnosis {
    store: String,
    /// The process that serves it; absent if none does, or if it cannot be seen from here.
    served_by: Option<u32>,
    served: bool,
    findings: Vec<Finding>,
}

impl Doctor {
    pub fn run(self, context: &Context) -> Result<ExitCode> {
        let path = context.store()?;
        let mut diagnosis = Diagnosis { store: path.display().to_string(), ..Diagnosis::default() };
        match Target::open(context, false) {
            Ok(Target::Live(store)) => {
                let target = Target::Live(store);
                // A store that opens may fail to be read further on: that is a finding, too.
                let looked = diagnosis.store_of(context, &target, self.no_check);
                if let Err(error) = looked.and_then(|()| target.close()) {
                    diagnosis.fails(&error);
                }
            }
            Ok(Target::Old(_)) => diagnosis.add(
                Grade::Warning,
                "store",
                "this is an image of version 1.0.0, which is only read".into(),
                "`dbs upgrade IMAGE NEW` makes a store of it",
            ),
            // Then there is nothing to look at.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
                return Err(error);
            }
            Err(error) => diagnosis.fails(&error),
        }
        diagnosis.file_system(path);
        diagnosis.devices(context, path);
        diagnosis.machine();
        diagnosis.findings.sort_by_key(|finding| finding.grade);
        match context.json {
            true => print_json(&diagnosis)?,
            false => print(&diagnosis.text())?,
        }
        Ok(match diagnosis.findings.first().map(|finding| finding.grade) {
            None | Some(Grade::Note) => ExitCode::SUCCESS,
            Some(Grade::Damage) => ExitCode::from(exit::CORRUPT),
            Some(_) => ExitCode::from(exit::FINDINGS),
        })
    }
}

impl Diagnosis {
    fn add(&mut self, grade: Grade, about: &'static str, found: String, remedy: &str) {
        self.findings.push(Finding { grade, about, found, remedy: remedy.to_owned() });
    }

    /// The store cannot be opened, or read to the end.
    fn fails(&mut self, error: &Error) {
        let grade = match error.kind() {
            ErrorKind::Corrupt => Grade::Damage,
            _ => Grade::Problem,
        };
        let remedy = match error.kind() {
            ErrorKind::Corrupt => {
                "`dbs check` says what is damaged, `dbs repair --dry-run` what can be repaired (docs/damage.md)"
            }
            ErrorKind::Busy => {
                "end the process that has it, or serve the store with `dbs serve`, which commands ask"
            }
            ErrorKind::Elsewhere => {
                "end what writes it there (docs/damage.md), or let it close the store"
            }
            ErrorKind::Unsupported => "use the version of `dbs` that made it, or a newer one",
            _ => "see the message; the store was not changed",
        };
        self.add(grade, "store", error.to_string(), remedy);
    }

    fn store_of(&mut self, context: &Context, target: &Target, no_check: bool) -> Result<()> {
        let info: StoreInfo = typed(target.call(context, &Request::Info)?)?;
        if let Target::Live(AnyStore::Served(server)) = target {
            (self.served, self.served_by) = (true, server.server_process());
            self.server(&info);
        }
        for warning in &info.warnings {
            self.add(
                Grade::Warning,
                "store",
                warning.clone(),
                "docs/reliability.md and docs/damage.md say what it means",
            );
        }
        self.checksums(&info);
        self.space(&info);
        let volumes = target.call(context, &Request::VolumeList { usage: false })?;
        let volumes: Vec<VolumeInfo> = typed(volumes)?;
        for volume in volumes.iter().filter(|volume| volume.rebuilding && !volume.open) {
            self.add(
                Grade::Warning,
                "volumes",
                format!("volume {} is incomplete, and nobody fills it", volume.name),
                "go on with the import, receive or restore that filled it; or give it up: roll it back, or delete it",
            );
        }
        if !no_check {
            let report: CheckReport = typed(target.call(context, &Request::Check)?)?;
            self.metadata(&report);
        }
        Ok(())
    }

    fn server(&mut self, info: &StoreInfo) {
        if info.read_only {
            let found = "the server has opened the store for reading only";
            self.add(
                Grade::Note,
                "store",
                found.into(),
                "start `dbs serve` without --read-only to write",
            );
        } else if !info.tail {
            self.add(
                Grade::Warning,
                "store",
                "the server has no place for a tail: each write to new blocks waits for the disk".into(),
                "give its user a directory on tmpfs: /run/dbs (as root) or /dev/shm; then start the server again",
            );
        }
        if info.driver != "io_uring" {
            self.add(
                Grade::Warning,
                "store",
                format!("the server does I/O with {}, which takes more CPU time", info.driver),
                "allow io_uring (`dbs preflight` says how), and start the server again without --driver",
            );
        }
    }

    fn checksums(&mut self, info: &StoreInfo) {
        let Some(sums) = &info.checksums else {
            let found = "the store keeps no checksums: data that the medium has damaged is returned as it is";
            let remedy = "make a new store without --no-checksums, and bring the volumes over with `dbs send` and `receive`";
            return self.add(Grade::Note, "store", found.into(), remedy);
        };
        if sums.mismatches > 0 {
            self.add(
                Grade::Damage,
                "store",
                format!("damaged data was met {} times since the store was opened", sums.mismatches),
                "`dbs scrub` says where; restore that from a backup (docs/damage.md), and look at the disk",
            );
        }
    }

    fn space(&mut self, info: &StoreInfo) {
        let (free, size) = (format_size(info.free), format_size(info.size));
        let remedy = "delete snapshots or volumes (`dbs volume list --usage`), or `dbs grow`";
        if info.extents_free == 0 {
            self.add(
                Grade::Problem,
                "space",
                "the store is full: new data is refused".into(),
                remedy,
            );
        } else if info.extents_free < info.extents_total / FREE_PART {
            self.add(Grade::Warning, "space", format!("only {free} of {size} are free"), remedy);
        }
        let slots = [
            ("volumes", info.volumes, info.volumes_max),
            ("snapshots and volumes", info.snapshots, info.snapshots_max),
        ];
        for (what, used, most) in slots {
            if most - used.min(most) < most / FREE_PART {
                self.add(
                    Grade::Warning,
                    "space",
                    format!("the store has {used} of at most {most} {what}"),
                    "delete some; the numbers are chosen by `dbs init`, so more need a new store",
                );
            }
        }
    }

    fn metadata(&mut self, report: &CheckReport) {
        for finding in &report.findings {
            let (grade, remedy) = match finding.severity {
                Severity::Note => (Grade::Note, "nothing: it is healed, or does no harm"),
                Severity::Leak => {
                    (Grade::Warning, "`dbs repair --dry-run` on the idle store, then `dbs repair`")
                }
                Severity::Corrupt => (
                    Grade::Damage,
                    "back up what can be read; then `dbs repair --dry-run` (docs/damage.md)",
                ),
            };
            let index = finding.index.map(|index| format!(" {index}")).unwrap_or_default();
            let found = format!("{}{index}: {}", finding.region, finding.message);
            self.add(grade, "metadata", found, remedy);
        }
        if report.checksums_open > 0 {
            self.add(
                Grade::Note,
                "metadata",
                format!(
                    "up to {} of data has no checksums after a crash",
                    format_size(report.checksums_open)
                ),
                "`dbs serve` makes them again in the background, `dbs scrub` at once",
            );
        }
    }

    /// What the file system below leaves.
    fn file_system(&mut self, path: &Path) {
        let Ok(file) = fs::metadata(path).map(|file| (file.is_file(), file)) else { return };
        let (true, file) = file else { return };
        let Ok(below) = statfs(path) else { return };
        if below.filesystem_type() == TMPFS_MAGIC {
            let found = "the store is in memory (tmpfs): it is gone when the machine restarts";
            self.add(Grade::Problem, "space", found.into(), "copy the store to a disk");
        }
        let available = below.blocks_available() * u64::try_from(below.block_size()).unwrap_or(0);
        let wanted = file.len().saturating_sub(file.blocks() * 512);
        if available < wanted {
            let grade = if available < wanted / FREE_PART { Grade::Problem } else { Grade::Note };
            self.add(
                grade,
                "space",
                format!(
                    "the file system below has {} left, and the store may come to need {}",
                    format_size(available),
                    format_size(wanted)
                ),
                "make room there in time: if it is full, writes of new data fail with \"no space left\", and lose nothing",
            );
        }
    }

    fn devices(&mut self, context: &Context, path: &Path) {
        let Ok(key) = store_key(path) else { return };
        for device in list(&context.runtime_dir(), Some(&key)) {
            let what = format!("{}, the device of {}", device.device.display(), device.spec());
            match device.state {
                State::Waiting => self.add(
                    Grade::Problem,
                    "devices",
                    format!("{what}, has no server: its users wait"),
                    "`dbs serve` takes the device over; `dbs detach --force` removes it, and its users get errors",
                ),
                State::Dead => self.add(
                    Grade::Problem,
                    "devices",
                    format!("{what}, does not work any more"),
                    "the server's log says why; `dbs detach --force`, then `dbs attach`",
                ),
                State::Live | State::Unknown => {}
            }
        }
    }

    fn machine(&mut self) {
        let found = preflight();
        for way in found.ways.iter().filter(|way| !way.works) {
            let remedy = |name: &String| {
                found.checks.iter().find(|check| check.name == *name)?.remedy.clone()
            };
            let remedies: Vec<_> = way.lacks.iter().filter_map(remedy).take(1).collect();
            let text = format!("not possible here: {}", way.what);
            self.add(
                Grade::Note,
                "machine",
                text,
                &format!("{} (`dbs preflight`)", remedies.join("; ")),
            );
        }
    }

    fn text(&self) -> String {
        let by = match (self.served, self.served_by) {
            (false, _) => "nobody serves it".to_owned(),
            (true, None) => "it is served".to_owned(),
            (true, Some(process)) => format!("served by process {process}"),
        };
        let mut text = format!("{}: {by}\n", printable(&self.store));
        for Finding { grade, about, found, remedy } in &self.findings {
            let grade = match grade {
                Grade::Damage => "DAMAGE",
                Grade::Problem => "PROBLEM",
                Grade::Warning => "warning",
                Grade::Note => "note",
            };
            text +=
                &format!("\n{grade} ({about}): {}\n  -> {}\n", printable(found), printable(remedy));
        }
        let count = self.findings.iter().filter(|finding| finding.grade != Grade::Note).count();
        text + &match count {
            0 => "\nnothing is wrong\n".to_owned(),
            1 => "\n1 thing is wrong\n".to_owned(),
            count => format!("\n{count} things are wrong\n"),
        }
    }
}
