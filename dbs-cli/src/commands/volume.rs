//! Commands on volumes.

use crate::confirm::confirm_in_store;
use crate::context::{Context, typed};
use crate::output::{Table, exact_size, facts, print, print_json, time};
use crate::secret;
use crate::spec::{self, SnapshotSpec, Spec};
use crate::target::Target;
use clap::Args;
use dbs_client::any_store::AnyStore;
use dbs_control::api::{Given, Ranges, Request, Trimmed};
use dbs_core::info::{
    CompressReport, MapRange, RangeState, TrimReport, Usage, VolumeInfo, VolumeLimits,
};
use dbs_core::{Error, Result, format_size};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Sizes of volumes are multiples of it.
const SECTOR: u64 = 512;

/// Create an empty volume, or one that shows an image until it is written.
#[derive(Debug, Args)]
pub struct Create {
    /// Name of the new volume
    name: String,
    /// Size, such as 10GiB. The volume takes space only for what is written. With --on the default is the
    /// size of the image
    #[arg(value_parser = spec::size, required_unless_present = "on")]
    size: Option<u64>,
    /// A raw or qcow2 image that the volume shows where nothing was written. The image stays where it is
    /// and must not change. Name it with --backing-file in each later command that reads or serves the
    /// volume. The store must be idle
    #[arg(long, value_name = "FILE")]
    on: Option<PathBuf>,
    /// Encrypt what is written to the volume, with a key that a secret unlocks: --key-file,
    /// DBS_VOLUME_PASSPHRASE, DBS_VOLUME_PASSPHRASE_FILE (a file whose first line is the passphrase),
    /// DBS_VOLUME_KEY_FILE, or else a passphrase that the command asks for. Without the secret nobody can
    /// read the volume any more. Clones of the volume share the key
    #[arg(long, conflicts_with = "on")]
    encrypt: bool,
    /// File of 32 random bytes, the secret that unlocks the volume
    #[arg(long, value_name = "FILE", requires = "encrypt")]
    key_file: Option<PathBuf>,
}

impl Create {
    pub fn run(self, context: &Context) -> Result<()> {
        let value = match (&self.on, self.size) {
            (Some(image), _) => {
                // If it is not there, opening it says so.
                if image.exists() {
                    context.refuse_store(image)?;
                }
                context.with(true, |target| self.on(target, image))?
            }
            (None, size) if self.encrypt => {
                let secret = Given(secret::of_new_volume(self.key_file.as_deref(), &self.name)?);
                let (volume, size) = (self.name, size.unwrap_or(0));
                context.call(&Request::VolumeCreateEncrypted {
                    volume,
                    size,
                    secret,
                    rebuilding: false,
                })?
            }
            (None, size) => context.call(&Request::VolumeCreate {
                volume: self.name,
                size: size.unwrap_or(0),
                rebuilding: false,
            })?,
        };
        let volume: VolumeInfo = typed(value.clone())?;
        let size = format_size(volume.size);
        context.done(&value, &format!("created volume {}, {size}", volume.name))
    }

    fn on(&self, target: &Target, image: &Path) -> Result<Value> {
        let Target::Live(AnyStore::Idle(store, _)) = target else {
            return Err(Error::unsupported(
                "a volume on an image is made in an idle store: end the server of the store, make the volume, \
                 and start the server with --backing-file",
            ));
        };
        let file = dbs_backing::open(image)?;
        let size = self.size.unwrap_or_else(|| file.size().next_multiple_of(SECTOR));
        let volume = store.create_backed(&self.name, size, &file)?;
        serde_json::to_value(volume).map_err(|e| Error::io(e.into(), "encoding the result"))
    }
}

/// List all volumes.
#[derive(Debug, Args)]
pub struct List {
    /// Also show the space of each volume, which takes longer
    #[arg(long, short)]
    usage: bool,
}

impl List {
    pub fn run(self, context: &Context) -> Result<()> {
        let value = context.call(&Request::VolumeList { usage: self.usage })?;
        context.show(value, |volumes: Vec<VolumeInfo>| self.table(&volumes))
    }

