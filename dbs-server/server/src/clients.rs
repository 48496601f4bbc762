//! Who uses a served store, and how much: what `dbs clients` shows.

use dbs_control::api::Progress;
use dbs_core::info::HolderKind;
use dbs_core::{Error, ErrorKind, Result, Store};
use dbs_nbd::{ClientInfo, ServerHandle};
use serde::{Deserialize, Serialize};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time over which rates are measured.
const INTERVAL_MAX: Duration = Duration::from_secs(60);
/// Between two looks whether whoever asks for rates still waits for them.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// A user of a volume or snapshot, or an NBD client that has not chosen one yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Client {
    /// What kind of user.
    pub kind: HolderKind,
    /// The number of an NBD client, by which it can be disconnected.
    pub id: Option<u64>,
    /// Who it is: `NBD client tcp:10.0.0.3:5123`.
    pub who: String,
    /// The volume, as it is called now; absent while a client chooses.
    pub volume: Option<String>,
    /// One of its snapshots; absent for the volume itself.
    pub snapshot: Option<String>,
    /// Whether it may only read.
    pub read_only: bool,
    /// Since when: of an NBD client when it connected, else when it opened the volume.
    pub since_ns: u64,
    /// What it has asked for since then; absent where that is not counted.
    pub requests: Option<Requests>,
    /// The same in a second, if it was asked for.
    pub rates: Option<Rates>,
}

/// What an NBD client has asked for.
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

/// What an NBD client asks for in a second.
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
    nbd: &ServerHandle,
    interval: Option<Duration>,
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Vec<Client>> {
    let Some(interval) = interval.map(|interval| interval.min(INTERVAL_MAX)) else {
        return Ok(now(store, nbd.clients()));
    };
    let (before, begun) = (nbd.clients(), Instant::now());
    while let Some(rest) = interval.checked_sub(begun.elapsed()) {
        if !progress(Progress { done: 0, total: 1 }) {
            return Err(Error::new(ErrorKind::Interrupted, "stopped while measuring"));
        }
        thread::sleep(rest.min(WATCH_INTERVAL));
    }
    let (after, seconds) = (nbd.clients(), begun.elapsed().as_secs_f64());
    let mut clients = now(store, after);
    for client in &mut clients {
        let Some(requests) = client.requests else { continue };
        // One that came meanwhile began with nothing.
        let then = before.iter().find(|then| Some(then.id) == client.id).map(requests_of);
        client.rates = Some(rates(then, requests, seconds));
    }
    Ok(clients)
}

/// Disconnects an NBD client; who it was.
///
/// # Errors
/// `NotFound`.
pub fn kick(store: &Store, nbd: &ServerHandle, id: u64) -> Result<Client> {
    let there = now(store, nbd.clients()).into_iter().find(|client| client.id == Some(id));
    let gone = || Error::not_found(format!("no NBD client has the number {id}; see `dbs clients`"));
    let client = there.ok_or_else(gone)?;
    nbd.kick(id).ok_or_else(gone)?;
    Ok(client)
}

/// Everybody who has something open, and NBD clients that have not.
fn now(store: &Store, clients: Vec<ClientInfo>) -> Vec<Client> {
    let holders = store.holders();
    let mut found: Vec<Client> = Vec::new();
    for client in clients {
        // What it has open, by the name of now.
        let held = holders
            .iter()
            .find(|held| held.holder.kind == HolderKind::Nbd && held.holder.id == Some(client.id));
        let held = held.filter(|_| client.export.is_some());
        found.push(Client {
            kind: HolderKind::Nbd,
            id: Some(client.id),
            who: client.who.clone(),
            volume: held.map(|held| held.volume.clone()),
            snapshot: held.and_then(|held| held.snapshot.clone()),
            read_only: client.read_only,
            since_ns: client.since_ns,
            requests: Some(requests_of(&client)),
            rates: None,
        });
    }
    let others = holders.into_iter().filter(|held| held.holder.kind != HolderKind::Nbd);
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
    }));
    found
}

fn requests_of(client: &ClientInfo) -> Requests {
    let ClientInfo { reads, read_bytes, writes, written_bytes, others, .. } = *client;
    Requests { reads, read_bytes, writes, written_bytes, others }
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
