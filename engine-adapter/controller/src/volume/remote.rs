//! Control of replicas over gRPC: `ReplicaService` on their port, `SyncAgentService` two above. What
//! is in this process is called there, and so are files.

use super::file::{Backends, Files};
use super::parts::{Call, CallError, Called, RebuildStatus, Replicas, Target, done};
use crate::rules::call_timeout::{CallTimeout, Waiting};
use crate::rules::timeout::lost;
use dbs_core::Error;
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use longhorn_wire::proto::ptypes::replica_service_server::ReplicaService;
use longhorn_wire::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use longhorn_wire::proto::ptypes::{
    DiskRemoveRequest, FileSendRequest, RebuildingSetRequest, ReceiverLaunchRequest,
    ReplicaExpandRequest, ReplicaOpenRequest, ReplicaRevertRequest, ReplicaSnapshotRequest,
    RevisionCounterSetRequest, SnapshotMaxCountSetRequest, SnapshotMaxSizeSetRequest,
    UnmapMarkDiskChainRemovedSetRequest,
};
use longhorn_wire::remote::{self, Address, Calls, LONG_CALL, SHORT_CALL, within};
use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::{Code, Request, Status};

/// How long a replica that left is waited for, so that it can be added again at once.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the clock is looked at while replicas are waited for.
const LOOK: Duration = Duration::from_secs(1);

/// Replicas as servers. Each call has a connection of its own, so that one that broke unseen is not
/// used again. Not to be used on threads of the runtime.
#[derive(Clone)]
pub struct RemoteReplicas {
    runtime: Handle,
    volume: String,
    http_timeout_s: i32,
    /// Replicas in this process, by their addresses.
    locals: Arc<HashMap<String, Arc<dyn ReplicaService>>>,
    backends: Backends,
}

impl RemoteReplicas {
    /// Replicas of this volume; `http_timeout_s` is for each request of a file's transfer.
    #[must_use]
    pub fn new(runtime: Handle, volume: String, http_timeout_s: i32) -> Self {
        let (locals, backends) = (Arc::default(), Backends::default());
        Self { runtime, volume, http_timeout_s, locals, backends }
    }

    /// Calls of the replicas at these addresses go to them directly: they are in this process.
    #[must_use]
    pub fn with_locals(self, locals: HashMap<String, Arc<dyn ReplicaService>>) -> Self {
        Self { locals: Arc::new(locals), ..self }
    }

    /// Replicas are of these kinds, and of no others.
    #[must_use]
    pub fn with_backends(self, backends: Backends) -> Self {
        Self { backends, ..self }
    }

    /// One call of a replica's own service, wherever it is.
    fn one(&self, target: Target, call: Call) -> impl Future<Output = Called> + Send + use<> {
        let volume = self.volume.clone();
        let local = self.locals.get(&target.address).map(Arc::clone);
        let files = match local {
            Some(_) => Ok(None),
            None => self.backends.find(&target.address).map(Option::<&Files>::cloned),
        };
        async move {
            match (local, files.map_err(unusable)?) {
                (Some(replica), _) => soon(local_call(replica, call)).await,
                (None, Some(files)) => soon(file_call(files, target.address, call)).await,
                (None, None) => remote_call(&volume, &target, call).await,
            }
        }
    }
}

