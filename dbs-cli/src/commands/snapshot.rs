//! Commands on snapshots.

use super::volume::usage_rows;
use crate::confirm::confirm_in_store;
use crate::context::{Context, typed};
use crate::output::{Table, exact_size, facts, time};
use crate::spec::{self, LabelChange, SnapshotSpec};
use clap::Args;
use dbs_control::api::Request;
use dbs_core::info::{Labels, SnapshotInfo};
use dbs_core::{Error, Result, format_size};

/// Take a snapshot of a volume.
#[derive(Debug, Args)]
pub struct Create {
    /// The snapshot to make, as VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
    /// A label to start with; can be repeated
    #[arg(long = "label", value_parser = spec::label, value_name = "KEY=VALUE")]
    labels: Vec<(String, String)>,
}

impl Create {
    pub fn run(self, context: &Context) -> Result<()> {
        spec::check_new_snapshot(&self.snapshot.snapshot)?;
        let message = format!("created snapshot {}", self.snapshot);
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let labels = self.labels.into_iter().collect();
        let request =
            Request::SnapshotCreate { volume, snapshot, labels, system: false, rebuilding: None };
        context.done(&context.call(&request)?, &message)
    }
}

/// List the snapshots of a volume, oldest first.
#[derive(Debug, Args)]
pub struct List {
    /// Volume
    volume: String,
    /// Also show the space of each snapshot, which takes longer
    #[arg(long, short)]
    usage: bool,
}

impl List {
    pub fn run(self, context: &Context) -> Result<()> {
        let request = Request::SnapshotList { volume: self.volume.clone(), usage: self.usage };
        let value = context.call(&request)?;
        context.show(value, |snapshots: Vec<SnapshotInfo>| self.table(&snapshots))
    }

    fn table(&self, snapshots: &[SnapshotInfo]) -> String {
        let mut headings = vec!["NAME", ">SIZE", "PARENT", "STATE", "CREATED", "LABELS"];
        if self.usage {
            headings.extend([">REFERENCED", ">EXCLUSIVE", ">RECLAIMABLE"]);
        }
        let mut table = Table::new(&headings);
        for snapshot in snapshots {
            let mut row = vec![
                snapshot.name.clone(),
                format_size(snapshot.size),
                snapshot.parent.clone().unwrap_or_default(),
                state(snapshot),
                time(snapshot.created_ns),
                labels(&snapshot.labels),
            ];
            if self.usage {
                let usage = &snapshot.usage;
                row.extend([usage.referenced, usage.exclusive, usage.reclaimable].map(format_size));
            }
            table.row(row);
        }
        table.text()
    }
}

fn state(snapshot: &SnapshotInfo) -> String {
    let words = [(snapshot.protected, "protected"), (snapshot.retired, "retired")];
    let words: Vec<_> = words.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect();
    words.join(",")
}

fn labels(labels: &Labels) -> String {
    let pairs: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",")
}

/// Show one snapshot.
#[derive(Debug, Args)]
pub struct Show {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
}

impl Show {
    pub fn run(self, context: &Context) -> Result<()> {
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let value = context.call(&Request::SnapshotShow { volume, snapshot, usage: true })?;
        context.show(value, |snapshot: SnapshotInfo| {
            let yes_no = |yes| if yes { "yes" } else { "no" }.to_owned();
            let mut rows = vec![
                ("volume", snapshot.volume),
                ("name", snapshot.name),
                ("uuid", snapshot.uuid),
                ("size", exact_size(snapshot.size)),
                ("created", time(snapshot.created_ns)),
                ("by", if snapshot.user_created { "user" } else { "system" }.to_owned()),
                ("protected", yes_no(snapshot.protected)),
                ("retired", yes_no(snapshot.retired)),
            ];
            rows.extend(snapshot.parent.map(|parent| ("parent", parent)));
            rows.extend(snapshot.children.into_iter().map(|child| ("child", child)));
            let labels = snapshot.labels.iter().map(|(key, value)| format!("{key}={value}"));
            rows.extend(labels.map(|label| ("label", label)));
            rows.extend(usage_rows(&snapshot.usage));
            facts(&rows)
        })
    }
}