    fn table(&self, volumes: &[VolumeInfo]) -> String {
        let mut headings = vec!["NAME", ">SIZE", ">SNAPSHOTS", "ORIGIN", "CREATED"];
        // Of most stores nobody needs it.
        let states = volumes.iter().any(|volume| !state(volume).is_empty());
        if states {
            headings.insert(4, "STATE");
        }
        if self.usage {
            headings.extend([">REFERENCED", ">EXCLUSIVE", ">ALLOCATED"]);
        }
        let mut table = Table::new(&headings);
        for volume in volumes {
            let mut row = vec![
                volume.name.clone(),
                format_size(volume.size),
                volume.snapshots.to_string(),
                volume.origin.clone().unwrap_or_default(),
                time(volume.created_ns),
            ];
            if states {
                row.insert(4, state(volume));
            }
            if self.usage {
                let usage = &volume.usage;
                row.extend([usage.referenced, usage.exclusive, usage.allocated].map(format_size));
            }
            table.row(row);
        }
        table.text()
    }
}

/// What is out of the ordinary about a volume.
fn state(volume: &VolumeInfo) -> String {
    let encryption = volume.encryption.as_ref();
    let encryption = encryption.map(|it| if it.locked { "locked" } else { "unlocked" });
    let rebuilding = volume.rebuilding.then_some("rebuilding");
    [rebuilding, encryption].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Show one volume.
#[derive(Debug, Args)]
pub struct Show {
    /// Volume
    name: String,
}

impl Show {
    pub fn run(self, context: &Context) -> Result<()> {
        let value = context.call(&Request::VolumeShow { volume: self.name, usage: true })?;
        context.show(value, |volume: VolumeInfo| {
            let yes_no = |yes| if yes { "yes" } else { "no" }.to_owned();
            let mut rows = vec![
                ("name", volume.name),
                ("uuid", volume.uuid),
                ("size", exact_size(volume.size)),
                ("created", time(volume.created_ns)),
                ("snapshots", volume.snapshots.to_string()),
                ("depth", volume.depth.to_string()),
                ("open", yes_no(volume.open)),
                ("rebuilding", yes_no(volume.rebuilding)),
            ];
            rows.extend(volume.parent.map(|parent| ("parent", parent)));
            if volume.limits.is_some() {
                rows.push(("limits", limits_text(&volume.limits)));
            }
            rows.extend(volume.encryption.map(|it| {
                let state = if it.locked { "locked" } else { "unlocked" };
                ("encrypted", format!("{state}, by a {}", it.secret))
            }));
            rows.extend(volume.origin.map(|origin| ("clone of", origin)));
            rows.extend(volume.backing.map(|file| ("rests on", file)));
            rows.extend(usage_rows(&volume.usage));
            facts(&rows)
        })
    }
}

/// The lines of a usage.
pub fn usage_rows(usage: &Usage) -> [(&'static str, String); 5] {
    [
        ("referenced", exact_size(usage.referenced)),
        ("exclusive", exact_size(usage.exclusive)),
        ("shared", exact_size(usage.shared)),
        ("allocated", exact_size(usage.allocated)),
        ("reclaimable", exact_size(usage.reclaimable)),
    ]
}

/// Rename a volume.
#[derive(Debug, Args)]
pub struct Rename {
    /// Volume
    name: String,
    /// Its new name
    new: String,
}

impl Rename {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("renamed volume {} to {}", self.name, self.new);
        let request = Request::VolumeRename { volume: self.name, new: self.new };
        context.done(&context.call(&request)?, &message)
    }
}

/// Change the size of a volume.
///
/// A volume cannot be made smaller while a client, a block device or a replica has it open. `dbs
/// clients` lists who has.
#[derive(Debug, Args)]
pub struct Resize {
    /// Volume
    name: String,
    /// New size. A smaller size destroys the content beyond it
    #[arg(value_parser = spec::size)]
    size: u64,
}

impl Resize {
    pub fn run(self, context: &Context) -> Result<()> {
        let Self { name, size } = self;
        let value = context.with(true, |target| {
            let show = Request::VolumeShow { volume: name.clone(), usage: false };
            let old: VolumeInfo = typed(target.call(context, &show)?)?;
            let shrink = size < old.size;
            if shrink {
                let (from, to) = (format_size(old.size), format_size(size));
                let what = format!("Shrink volume {name} from {from} to {to}, losing its end?");
                confirm_in_store(context, &what)?;
            }
            // The question may have been open for long, and names are used again.
            let uuid = Some(old.uuid);
            let request = Request::VolumeResize { volume: name.clone(), size, shrink, uuid };
            target.call(context, &request)
        })?;
        context.done(&value, &format!("volume {name} has {} now", format_size(size)))?;
        let on_device = value["device_size"].as_u64().filter(|on_device| *on_device != size);
        if let Some(on_device) = on_device {
            let old = format_size(on_device);
            context.note(&format!(
                "its block device keeps the size {old} until it is detached and attached again: \
                 Linux 6.16 can change the size of a device in use, this kernel cannot"
            ));
        }
        Ok(())
    }
}

/// Limit how fast the clients of a volume may use it.
///
/// The limits are those of all clients of the volume and of its snapshots together: NBD, block devices and
/// virtual machines. The server delays requests that come faster. New limits hold at once, and are kept in
/// the store. Flushes are not limited.
#[derive(Debug, Args)]
pub struct Set {
    /// Volume
    name: String,
    /// Most requests in a second, or `none`
    #[arg(long, value_name = "N", value_parser = spec::iops)]
    #[arg(required_unless_present_any = ["bandwidth", "burst"])]
    iops: Option<u32>,
    /// Most bytes read and written in a second, such as 100MiB, or `none`
    #[arg(long, value_name = "SIZE", value_parser = spec::bandwidth)]
    bandwidth: Option<u64>,
    /// What the limits allow in so many seconds may be used at once, after as many seconds without use.
    /// 1 unless set; with 0 requests come evenly
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(..=3600))]
    burst: Option<u32>,
}

