//! A gRPC server on a listening socket, from start to a graceful end.

use crate::transport;
use dbs_core::{Error, Result};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tonic::service::RoutesBuilder;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

/// How often an idle connection is asked whether somebody is there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(60);
/// How long the answer may take.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Rest after a connection could not be accepted, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A running gRPC server. Dropping it ends it without waiting.
#[derive(Debug)]
pub struct ControlServer {
    runtime: Handle,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl ControlServer {
    /// Serves on a socket that is bound and listening already.
    ///
    /// # Errors
    /// `Io` if the socket cannot be used.
    pub fn start(runtime: &Handle, listener: TcpListener, routes: RoutesBuilder) -> Result<Self> {
        let failed = |e| Error::io(e, "starting a gRPC server");
        let address = listener.local_addr().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = {
            let _context = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(failed)?
        };
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let incoming = incoming.then(async |accepted| {
            if accepted.is_err() {
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            accepted
        });
        let incoming = transport::incoming(runtime, incoming);
        let (stop, mut stopped) = watch::channel(false);
        let server = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_routes(routes.routes());
        let task = runtime.spawn(async move {
            let asked = async move {
                // An error says that the handle is gone, which ends it as well.
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            if let Err(e) = server.serve_with_incoming_shutdown(incoming, asked).await {
                dbs_service::log::error("grpc", &[("address", &address), ("error", &e)]);
            }
        });
        Ok(Self { runtime: runtime.clone(), address, stop, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it still serves.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.task.is_finished()
    }

    /// Accepts no more, closes idle connections, and waits so long for calls in flight; says
    /// whether all have ended. Not to be called on a thread of the runtime.
    pub fn stop(self, timeout: Duration) -> bool {
        self.stop.send_replace(true);
        let Self { runtime, task, .. } = self;
        runtime.block_on(async { tokio::time::timeout(timeout, task).await.is_ok() })
    }
}