impl Replicas for RemoteReplicas {
    fn call_all(&self, calls: Vec<(Target, Call)>, timeout: Option<CallTimeout>) -> Vec<Called> {
        let late = || Err(CallError::unknown("it has not answered in time"));
        let mut answers: Vec<_> = calls.iter().map(|_| late()).collect();
        self.runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for (index, (target, call)) in calls.into_iter().enumerate() {
                let one = self.one(target, call);
                tasks.spawn(async move { (index, one.await) });
            }
            let (mut begun, mut waiting) = (Instant::now(), Waiting::begin(timeout));
            loop {
                let due = (begun.elapsed() + LOOK).min(waiting.end().unwrap_or(Duration::MAX));
                let next = timeout_at(begun + due, tasks.join_next()).await;
                begun += lost(begun.elapsed(), due);
                let Ok(next) = next else {
                    match waiting.end() {
                        Some(end) if end <= begun.elapsed() => break,
                        _ => continue,
                    }
                };
                let Some(joined) = next else { break };
                let Ok((index, answer)) = joined else { continue };
                waiting.answered(index, answer.is_ok(), begun.elapsed());
                if let Some(place) = answers.get_mut(index) {
                    *place = answer;
                }
            }
        });
        answers
    }

    fn copy_file(
        &self,
        (from, from_name): (&Target, &str),
        (to, to_name): (&Target, &str),
    ) -> Result<(), CallError> {
        self.runtime.block_on(async {
            let mut receiver = agent(&self.volume, to)?;
            let launch = ReceiverLaunchRequest { to_file_name: to_name.to_owned() };
            let launch = self.request(to, SHORT_CALL, launch)?;
            let port = receiver.receiver_launch(launch).await.map_err(failed)?.into_inner().port;
            let send = FileSendRequest {
                from_file_name: from_name.to_owned(),
                host: address(to)?.host().to_owned(),
                port,
                fast_sync: false,
                file_sync_http_client_timeout: self.http_timeout_s,
            };
            let send = self.request(from, LONG_CALL, send)?;
            agent(&self.volume, from)?.file_send(send).await.map_err(failed)?;
            Ok(())
        })
    }

    fn rebuild_status(&self, target: &Target) -> Result<RebuildStatus, CallError> {
        self.runtime.block_on(async {
            let request = self.request(target, SHORT_CALL, ())?;
            let mut agent = agent(&self.volume, target)?;
            let status = agent.replica_rebuild_status(request).await.map_err(failed)?.into_inner();
            Ok(RebuildStatus { running: status.is_rebuilding, error: status.error })
        })
    }

    fn close_soon(&self, target: &Target) {
        let (close, address) = (self.one(target.clone(), Call::Close), target.address.clone());
        let task = self.runtime.spawn(async move {
            if let Err(error) = close.await {
                dbs_service::log::warn("close", &[("replica", &address), ("error", &error)]);
            }
        });
        // It goes on without us.
        let _ = self.runtime.block_on(async { timeout(CLOSE_TIMEOUT, task).await });
    }
}

impl RemoteReplicas {
    fn request<T>(
        &self,
        target: &Target,
        time: Duration,
        message: T,
    ) -> Result<Request<T>, CallError> {
        named(target, within(time, message))
    }
}

/// Makes a call with `$ask`, a macro of a method and its message that gives the reply.
macro_rules! make_call {
    ($call:expr, $ask:ident) => {
        match $call {
            Call::Get => $ask!(replica_get, ()),
            Call::Open { upgrade, expected_size } => {
                let expected_backend_size = signed(expected_size)?;
                let message = ReplicaOpenRequest { is_upgrade: upgrade, expected_backend_size };
                $ask!(replica_open, message)
            }
            Call::Close => $ask!(replica_close, ()),
            Call::Snapshot { name, user_created, created, labels } => {
                let message = ReplicaSnapshotRequest { name, user_created, created, labels };
                $ask!(replica_snapshot, message)
            }
            Call::Revert { disk, created, revert } => {
                let message = ReplicaRevertRequest { name: disk, created, revert: Some(revert) };
                $ask!(replica_revert, message)
            }
            Call::Expand(size) => {
                $ask!(replica_expand, ReplicaExpandRequest { size: signed(size)? })
            }
            Call::SetRebuilding(rebuilding) => {
                $ask!(rebuilding_set, RebuildingSetRequest { rebuilding })
            }
            Call::SetCounter(counter) => {
                $ask!(revision_counter_set, RevisionCounterSetRequest { counter })
            }
            Call::SetUnmapMark(enabled) => {
                let message = UnmapMarkDiskChainRemovedSetRequest { enabled };
                $ask!(unmap_mark_disk_chain_removed_set, message)
            }
            Call::SetSnapshotMaxCount(count) => {
                let count = i32::try_from(count).unwrap_or(i32::MAX);
                $ask!(snapshot_max_count_set, SnapshotMaxCountSetRequest { count })
            }
            Call::SetSnapshotMaxSize(size) => {
                $ask!(snapshot_max_size_set, SnapshotMaxSizeSetRequest { size: signed(size)? })
            }
            Call::RemoveDisk(name) => {
                $ask!(disk_remove, DiskRemoveRequest { name, force: true })
            }
        }
    };
}