impl Set {
    pub fn run(self, context: &Context) -> Result<()> {
        let Self { name: volume, iops, bandwidth, burst: burst_seconds } = self;
        let request = Request::VolumeSet { volume, iops, bandwidth, burst_seconds };
        let value = context.call(&request)?;
        let VolumeInfo { name, limits, .. } = typed(value.clone())?;
        context.done(&value, &format!("volume {name}: {}", limits_text(&limits)))
    }
}

/// What people read of limits.
fn limits_text(limits: &VolumeLimits) -> String {
    let mut parts = Vec::new();
    parts.extend((limits.iops > 0).then(|| format!("{} requests/s", limits.iops)));
    parts.extend((limits.bandwidth > 0).then(|| format!("{}/s", format_size(limits.bandwidth))));
    if parts.is_empty() {
        return "no limits".to_owned();
    }
    format!("at most {}, burst {} s", parts.join(" and "), limits.burst_seconds)
}

/// Delete a volume and its snapshots; clones of the snapshots stay.
#[derive(Debug, Args)]
pub struct Delete {
    /// Volume
    name: String,
}

impl Delete {
    pub fn run(self, context: &Context) -> Result<()> {
        let Self { name } = self;
        let value = context.with(true, |target| {
            let show = Request::VolumeShow { volume: name.clone(), usage: false };
            let volume: VolumeInfo = typed(target.call(context, &show)?)?;
            let snapshots = match volume.snapshots {
                0 => String::new(),
                1 => " and its snapshot".to_owned(),
                n => format!(" and its {n} snapshots"),
            };
            confirm_in_store(context, &format!("Delete volume {name}{snapshots}?"))?;
            // The question may have been open for long, and names are used again.
            let (volume, uuid) = (volume.name, Some(volume.uuid));
            target.call(context, &Request::VolumeDelete { volume, uuid, rebuilding: false })
        })?;
        context.done(&value, &format!("deleted volume {name}"))
    }
}

/// Create a volume that starts with the content of a snapshot, without a copy.
///
/// A clone of an encrypted volume is encrypted with the same key, and begins with the same passphrase or key file:
/// `dbs volume rekey` gives it one of its own.
#[derive(Debug, Args)]
pub struct CloneFrom {
    /// Snapshot, as VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
    /// Name of the new volume
    new: String,
}

impl CloneFrom {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("created volume {} on {}", self.new, self.snapshot);
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let new = self.new;
        let request = Request::VolumeClone { volume, snapshot, new, rebuilding: false };
        let value = context.call(&request)?;
        let made: VolumeInfo = typed(value.clone())?;
        let how = made
            .encryption
            .map(|how| format!(", encrypted: the {} of its origin unlocks it", how.secret));
        context.done(&value, &format!("{message}{}", how.unwrap_or_default()))
    }
}

