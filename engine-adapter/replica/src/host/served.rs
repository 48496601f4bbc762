//! The servers of one replica: gRPC, data connections, sync agent.

use super::options::Options;
use super::sockets::Sockets;
use crate::agent::{Agent, AgentOptions, ReceiverPorts, SERVICE_NAMES};
use crate::metrics;
use crate::replica::{Replica, ReplicaRpc, SERVICE_NAME};
use dbs_core::{Error, Result};
use longhorn_data::{DataServer, DataService};
use longhorn_wire::control::{ControlServer, Identity, routes};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads of the runtime of a process: only the control plane uses it.
const RUNTIME_THREADS: usize = 2;
/// How long calls in flight may take when a server ends.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// What replicas of one process share.
pub struct Common {
    /// Always there until it is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
    data: DataServer,
}

impl Common {
    /// Starts the threads.
    ///
    /// # Errors
    /// `Io` if they cannot be had.
    pub fn start(data: longhorn_data::DataOptions) -> Result<Self> {
        dbs_frontend::raise_descriptors();
        let runtime = Builder::new_multi_thread()
            .worker_threads(RUNTIME_THREADS)
            .thread_name("grpc")
            .enable_all()
            .build()
            .map_err(|e| Error::io(e, "starting the runtime"))?;
        let data = DataServer::start(data).map_err(|e| Error::io(e, "starting the data server"))?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime), data })
    }

    /// Where asynchronous work runs.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        &self.handle
    }

    /// Name of the reactors' driver.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        self.data.driver()
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // What still runs works on a store that is closed, and cannot do harm.
            runtime.shutdown_background();
        }
    }
}

/// A replica being served. Dropping it ends its servers without waiting for calls in flight.
pub struct Served {
    replica: Arc<Replica>,
    name: String,
    volume_name: String,
    data: Mutex<Option<DataService>>,
    grpc: Mutex<Option<ControlServer>>,
    agent: Mutex<Option<ServedAgent>>,
}

/// A sync agent being served, on its own port.
pub struct ServedAgent {
    agent: Arc<Agent>,
    grpc: ControlServer,
}

impl Served {
    /// Serves `replica` on these sockets.
    ///
    /// # Errors
    /// `Io` if they cannot be used.
    pub fn start(
        common: &Common,
        replica: Arc<Replica>,
        options: &Options,
        sockets: Sockets,
        receivers: ReceiverPorts,
    ) -> Result<Self> {
        let identity = Identity::replica(&options.volume_name, &options.instance_name);
        let mut all = routes(&identity, &[SERVICE_NAME], true)?;
        all.add_service(ReplicaRpc::server(Arc::clone(&replica), identity.clone()));
        let listener = sockets.data.into_listener()?;
        let data = common.data.serve(Arc::clone(replica.gate()), vec![listener]);
        let data = data.map_err(|e| Error::io(e, "serving data connections"))?;
        let grpc = ControlServer::start(common.runtime(), sockets.grpc, all)?;
        let served = Self {
            replica,
            name: options.name(),
            volume_name: options.volume_name.clone(),
            data: Mutex::new(Some(data)),
            grpc: Mutex::new(Some(grpc)),
            agent: Mutex::default(),
        };
        if let Some(listener) = sockets.agent {
            let replica = Arc::clone(&served.replica);
            let agent = ServedAgent::start(common, replica, &identity, listener, receivers)?;
            *lock(&served.agent) = Some(agent);
        }
        Ok(served)
    }

    /// Whether its sync agent is served here.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        lock(&self.agent).is_some()
    }

    /// The replica.
    #[must_use]
    pub fn replica(&self) -> &Arc<Replica> {
        &self.replica
    }

    /// What it contributes to metrics.
    #[must_use]
    pub fn measure(&self) -> metrics::Source {
        let agent = lock(&self.agent).as_ref().map(|served| Arc::clone(&served.agent));
        let jobs = agent.as_ref().map(|agent| agent.jobs());
        metrics::Source::of(&self.name, &self.volume_name, &self.replica, jobs)
    }

    /// Whether all its servers still serve.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let agent = lock(&self.agent).as_ref().is_none_or(ServedAgent::is_running);
        agent && lock(&self.grpc).as_ref().is_some_and(ControlServer::is_running)
    }

    /// Ends its servers in good order; what its store is to become is for the caller.
    pub fn stop(&self) {
        // The sockets go with their servers, the data server's first: nobody new comes.
        drop(lock(&self.data).take());
        if let Some(agent) = lock(&self.agent).take() {
            agent.stop();
        }
        if let Some(grpc) = lock(&self.grpc).take() {
            grpc.stop(CALL_TIMEOUT);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic leaves what they guard inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServedAgent {
    /// Serves the sync agent of `replica`, which has no other one.
    ///
    /// # Errors
    /// `Io` if the socket cannot be used.
    pub fn start(
        common: &Common,
        replica: Arc<Replica>,
        identity: &Identity,
        listener: TcpListener,
        receivers: ReceiverPorts,
    ) -> Result<Self> {
        let agent = Agent::new(replica, AgentOptions::new(&identity.volume, receivers));
        let mut all = routes(identity, &SERVICE_NAMES, false)?;
        agent.add_to(&mut all, identity);
        let grpc = ControlServer::start(common.runtime(), listener, all)?;
        Ok(Self { agent, grpc })
    }

    /// Whether it still serves.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.grpc.is_running()
    }

    /// Ends it in good order.
    pub fn stop(self) {
        self.agent.stop();
        self.grpc.stop(CALL_TIMEOUT);
    }
}
