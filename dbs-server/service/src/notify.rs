//! Telling systemd how a service is (`Type=notify`).

use crate::log;
use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells systemd, if it wants to know, a state such as `READY=1`.
pub fn notify(state: &str) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET").filter(|place| !place.is_empty()) else {
        return;
    };
    let sent = address(&place).and_then(|address| {
        UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
    });
    if let Err(e) = sent {
        log::warn("notify", &[("error", &e)]);
    }
}

/// A path, or with `@` in front a name in the abstract namespace.
fn address(place: &OsString) -> std::io::Result<SocketAddr> {
    match place.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(OsStr::from_bytes(place.as_bytes())),
    }
}
