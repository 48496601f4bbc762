//! What virtual machines and hosts of NVMe have in common with NBD clients.

use dbs_nbd::{Access, ExportRules, Peer, ServerHandle};
use std::path::Path;
use std::sync::Arc;

/// What may be done through the socket of a volume: the rules of exports hold for it as for a unix socket of NBD.
pub(crate) fn access(rules: ExportRules) -> dbs_vhost::Access {
    Box::new(move |volume: &str, socket: &Path| {
        let address = format!("unix:{}", socket.display());
        match rules.access(volume, &Peer { address, ..Peer::default() }) {
            Access::None => None,
            access => Some(access == Access::Read),
        }
    })
}

/// What may be done by a host of NVMe from an address: the rules of exports hold for it as for an NBD client over TCP.
pub(crate) fn host_access(rules: ExportRules) -> dbs_nvme::Access {
    Box::new(move |volume: &str, address: &str| {
        let peer = Peer { address: address.to_owned(), ..Peer::default() };
        match rules.access(volume, &peer) {
            Access::None => None,
            access => Some(access == Access::Read),
        }
    })
}

/// Numbers for machines and hosts, which no NBD client has.
pub(crate) fn numbers(nbd: &Arc<ServerHandle>) -> Box<dyn Fn() -> u64 + Send + Sync> {
    let nbd = Arc::downgrade(nbd);
    // Without it the server is stopping.
    Box::new(move || nbd.upgrade().map_or(0, |nbd| nbd.number()))
}