/// Make a clone independent of its origin, by a copy of the data that both share.
#[derive(Debug, Args)]
pub struct Flatten {
    /// Volume
    name: String,
}

impl Flatten {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("volume {} is independent of its origin now", self.name);
        let value = context.call(&Request::VolumeFlatten { volume: self.name })?;
        context.done(&value, &message)
    }
}

/// List the clones made from a volume or snapshot.
#[derive(Debug, Args)]
pub struct Children {
    /// VOLUME, or VOLUME@SNAPSHOT
    spec: Spec,
}

impl Children {
    pub fn run(self, context: &Context) -> Result<()> {
        let Spec { volume, snapshot } = self.spec;
        let value = context.call(&Request::VolumeChildren { volume, snapshot })?;
        context.show(value, |names: Vec<String>| {
            names.iter().map(|name| format!("{name}\n")).collect()
        })
    }
}

/// Show the space of a volume or snapshot.
#[derive(Debug, Args)]
pub struct Du {
    /// VOLUME, or VOLUME@SNAPSHOT
    spec: Spec,
}

impl Du {
    pub fn run(self, context: &Context) -> Result<()> {
        let Spec { volume, snapshot } = self.spec;
        let value = context.call(&Request::VolumeDu { volume, snapshot })?;
        context.show(value, |usage: Usage| facts(&usage_rows(&usage)))
    }
}

/// Give the space of deleted and discarded data back to the file system or device.
///
/// If a volume is named, its blocks that hold only zeros are released first. Clients can go on writing
/// meanwhile. Space is given back in whole extents (1 MiB by default). The content of the volume's
/// snapshots stays allocated.
#[derive(Debug, Args)]
pub struct Trim {
    /// Also read the data of this volume, and release the blocks that hold only zeros
    volume: Option<String>,
    /// Release nothing; say how much would be released
    #[arg(long, short = 'n', requires = "volume")]
    dry_run: bool,
}

impl Trim {
    pub fn run(self, context: &Context) -> Result<()> {
        if let Some(volume) = &self.volume {
            return self.release(context, volume);
        }
        let value = context.call(&Request::VolumeTrim)?;
        let trimmed: Trimmed = typed(value.clone())?;
        let (freed, now) = (format_size(trimmed.freed), format_size(trimmed.allocated));
        context.done(&value, &format!("freed {freed}; {now} are in use"))
    }

    fn release(&self, context: &Context, volume: &str) -> Result<()> {
        let dry_run = self.dry_run;
        let request = Request::VolumeRelease { volume: volume.to_owned(), dry_run };
        let value = context.call(&request)?;
        let report: TrimReport = typed(value.clone())?;
        let [checked, zeros, freed, unreadable] =
            [report.checked, report.zeros, report.freed, report.unreadable].map(format_size);
        let (would, how) = if dry_run { ("would release", "free") } else { ("released", "freed") };
        let text = format!(
            "volume {volume}: {would} {zeros} of zeros in {checked} of data, and {how} {freed}"
        );
        context.done(&value, &text)?;
        if report.unreadable > 0 {
            context.note(&format!(
                "{unreadable} were left as they are, because some of the data is damaged: `dbs \
                 scrub` says where"
            ));
        }
        Ok(())
    }
}

/// Compress the data of a volume or snapshot that is seldom used.
///
/// The volume's own data and that of its snapshots is compressed, or, if a snapshot is named, the data of that
/// snapshot and of those below it: each extent (1 MiB by default) that takes at least a quarter less by it. Name a snapshot
/// of a volume that is written to: else its own data is compressed, too, and expanded by the next writes. The space
/// is given back to the file system below the store's file, or to a thin device. The store's own free space stays what it is. The
/// first write to a compressed extent expands it again. Clients can go on meanwhile. An older version of dbs does not open
/// the store any more.
#[derive(Debug, Args)]
pub struct Compress {
    /// VOLUME, or VOLUME@SNAPSHOT
    spec: Spec,
}

impl Compress {
    pub fn run(self, context: &Context) -> Result<()> {
        let shown = self.spec.to_string();
        let Spec { volume, snapshot } = self.spec;
        let value = context.call(&Request::VolumeCompress { volume, snapshot })?;
        let report: CompressReport = typed(value.clone())?;
        let [checked, compressed, stored] =
            [report.checked, report.compressed, report.stored].map(format_size);
        let text = format!("{shown}: compressed {compressed} of {checked} of data, to {stored}");
        context.done(&value, &text)?;
        if report.unreadable > 0 {
            context.note(&format!(
                "{} were left as they are, because some of the data is damaged: `dbs scrub` says where",
                format_size(report.unreadable)
            ));
        }
        Ok(())
    }
}

