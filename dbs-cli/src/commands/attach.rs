//! `dbs attach`, `detach`, `attached` and `preflight`: volumes as block devices.

use super::serve::Serve;
use crate::context::{Context, typed};
use crate::output::{Table, print, print_json};
use crate::spec::{self, Spec};
use clap::Args;
use dbs_client::any_store::find_server;
use dbs_client::remote::RemoteStore;
use dbs_control::api::Request;
use dbs_control::{socket_path, store_key};
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_ublk::preflight::{Preflight, preflight};
use dbs_ublk::{Attached, QUEUES_MAX, State, find, list, remove_unserved};
use nix::fcntl::OFlag;
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long a server that was started may take to answer: it may have devices to take over.
const START_PATIENCE: Duration = Duration::from_secs(120);
/// How long one may take that somebody else started, and that has the store already.
const OTHER_PATIENCE: Duration = Duration::from_secs(15);
/// How long to wait for the end of a server that was started for nothing; it stays if others use it.
const END_PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// Make a block device of a volume or snapshot.
///
/// The device is made with the kernel's ublk driver. The server of the store serves the device. If no
/// server runs, the command starts one in the background; that server ends when its last device is
/// detached. If the server dies, users of the device wait until a server of the store runs again: `dbs
/// serve`, or another `dbs attach`. The command also makes the link /dev/dbs/STORE/VOLUME to the
/// device, where STORE is the last component of the store's path. If the volume is attached already
/// with the same options, nothing changes.
#[derive(Debug, Args)]
pub struct Attach {
    /// VOLUME, or VOLUME@SNAPSHOT, whose device is read-only
    volume: Spec,
    /// Queues of the device, each with a thread of the server; at most one for each processor
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    queues: u16,
    /// Requests that a queue holds at a time
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=4096))]
    depth: u16,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Number of the device, as in /dev/ublkbN; by default the first that is free
    #[arg(long, value_name = "N")]
    id: Option<u32>,
    /// Memory for checksums, as for `dbs serve`, if the command starts the server. A server that runs
    /// already keeps its own setting
    #[arg(long, value_name = "SIZE", value_parser = spec::checksum_cache)]
    checksum_cache: Option<u64>,
    /// Serve the store in this process, until SIGINT, SIGTERM or SIGHUP
    #[arg(long)]
    foreground: bool,
}

impl Attach {
    pub fn run(self, context: &Context) -> Result<()> {
        let store = std::path::absolute(context.store()?)
            .map_err(|e| Error::io(e, "finding the store's path"))?;
        let request = Request::DeviceAttach {
            volume: self.volume.volume,
            snapshot: self.volume.snapshot,
            queues: Some(self.queues),
            depth: Some(self.depth),
            read_only: self.read_only,
            id: self.id,
        };
        if self.foreground {
            return Serve::for_attach(self.checksum_cache).run_with(context, &mut |serving| {
                show_attached(context, serving.execute(&request)?)
            });
        }
        let key = store_key(&store)?;
        let (server, child) = match find_server(&store, &context.runtime_dir()) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                start(context, &store, &key, self.checksum_cache)?
            }
            other => (other?, None),
        };
        let attached = server.call(&request, &mut |_| true);
        drop(server);
        if let (Err(_), Some(mut child)) = (&attached, child) {
            wait_for_end(&mut child);
        }
        show_attached(context, attached?)
    }
}

/// Waits for a server that was started for nothing to let the store go, as it does by itself.
fn wait_for_end(child: &mut Child) {
    let deadline = Instant::now() + END_PATIENCE;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        thread::sleep(POLL);
    }
}

fn show_attached(context: &Context, value: Value) -> Result<()> {
    let attached: Attached = typed(value.clone())?;
    tell_udev(&attached.device);
    let link = attached.link.as_ref().map_or_else(String::new, |l| format!(" ({})", l.display()));
    let message = format!("attached {} as {}{link}", attached.spec(), attached.device.display());
    context.done(&value, &message)
}

/// Has udev look at a device again, now that it has its link: systemd then knows the device by the link, too
/// (`contrib/dbs.rules`).
fn tell_udev(device: &Path) {
    if let Some(name) = device.file_name() {
        // Where there is no udev, nobody asks for that.
        let _ = fs::write(Path::new("/sys/class/block").join(name).join("uevent"), "change");
    }
}

