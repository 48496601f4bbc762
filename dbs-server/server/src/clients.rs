//! Who uses a served store, and how much: what `dbs clients` shows.

use dbs_control::api::Progress;
use dbs_core::info::{HolderInfo, HolderKind};
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_frontend::Counted;
use dbs_nbd::ServerHandle;
use dbs_nvme::NvmeTcp;
use dbs_vhost::VhostUser;
use serde::{Deserialize, Serialize};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time over which rates are measured.
const INTERVAL_MAX: Duration = Duration::from_secs(60);
/// Between two looks whether whoever asks for rates still waits for them.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Where clients come in that have numbers.
#[derive(Clone, Copy)]
pub struct Doors<'a> {
    /// NBD.
    pub nbd: &'a ServerHandle,
    /// Virtual machines, if they are served.
    pub vhost: Option<&'a VhostUser>,
    /// Hosts of NVMe over TCP, if they are served.
    pub nvme: Option<&'a NvmeTcp>,
}

/// A client that has a number.
struct Numbered {
    kind: HolderKind,
    id: u64,
    who: String,
    /// It has something open.
    open: bool,
    read_only: bool,
    since_ns: u64,
    requests: Requests,
    load: Option<Load>,
}

/// A user of a volume or snapshot, or an NBD client that has not chosen one yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Client {
    /// What kind of user.
    pub kind: HolderKind,
    /// The number of an NBD client, a virtual machine or a host of NVMe, by which it can be disconnected.
    pub id: Option<u64>,
    /// Who it is: `NBD client tcp:10.0.0.3:5123`.
    pub who: String,
    /// The volume, as it is called now; absent while a client chooses.
    pub volume: Option<String>,
    /// One of its snapshots; absent for the volume itself.
    pub snapshot: Option<String>,
    /// Whether it may only read.
    pub read_only: bool,
    /// Since when: of who has a number when it connected, else when it opened the volume.
    pub since_ns: u64,
    /// What it has asked for since then; absent where that is not counted.
    pub requests: Option<Requests>,
    /// The same in a second, if it was asked for.
    pub rates: Option<Rates>,
    /// What of an NBD client is under way, and how long it takes; in a [`Top`](crate::top::Top) alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
}

/// What an NBD client waits for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Requests that are not answered yet.
    pub in_flight: u64,
    /// How long reads took since it connected: pairs of a time in nanoseconds and how many took less than that,
    /// and no less than the time of the pair before. Pairs of none are left out.
    pub read_latency: Vec<(u64, u64)>,
    /// The same of writes.
    pub write_latency: Vec<(u64, u64)>,
}

/// What a client has asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requests {
    /// Reads.
    pub reads: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Writes, and ranges made zero.
    pub writes: u64,
    /// Bytes of these.
    pub written_bytes: u64,
    /// Other requests.
    pub others: u64,
}

/// What a client asks for in a second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Requests of all kinds.
    pub iops: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes written.
    pub written_bytes: f64,
}

