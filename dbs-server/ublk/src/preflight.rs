//! What this machine has and lacks for serving volumes, and how to get it.

use dbs_reactor::ublk::{CONTROL_PATH, Control, feature};
use nix::sys::utsname::uname;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// The result of `dbs preflight`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preflight {
    /// Release of the running kernel.
    pub kernel: String,
    /// What was looked at.
    pub checks: Vec<Check>,
    /// What works with all that.
    pub ways: Vec<Way>,
}

/// One thing that a way of serving needs, or is better with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Stable name.
    pub name: String,
    /// Whether it is there.
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// What to do about it; absent if nothing.
    pub remedy: Option<String>,
}

/// A way of giving volumes to their users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// Stable name: `attach`, `attach_resize`, `nbd`, `nbd_device`, `fuse`.
    pub name: String,
    /// Whether it works here.
    pub works: bool,
    /// What it is.
    pub what: String,
    /// Names of the checks that keep it from working.
    pub lacks: Vec<String>,
}

/// Looks at this machine. Nothing is changed.
#[must_use]
pub fn preflight() -> Preflight {
    let kernel = uname().map_or_else(
        |_| "unknown".to_owned(),
        |names| names.release().to_string_lossy().into_owned(),
    );
    let config = Config::read(&kernel);
    let features = features();
    let checks = vec![
        io_uring(),
        ublk_config(&config, &kernel),
        ublk_driver(&features),
        ublk_features(&features),
        resize(&features),
        admin(),
        device(&config, "nbd_device", "nbd", "CONFIG_BLK_DEV_NBD", "/dev/nbd0"),
        device(&config, "fuse", "fuse", "CONFIG_FUSE_FS", "/dev/fuse"),
    ];
    let ways = ways(&checks);
    Preflight { kernel, checks, ways }
}

/// What each way needs.
const WAYS: [(&str, &str, &[&str]); 5] = [
    (
        "attach",
        "`dbs attach`: block devices through ublk",
        &["io_uring", "ublk_driver", "ublk_features", "admin"],
    ),
    (
        "attach_resize",
        "resizing an attached volume in use",
        &["io_uring", "ublk_driver", "ublk_resize", "admin"],
    ),
    ("nbd", "`dbs serve --nbd`: any NBD client, without the kernel's help", &[]),
    (
        "nbd_device",
        "block devices through `nbd-client` and `dbs serve --nbd`",
        &["nbd_device", "admin"],
    ),
    ("fuse", "volumes as files, by programs that use FUSE over NBD (`nbdfuse`)", &["fuse"]),
];

fn ways(checks: &[Check]) -> Vec<Way> {
    let fails = |name: &&&str| checks.iter().any(|check| check.name == **name && !check.ok);
    WAYS.iter()
        .map(|(name, what, needs)| {
            let lacks: Vec<String> =
                needs.iter().filter(fails).map(|name| (*name).to_owned()).collect();
            Way { name: (*name).into(), works: lacks.is_empty(), what: (*what).into(), lacks }
        })
        .collect()
}

fn check(name: &str, ok: bool, found: impl Into<String>, remedy: &str) -> Check {
    let remedy = (!ok && !remedy.is_empty()).then(|| remedy.to_owned());
    Check { name: name.to_owned(), ok, found: found.into(), remedy }
}

fn io_uring() -> Check {
    let remedy = "set /proc/sys/kernel/io_uring_disabled to 0, and allow the io_uring system calls \
                  where a container's seccomp profile forbids them; without, stores are read and \
                  written with plain system calls";
    match dbs_reactor::uring_allowed() {
        Ok(()) => check("io_uring", true, "allowed", ""),
        Err(error) => check("io_uring", false, error.to_string(), remedy),
    }
}

/// Features of the driver, or why they are not known.
fn features() -> std::io::Result<u64> {
    Control::open()?.features()
}

fn ublk_config(config: &Config, kernel: &str) -> Check {
    let module = Path::new("/lib/modules").join(kernel).join("modules.dep");
    let listed = fs::read_to_string(module).is_ok_and(|text| text.contains("ublk_drv.ko"));
    let (ok, found) = match config.value("CONFIG_BLK_DEV_UBLK") {
        Some('y') => (true, "built in"),
        Some(_) if listed => (true, "a module, installed"),
        Some(_) => (false, "a module, not installed"),
        None if listed => (true, "a module, installed"),
        None if config.known => (false, "left out of this kernel"),
        None => (false, "not known: the kernel's configuration was not found"),
    };
    let remedy = "install the package with the kernel's further modules, or a kernel with \
                  CONFIG_BLK_DEV_UBLK (Linux 6.5 or later)";
    check("ublk_config", ok, found, remedy)
}

fn ublk_driver(features: &std::io::Result<u64>) -> Check {
    let remedy = format!(
        "`modprobe ublk_drv` as root; in a container, also pass on {CONTROL_PATH} and the devices \
         /dev/ublkc* and /dev/ublkb*"
    );
    match features {
        Ok(_) => check("ublk_driver", true, "loaded", ""),
        Err(_) if Path::new(CONTROL_PATH).exists() => {
            check("ublk_driver", true, "loaded, but not usable by this user", "")
        }
        Err(_) => {
            let missing = format!("{CONTROL_PATH} is missing");
            check("ublk_driver", false, missing, &remedy)
        }
    }
}

