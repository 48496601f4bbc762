//! What virtual machines and hosts of NVMe have in common with NBD clients.

use dbs_nbd::{Access, ExportRules, Peer, ServerHandle};
use std::sync::Arc;

/// What may be done by who comes through a socket or from an address: the rules of exports hold for it as for an NBD
/// client.
pub(crate) fn access(rules: ExportRules) -> dbs_frontend::Access {
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
