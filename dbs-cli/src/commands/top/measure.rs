//! From two answers of a server to what happened between them.

use super::Usages;
use dbs_core::info::VolumeIo;
use dbs_frontend::Times;
use dbs_server::clients::{Client, Load, Requests};
use dbs_server::jobs::Job;
use dbs_server::top::{Top, VolumeLoad};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashMap;

/// What happened in a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Rates {
    pub iops: f64,
    pub reads: f64,
    pub writes: f64,
    pub read_bytes: f64,
    pub written_bytes: f64,
}

/// What a volume or a client was asked for.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Flow {
    /// Absent before the second answer, and where nothing is counted.
    pub rates: Option<Rates>,
    /// Requests that are not answered yet; absent where that is not counted.
    pub in_flight: Option<u64>,
    pub reads: Times,
    pub writes: Times,
}

/// An answer, and what happened since the one before.
#[derive(Debug)]
pub struct Measured {
    pub now: Top,
    /// Seconds between the two; 0 if this is the first one of its server.
    pub seconds: f64,
    /// One for each volume.
    pub volumes: Vec<Flow>,
    /// One for each client.
    pub clients: Vec<Flow>,
    /// Nanoseconds that each job still takes, as far as that can be told.
    pub left: Vec<Option<u64>>,
}

impl Rates {
    /// Of counts of all requests, reads, writes, bytes read and bytes written; none without a time.
    fn between(then: [u64; 5], now: [u64; 5], seconds: f64) -> Option<Self> {
        let mut counts = then.into_iter().zip(now);
        let mut next = || {
            let (then, now) = counts.next().unwrap_or_default();
            now.saturating_sub(then) as f64 / seconds
        };
        let (iops, reads, writes, read_bytes, written_bytes) =
            (next(), next(), next(), next(), next());
        (seconds > 0.0).then_some(Self { iops, reads, writes, read_bytes, written_bytes })
    }
}

/// Percentiles, as documents have them.
fn document(times: &Times) -> Value {
    match times.requests() {
        0 => Value::Null,
        requests => json!({
            "p50_ns": times.percentile(50),
            "p90_ns": times.percentile(90),
            "p99_ns": times.percentile(99),
            "requests": requests,
        }),
    }
}

impl Flow {
    fn add(&mut self, client: &Self) {
        if let Some(more) = client.in_flight {
            self.in_flight = Some(self.in_flight.unwrap_or(0) + more);
        }
        self.reads = self.reads.and(&client.reads);
        self.writes = self.writes.and(&client.writes);
    }

    /// Reads and writes together.
    pub fn times(&self) -> Times {
        self.reads.and(&self.writes)
    }

    /// Sets its members in what it is the flow of.
    fn put(&self, into: &mut Value) {
        into["rates"] = json!(self.rates);
        into["in_flight"] = json!(self.in_flight);
        into["latency"] =
            json!({ "reads": document(&self.reads), "writes": document(&self.writes) });
    }
}

impl Measured {
    /// What happened between two answers. One of another server counts anew.
    pub fn new(before: Option<&Top>, now: Top) -> Self {
        let before =
            before.filter(|then| then.started_ns == now.started_ns && then.clock_ns < now.clock_ns);
        let seconds = before.map_or(0.0, |before| (now.clock_ns - before.clock_ns) as f64 / 1e9);
        let clients = clients(before, &now, seconds);
        let mut volumes = volumes(before, &now, seconds);
        let places: HashMap<&str, usize> =
            now.volumes.iter().enumerate().map(|(at, volume)| (volume.name.as_str(), at)).collect();
        for (client, flow) in now.clients.iter().zip(&clients) {
            let at = client.volume.as_deref().and_then(|name| places.get(name));
            if let Some(volume) = at.and_then(|at| volumes.get_mut(*at)) {
                volume.add(flow);
            }
        }
        let left = now.jobs.iter().map(|job| left(job, before, seconds)).collect();
        Self { now, seconds, volumes, clients, left }
    }