fn ublk_features(features: &std::io::Result<u64>) -> Check {
    let wanted = [
        (feature::USER_COPY, "user_copy"),
        (feature::USER_RECOVERY, "user_recovery"),
        (feature::USER_RECOVERY_REISSUE, "user_recovery_reissue"),
    ];
    let remedy = "Linux 6.5 or later";
    match features {
        Ok(bits) => {
            let name = |(bit, name): &(u64, &'static str)| (bits & bit == 0).then_some(*name);
            let lacking: Vec<&str> = wanted.iter().filter_map(name).collect();
            let found = match lacking.is_empty() {
                true => format!("{bits:#x}"),
                false => format!("{bits:#x}, without {}", lacking.join(", ")),
            };
            check("ublk_features", lacking.is_empty(), found, remedy)
        }
        Err(error) => {
            check("ublk_features", false, format!("not known: {error}"), "see the other checks")
        }
    }
}

fn resize(features: &std::io::Result<u64>) -> Check {
    let ok = features.as_ref().is_ok_and(|bits| bits & feature::UPDATE_SIZE != 0);
    let found = if ok { "the driver can" } else { "the driver cannot do this, or cannot be asked" };
    let remedy = "Linux 6.16 or later; until then a new size shows when a volume is detached and \
                  attached again";
    check("ublk_resize", ok, found, remedy)
}

/// `CAP_SYS_ADMIN`.
const CAPABILITY_ADMIN: u32 = 21;

fn admin() -> Check {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ok = capability(&status, CAPABILITY_ADMIN);
    let found = if ok { "CAP_SYS_ADMIN" } else { "no CAP_SYS_ADMIN" };
    check("admin", ok, found, "run it as root, or with CAP_SYS_ADMIN")
}

/// Whether a process whose `/proc/PID/status` this is has a capability.
fn capability(status: &str, number: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_some_and(|bits| bits & (1 << number) != 0)
}

fn device(config: &Config, name: &str, module: &str, option: &str, path: &str) -> Check {
    let there = Path::new(path).exists();
    let loaded = Path::new("/sys/module").join(module).exists();
    let found = match (there, loaded, config.value(option)) {
        (true, ..) => format!("{path} is there"),
        (false, true, _) => format!("the driver is loaded, but {path} is missing"),
        (false, false, Some(_)) => "the driver is not loaded".to_owned(),
        (false, false, None) => format!("{path} is missing"),
    };
    check(name, there, found, &format!("`modprobe {module}` as root"))
}

/// The configuration of the running kernel.
struct Config {
    known: bool,
    text: String,
}

impl Config {
    fn read(kernel: &str) -> Self {
        // /proc/config.gz is compressed, and says no more where a distribution has the file.
        let places = [format!("/boot/config-{kernel}"), format!("/lib/modules/{kernel}/config")];
        let text = places.iter().find_map(|path| fs::read_to_string(path).ok());
        Self { known: text.is_some(), text: text.unwrap_or_default() }
    }

    /// `y` or `m`.
    fn value(&self, option: &str) -> Option<char> {
        let line = self.text.lines().find_map(|line| line.strip_prefix(option)?.strip_prefix('='));
        line?.chars().next().filter(|value| matches!(value, 'y' | 'm'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_names_checks_that_exist() {
        let found = preflight();
        let names: Vec<&str> = found.checks.iter().map(|check| check.name.as_str()).collect();
        for (way, _, needs) in WAYS {
            assert!(needs.iter().all(|need| names.contains(need)), "{way}");
        }
        let nbd = found.ways.iter().find(|way| way.name == "nbd").unwrap();
        assert!(nbd.works, "it needs nothing");
        for check in &found.checks {
            assert!(check.ok || check.remedy.is_some(), "{check:?}");
            assert!(!check.found.is_empty());
        }
        if !Path::new(CONTROL_PATH).exists() {
            let attach = found.ways.iter().find(|way| way.name == "attach").unwrap();
            assert!(attach.lacks.iter().any(|name| name == "ublk_driver"), "{attach:?}");
        }
    }

    #[test]
    fn what_is_lacking_is_named() {
        let checks = [check("io_uring", true, "", ""), check("admin", false, "no", "be root")];
        let attach = &ways(&checks)[0];
        assert_eq!(
            (attach.works, attach.lacks.as_slice()),
            (false, ["admin".to_owned()].as_slice())
        );
    }

    #[test]
    fn options_and_capabilities() {
        let text = "CONFIG_BLK_DEV_UBLK=m\n# CONFIG_FUSE_FS is not set\nCONFIG_FUSE_FS_X=y\n";
        let config = Config { known: true, text: text.to_owned() };
        assert_eq!(config.value("CONFIG_BLK_DEV_UBLK"), Some('m'));
        assert_eq!(config.value("CONFIG_FUSE_FS"), None);
        let status = "Name:\tx\nCapEff:\t0000000000200000\n";
        assert!(capability(status, CAPABILITY_ADMIN) && !capability(status, 20));
        assert!(!capability("", CAPABILITY_ADMIN));
    }
}
