//! The host's initiator, which makes a disk of a target: `iscsiadm` in the namespaces of its `iscsid`.

use super::program::{Failure, Run, Why};
use super::target::LUN;
use dbs_core::{Error, Result};
use dbs_service::log;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long each may take, with all its attempts: other volumes of the host wait meanwhile.
const QUICK: Duration = Duration::from_secs(30);
const DISK: Duration = Duration::from_secs(15);
const DISCOVERY: Duration = Duration::from_secs(60);
const LOGIN: Duration = Duration::from_secs(60);
const LOGOUT: Duration = Duration::from_secs(60);
/// How long a logout that was given up may go on in the background.
const LATE: Duration = Duration::from_secs(20);
/// No command is begun with less time than that.
const LEAST: Duration = Duration::from_secs(5);
/// What a command with the host's records has in any case: they have a lock, which one that is killed leaves
/// behind, and which `iscsiadm` itself waits 30 s for.
const RECORDS_LEAST: Duration = Duration::from_secs(35);
/// What to do then.
const LOCK_LEFT: &str = "if `iscsiadm` fails on this host from now on, for all volumes, the command has left its \
                         lock behind: remove /run/lock/iscsi/lock.write on the host";
/// How often discovery, logout and deletion are tried, and the pause before the next time: the initiator's
/// files are those of all volumes of the host.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_secs(3);
const DISK_PAUSE: Duration = Duration::from_millis(100);
/// What `iscsiadm` says if there is no such record or session.
const NOTHING_FOUND: i32 = 21;
/// The list of sessions with their disks.
const SESSIONS: [&str; 4] = ["-m", "session", "-P", "3"];
const ABORT_TIMEOUT: &str = "node.session.err_timeo.abort_timeout";
/// Seconds after which an aborted request is given up.
const ABORT_SECONDS: &str = "15";
/// The lock by which all engines of the host take turns with the initiator.
const LOCK: &str = "longhorn-iscsi.lock";
const LOCK_LIMIT: Duration = Duration::from_secs(240);
const LOCK_PAUSE: Duration = Duration::from_millis(100);
/// Whoever waits for one other engine gets its turn.
const _: () = {
    let more = RECORDS_LEAST.as_secs() - LEAST.as_secs();
    let attach =
        QUICK.as_secs() + DISCOVERY.as_secs() + LOGIN.as_secs() + DISK.as_secs() + 2 * more;
    let detach = QUICK.as_secs() + LOGOUT.as_secs() + LATE.as_secs() + QUICK.as_secs() + 2 * more;
    assert!(attach < LOCK_LIMIT.as_secs() && detach < LOCK_LIMIT.as_secs());
};
/// Where the initiator has its records of targets.
const RECORDS: [&str; 2] = ["etc/iscsi/nodes", "var/lib/iscsi/nodes"];
/// Ancestors of a container's processes that are in the host's namespaces.
const RUNTIMES: [&str; 3] = ["dockerd", "containerd", "containerd-shim"];

/// What a command came to.
type Done<T> = std::result::Result<T, Failure>;

/// The initiator, for one target.
pub(super) struct Initiator<'a> {
    pub run: &'a dyn Run,
    pub target: &'a str,
    /// Where this process sees the host's processes.
    pub proc: &'a Path,
    /// Where the kernel shows disks, by their names.
    pub disks: &'a Path,
    /// After how many the kernel gives up a request to the disk.
    pub seconds: u64,
}

/// Where the host's processes are seen: a container has them under `/host`.
pub(super) fn host_proc() -> PathBuf {
    let host = PathBuf::from("/host/proc");
    if host.is_dir() { host } else { PathBuf::from("/proc") }
}

