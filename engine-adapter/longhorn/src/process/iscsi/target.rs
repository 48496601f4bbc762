//! The target of a volume: `tgtd` with its backing store `longhorn`, told what to do by `tgtadm`.

use super::program::{Failure, Run, Why};
use dbs_core::{Error, Result};
use dbs_service::log;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

/// How long a command may take. Adding a unit, `tgtd` tries for 25 s to connect to the volume, and answers nobody
/// meanwhile.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a question may take.
const QUESTION: Duration = Duration::from_secs(30);
/// The number of the volume's unit in its target.
pub(super) const LUN: &str = "1";
/// How `tgtd` names the way to a volume.
const BACKING_STORE: &str = "longhorn";
const TARGETS_MAX: u32 = 4095;
/// Of a number that another controller may take first.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);
/// How often a `tgtd` that was just started is looked for.
const STARTS: u32 = 50;
const START_PAUSE: Duration = Duration::from_millis(100);
const LOG: &str = "/var/log/tgtd.log";
/// The caching page of a disk whose write cache is off: `tgtd` does not pass flushes on.
const NO_WRITE_CACHE: &str =
    "mode_page=8:0:18:0x10:0:0xff:0xff:0:0:0xff:0xff:0xff:0xff:0x80:0x14:0:0:0:0:0:0";
/// How `tgtadm` says that no `tgtd` runs: ENOTCONN.
const NO_DAEMON: i32 = 107;
/// Why one may hang, and all volumes that it serves with it.
const TOO_OLD: &str = "`tgtd` hangs, as one from before Longhorn 1.4 (October 2022) does, which does not know \
                       the option `request_timeout`: use that of github.com/longhorn/tgt, from then or later";
const WAY_OUT: &str = "the frontend `nbd`, and ublk (`modprobe ublk_drv`), work without";

/// The iSCSI name of a volume's target. Names of volumes have one character that iSCSI does not allow.
pub(super) fn name_of(volume: &str) -> String {
    format!("iqn.2019-10.io.longhorn:{}", volume.replace('_', ":"))
}

/// The target of one volume.
pub(super) struct Target<'a> {
    pub run: &'a dyn Run,
    pub name: &'a str,
}

impl Target<'_> {
    /// Has a `tgtd` run that can serve volumes.
    ///
    /// # Errors
    /// `Unsupported` if there is none, or another one than Longhorn's.
    pub fn ready_daemon(&self) -> Result<()> {
        let stores = match self.stores() {
            Ok(stores) => stores,
            Err(failure) if matches!(failure.why, Why::Missing) => return Err(missing(&failure)),
            Err(failure) if failure.is_slow() => return Err(failure.into()),
            Err(_) => self.start_daemon()?,
        };
        match stores.contains(&format!(" {BACKING_STORE}")) {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "the `tgtd` that runs here has no backing store `{BACKING_STORE}`: end it, and have \
                 Longhorn's own `tgtd` in PATH; {WAY_OUT}"
            ))),
        }
    }

    fn stores(&self) -> std::result::Result<String, Failure> {
        self.system("show", "system", &[])
    }

    fn start_daemon(&self) -> Result<String> {
        let started = self.run.start("tgtd", &["-f"], Path::new(LOG));
        started.map_err(|failure| missing(&failure))?;
        log::info("started", &[("program", &"tgtd"), ("log", &LOG)]);
        let mut last = String::new();
        for _ in 0..STARTS {
            match self.stores() {
                Ok(stores) => return Ok(stores),
                // It would be so each time.
                Err(failure) if failure.is_slow() => return Err(failure.into()),
                Err(failure) => last = failure.to_string(),
            }
            self.run.sleep(START_PAUSE);
        }
        Err(Error::unsupported(format!(
            "`tgtd` does not start, {LOG} may say why ({last}); {WAY_OUT}"
        )))
    }

    /// Its number; `None` if there is no such target, as without a `tgtd`.
    ///
    /// # Errors
    /// `tgtd` does not say.
    pub fn find(&self) -> Result<Option<u32>> {
        let list = match self.list() {
            Err(failure) if failure.exited(NO_DAEMON) => return Ok(None),
            Err(failure) if matches!(failure.why, Why::Missing) => return Ok(None),
            list => list?,
        };
        Ok(targets(&list).find(|(_, name)| *name == self.name).map(|(tid, _)| tid))
    }

    fn list(&self) -> std::result::Result<String, Failure> {
        self.system("show", "target", &[])
    }

    /// Makes it, with the volume behind a socket as its unit, for all initiators.
    ///
    /// # Errors
    /// `tgtd` refuses; what was made by then is there.
    pub fn make(&self, socket: &str, size: u64, timeout: Duration) -> Result<()> {
        let tid = self.make_empty()?.to_string();
        let options = format!("size={size};request_timeout={}", timeout.as_secs());
        let unit = |op, more: &[&str]| {
            self.system(op, "logicalunit", &[&["--tid", &tid, "--lun", LUN], more].concat())
        };
        let made = unit("new", &["-b", socket, "--bstype", BACKING_STORE, "--bsopts", &options]);
        made.map_err(|failure| {
            let is_slow = failure.is_slow();
            let error = Error::from(failure);
            if is_slow { error.context(TOO_OLD) } else { error }
        })?;
        unit("update", &["--params", "thin_provisioning=1"])?;
        unit("update", &["--params", NO_WRITE_CACHE])?;
        self.system("bind", "target", &["--tid", &tid, "-I", "ALL"])?;
        Ok(())
    }

    /// Makes it under the first number that is free; another controller may look for one meanwhile.
    fn make_empty(&self) -> Result<u32> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let list = self.list()?;
            let taken: BTreeSet<u32> = targets(&list).map(|(tid, _)| tid).collect();
            let free = (1..TARGETS_MAX).find(|tid| !taken.contains(tid));
            let tid = free.ok_or_else(|| Error::busy("`tgtd` has no number left for a target"))?;
            match self.system("new", "target", &["--tid", &tid.to_string(), "-T", self.name]) {
                Ok(_) => return Ok(tid),
                Err(failure) if attempts == ATTEMPTS || failure.is_slow() => {
                    return Err(failure.into());
                }
                Err(_) => self.run.sleep(PAUSE),
            }
        }
    }

    /// Removes it if it is there, with what initiators have open.
    ///
    /// # Errors
    /// It is there still.
    pub fn remove(&self) -> Result<()> {
        let Some(number) = self.find()? else { return Ok(()) };
        let tid = number.to_string();
        let of = |op, mode, more: &[&str]| {
            self.system(op, mode, &[&["--tid", tid.as_str()], more].concat())
        };
        unless(of("unbind", "target", &["-I", "ALL"]), &["access control rule does not exist"])?;
        for (session, connection) in connections(&of("show", "conn", &[])?) {
            let closed = of("delete", "conn", &["--sid", session, "--cid", connection]);
            // It may have ended meanwhile.
            unless(closed, &["can't find the session", "can't find the connection"])?;
        }
        if !self.is_still(number)? {
            return Ok(());
        }
        // The unit of a target whose `tgtd` lost its volume may stay; it goes with the target.
        let deleted = of("delete", "logicalunit", &["--lun", LUN]);
        unless(deleted, &["logical unit is still active", "can't find the logical unit"])?;
        if self.is_still(number)? {
            of("delete", "target", &[])?;
        }
        Ok(())
    }

    /// Whether it has this number still: a `tgtd` that was started anew meanwhile may have given it to another
    /// volume. `false` if it is gone.
    fn is_still(&self, number: u32) -> Result<bool> {
        match self.find()? {
            Some(now) if now != number => Err(Error::busy(format!(
                "the target {} has another number than a moment ago, as when `tgtd` was started anew: try again",
                self.name
            ))),
            now => Ok(now.is_some()),
        }
    }

    /// Tells it that the volume has so many bytes.
    ///
    /// # Errors
    /// There is no such target, it is larger, `tgtd` cannot do that.
    pub fn grow(&self, size: u64) -> Result<()> {
        let tid = self.find()?.ok_or_else(|| {
            Error::not_found(format!("`tgtd` has no target {}: it may have been ended", self.name))
        })?;
        let (tid, size) = (tid.to_string(), format!("bsopts=size={size}"));
        self.system("update", "logicalunit", &["--tid", &tid, "--lun", LUN, "--params", &size])?;
        Ok(())
    }

    fn system(&self, op: &str, mode: &str, more: &[&str]) -> std::result::Result<String, Failure> {
        let args = [&["--lld", "iscsi", "--op", op, "--mode", mode], more].concat();
        self.run.run("tgtadm", &args, if op == "show" { QUESTION } else { LIMIT })
    }
}

