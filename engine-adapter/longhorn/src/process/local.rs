//! Replicas in the controller's own process: `--replica local:DIRECTORY` and `--local DIRECTORY`.
//!
//! Each is what `longhorn replica DIRECTORY` serves, on ports of its own, so that it is source and
//! target of rebuilds like any other, and everybody calls it by the address of these. Only the
//! controller itself goes to it directly, for data and for control.

use dbs_core::{Error, Result};
use dbs_frontend::ListenAddress;
use dbs_service::log;
use longhorn_controller::path::LocalReplica;
use longhorn_data::DataOptions;
use longhorn_replica::host::file::{STORE_FILE, StoreOptions};
use longhorn_replica::host::options::Options;
use longhorn_replica::host::own::{self, Running};
use longhorn_replica::host::sockets::Wanted;
use longhorn_replica::metrics;
use longhorn_replica::replica::{Replica, ReplicaRpc};
use longhorn_wire::proto::ptypes::replica_service_server::ReplicaService;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How a replica of this process is written among addresses.
pub const PREFIX: &str = "local:";
/// Ports of a replica besides those for receiving files.
const SERVERS: u16 = 3;
/// Threads for requests of one replica that have to wait, as `longhorn replica` has them.
pub(super) const WORKERS: usize = 8;

/// Replicas that a controller is to have in its process.
#[derive(Debug, Clone)]
pub struct LocalOptions {
    /// Directories of replicas that are not part of the volume yet.
    pub standby: Vec<PathBuf>,
    /// Where the first of all listens; without a port, the system chooses for each.
    pub listen: ListenAddress,
    /// What they have in common; the directory is each one's own.
    pub options: Options,
    /// Ports for receiving files, of each.
    pub receivers: u16,
    /// Threads for connections of others, when it is rebuilt or they are.
    pub data: DataOptions,
    /// Directory of control sockets.
    pub runtime_dir: PathBuf,
    /// Their stores.
    pub store: StoreOptions,
}

/// The replicas, by their addresses.
pub(super) struct Locals {
    running: Vec<(String, Running)>,
    data: HashMap<String, Local>,
}

/// The data side of a replica.
#[derive(Clone)]
pub(super) struct Local {
    pub replica: LocalReplica,
    /// What it is known by where its address would not do, which is another one after each start:
    /// `local:DIRECTORY`.
    pub name: String,
}

/// One that is to be started.
struct Planned {
    dir: PathBuf,
    standby: bool,
    is_new: bool,
}

impl Locals {
    /// Starts those named in `replicas`, and answers with all of these as addresses.
    ///
    /// # Errors
    /// One cannot be served; a new one could be taken as complete beside others that are not new.
    pub fn start(replicas: &[String], local: &LocalOptions) -> Result<(Self, Vec<String>)> {
        let planned = plan(replicas, local)?;
        let mut locals = Self { running: Vec::new(), data: HashMap::new() };
        let started = planned.iter().try_for_each(|planned| {
            let index = locals.running.len();
            let (address, running) = start_one(index, planned, local)?;
            let replica = LocalReplica::new(Arc::clone(running.replica().gate()), WORKERS);
            let replica = replica.map_err(|e| Error::io(e, "starting the workers of a replica"))?;
            // Now it is there.
            let dir = planned.dir.canonicalize().unwrap_or_else(|_| planned.dir.clone());
            let name = format!("{PREFIX}{}", dir.display());
            log::info("local", &[("replica", &planned.dir.display()), ("address", &address)]);
            locals.data.insert(address.clone(), Local { replica, name });
            locals.running.push((address, running));
            Ok(())
        });
        if let Err(error) = started {
            // What went wrong first is what counts.
            let _ = locals.stop();
            return Err(error);
        }
        let mut addresses = locals.running.iter().map(|(address, _)| address.clone());
        let address = |replica: &String| match replica.starts_with(PREFIX) {
            true => addresses.next().unwrap_or_default(),
            false => replica.clone(),
        };
        let replicas = replicas.iter().map(address).collect();
        Ok((locals, replicas))
    }

    /// Their data sides.
    pub fn data(&self) -> HashMap<String, Local> {
        self.data.clone()
    }

    /// Their control sides.
    pub fn control(&self) -> HashMap<String, Arc<dyn ReplicaService>> {
        let service = |running: &Running| -> Arc<dyn ReplicaService> {
            Arc::new(ReplicaRpc::direct(Arc::clone(running.replica())))
        };
        self.running.iter().map(|(address, running)| (address.clone(), service(running))).collect()
    }