impl Initiator<'_> {
    /// Makes a disk of the target; answers with the kernel's name of it.
    ///
    /// # Errors
    /// The host has no initiator, or it does not find the target or the disk.
    pub fn attach(&self) -> Result<String> {
        let turn = self.turn()?;
        let ip = self.address()?;
        turn.allow(DISCOVERY);
        turn.discover(&ip)?;
        turn.allow(LOGIN);
        turn.node(&["-o", "update", "-n", ABORT_TIMEOUT, "-v", ABORT_SECONDS])?;
        turn.node(&["-p", &ip, "--login"])?;
        // Where units are not looked for at each login.
        let settings = turn.node(&["-p", &ip, "-o", "show"])?;
        if settings.contains("node.session.scan = manual") {
            turn.node(&["-p", &ip, "--rescan"])?;
        }
        turn.allow(DISK);
        turn.disk()
    }

    /// The disk that is there now; the kernel's name of it.
    ///
    /// # Errors
    /// There is none, or the initiator does not say.
    pub fn present(&self) -> Result<String> {
        let list = Turn::to_ask(self).iscsiadm(&SESSIONS)?;
        let disk = disk_in(&list, self.target).map(str::to_owned);
        disk.ok_or_else(|| Error::not_found(format!("the host has no disk of {}", self.target)))
    }

    /// Removes the disk, if there is one, and what the host knows of the target.
    ///
    /// # Errors
    /// It may be there still.
    pub fn detach(&self) -> Result<()> {
        let turn = self.turn()?;
        if !turn.sessions()?.is_empty() {
            turn.log_out()?;
        }
        turn.allow(QUICK);
        // Others change the host's records meanwhile.
        turn.again(|| match turn.node(&[]) {
            Ok(_) => turn.node(&["-o", "delete"]),
            Err(_) => Ok(String::new()),
        })?;
        Ok(())
    }

    /// Has the disk get the size that the target has now.
    ///
    /// # Errors
    /// It has not.
    pub fn rescan(&self) -> Result<()> {
        let turn = self.turn()?;
        let ip = self.address()?;
        turn.allow(DISK);
        turn.node(&["-R", "-p", &ip])?;
        Ok(())
    }

    /// Waits for the host's initiator, if the host has one.
    fn turn(&self) -> Result<Turn<'_>> {
        let lock = self.lock()?;
        let turn = Turn { lock: Some(lock), ..Turn::to_ask(self) };
        match turn.iscsiadm(&["--version"]) {
            Err(failure) if failure.is_slow() => Err(failure.into()),
            Err(failure) => {
                let error = Error::unsupported(failure.to_string());
                Err(error
                    .context("the host has no iSCSI initiator: install open-iscsi on the node"))
            }
            Ok(_) => Ok(turn),
        }
    }

    /// An empty file among the records, left by a crash, makes `iscsiadm` fail each time.
    fn remove_empty_records(&self) {
        let root = self.process().join("root");
        for directory in RECORDS {
            remove_empty(&root.join(directory).join(self.target), 2);
        }
    }

    /// A process in the namespaces of the host's `iscsid`.
    fn process(&self) -> PathBuf {
        // The host's own before one of a container that has the host's network: that has other records.
        let all = processes_named(self.proc, "iscsid").into_iter();
        let pid = all.filter_map(|pid| Some((nearness(self.proc, pid)?, pid))).min();
        let pid = pid.map(|(_, pid)| pid);
        let pid = pid.or_else(|| RUNTIMES.iter().find_map(|name| ancestor(self.proc, name)));
        self.proc.join(pid.unwrap_or(1).to_string())
    }

    /// Where the host reaches `tgtd`: an address of this process's network.
    pub fn address(&self) -> Result<String> {
        let all =
            nix::ifaddrs::getifaddrs().map_err(|e| Error::io(e.into(), "looking for addresses"))?;
        let all: Vec<(String, IpAddr)> = all
            .filter_map(|one| {
                let address = one.address?;
                let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
                    (Some(v4), _) => IpAddr::V4(v4.ip()),
                    (_, Some(v6)) => IpAddr::V6(v6.ip()),
                    _ => return None,
                };
                Some((one.interface_name, ip))
            })
            .collect();
        let net = |process: PathBuf| fs::read_link(process.join("ns/net")).ok();
        let same =
            net(PathBuf::from("/proc/self")).is_some_and(|own| net(self.process()) == Some(own));
        choose_address(&all, same).ok_or_else(|| {
            Error::not_found("this process has no address at which the host could reach `tgtd`")
        })
    }

    /// Waits for its turn with the host's initiator.
    fn lock(&self) -> Result<File> {
        let root = self.process().join("root");
        let run = [root.join("var/run"), root.join("run")];
        // A link to `/run` would lead to this process's own.
        let real = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|file| file.is_dir());
        let directory = run.iter().find(|path| real(path)).unwrap_or(&run[1]);
        let path = directory.join(LOCK);
        let named = |e| Error::io(e, format!("locking {}", path.display()));
        let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(named)?;
        let deadline = self.run.now() + LOCK_LIMIT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if self.run.now() < deadline => {
                    self.run.sleep(LOCK_PAUSE);
                }
                Err(TryLockError::WouldBlock) => {
                    let text = format!("another engine has {} for too long", path.display());
                    return Err(Error::busy(text));
                }
                Err(TryLockError::Error(error)) => return Err(named(error)),
            }
        }
    }
}

