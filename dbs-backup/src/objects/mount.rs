//! Network file systems, mounted as upstream mounts them, in the place where upstream does.
//!
//! Source: upstream's `nfs/nfs.go`, `cifs/cifs.go` and `util/util.go` (longhorn/backupstore, commit `ab5179e`).

use super::Directory;
use super::http::Variables;
use crate::url::Url;
use dbs_core::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where all of them are mounted.
const MOUNTS: &str = "/var/lib/longhorn-backupstore-mounts";
/// A mount that takes longer fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// Versions of NFS, the newest first.
const VERSIONS: [&str; 3] = ["4.2", "4.1", "4.0"];

/// A mount to make.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// `nfs4` or `cifs`.
    kind: &'static str,
    source: String,
    place: PathBuf,
    /// Options, to be tried one after the other.
    options: Vec<String>,
    /// Variables for the program.
    secrets: Vec<(&'static str, String)>,
}

/// Mounts what a URL names, unless it is mounted, and opens it.
///
/// # Errors
/// `Invalid` for what is no such URL; `Io` with what `mount` says.
pub fn open(url: &Url, variable: Variables<'_>) -> Result<Directory> {
    let plan = if url.scheme == "nfs" { nfs(url)? } else { cifs(url, variable)? };
    let mounts = fs::read_to_string("/proc/self/mounts")
        .map_err(|e| Error::io(e, "reading /proc/self/mounts"))?;
    match mounted(&mounts, &plan.place) {
        Some((source, kind)) if kind == plan.kind && is_same(&source, &plan.source) => {}
        Some((source, kind)) => {
            return Err(Error::invalid(format!(
                "{} is a mount of {source} ({kind}), not of {} ({}): unmount it",
                plan.place.display(),
                plan.source,
                plan.kind
            )));
        }
        None => mount(&plan)?,
    }
    Directory::open(&plan.place)
}

/// Unmounts all backup stores of this machine. One that is in use stays, and is an error.
///
/// # Errors
/// `Io` with what `umount` says of all that stay.
pub fn unmount_all() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")
        .map_err(|e| Error::io(e, "reading /proc/self/mounts"))?;
    let mut said = Vec::new();
    for place in below(&mounts, MOUNTS) {
        let mut command = Command::new("umount");
        command.arg("--").arg(&place);
        match run(command) {
            // It is empty now, or somebody has mounted it again.
            Ok(()) => drop(fs::remove_dir(&place)),
            Err(text) => said.push(format!("{place}: {text}")),
        }
    }
    if said.is_empty() {
        return Ok(());
    }
    Err(Error::io(std::io::Error::other(said.join("; ")), "unmounting backup stores"))
}

/// What is mounted below a folder, the last first.
fn below(mounts: &str, folder: &str) -> Vec<String> {
    let place = |line: &str| line.split(' ').nth(1).map(plain);
    let mut found: Vec<_> = mounts.lines().filter_map(place).collect();
    found.retain(|place| Path::new(place).starts_with(folder) && place != folder);
    found.reverse();
    found
}

fn nfs(url: &Url) -> Result<Plan> {
    if url.host.is_empty() || url.path.is_empty() {
        return Err(Error::invalid(
            "NFS path must follow format: nfs://<server-address>:/<share-name>/",
        ));
    }
    let options = match url.option("nfsOptions") {
        Some(options) => vec![options.to_owned()],
        None => VERSIONS
            .iter()
            .map(|version| format!("nfsvers={version},actimeo=1,soft,timeo=300,retry=2"))
            .collect(),
    };
    Ok(Plan {
        kind: "nfs4",
        source: format!("{}{}", url.host, url.path),
        place: place(url),
        options,
        secrets: Vec::new(),
    })
}

fn cifs(url: &Url, variable: Variables<'_>) -> Result<Plan> {
    if url.host.is_empty() || url.path.is_empty() {
        return Err(Error::invalid(
            "CIFS path must follow format: cifs://<server-address>/<share-name>/",
        ));
    }
    let options = url.option("cifsOptions").unwrap_or("soft").to_owned();
    // In the environment other users do not see them, as they would in the arguments.
    let secret = |of: &str, name| variable(of).map(|value| (name, value));
    let secrets = [secret("CIFS_USERNAME", "USER"), secret("CIFS_PASSWORD", "PASSWD")];
    Ok(Plan {
        kind: "cifs",
        source: format!("//{}{}", url.host, url.path),
        place: place(url),
        options: vec![options],
        secrets: secrets.into_iter().flatten().collect(),
    })
}