fn missing(failure: &Failure) -> Error {
    Error::unsupported(format!(
        "{failure}; a volume over iSCSI needs `tgtd` and `tgtadm` of Longhorn, as its instance manager has \
         them; {WAY_OUT}"
    ))
}

/// A command that succeeded, or failed for one of these reasons.
fn unless(done: std::result::Result<String, Failure>, fine: &[&str]) -> Result<()> {
    match done {
        Err(failure) if !fine.iter().any(|text| failure.said(text)) => Err(failure.into()),
        _ => Ok(()),
    }
}

/// Numbers and names of the targets in what `tgtadm` lists: lines `Target 1: NAME`.
fn targets(list: &str) -> impl Iterator<Item = (u32, &str)> {
    list.lines().filter_map(|line| {
        let (tid, name) = line.strip_prefix("Target ")?.split_once(": ")?;
        Some((tid.parse().ok()?, name.trim()))
    })
}

/// Sessions and their connections in what `tgtadm` lists: a line `Session: 11`, below it `Connection: 0`.
fn connections(list: &str) -> Vec<(&str, &str)> {
    let mut session = None;
    let mut all = Vec::new();
    for line in list.lines().map(str::trim) {
        if let Some(number) = line.strip_prefix("Session: ") {
            session = Some(number);
        } else if let (Some(number), Some(session)) = (line.strip_prefix("Connection: "), session) {
            all.push((session, number));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_only_what_iscsi_allows() {
        let long = "x".repeat(64);
        for volume in ["v1", "pvc-0a.b_C", "_", &long] {
            let name = name_of(volume);
            let allowed = |c: char| c.is_ascii_alphanumeric() || ".-:".contains(c);
            assert!(name.chars().all(allowed) && name.len() < 224, "{name}");
        }
        assert_eq!(name_of("a_b-c.d"), "iqn.2019-10.io.longhorn:a:b-c.d");
    }

    #[test]
    fn what_tgtadm_lists() {
        let list = "Target 1: iqn.2019-10.io.longhorn:v1\n    System information:\n        State: ready\n\
                    Target 12: iqn.2019-10.io.longhorn:v12\n    LUN: 1\n";
        let all: Vec<_> = targets(list).collect();
        assert_eq!(all, [(1, "iqn.2019-10.io.longhorn:v1"), (12, "iqn.2019-10.io.longhorn:v12")]);
        let list = "Session: 11\n    Connection: 0\n        Initiator: iqn.x\nSession: 12\n    \
                    Connection: 1\n    Connection: 2\n";
        assert_eq!(connections(list), [("11", "0"), ("12", "1"), ("12", "2")]);
        assert!(connections("").is_empty() && targets("").next().is_none());
    }
}