/// The host's initiator, for one engine at a time; alone, only to be asked.
struct Turn<'a> {
    initiator: &'a Initiator<'a>,
    lock: Option<File>,
    /// When what is being done must be done.
    by: Cell<Instant>,
}

impl<'a> Turn<'a> {
    fn to_ask(initiator: &'a Initiator<'a>) -> Self {
        Self { initiator, lock: None, by: Cell::new(initiator.run.now() + QUICK) }
    }

    /// What comes next may take so long, with all that belongs to it.
    fn allow(&self, time: Duration) {
        self.by.set(self.initiator.run.now() + time);
    }

    fn left(&self) -> Duration {
        self.by.get().saturating_duration_since(self.initiator.run.now())
    }

    fn pause(&self, time: Duration) {
        debug_assert!(self.lock.is_some(), "who only asks waits for nothing");
        self.initiator.run.sleep(time);
    }

    fn discover(&self, ip: &str) -> Result<()> {
        let target = self.initiator.target;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let found = self.iscsiadm(&["-m", "discovery", "-t", "sendtargets", "-p", ip]);
            if self.node(&["-p", ip]).is_ok() {
                return Ok(());
            }
            let why = match found {
                Ok(list) => format!("{target} is not among the targets on {ip}: {}", list.trim()),
                Err(failure) => failure.to_string(),
            };
            if attempts == ATTEMPTS || self.left() <= PAUSE + LEAST {
                return Err(Error::new(
                    dbs_core::ErrorKind::Io,
                    format!("the host's initiator does not find the target: {why}"),
                ));
            }
            log::warn("discovery", &[("target", &target), ("error", &why)]);
            self.initiator.remove_empty_records();
            self.pause(PAUSE);
        }
    }

    fn disk(&self) -> Result<String> {
        let target = self.initiator.target;
        let name = loop {
            let list = self.iscsiadm(&SESSIONS);
            if let Some(name) = list.as_ref().ok().and_then(|list| disk_in(list, target)) {
                break name.to_owned();
            }
            if self.left() <= DISK_PAUSE + LEAST {
                list?;
                return Err(Error::not_found(format!("the host has no disk of {target}")));
            }
            self.pause(DISK_PAUSE);
        };
        let file = self.initiator.disks.join(&name).join("device/timeout");
        if let Err(error) = fs::write(&file, self.initiator.seconds.to_string()) {
            // The kernel's own is 30.
            log::warn("timeout", &[("file", &file.display()), ("error", &error)]);
        }
        Ok(name)
    }

    /// The numbers of the sessions with the target.
    fn sessions(&self) -> Done<Vec<String>> {
        match self.iscsiadm(&["-m", "session"]) {
            Ok(list) => Ok(sessions_in(&list, self.initiator.target)),
            Err(failure) if failure.exited(NOTHING_FOUND) => Ok(Vec::new()),
            Err(failure) => Err(failure),
        }
    }

    /// Ends all sessions with the target.
    fn log_out(&self) -> Result<()> {
        self.allow(LOGOUT);
        match self.again(|| self.node(&["--logout"])) {
            // It may be done later.
            Err(failure) if failure.is_slow() => return self.wait_until_logged_out(failure),
            done => done?,
        };
        // One whose record is gone does not end so.
        for session in self.sessions()? {
            self.again(|| self.iscsiadm(&["-m", "session", "-r", &session, "-u"]))?;
        }
        match self.sessions()?.is_empty() {
            true => Ok(()),
            false => Err(Error::busy(format!(
                "the host's initiator has a session with {} still, after it was ended",
                self.initiator.target
            ))),
        }
    }

    fn wait_until_logged_out(&self, failure: Failure) -> Result<()> {
        self.allow(LATE);
        while self.left() > PAUSE + LEAST {
            if self.sessions().is_ok_and(|sessions| sessions.is_empty()) {
                return Ok(());
            }
            self.pause(PAUSE);
        }
        Err(failure.into())
    }

    /// Tries something a few times; what is not there needs nothing, and what hangs is tried once.
    fn again(&self, mut what: impl FnMut() -> Done<String>) -> Done<String> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match what() {
                Err(failure) if failure.exited(NOTHING_FOUND) => return Ok(String::new()),
                Err(failure)
                    if !failure.is_slow() && attempts < ATTEMPTS && self.left() > PAUSE + LEAST =>
                {
                    let target = &self.initiator.target;
                    log::warn("initiator", &[("target", target), ("error", &failure)]);
                    self.pause(PAUSE);
                }
                done => return done,
            }
        }
    }

    fn node(&self, more: &[&str]) -> Done<String> {
        self.iscsiadm(&[&["-m", "node", "-T", self.initiator.target], more].concat())
    }

    fn iscsiadm(&self, args: &[&str]) -> Done<String> {
        let namespaces = self.initiator.process().join("ns");
        let enter =
            |option: &str, file: &str| format!("{option}={}", namespaces.join(file).display());
        let (mount, net) = (enter("--mount", "mnt"), enter("--net", "net"));
        let has_records = uses_records(args);
        let args = [&[mount.as_str(), net.as_str(), "iscsiadm"], args].concat();
        let left = self.left();
        if left < LEAST {
            return Err(Failure::not_begun("nsenter", &args));
        }
        let limit = if has_records { left.max(RECORDS_LEAST) } else { left };
        let done = self.initiator.run.run("nsenter", &args, limit);
        done.map_err(|mut failure| {
            // `nsenter` says by this code that there is no such program.
            if failure.exited(127) {
                failure.why = Why::Missing;
            }
            if failure.is_slow() && has_records {
                failure.said = [failure.said.as_str(), LOCK_LEFT].join("\n");
            }
            failure
        })
    }
}

