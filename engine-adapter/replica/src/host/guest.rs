//! A sync agent started by itself (`longhorn sync-agent`), served by the process of its replica.

use super::hosting::{check_directory, receive};
use super::owner::Offer;
use super::protocol::{self, Expected, SYNC_AGENT, SyncAgent};
use super::served::{Common, ServedAgent};
use super::sessions;
use super::sockets::{receivers_from, tcp};
use crate::replica::Replica;
use dbs_control::{Extra, Failure, Reply};
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_wire::control::Identity;
use longhorn_wire::transport;
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What serves guests.
struct Host {
    common: Arc<Common>,
    replica: Arc<Replica>,
    /// There is an agent already.
    taken: AtomicBool,
}

/// Offers to serve the sync agent of `replica`, unless there is one already, on control sockets.
#[must_use]
pub fn offer(common: Arc<Common>, replica: Arc<Replica>, has_agent: bool) -> Offer {
    let host = Arc::new(Host { common, replica, taken: AtomicBool::new(has_agent) });
    Box::new(move |method, params| {
        if method != SYNC_AGENT {
            return Ok(None);
        }
        let request: SyncAgent = serde_json::from_value(params.clone())
            .map_err(|e| Error::invalid(format!("no request: {e}")))?;
        let answer = json!(Expected { descriptors: request.descriptors() });
        let host = Arc::clone(&host);
        Ok(Some(Extra::Session(answer, Box::new(move |stream| host.session(stream, &request)))))
    })
}

impl Host {
    fn session(self: Arc<Self>, stream: UnixStream, request: &SyncAgent) {
        if self.taken.swap(true, Ordering::SeqCst) {
            let text = "the replica has a sync agent already";
            let error = Error::new(ErrorKind::Exists, text);
            let _gone = protocol::reply(&stream, &Reply::Error(Failure::from(&error)));
            return;
        }
        let stays = self.serve(&stream, request).and_then(|agent| {
            protocol::reply(&stream, &Reply::Result(json!({})))?;
            let host = Arc::clone(&self);
            sessions::when_over(self.common.runtime(), stream, move |stream| {
                agent.stop();
                host.taken.store(false, Ordering::SeqCst);
                let _gone = protocol::reply(stream, &Reply::Result(Value::Null));
            })
        });
        if let Err(e) = stays {
            log::warn("sync-agent", &[("error", &e)]);
            self.taken.store(false, Ordering::SeqCst);
        }
    }

    fn serve(&self, stream: &UnixStream, request: &SyncAgent) -> Result<ServedAgent> {
        let served = receive(stream, request.descriptors()).and_then(|files| {
            transport::check_wanted(request.tls)?;
            let mut files = files.into_iter();
            check_directory(&request.dir, files.next())?;
            let listener = tcp(files.next())?;
            let receivers = receivers_from(files)?;
            let identity = Identity::replica(&request.volume_name, &request.instance_name);
            let replica = Arc::clone(&self.replica);
            ServedAgent::start(&self.common, replica, &identity, listener, receivers)
        });
        if let Err(e) = &served {
            let _gone = protocol::reply(stream, &Reply::Error(Failure::from(e)));
        }
        served
    }
}