fn place(url: &Url) -> PathBuf {
    let host = url.host.replace('.', "_");
    Path::new(MOUNTS).join(host.trim_end_matches(':')).join(url.path.trim_start_matches('/'))
}

/// Source and type of what is mounted at a place, by the text of `/proc/self/mounts`.
fn mounted<'a>(mounts: &'a str, place: &Path) -> Option<(String, &'a str)> {
    let place = place.to_str()?.trim_end_matches('/');
    // The last one covers the others.
    mounts.lines().rev().find_map(|line| {
        let mut fields = line.split(' ');
        let (source, found) = (plain(fields.next()?), plain(fields.next()?));
        if found == place { Some((source, fields.next()?)) } else { None }
    })
}

/// A field as it was before the kernel wrote a space in it as a number.
fn plain(field: &str) -> String {
    field.replace("\\040", " ")
}

fn is_same(one: &str, other: &str) -> bool {
    one.trim_end_matches('/') == other.trim_end_matches('/')
}

fn mount(plan: &Plan) -> Result<()> {
    let place = plan.place.display();
    fs::create_dir_all(&plan.place).map_err(|e| Error::io(e, format!("making {place}")))?;
    let mut said = Vec::new();
    for options in &plan.options {
        let mut command = Command::new("mount");
        command.args(["-t", plan.kind, "-o", options, "--", &plan.source]).arg(&plan.place);
        command.envs(plan.secrets.iter().map(|(name, value)| (name, value)));
        match run(command) {
            Ok(()) => return Ok(()),
            Err(text) => said.push(format!("{options}: {text}")),
        }
    }
    let (kind, source) = (plan.kind, &plan.source);
    Err(Error::io(
        std::io::Error::other(said.join("; ")),
        format!("mounting {source} as {kind} at {place}"),
    ))
}

/// Runs a program for as long as it may take; what it says if it fails.
fn run(mut command: Command) -> std::result::Result<(), String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("starting it: {e}"))?;
    let begun = Instant::now();
    while child.try_wait().map_err(|e| e.to_string())?.is_none() {
        if begun.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it takes longer than {} s", PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', ", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans() {
        let plan = nfs(&Url::parse("nfs://10.1.2.3:/export/a").unwrap()).unwrap();
        assert_eq!(plan.source, "10.1.2.3:/export/a");
        assert_eq!(plan.place, Path::new("/var/lib/longhorn-backupstore-mounts/10_1_2_3/export/a"));
        assert_eq!(plan.options[0], "nfsvers=4.2,actimeo=1,soft,timeo=300,retry=2");
        let plan = nfs(&Url::parse("nfs://h:/e?nfsOptions=nfsvers%3D4.1,hard").unwrap()).unwrap();
        assert_eq!(plan.options, ["nfsvers=4.1,hard"]);
        assert!(nfs(&Url::parse("nfs:///e").unwrap()).is_err());
        let variable = |name: &str| (name == "CIFS_PASSWORD").then(|| "secret".to_owned());
        let plan = cifs(&Url::parse("cifs://host/share").unwrap(), &variable).unwrap();
        assert_eq!((&*plan.source, &*plan.options[0]), ("//host/share", "soft"));
        assert_eq!(plan.secrets, [("PASSWD", "secret".to_owned())]);
    }

    #[test]
    fn what_is_mounted() {
        let mounts = "a /x ext4 rw 0 0\nh:/e /y\\040z nfs4 rw 0 0\nb /x cifs rw 0 0\n";
        assert_eq!(mounted(mounts, Path::new("/x/")), Some(("b".to_owned(), "cifs")));
        assert_eq!(mounted(mounts, Path::new("/y z")), Some(("h:/e".to_owned(), "nfs4")));
        // Two servers can have one place: `a.b` and `a_b`.
        assert!(is_same("h:/e/", "h:/e") && !is_same("a.b:/e", "a_b:/e"));
        assert_eq!(mounted(mounts, Path::new("/")), None);
        let mounts =
            "a /m/h/x nfs4 rw 0 0\nb /m/h/x/y nfs4 rw 0 0\nc /m ext4 rw 0 0\nd /mm cifs rw 0 0\n";
        assert_eq!(below(mounts, "/m"), ["/m/h/x/y", "/m/h/x"]);
    }
}
