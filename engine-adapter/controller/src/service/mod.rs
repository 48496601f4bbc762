//! What a controller shows: `ptypes.ControllerService`, beside health, reflection and the profiler's
//! switch on one port, and metrics for Prometheus on another.

mod metrics;
mod rpc;

pub use metrics::text as metrics_text;
pub use rpc::{ControllerRpc, SERVICE_NAME};

use crate::volume::Controller;
use dbs_core::Result;
use longhorn_wire::control::{ControlServer, Identity, controller_routes};
use std::net::TcpListener;
use std::sync::Arc;
use tokio::runtime::Handle;

/// Serves a controller on a socket that is bound already, to callers that mean this identity. To be
/// called when the volume has been started, if it is started at all: that the port answers is what
/// tells Longhorn that it was.
///
/// # Errors
/// `Io` if the socket cannot be used.
pub fn serve(
    runtime: &Handle,
    listener: TcpListener,
    identity: &Identity,
    controller: Arc<Controller>,
) -> Result<ControlServer> {
    let mut routes = controller_routes(identity, &[SERVICE_NAME])?;
    routes.add_service(ControllerRpc::server(controller, identity.clone()));
    ControlServer::start(runtime, listener, routes)
}