    /// How to measure them, for Prometheus; nothing where there are none.
    pub fn measure(&self) -> impl Fn() -> String + Send + Sync + use<> {
        let each: Vec<_> = self.running.iter().map(|(_, running)| running.measure()).collect();
        move || {
            let parts: Vec<_> = each.iter().filter_map(|measure| measure()).collect();
            if parts.is_empty() { String::new() } else { metrics::text_of_parts(&parts) }
        }
    }

    /// Ends all of them. Nobody may use them any more.
    ///
    /// # Errors
    /// The first that did not end well.
    pub fn stop(self) -> Result<()> {
        drop(self.data);
        let stop = |(_, running): (String, Running)| running.stop();
        self.running.into_iter().map(stop).fold(Ok(()), Result::and)
    }
}

/// What is to be started, first those among the volume's replicas, in their order.
fn plan(replicas: &[String], local: &LocalOptions) -> Result<Vec<Planned>> {
    let members = replicas.iter().filter_map(|replica| replica.strip_prefix(PREFIX));
    let members = members.map(|dir| (PathBuf::from(dir), false));
    let standby = local.standby.iter().map(|dir| (dir.clone(), true));
    let mut planned: Vec<Planned> = Vec::new();
    for (dir, standby) in members.chain(standby) {
        if dir.as_os_str().is_empty() {
            return Err(Error::invalid(format!("`{PREFIX}` needs a directory behind it")));
        }
        let named = |e| Error::io(e, format!("finding `{}`", dir.display()));
        let dir = std::path::absolute(&dir).map_err(named)?;
        // What is not there yet has no other name.
        let dir = dir.canonicalize().unwrap_or(dir);
        if planned.iter().any(|other| other.dir == dir) {
            return Err(Error::invalid(format!("`{}` is given twice", dir.display())));
        }
        let is_new = !dir.join(STORE_FILE).exists();
        planned.push(Planned { dir, standby, is_new });
    }
    check_new(replicas.len(), &planned, local)?;
    Ok(planned)
}

/// A new replica is empty. It may be part of the volume from the start where counters of changes tell
/// it from complete ones, or where there are only such.
fn check_new(members: usize, planned: &[Planned], local: &LocalOptions) -> Result<()> {
    let new = |planned: &&Planned| planned.is_new && !planned.standby;
    let Some(first) = planned.iter().find(new) else { return Ok(()) };
    if local.options.size.is_none() {
        let dir = first.dir.display();
        return Err(Error::invalid(format!("`{dir}` holds no replica, and there is no --size")));
    }
    if local.options.revision_counter || planned.iter().filter(new).count() == members {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "`{}` is new, and with --disableRevCounter nothing tells it from complete replicas: serve \
         it with --local, then add it with `add-replica`",
        first.dir.display()
    )))
}

fn start_one(index: usize, planned: &Planned, local: &LocalOptions) -> Result<(String, Running)> {
    let process = own::Process {
        options: Options { dir: planned.dir.clone(), ..local.options.clone() },
        wanted: Wanted { listen: listen(index, local)?, unix: None, agent: true },
        receivers: local.receivers,
        data: local.data.clone(),
        metrics: None,
        runtime_dir: local.runtime_dir.clone(),
        store: local.store.clone(),
        take_over: None,
    };
    let running = Running::start(&process)?;
    let address = format!("tcp://{}", running.grpc());
    if planned.standby && planned.is_new {
        mark_incomplete(running.replica(), &planned.dir)?;
    }
    Ok((address, running))
}

/// A new replica beside the volume says that it lacks everything, so that no start takes it as it is.
fn mark_incomplete(replica: &Replica, dir: &Path) -> Result<()> {
    let marked = replica
        .open(false, 0)
        .and_then(|()| replica.set_rebuilding(true))
        .and_then(|()| replica.close());
    marked.map_err(|error| error.context(format!("marking `{}` as incomplete", dir.display())))
}

/// Where a replica listens.
fn listen(index: usize, local: &LocalOptions) -> Result<ListenAddress> {
    let ListenAddress { host, port } = &local.listen;
    if host.is_empty() || matches!(host.as_str(), "0.0.0.0" | "::") {
        return Err(Error::invalid(format!(
            "replicas in this process are identified by the address that they listen on, and `{}` \
             is not an address of one machine",
            local.listen
        )));
    }
    let ports = usize::from(SERVERS + local.receivers);
    let port = match port {
        0 => Some(0),
        port => u16::try_from(usize::from(*port) + index * ports).ok(),
    };
    let port = port.ok_or_else(|| Error::invalid("there are not enough ports for all replicas"))?;
    Ok(ListenAddress { host: host.clone(), port })
}