/// A part of a volume.
#[derive(Debug, Args)]
struct Part {
    /// Offset at which to begin
    #[arg(long, value_parser = spec::size, default_value = "0")]
    offset: u64,
    /// Length of the part to show; by default all
    #[arg(long, value_parser = spec::size)]
    length: Option<u64>,
}

/// Show where a volume or snapshot has data, zeros and holes.
#[derive(Debug, Args)]
pub struct Map {
    /// VOLUME, or VOLUME@SNAPSHOT
    spec: Spec,
    #[command(flatten)]
    part: Part,
}

impl Map {
    pub fn run(self, context: &Context) -> Result<()> {
        let Spec { volume, snapshot } = self.spec;
        self.part.show(context, |offset, length| Request::VolumeMap {
            volume: volume.clone(),
            snapshot: snapshot.clone(),
            offset,
            length,
        })
    }
}

/// Show where a volume or snapshot differs from an earlier snapshot.
#[derive(Debug, Args)]
pub struct Diff {
    /// The snapshot to compare with, as VOLUME@SNAPSHOT
    from: SnapshotSpec,
    /// VOLUME or VOLUME@SNAPSHOT, of the same volume
    to: Spec,
    #[command(flatten)]
    part: Part,
}

impl Diff {
    pub fn run(self, context: &Context) -> Result<()> {
        if self.from.volume != self.to.volume {
            return Err(Error::invalid(format!(
                "{} and {} belong to different volumes: only snapshots of one volume, and the \
                 volume itself, can be compared",
                self.from, self.to
            )));
        }
        self.part.show(context, |offset, length| Request::VolumeDiff {
            volume: self.from.volume.clone(),
            from: Some(self.from.snapshot.clone()),
            to: self.to.snapshot.clone(),
            offset,
            length,
        })
    }
}

impl Part {
    /// Prints the ranges, asked for piece by piece.
    fn show(&self, context: &Context, request: impl Fn(u64, Option<u64>) -> Request) -> Result<()> {
        let ranges = context.with(false, |target| {
            let end = self.length.map(|length| self.offset.saturating_add(length));
            let mut ranges: Vec<MapRange> = Vec::new();
            let mut next = Some(self.offset);
            while let Some(offset) = next {
                let request = request(offset, end.map(|end| end - offset));
                let answer: Ranges = typed(target.call(context, &request)?)?;
                ranges.extend(answer.ranges);
                next =
                    answer.next.filter(|next| *next > offset && end.is_none_or(|end| *next < end));
            }
            Ok(ranges)
        })?;
        if context.json {
            return print_json(&ranges);
        }
        let mut table = Table::new(&[">OFFSET", ">LENGTH", ">", "STATE"]);
        for range in &ranges {
            let state = match range.state {
                RangeState::Data => "data",
                RangeState::Zero => "zero",
                RangeState::Hole => "hole",
            };
            table.row(vec![
                range.offset.to_string(),
                range.length.to_string(),
                format_size(range.length),
                state.to_owned(),
            ]);
        }
        print(&table.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str, rebuilding: bool) -> VolumeInfo {
        VolumeInfo {
            name: name.to_owned(),
            uuid: String::new(),
            size: 4096,
            created_ns: 0,
            parent: None,
            origin: None,
            snapshots: 0,
            depth: 1,
            open: false,
            rebuilding,
            revision: 0,
            limits: VolumeLimits::default(),
            backing: None,
            encryption: None,
            usage: Usage::default(),
        }
    }

    #[test]
    fn a_volume_that_is_being_filled_shows_in_the_list() {
        let list = List { usage: false };
        assert!(!list.table(&[volume("a", false)]).contains("STATE"));
        let table = list.table(&[volume("a", false), volume("b", true)]);
        let lines: Vec<_> = table.lines().collect();
        assert!(lines[0].contains("ORIGIN  STATE       CREATED"), "{table}");
        assert!(!lines[1].contains("rebuilding") && lines[2].contains(" rebuilding  -"), "{table}");
    }
}