/// Rename a snapshot.
#[derive(Debug, Args)]
pub struct Rename {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
    /// Its new name (without the volume)
    new: String,
}

impl Rename {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("renamed snapshot {} to {}", self.snapshot, self.new);
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let request = Request::SnapshotRename { volume, snapshot, new: self.new };
        context.done(&context.call(&request)?, &message)
    }
}

/// Delete a snapshot.
#[derive(Debug, Args)]
pub struct Delete {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
}

impl Delete {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("deleted snapshot {}", self.snapshot);
        let question = format!("Delete snapshot {}?", self.snapshot);
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let request = Request::SnapshotDelete { volume, snapshot, uuid: None };
        destroy(context, request, &question, &message)
    }
}

/// Return a volume to a snapshot: what was written since is lost, later snapshots stay.
///
/// The command is refused while a client, a block device or a replica has the volume open. `dbs
/// clients` lists who has.
#[derive(Debug, Args)]
pub struct Rollback {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
}

impl Rollback {
    pub fn run(self, context: &Context) -> Result<()> {
        let spec = &self.snapshot;
        let message = format!("rolled back volume {} to snapshot {}", spec.volume, spec.snapshot);
        let question = format!(
            "Roll back volume {}? Everything written to it since its last snapshot is lost.",
            spec.volume
        );
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let request = Request::SnapshotRollback { volume, snapshot, uuid: None };
        destroy(context, request, &question, &message)
    }
}

/// Runs a request that destroys something, after asking; a snapshot that is not there is reported
/// without asking.
fn destroy(context: &Context, mut request: Request, question: &str, message: &str) -> Result<()> {
    let (Request::SnapshotDelete { volume, snapshot, .. }
    | Request::SnapshotRollback { volume, snapshot, .. }) = &request
    else {
        return Err(Error::unsupported("no such command"));
    };
    let (volume, snapshot) = (volume.clone(), snapshot.clone());
    let spec = format!("{volume}@{snapshot}");
    let show = Request::SnapshotShow { volume, snapshot, usage: false };
    let value = context.with(true, |target| {
        let asked: SnapshotInfo = typed(target.call(context, &show)?)?;
        confirm_in_store(context, question)?;
        // The question may have been open for long, and names are used again.
        request.mean(&spec, &asked.uuid);
        target.call(context, &request)
    })?;
    context.done(&value, message)
}

/// Protect a snapshot from deletion.
#[derive(Debug, Args)]
pub struct Protect {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
}

impl Protect {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("snapshot {} is protected", self.snapshot);
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        context.done(&context.call(&Request::SnapshotProtect { volume, snapshot })?, &message)
    }
}

/// Remove the protection of a snapshot, so that it can be deleted.
#[derive(Debug, Args)]
pub struct Unprotect {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
}

impl Unprotect {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("snapshot {} is no longer protected", self.snapshot);
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        context.done(&context.call(&Request::SnapshotUnprotect { volume, snapshot })?, &message)
    }
}

/// Set labels with KEY=VALUE, remove them with KEY-.
#[derive(Debug, Args)]
pub struct Label {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
    /// KEY=VALUE or KEY-
    #[arg(required = true)]
    changes: Vec<LabelChange>,
}

impl Label {
    pub fn run(self, context: &Context) -> Result<()> {
        let name = self.snapshot.to_string();
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let (mut set, mut remove) = (Labels::new(), Vec::new());
        for change in self.changes {
            match change {
                LabelChange::Set(key, value) => {
                    set.insert(key, value);
                }
                LabelChange::Remove(key) => remove.push(key),
            }
        }
        let value = context.call(&Request::SnapshotLabel { volume, snapshot, set, remove })?;
        let info: SnapshotInfo = typed(value.clone())?;
        context.done(&value, &format!("snapshot {name}: {}", labels(&info.labels)))
    }
}