/// Everybody who uses the store, measured over an interval if there is one.
///
/// # Errors
/// `Interrupted` if `progress` stopped it.
pub fn list(
    store: &Store,
    doors: Doors<'_>,
    interval: Option<Duration>,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Vec<Client>> {
    let Some(interval) = interval.map(|interval| interval.min(INTERVAL_MAX)) else {
        return Ok(now(store, numbered(doors), false));
    };
    let (before, begun) = (numbered(doors), Instant::now());
    while let Some(rest) = interval.checked_sub(begun.elapsed()) {
        if !progress(Progress { done: 0, total: 1 }) {
            return Err(Error::new(ErrorKind::Interrupted, "stopped while measuring"));
        }
        thread::sleep(rest.min(WATCH_INTERVAL));
    }
    let (after, seconds) = (numbered(doors), begun.elapsed().as_secs_f64());
    let mut clients = now(store, after, false);
    for client in &mut clients {
        let Some(requests) = client.requests else { continue };
        // One that came meanwhile began with nothing.
        let then = before.iter().find(|then| Some(then.id) == client.id).map(|then| then.requests);
        client.rates = Some(rates(then, requests, seconds));
    }
    Ok(clients)
}

/// Disconnects a client; who it was.
///
/// # Errors
/// `NotFound`.
pub fn kick(store: &Store, doors: Doors<'_>, id: u64) -> Result<Client> {
    let clients = now(store, numbered(doors), false).into_iter();
    let there = clients.into_iter().find(|client| client.id == Some(id));
    let gone = || Error::not_found(format!("no client has the number {id}; see `dbs clients`"));
    let client = there.ok_or_else(gone)?;
    let kicked = match client.kind {
        HolderKind::VhostUser => doors.vhost.is_some_and(|vhost| vhost.kick(id)),
        HolderKind::NvmeTcp => doors.nvme.is_some_and(|nvme| nvme.kick(id)),
        _ => doors.nbd.kick(id).is_some(),
    };
    if kicked { Ok(client) } else { Err(gone()) }
}

fn numbered(doors: Doors<'_>) -> Vec<Numbered> {
    let nbd = doors.nbd.clients().into_iter().map(|client| Numbered {
        kind: HolderKind::Nbd,
        id: client.id,
        who: client.who,
        open: client.export.is_some(),
        read_only: client.read_only,
        since_ns: client.since_ns,
        requests: Requests {
            reads: client.reads,
            read_bytes: client.read_bytes,
            writes: client.writes,
            written_bytes: client.written_bytes,
            others: client.others,
        },
        load: Some(Load {
            in_flight: client.in_flight,
            read_latency: client.read_latency,
            write_latency: client.write_latency,
        }),
    });
    let machines = doors.vhost.map(VhostUser::clients).unwrap_or_default().into_iter();
    let machines = machines.map(|client| Numbered {
        kind: HolderKind::VhostUser,
        id: client.id,
        who: client.who,
        open: true,
        read_only: client.read_only,
        since_ns: client.since_ns,
        requests: client.counted.into(),
        load: None,
    });
    let hosts = doors.nvme.map(NvmeTcp::clients).unwrap_or_default().into_iter();
    let hosts = hosts.map(|client| Numbered {
        kind: HolderKind::NvmeTcp,
        id: client.id,
        who: client.who,
        open: true,
        read_only: client.read_only,
        since_ns: client.since_ns,
        requests: client.counted.into(),
        load: None,
    });
    nbd.chain(machines).chain(hosts).collect()
}

impl From<Counted> for Requests {
    fn from(counted: Counted) -> Self {
        let Counted { reads, read_bytes, writes, written_bytes, others } = counted;
        Self { reads, read_bytes, writes, written_bytes, others }
    }
}

/// Everybody who uses the store, with their loads.
#[must_use]
pub fn loads(store: &Store, doors: Doors<'_>) -> Vec<Client> {
    now(store, numbered(doors), true)
}

/// Everybody who has something open, and NBD clients that have not.
fn now(store: &Store, clients: Vec<Numbered>, loads: bool) -> Vec<Client> {
    let holders = store.holders();
    let mut found: Vec<Client> = Vec::new();
    for Numbered { kind, id, who, open, read_only, since_ns, requests, load } in clients {
        // What it has open, by the name of now.
        let is_it = |held: &&HolderInfo| held.holder.kind == kind && held.holder.id == Some(id);
        let held = holders.iter().find(is_it).filter(|_| open);
        found.push(Client {
            kind,
            id: Some(id),
            who,
            volume: held.map(|held| held.volume.clone()),
            snapshot: held.and_then(|held| held.snapshot.clone()),
            read_only,
            since_ns,
            requests: Some(requests),
            rates: None,
            load: load.filter(|_| loads),
        });
    }
    let numbered = [HolderKind::Nbd, HolderKind::VhostUser, HolderKind::NvmeTcp];
    let others = holders.into_iter().filter(|held| !numbered.contains(&held.holder.kind));
    found.extend(others.map(|held| Client {
        kind: held.holder.kind,
        id: None,
        who: held.holder.who,
        volume: Some(held.volume),
        snapshot: held.snapshot,
        read_only: !held.holder.writes,
        since_ns: held.since_ns,
        requests: None,
        rates: None,
        load: None,
    }));
    found
}

fn rates(before: Option<Requests>, after: Requests, seconds: f64) -> Rates {
    let rate = |count: fn(&Requests) -> u64| {
        let before = before.as_ref().map_or(0, count);
        count(&after).saturating_sub(before) as f64 / seconds.max(f64::MIN_POSITIVE)
    };
    Rates {
        iops: rate(|requests| requests.reads + requests.writes + requests.others),
        read_bytes: rate(|requests| requests.read_bytes),
        written_bytes: rate(|requests| requests.written_bytes),
    }
}
