//! Commands on the store as a whole.

use crate::confirm::confirm;
use crate::context::{Context, typed};
use crate::exit;
use crate::output::{check_open, exact_size, facts, print, print_json};
use crate::pipes::sync;
use crate::progress::Unit;
use crate::spec;
use crate::target::{Target, watch};
use clap::Args;
use dbs_client::any_store::AnyStore;
use dbs_control::api::{Request, Vacuumed};
use dbs_control::store_key;
use dbs_core::info::{CheckReport, ChecksumInfo, Severity, StoreInfo};
use dbs_core::store::{is_same_place, parse_uuid};
use dbs_core::v1::{self, Image};
use dbs_core::{Error, ErrorKind, InitOptions, Result, Store, format_size};
use dbs_ublk::first_left;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Room for metadata that an upgraded store gets beyond its image's size.
const UPGRADE_ROOM_BYTES: u64 = 256 << 20;

/// Format a new store.
#[derive(Debug, Args)]
pub struct Init {
    /// File, which is made if absent, or block device; by default what --store or DBS_STORE names
    path: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// How a store is formatted.
#[derive(Debug, Args)]
struct Format {
    /// Size of the store. Needed for a new file, which is sparse and may be larger than the disk below
    /// it
    #[arg(long, value_parser = spec::size)]
    size: Option<u64>,
    /// Unit of allocation, a power of two from 64KiB to 4MiB
    #[arg(long, value_parser = spec::size, value_name = "SIZE", default_value = "1MiB")]
    extent_size: u64,
    /// Format even if the file or device looks used. Mounted devices and open stores are never
    /// formatted
    #[arg(long)]
    force: bool,
    /// Highest number of volumes; by default chosen by the size of the store
    #[arg(long, value_name = "N")]
    max_volumes: Option<u32>,
    /// Highest number of snapshots, where each volume counts as one more; by default chosen by the size
    /// of the store
    #[arg(long, value_name = "N")]
    max_snapshots: Option<u32>,
    /// Size that the store can grow to; by default 16 times its size
    #[arg(long, value_parser = spec::size, value_name = "SIZE")]
    max_size: Option<u64>,
    /// Size of the journal; by default chosen by the size of the store
    #[arg(long, value_parser = spec::size, value_name = "SIZE")]
    journal_size: Option<u64>,
    /// Keep no checksums of data. Data that the medium has damaged is then returned without an error
    #[arg(long)]
    no_checksums: bool,
}

impl Format {
    /// Formats; what is in the way is destroyed only with `--force`, and after asking.
    fn init(&self, context: &Context, path: &Path, size: Option<u64>) -> Result<StoreInfo> {
        let options = InitOptions {
            size,
            extent_size: self.extent_size,
            max_volumes: self.max_volumes,
            max_snapshots: self.max_snapshots,
            journal_size: self.journal_size,
            max_size: self.max_size,
            checksums: !self.no_checksums,
            force: false,
        };
        match Store::init(path, &options) {
            Err(found) if self.force && found.kind() == ErrorKind::Exists => {
                check_unattached(context, path)?;
                confirm(context, &format!("{found}. Destroy what is there?"))?;
                Store::init(path, &InitOptions { force: true, ..options })
            }
            other => other,
        }
    }
}

impl Init {
    pub fn run(self, context: &Context) -> Result<()> {
        let path = match &self.path {
            Some(path) => path,
            None => context.store()?,
        };
        let info = self.format.init(context, path, self.format.size)?;
        let size = format_size(info.size);
        context.done(&info, &format!("made the store {}, {size}", path.display()))
    }
}

/// Refuses what makes another store of the one at `path`, if one is there: its devices wait for it.
fn check_unattached(context: &Context, path: &Path) -> Result<()> {
    // What has no key is no store.
    let Ok(key) = store_key(path) else { return Ok(()) };
    match first_left(&context.runtime_dir(), &key) {
        None => Ok(()),
        Some(device) => Err(Error::busy(format!(
            "{} is attached as {}, which would lose its store: detach it first",
            device.spec(),
            device.device.display()
        ))),
    }
}

/// Show facts about the store.
#[derive(Debug, Args)]
pub struct Info {}

impl Info {
    pub fn run(self, context: &Context) -> Result<()> {
        let value = context.call(&Request::Info)?;
        context.show(value, |info: StoreInfo| describe(&info))
    }
}

fn describe(info: &StoreInfo) -> String {
    let used = info.extents_total - info.extents_free.min(info.extents_total);
    let mut rows = vec![
        ("format", info.format.clone()),
        ("uuid", info.uuid.clone()),
        ("size", exact_size(info.size)),
        ("can grow to", format_size(info.max_size)),
        ("extent size", format_size(info.extent_size)),
        ("extents", format!("{used} of {} used", info.extents_total)),
        ("allocated", exact_size(info.allocated)),
        ("free", exact_size(info.free)),
        ("metadata", format_size(info.metadata)),
        ("volumes", format!("{} of {}", info.volumes, info.volumes_max)),
        ("snapshots", format!("{} of {}, heads included", info.snapshots, info.snapshots_max)),
        ("driver", info.driver.clone()),
    ];
    if info.compressed > 0 {
        let [data, stored] = [info.compressed, info.compressed_stored].map(format_size);
        rows.push(("compressed", format!("{data} of data, in {stored}")));
    }
    if let Some(sums) = info.checksums {
        rows.push(("checksums", checksums(&sums)));
    }
    if info.lookups.forgotten > 0 {
        let (memory, forgotten) = (format_size(info.lookups.memory_max), info.lookups.forgotten);
        let text =
            format!("{memory} of memory do not hold all: {forgotten} times some were forgotten");
        rows.push(("look-ups", text));
    }
    if info.lookups.bitmap_reads > 0 {
        let (memory, reads) = (format_size(info.lookups.bitmap_memory), info.lookups.bitmap_reads);
        let text = format!("{memory} in memory, not all: {reads} times some were read again");
        rows.push(("bitmaps", text));
    }
    if info.extents_pending > 0 {
        rows.push(("being freed", format!("{} extents", info.extents_pending)));
    }
    if info.snapshots_deleting > 0 {
        let put_off = match info.snapshots_put_off {
            0 => String::new(),
            some => {
                format!(", {some} of them put off: see the warnings, and `dbs check`")
            }
        };
        rows.push(("being deleted", format!("{} snapshots{put_off}", info.snapshots_deleting)));
    }
    if info.read_only {
        rows.push(("opened", "for reading".to_owned()));
    }
    rows.extend(info.warnings.iter().map(|warning| ("warning", warning.clone())));
    facts(&rows)
}

fn checksums(sums: &ChecksumInfo) -> String {
    let met = sums.verified + sums.unknown;
    let damaged = match sums.mismatches {
        0 => String::new(),
        count => format!(", {count} DAMAGED"),
    };
    format!("kept; {} of {met} blocks read were compared{damaged}", sums.verified)
}

/// Grow the store in place.
#[derive(Debug, Args)]
pub struct Grow {
    /// New size. A file is extended; a device must have this size already
    #[arg(value_parser = spec::size)]
    size: u64,
}

impl Grow {
    pub fn run(self, context: &Context) -> Result<()> {
        let value = context.call(&Request::Grow { size: self.size })?;
        let info: StoreInfo = typed(value.clone())?;
        context.done(&value, &format!("the store has {} now", format_size(info.size)))
    }
}

/// Compact a store in a file and cut off its end.
///
/// The command can be interrupted and run again. A store does not grow by itself: only the space that
/// the command leaves free can be written, until `dbs grow` adds more. When this space is used up,
/// writes of new data fail with "no space left".
#[derive(Debug, Args)]
pub struct Vacuum {
    /// Space to leave free for new data; by default a sixteenth of the space in use, at least 64MiB.
    /// With 0, no new data can be written until `dbs grow`
    #[arg(long, value_name = "SIZE", value_parser = spec::size)]
    keep: Option<u64>,
}

impl Vacuum {
    pub fn run(self, context: &Context) -> Result<()> {
        if self.keep == Some(0) {
            let text = "Leave no free space? Writes of new data fail until `dbs grow`.";
            confirm(context, text)?;
        }
        let value = context.call(&Request::Vacuum { keep: self.keep })?;
        let Vacuumed { before, after, free } = typed(value.clone())?;
        let [before, after, free] = [before, after, free].map(format_size);
        let text = format!("the store had {before} and has {after} now, {free} of them free");
        context.done(&value, &text)
    }
}

/// Give an idle store a new uuid.
///
/// A copy of a store has the uuid of its original; give the copy its own. Only the superblock changes,
/// and a crash leaves the old uuid or the new one. Volumes and snapshots keep their uuids, so that
/// differences can still be sent from one copy to the other.
#[derive(Debug, Args)]
pub struct NewUuid {
    /// The new uuid; by default a random one
    #[arg(value_parser = parse_uuid)]
    uuid: Option<Uuid>,
}

/// The bytes of a uuid.
type Uuid = [u8; 16];

impl NewUuid {
    pub fn run(self, context: &Context) -> Result<()> {
        let path = context.store()?;
        check_unattached(context, path)?;
        let info = context.with(true, |target| match target {
            Target::Live(AnyStore::Idle(store, _)) => {
                store.set_uuid(self.uuid)?;
                Ok(store.info())
            }
            Target::Live(AnyStore::Served(_)) => Err(Error::busy(format!(
                "{} is being served: stop the server first",
                path.display()
            ))),
            Target::Old(_) => Err(crate::old::unsupported()),
        })?;
        context.done(&info, &format!("the store has the uuid {} now", info.uuid))
    }
}

/// Check all metadata, changing nothing: exit code 3 for leaks, 4 for damage.
///
/// Of a served store, the command checks the metadata as it was on the device when the check began,
/// while commits go on.
#[derive(Debug, Args)]
pub struct Check {}

impl Check {
    pub fn run(self, context: &Context) -> Result<ExitCode> {
        let value = match context.call(&Request::Check) {
            // One that is too damaged to be opened is what this is for.
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let report = Store::check_path(context.store()?)?;
                serde_json::to_value(report).map_err(|_| error)?
            }
            value => value?,
        };
        let report: CheckReport = typed(value.clone())?;
        context.show(value, |report: CheckReport| findings(&report))?;
        Ok(match report.worst() {
            None | Some(Severity::Note) => ExitCode::SUCCESS,
            Some(Severity::Leak) => ExitCode::from(exit::FINDINGS),
            Some(Severity::Corrupt) => ExitCode::from(exit::CORRUPT),
        })
    }
}