/// Whether `iscsiadm` opens the records of targets for that: it does not to list sessions, nor to say its version.
fn uses_records(args: &[&str]) -> bool {
    !matches!(args, ["--version"] | ["-m", "session"] | ["-m", "session", "-P", _])
}

/// The processes of this name.
fn processes_named(proc: &Path, name: &str) -> BTreeSet<u32> {
    let entries = fs::read_dir(proc).into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| name_of(proc, &pid.to_string()).is_some_and(|other| other == name)).collect()
}

/// Whether a process has the network and the users of the host's first one, or of this one, if that may not be
/// looked at, else `None`: any container may have one that is called as that of the host. 0 if it sees the same
/// files, too.
fn nearness(proc: &Path, pid: u32) -> Option<u32> {
    let of = |pid: &str, file| fs::read_link(proc.join(pid).join("ns").join(file)).ok();
    let namespaces = |pid: &str| Some((of(pid, "net")?, of(pid, "user")?));
    let first = if namespaces("1").is_some() { "1" } else { "self" };
    let pid = pid.to_string();
    let is_host = namespaces(first).is_some_and(|host| namespaces(&pid) == Some(host));
    is_host.then(|| u32::from(of(first, "mnt") != of(&pid, "mnt")))
}

fn name_of(proc: &Path, pid: &str) -> Option<String> {
    let text = fs::read_to_string(proc.join(pid).join("comm")).ok()?;
    Some(text.trim_end().to_owned())
}