    /// All of it, as `docs/json.md` has it.
    pub fn document(&self, usages: &Usages) -> Value {
        let mut document = json!(self.now);
        document["seconds"] = json!(self.seconds);
        let items = |document: &mut Value, name: &str, put: &dyn Fn(usize, &mut Value)| {
            let items = document[name].as_array_mut();
            items.into_iter().flatten().enumerate().for_each(|(at, item)| put(at, item));
        };
        items(&mut document, "volumes", &|at, volume| {
            self.volumes.get(at).iter().for_each(|flow| flow.put(volume));
            if let Some(usage) = volume["uuid"].as_str().and_then(|uuid| usages.get(uuid)) {
                volume["usage"] = json!(usage);
            }
        });
        items(&mut document, "clients", &|at, client| {
            client.as_object_mut().map(|client| client.remove("load"));
            self.clients.get(at).iter().for_each(|flow| flow.put(client));
        });
        items(&mut document, "jobs", &|at, job| {
            job["left_ns"] = json!(self.left.get(at).copied().flatten());
        });
        document
    }
}

fn volumes(before: Option<&Top>, now: &Top, seconds: f64) -> Vec<Flow> {
    let before = before.into_iter().flat_map(|before| &before.volumes);
    let known: HashMap<&str, VolumeIo> =
        before.map(|volume| (volume.uuid.as_str(), volume.io)).collect();
    let counts =
        |io: VolumeIo| [io.reads + io.writes, io.reads, io.writes, io.read_bytes, io.written_bytes];
    let flow = |volume: &VolumeLoad| {
        // One that is new has counted since it was made.
        let then = known.get(volume.uuid.as_str()).copied().unwrap_or_default();
        let rates = Rates::between(counts(then), counts(volume.io), seconds);
        Flow { rates, ..Flow::default() }
    };
    now.volumes.iter().map(flow).collect()
}

fn clients(before: Option<&Top>, now: &Top, seconds: f64) -> Vec<Flow> {
    let before = before.into_iter().flat_map(|before| &before.clients);
    let known: HashMap<_, &Client> =
        before.map(|client| ((client.id, &client.who), client)).collect();
    let counts = |requests: Requests| {
        let Requests { reads, read_bytes, writes, written_bytes, others } = requests;
        [reads + writes + others, reads, writes, read_bytes, written_bytes]
    };
    let flow = |client: &Client| {
        let Some(requests) = client.requests else { return Flow::default() };
        let then = known.get(&(client.id, &client.who));
        let requests_then = then.and_then(|then| then.requests).map_or([0; 5], counts);
        let none = Load::default();
        let load_then = then.and_then(|then| then.load.as_ref()).unwrap_or(&none);
        let rates = Rates::between(requests_then, counts(requests), seconds);
        let Some(load) = &client.load else { return Flow { rates, ..Flow::default() } };
        let mut flow = Flow { rates, in_flight: Some(load.in_flight), ..Flow::default() };
        // The first answer says nothing of now.
        if rates.is_some() {
            flow.reads = Times::since(&load.read_latency, &load_then.read_latency);
            flow.writes = Times::since(&load.write_latency, &load_then.write_latency);
        }
        flow
    };
    now.clients.iter().map(flow).collect()
}

/// How long a job still takes if it goes on as it did.
fn left(job: &Job, before: Option<&Top>, seconds: f64) -> Option<u64> {
    let (done, took_ns) = match job.elapsed_ns {
        // The background work tells only what is left.
        0 => {
            let jobs = before.map(|before| &before.jobs[..]).unwrap_or_default();
            let then = jobs.iter().find(|then| then.what == job.what && then.elapsed_ns == 0)?;
            (then.total.checked_sub(job.total)?, seconds * 1e9)
        }
        elapsed => (job.done.saturating_sub(job.earlier), elapsed as f64),
    };
    let ahead = job.total.saturating_sub(job.done) as f64;
    (done > 0).then(|| (ahead * took_ns / done as f64) as u64)
}