async fn remote_call(volume: &str, target: &Target, call: Call) -> Called {
    let calls = remote::calls(&address(target)?, volume).map_err(unusable)?;
    let mut client = ReplicaServiceClient::new(calls);
    macro_rules! ask {
        ($method:ident, $message:expr) => {
            client
                .$method(named(target, within(SHORT_CALL, $message))?)
                .await
                .map(|reply| reply.into_inner().replica)
        };
    }
    let needs_open = call.needs_open();
    // Some of upstream's replies leave the replica out.
    let answer = make_call!(call, ask).map(Option::unwrap_or_default).map_err(failed)?;
    done(needs_open, answer)
}

/// What a call of something in this process comes to, if it does in time.
async fn soon(call: impl Future<Output = Called>) -> Called {
    let late = || CallError::unknown(format!("it has not answered within {SHORT_CALL:?}"));
    timeout(SHORT_CALL, call).await.unwrap_or_else(|_| Err(late()))
}

/// The same of a file, which may wait for its disk.
async fn file_call(files: Files, address: String, call: Call) -> Called {
    let called = tokio::task::spawn_blocking(move || files.call(&address, call)).await;
    called.unwrap_or_else(|error| Err(CallError::unknown(error.to_string())))
}

/// The same of a replica in this process: as its server does it, without what is in between.
async fn local_call(service: Arc<dyn ReplicaService>, call: Call) -> Called {
    macro_rules! ask {
        ($method:ident, $message:expr) => {
            service.$method(Request::new($message)).await.map(|reply| reply.into_inner().replica)
        };
    }
    let needs_open = call.needs_open();
    let answer = make_call!(call, ask).map(Option::unwrap_or_default).map_err(failed)?;
    done(needs_open, answer)
}

fn agent(volume: &str, target: &Target) -> Result<SyncAgentServiceClient<Calls>, CallError> {
    let agent = address(target)?.agent().map_err(unusable)?;
    Ok(SyncAgentServiceClient::new(remote::calls(&agent, volume).map_err(unusable)?))
}

/// With the instance that is meant, if it is known.
fn named<T>(target: &Target, mut request: Request<T>) -> Result<Request<T>, CallError> {
    if !target.instance.is_empty() {
        let instance = target.instance.parse().map_err(|_| {
            CallError::unknown(format!("{:?} cannot be sent as an instance name", target.instance))
        })?;
        request.metadata_mut().insert("instance-name", instance);
    }
    Ok(request)
}

fn address(target: &Target) -> Result<Address, CallError> {
    Address::parse(&target.address).map_err(unusable)
}

fn signed(size: u64) -> Result<i64, CallError> {
    i64::try_from(size)
        .map_err(|_| CallError::unknown(format!("a size of {size} bytes is too large")))
}

fn failed(status: Status) -> CallError {
    use Code::{FailedPrecondition, InvalidArgument, ResourceExhausted};
    if remote::was_never_sent(&status) {
        return CallError::never_sent(remote::text(&status));
    }
    let code = status.code();
    CallError {
        unavailable: code == Code::Unavailable,
        refused: matches!(code, InvalidArgument | ResourceExhausted | FailedPrecondition),
        text: remote::text(&status),
    }
}

fn unusable(error: Error) -> CallError {
    CallError::unknown(error.to_string())
}