/// The nearest ancestor of this process that has this name.
fn ancestor(proc: &Path, name: &str) -> Option<u32> {
    let mut pid = "self".to_owned();
    loop {
        let status = fs::read_to_string(proc.join(&pid).join("status")).ok()?;
        let field =
            |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        if field("Name:") == Some(name) {
            return field("Pid:")?.parse().ok();
        }
        match field("PPid:")? {
            "0" => return None,
            parent => pid = parent.to_owned(),
        }
    }
}

/// The address of `eth1` if there is such a link, else the first one that is not of this machine alone. If
/// the initiator is in the same network, loopback does as well.
fn choose_address(all: &[(String, IpAddr)], same_network: bool) -> Option<String> {
    let reached = |ip: &IpAddr| match ip {
        IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_broadcast(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local(),
    };
    let global = |ip: &IpAddr| {
        reached(ip) && !ip.is_loopback() && !ip.is_multicast() && !ip.is_unspecified()
    };
    let first = |link: Option<&str>| {
        let of = all.iter().filter(|(name, _)| link.is_none_or(|link| link == name));
        of.map(|(_, ip)| ip).find(|ip| global(ip))
    };
    let loopback = || all.iter().map(|(_, ip)| ip).find(|ip| same_network && ip.is_loopback());
    first(Some("eth1")).or_else(|| first(None)).or_else(loopback).map(IpAddr::to_string)
}

/// The disk of the unit of a target in the list of sessions.
fn disk_in<'a>(list: &'a str, target: &str) -> Option<&'a str> {
    let unit = format!(" Lun: {LUN}");
    let (mut in_target, mut in_unit) = (false, false);
    for line in list.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("Target: ") {
            in_target = name.split(' ').next() == Some(target);
            in_unit = false;
        } else if line.contains(" Lun: ") {
            in_unit = in_target && line.ends_with(&unit);
        } else if in_unit && let Some(disk) = line.strip_prefix("Attached scsi disk ") {
            return disk.split_whitespace().next();
        }
    }
    None
}

/// The numbers of the sessions with a target in the short list of sessions: lines `tcp: [1] IP:PORT,1 TARGET`.
fn sessions_in(list: &str, target: &str) -> Vec<String> {
    let number = |line: &str| {
        let mut words = line.split_whitespace();
        let number = words.find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))?;
        words.any(|word| word == target).then(|| number.to_owned())
    };
    list.lines().filter_map(number).collect()
}

/// Removes the empty files below a directory, and the directories that are empty then.
fn remove_empty(directory: &Path, depth: u32) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.filter_map(io::Result::ok).map(|entry| entry.path()) {
        match fs::symlink_metadata(&path) {
            Ok(file) if file.is_dir() && depth > 0 => remove_empty(&path, depth - 1),
            Ok(file) if file.is_file() && file.len() == 0 => {
                // Who cannot remove it finds out at the next attempt.
                let _ = fs::remove_file(&path);
            }
            _ => {}
        }
    }
    // One with records in it stays.
    let _ = fs::remove_dir(directory);
}

#[cfg(test)]
mod tests;