fn findings(report: &CheckReport) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let severity = match finding.severity {
            Severity::Note => "note",
            Severity::Leak => "leak",
            Severity::Corrupt => "corrupt",
        };
        let index = finding.index.map(|index| format!(" {index}")).unwrap_or_default();
        text += &format!("{severity}: {}{index}: {}\n", finding.region, finding.message);
    }
    if report.checksums_open > 0 {
        text += &format!(
            "up to {} of data has no checksums, because the last process ended without closing \
             the store. A server makes them again in the background, `dbs scrub` at once\n",
            format_size(report.checksums_open)
        );
    }
    let verdict = match report.worst() {
        None => "no findings",
        Some(Severity::Note) => "nothing is wrong",
        Some(Severity::Leak) => "space is leaked",
        Some(Severity::Corrupt) => "the store is damaged",
    };
    text + &format!(
        "checked {} metadata blocks, {} extents, {} volumes, {} snapshots: {verdict}\n",
        report.blocks_checked,
        report.extents_checked,
        report.volumes_checked,
        report.snapshots_checked
    )
}

/// Print all metadata as JSON.
#[derive(Debug, Args)]
pub struct Dump {}

impl Dump {
    pub fn run(self, context: &Context) -> Result<()> {
        context.with(false, |target| {
            let mut out = io::BufWriter::with_capacity(1 << 16, Stdout);
            match target {
                Target::Live(AnyStore::Idle(store, _)) => store.dump(&mut out)?,
                Target::Live(AnyStore::Served(server)) => {
                    let mut meter = context.meter("dumping", Unit::Bytes);
                    server.dump(&mut out, &mut |progress| watch(&mut meter, progress))?;
                }
                Target::Old(_) => return Err(crate::old::unsupported()),
            }
            out.write_all(b"\n")
                .and_then(|()| out.flush())
                .map_err(|e| Error::io(e, "writing the dump"))
        })
    }
}

