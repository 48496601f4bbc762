//! A replica on a network of its own, with a link that can be cut.

use crate::lab::{Lab, Replica, output, skip, stock};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The link to a replica's network. It goes with the replica's process, or when this is dropped.
pub struct Link {
    name: String,
    lab: std::path::PathBuf,
}

impl Link {
    fn ip(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new("ip");
        command.args(args);
        output(command, &self.lab)
    }

    /// Cuts the link, or mends it.
    pub fn set(&self, up: bool) {
        let state = if up { "up" } else { "down" };
        self.ip(&["link", "set", &self.name, state]).unwrap();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = self.ip(&["link", "del", &self.name]);
    }
}

impl Lab {
    /// A replica behind a link; `None`, said so, where there can be none.
    pub fn replica_apart(&self, test: &str, name: &str) -> Option<(Replica, Link)> {
        static LINKS: AtomicU32 = AtomicU32::new(0);
        if stock().is_some() {
            skip(test, "replicas of ours, which say that they are ready");
            return None;
        }
        if !nix::unistd::geteuid().is_root() {
            skip(test, "root, for networks of its own");
            return None;
        }
        let number = LINKS.fetch_add(1, Ordering::Relaxed);
        let mut try_it = Command::new("unshare");
        try_it.args(["--net", "--", "ip", "link", "set", "lo", "up"]);
        if let Err(error) = output(try_it, self.place.path()) {
            skip(test, &format!("network namespaces and `ip`: {}", error.trim()));
            return None;
        }
        let mut command = self.place.command("unshare");
        command.args(["--net", "--", crate::PROGRAM]);
        let mut replica = self.replica_of(command, "0.0.0.0", name, &["--disableRevCounter"]);
        let (own, its) = (format!("dbsa{}x{number}", std::process::id() % 100_000), "dbsb");
        let link = Link { name: own.clone(), lab: self.place.path().to_owned() };
        let pid = replica.process.pid().to_string();
        let net = format!("10.213.{}", std::process::id() % 250);
        let (here, there) = (number * 4 + 1, number * 4 + 2);
        let made =
            link.ip(&["link", "add", &own, "type", "veth", "peer", "name", its, "netns", &pid]);
        if let Err(error) = made {
            skip(test, &format!("veth links: {}", error.trim()));
            return None;
        }
        let inside = |args: &[&str]| {
            let mut command = Command::new("nsenter");
            command.args(["-t", &pid, "-n", "--", "ip"]).args(args);
            output(command, self.place.path())
        };
        let made = link
            .ip(&["addr", "add", &format!("{net}.{here}/30"), "dev", &own])
            .and_then(|_| inside(&["addr", "add", &format!("{net}.{there}/30"), "dev", its]))
            .and_then(|_| inside(&["link", "set", its, "up"]))
            .and_then(|_| inside(&["link", "set", "lo", "up"]));
        if let Err(error) = made {
            skip(test, &format!("addresses of veth links: {}", error.trim()));
            return None;
        }
        link.set(true);
        replica.host = format!("{net}.{there}");
        replica.address = format!("tcp://{}:{}", replica.host, replica.port);
        Some((replica, link))
    }
}
