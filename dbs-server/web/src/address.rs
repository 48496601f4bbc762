//! Where the page is served, and under which names it may be asked for.

use dbs_frontend::ListenAddress;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

/// `PORT` on loopback, or `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebAddress(pub ListenAddress);

impl FromStr for WebAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = text.strip_prefix(':').unwrap_or(text);
        if let Ok(port) = port.parse() {
            return Ok(Self(ListenAddress { host: Ipv4Addr::LOCALHOST.to_string(), port }));
        }
        let address = text.parse::<ListenAddress>();
        address.map(Self).map_err(|_| format!("`{text}` is no address; write PORT or HOST:PORT"))
    }
}

impl fmt::Display for WebAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The names under which the page may be asked for.
///
/// A page of another site can have its name lead here, and ask for this page from then on in a browser that has let
/// it (DNS rebinding). Its requests still say its name. Addresses are no names, so these are let through.
#[derive(Debug, Default)]
pub(crate) struct Names(Vec<String>);

impl Names {
    pub(crate) fn new(names: impl IntoIterator<Item = String>) -> Self {
        let all = names.into_iter().chain(["localhost".to_owned()]);
        Self(all.map(|name| name.trim_end_matches('.').to_ascii_lowercase()).collect())
    }

    /// Whether a request with this `Host` is meant for this page. Its port may be that of a tunnel.
    pub(crate) fn have(&self, host: &str) -> bool {
        let Some(name) = without_port(host) else { return false };
        let inner = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        if inner.unwrap_or(name).parse::<IpAddr>().is_ok() {
            return true;
        }
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        self.0.contains(&name)
    }
}

/// The host of `HOST` or `HOST:PORT`; `None` if what follows it is no port.
fn without_port(host: &str) -> Option<&str> {
    let at = host.rfind(':').filter(|at| !host[*at..].contains(']'));
    let Some(at) = at else { return Some(host) };
    host[at + 1..].parse::<u16>().ok().map(|_| &host[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_on_loopback() {
        for (text, shown) in [
            ("8080", "127.0.0.1:8080"),
            (":8080", "127.0.0.1:8080"),
            ("storage.example:443", "storage.example:443"),
            ("[::1]:1", "[::1]:1"),
        ] {
            assert_eq!(text.parse::<WebAddress>().unwrap().to_string(), shown);
        }
        for text in ["", "a", "65536", "a:b", "::1:2"] {
            assert!(text.parse::<WebAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_addresses_and_known_names_are_hosts() {
        let names = Names::new(["Storage.example".to_owned()]);
        for host in [
            "127.0.0.1:80",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "localhost:9",
            "LOCALHOST",
            "storage.example:443",
            "storage.example.",
        ] {
            assert!(names.have(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:80",
            "storage.example.evil.example",
            "localhost:x",
            "127.0.0.1.evil.example",
            "localhost:80@evil.example",
            "[::1",
            "::1:x",
        ] {
            assert!(!names.have(host), "{host}");
        }
    }
}