/// The standard output, without the line buffer.
struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        check_open()?;
        io::stdout().lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().lock().flush()?;
        sync(&File::from(io::stdout().as_fd().try_clone_to_owned()?))
    }
}

/// Copy an image of format 1.0.0 into a new store.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// The image, which is only read
    old: PathBuf,
    /// The store to make: file or block device
    new: PathBuf,
    #[command(flatten)]
    format: Format,
}

impl Upgrade {
    pub fn run(self, context: &Context) -> Result<()> {
        context.stop.on_signals()?;
        let image = Image::open(&self.old, None)?;
        if self.new.exists() && is_same_place(&self.old, &self.new)? {
            return Err(Error::invalid(format!(
                "{} is the image itself: name another file or device for the new store",
                self.new.display()
            )));
        }
        let room = image.size().saturating_add(image.size() / 8).saturating_add(UPGRADE_ROOM_BYTES);
        let is_device = std::fs::metadata(&self.new).is_ok();
        let size = self.format.size.or_else(|| (!is_device).then_some(room));
        self.format.init(context, &self.new, size)?;
        let store = Store::open(&self.new, &context.open_options(false))?;
        let mut meter = context.meter("copying", Unit::Bytes);
        let report = v1::upgrade(&image, &store, &mut |done, total| meter.update(done, total));
        drop(meter);
        let closed = store.close();
        let report = report.map_err(|e| {
            e.context(format!("{} is incomplete: delete it and begin again", self.new.display()))
        })?;
        closed.map_err(|e| e.context("closing the new store"))?;
        if context.json {
            return print_json(&report);
        }
        let mut text = String::new();
        for warning in &report.warnings {
            text += &format!("warning: {warning}\n");
        }
        for volume in &report.volumes {
            let snapshots = volume.snapshots.len();
            let size = format_size(volume.size);
            text += &format!("{}: {size}, {snapshots} snapshots\n", volume.name);
        }
        if context.quiet { Ok(()) } else { print(&text) }
    }
}