/// Connects to the server of the store with this key.
fn connect(context: &Context, key: &str) -> Result<RemoteStore> {
    RemoteStore::connect(&socket_path(&context.runtime_dir(), key), key)
}

/// Starts a server of the store in the background, and connects to it; or to the one that somebody else has started.
fn start(
    context: &Context,
    store: &Path,
    key: &str,
    checksum_cache: Option<u64>,
) -> Result<(RemoteStore, Option<Child>)> {
    let log_path = socket_path(&context.runtime_dir(), key).with_extension("log");
    let starting = |e: io::Error| Error::io(e, "starting a server of the store");
    let runtime_dir = std::path::absolute(context.runtime_dir()).map_err(starting)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&runtime_dir).map_err(starting)?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .map_err(|e| Error::io(e, format!("writing {}", log_path.display())))?;
    let before = log.metadata().map_err(starting)?.len();
    let program = std::env::current_exe().map_err(starting)?;
    let mut child = Command::new(program)
        .arg("--store")
        .arg(store)
        .args(context.io_arguments())
        .args(["--quiet", "serve", "--while-attached"])
        .args(checksum_cache.map(|bytes| format!("--checksum-cache={bytes}")))
        .env("DBS_RUNTIME_DIR", &runtime_dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(starting)?;
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        match connect(context, key) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            other => return Ok((other?, Some(child))),
        }
        match ended(&mut child, &log_path, before)? {
            // Who has the store may be a server that was started a moment ago.
            Some(error) if error.kind() == ErrorKind::Busy => {
                return Ok((connect_soon(context, key)?.ok_or(error)?, None));
            }
            Some(error) => return Err(error),
            None => {}
        }
        if Instant::now() >= deadline {
            return Err(Error::busy(format!(
                "the server that was started does not answer; see {}",
                log_path.display()
            )));
        }
        thread::sleep(POLL);
    }
}

/// Connects to a server that may be starting, if there is one.
fn connect_soon(context: &Context, key: &str) -> Result<Option<RemoteStore>> {
    let deadline = Instant::now() + OTHER_PATIENCE;
    loop {
        match connect(context, key) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Err(_) if Instant::now() >= deadline => return Ok(None),
            Err(_) => thread::sleep(POLL),
            Ok(server) => return Ok(Some(server)),
        }
    }
}

/// Why the server ended, if it has.
fn ended(child: &mut Child, log: &Path, before: u64) -> Result<Option<Error>> {
    let waited = child.try_wait().map_err(|e| Error::io(e, "waiting for the server"))?;
    let Some(status) = waited else { return Ok(None) };
    let text = fs::read(log).unwrap_or_default();
    let text = text.get(usize::try_from(before).unwrap_or(usize::MAX)..).unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    let said = text.lines().rev().find_map(|line| line.strip_prefix("dbs: "));
    let why = said.map_or_else(|| format!("the server ended: {status}"), str::to_owned);
    let kind = status.code().map_or(ErrorKind::Io, crate::exit::kind);
    Ok(Some(Error::new(kind, why)))
}

/// Remove the block device of a volume or snapshot.
///
/// A device that is in use stays. With --force it is removed all the same: later writes of its users
/// fail, and writes that they had not flushed are lost.
#[derive(Debug, Args)]
pub struct Detach {
    /// VOLUME, VOLUME@SNAPSHOT, or the path of the device or of a link to it
    target: String,
    /// Remove the device even if it is in use, or if its server is gone
    #[arg(long)]
    force: bool,
}

impl Detach {
    pub fn run(self, context: &Context) -> Result<()> {
        let runtime_dir = context.runtime_dir();
        let attached = find(&list(&runtime_dir, named_store(context)?.as_deref()), &self.target)?;
        let server = match connect(context, &attached.store_key) {
            Ok(server) => Some(server),
            // Its server has taken it over, and is about to listen.
            Err(error) if error.kind() == ErrorKind::NotFound && attached.state == State::Live => {
                connect_soon(context, &attached.store_key)?
            }
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let device = attached.device.display().to_string();
        let message = format!("detached {} from {device}", attached.spec());
        let Some(server) = server else {
            if !self.force {
                return Err(Error::busy(format!(
                    "no server serves {device}, and its users wait: `dbs --store {} serve` takes \
                     the device over; --force removes it, and the requests of its users fail",
                    attached.store.display()
                )));
            }
            remove_unserved(&runtime_dir, &attached)?;
            return context.done(&Attached { state: State::Dead, pid: None, ..attached }, &message);
        };
        if !self.force {
            release(&attached)?;
        }
        match server.call(&Request::DeviceDetach { target: device }, &mut |_| true) {
            // It is left over: the server could not take it over.
            Err(error) if error.kind() == ErrorKind::NotFound && self.force => {
                remove_unserved(&runtime_dir, &attached)?;
                // It looks what is left, and lets go of what the device held.
                server.call(&Request::DeviceList, &mut |_| true)?;
                context.done(&Attached { state: State::Dead, pid: None, ..attached }, &message)
            }
            result => context.done(&result?, &message),
        }
    }
}

/// Sees that nobody uses a device, and that what was written to it arrives.
fn release(attached: &Attached) -> Result<()> {
    let device = &attached.device;
    let mut options = OpenOptions::new();
    options.read(true).write(!attached.read_only).custom_flags(OFlag::O_EXCL.bits());
    let opened = options.open(device).and_then(|file: File| file.sync_all());
    match opened {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Err(Error::busy(format!(
            "{} is in use, perhaps mounted: unmount it first; --force removes it all the same, \
             and its users lose writes that they have not flushed",
            device.display()
        ))),
        Err(error) => Err(Error::io(
            error,
            format!("flushing {} (--force leaves the flush out)", device.display()),
        )),
    }
}

/// The key of the store that was named, if one was.
fn named_store(context: &Context) -> Result<Option<String>> {
    context.store().ok().map(store_key).transpose()
}

/// List the block devices of volumes and snapshots.
///
/// If a store is named, only devices of this store; else the devices of all stores whose servers use
/// this runtime directory. Devices that wait for a server are listed, too.
#[derive(Debug, Args)]
pub struct List {}

impl List {
    pub fn run(self, context: &Context) -> Result<()> {
        let found = list(&context.runtime_dir(), named_store(context)?.as_deref());
        if context.json {
            return print_json(&found);
        }
        let headings = ["DEVICE", "VOLUME", ">SIZE", "STATE", ">QUEUES", ">DEPTH", "STORE", "LINK"];
        let mut table = Table::new(&headings);
        for item in &found {
            let state = match item.state {
                State::Live if item.read_only => "live, read-only",
                State::Live => "live",
                State::Waiting => "waiting",
                State::Dead => "dead",
                State::Unknown => "unknown",
            };
            table.row(vec![
                item.device.display().to_string(),
                item.spec(),
                format_size(item.size),
                state.to_owned(),
                item.queues.to_string(),
                item.depth.to_string(),
                item.store.display().to_string(),
                item.link.as_ref().map_or_else(String::new, |link| link.display().to_string()),
            ]);
        }
        print(&table.text())
    }
}

/// Say what this machine lacks for block devices, and which other ways to use volumes work here.
///
/// The command looks at the kernel, its drivers, and the rights of this user. It changes nothing. The
/// exit code is 0 even if something is missing.
#[derive(Debug, Args)]
pub struct Check {}

impl Check {
    pub fn run(self, context: &Context) -> Result<()> {
        let found = preflight();
        if context.json { print_json(&found) } else { print(&text(&found)) }
    }
}

fn text(found: &Preflight) -> String {
    let mut checks = Table::new(&["CHECK", "", "FOUND"]);
    for check in &found.checks {
        let ok = if check.ok { "ok" } else { "no" };
        checks.row(vec![check.name.clone(), ok.to_owned(), check.found.clone()]);
    }
    let mut ways = Table::new(&["WAY", "WORKS", "WHAT"]);
    for way in &found.ways {
        let works = if way.works { "yes" } else { "no" };
        ways.row(vec![way.name.clone(), works.to_owned(), way.what.clone()]);
    }
    let mut text = format!("kernel {}\n\n{}\n{}", found.kernel, checks.text(), ways.text());
    for check in found.checks.iter().filter(|check| !check.ok) {
        let remedy = check.remedy.as_deref().unwrap_or_default();
        text.push_str(&format!("\n{}: {remedy}\n", check.name));
    }
    text
}
