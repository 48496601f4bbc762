//! Metrics for Prometheus, as text over HTTP.

use crate::agent::jobs::Jobs;
use crate::data::{DataStats, Kind, LATENCY_BOUNDS};
use crate::replica::Replica;
use dbs_core::info::{ChecksumInfo, StoreInfo};
use dbs_core::{Error, Result, Store};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::fmt::{Display, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// The text format's type.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Clients at once.
const CLIENTS_MAX: usize = 16;
/// How long a client may take for its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection lasts at most.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(300);
/// Rest after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Makes the text when it is asked for; it may block.
pub type Collect = Arc<dyn Fn() -> String + Send + Sync>;

/// A server of metrics. Dropping it ends it.
#[derive(Debug)]
pub struct MetricsServer {
    address: String,
    task: JoinHandle<()>,
}

impl MetricsServer {
    /// Serves `/metrics` on this socket.
    ///
    /// # Errors
    /// `Io` if the socket cannot be used.
    pub fn start(runtime: &Handle, listener: TcpListener, collect: Collect) -> Result<Self> {
        let failed = |e| Error::io(e, "serving metrics");
        let address = listener.local_addr().map_err(failed)?.to_string();
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = {
            let _context = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(failed)?
        };
        let task = runtime.spawn(accept(listener, collect));
        Ok(Self { address, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.clone()
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: tokio::net::TcpListener, collect: Collect) {
    let clients = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&clients).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                dbs_server::log::warn("metrics", &[("accept", &e)]);
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let collect = Arc::clone(&collect);
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, Arc::clone(&collect)));
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            // Whatever goes wrong is the client's to notice.
            let _ended = tokio::time::timeout(CONNECTION_TIMEOUT, served).await;
            drop(permit);
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    collect: Collect,
) -> std::result::Result<Response<Full<Bytes>>, Infallible> {
    let plain = |status, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response
    };
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(plain(StatusCode::METHOD_NOT_ALLOWED, "GET only\n"));
    }
    if !matches!(request.uri().path(), "/metrics" | "/") {
        return Ok(plain(StatusCode::NOT_FOUND, "see /metrics\n"));
    }
    let Ok(text) = tokio::task::spawn_blocking(move || collect()).await else {
        return Ok(plain(StatusCode::INTERNAL_SERVER_ERROR, "collecting failed\n"));
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(TEXT));
    Ok(response)
}

/// What one replica contributes.
#[derive(Debug)]
pub struct Source {
    name: String,
    volume: String,
    state: String,
    size: f64,
    snapshots: f64,
    head_bytes: f64,
    revision: f64,
    rebuild: Option<f64>,
    purge: Option<f64>,
    data: DataStats,
}

impl Source {
    /// How `replica`, of this name and of this volume, and the jobs of its sync agent are now.
    #[must_use]
    pub fn of(name: &str, volume: &str, replica: &Replica, jobs: Option<&Jobs>) -> Self {
        let info = replica.get().unwrap_or_default();
        let rebuild = jobs.map(Jobs::rebuild).filter(|job| job.is_rebuilding);
        let purge = jobs.map(Jobs::purge).filter(|job| job.is_purging);
        Self {
            name: name.to_owned(),
            volume: volume.to_owned(),
            rebuild: rebuild.map(|job| f64::from(job.progress)),
            purge: purge.map(|job| f64::from(job.progress)),
            size: info.size.parse().unwrap_or(0.0),
            snapshots: f64::from(info.snapshot_count_usage),
            head_bytes: info.head_file_size as f64,
            revision: info.revision_counter as f64,
            state: if info.state.is_empty() { "released".to_owned() } else { info.state },
            data: replica.gate().stats(),
        }
    }

    fn labels(&self) -> String {
        format!("replica={},volume={}", quoted(&self.name), quoted(&self.volume))
    }
}

/// States, each of which is a series of its own.
const STATES: [&str; 7] = ["initial", "closed", "open", "dirty", "rebuilding", "error", "released"];

/// All metrics, of a store if it is here and of replicas. `released` counts stores given up to
/// newer processes.
#[must_use]
pub fn text(store: Option<&Store>, replicas: &[Source], released: u64) -> String {
    let mut out = Text::default();
    let stores: Vec<_> = store.map(|store| (String::new(), store.info())).into_iter().collect();
    store_metrics(&mut out, &stores);
    out.head("dbs_handovers_total", "counter", "Stores given up to a newer process.");
    out.line("dbs_handovers_total", "", released);
    let replicas: Vec<_> = replicas.iter().collect();
    replica_metrics(&mut out, &replicas);
    job_metrics(&mut out, &replicas);
    data_metrics(&mut out, &replicas);
    out.0
}

/// Metrics of replicas that are part of another process, each with the store that it has to itself:
/// what is said of that is labelled with the replica.
#[must_use]
pub fn text_of_parts(parts: &[(Source, Option<Store>)]) -> String {
    let mut out = Text::default();
    let stores = parts.iter().filter_map(|(replica, store)| {
        let store = store.as_ref()?;
        Some((replica.labels(), store.info()))
    });
    store_metrics(&mut out, &stores.collect::<Vec<_>>());
    let replicas: Vec<_> = parts.iter().map(|(replica, _)| replica).collect();
    replica_metrics(&mut out, &replicas);
    job_metrics(&mut out, &replicas);
    data_metrics(&mut out, &replicas);
    out.0
}

/// Of stores with their labels.
fn store_metrics(out: &mut Text, stores: &[(String, StoreInfo)]) {
    type Value = fn(&StoreInfo) -> u64;
    let values: [(&str, &str, &str, Value); 10] = [
        ("dbs_store_size_bytes", "gauge", "Size of the store.", |info| info.size),
        ("dbs_store_allocated_bytes", "gauge", "Extents in use.", |info| info.allocated),
        ("dbs_store_free_bytes", "gauge", "Extents free.", |info| {
            info.extents_free * info.extent_size
        }),
        (
            "dbs_store_pending_bytes",
            "gauge",
            "Extents freed that cannot be used again yet.",
            |info| info.extents_pending * info.extent_size,
        ),
        ("dbs_store_volumes", "gauge", "Volumes.", |info| info.volumes),
        ("dbs_store_snapshots", "gauge", "Snapshots and heads.", |info| info.snapshots),
        (
            "dbs_store_snapshots_deleting",
            "gauge",
            "Deleted snapshots that are still being merged.",
            |info| info.snapshots_deleting,
        ),
        ("dbs_store_commits_total", "counter", "Durable commit groups, ever.", |info| {
            info.sequence
        }),
        ("dbs_store_tail", "gauge", "Whether there is a tail.", |info| u64::from(info.tail)),
        (
            "dbs_store_warnings",
            "gauge",
            "Things that an operator should know; the log has them.",
            |info| info.warnings.len() as u64,
        ),
    ];
    for (name, kind, help, value) in values {
        for (at, (labels, info)) in stores.iter().enumerate() {
            if at == 0 {
                out.head(name, kind, help);
            }
            out.line(name, labels, value(info));
        }
    }
    checksum_metrics(out, stores);
}

/// Of those stores that have checksums.
fn checksum_metrics(out: &mut Text, stores: &[(String, StoreInfo)]) {
    type Value = fn(&ChecksumInfo) -> u64;
    let values: [(&str, &str, Value); 5] = [
        ("verified", "Blocks read whose checksum was compared, and equal.", |s| s.verified),
        ("unknown", "Blocks read of which no checksum was known.", |s| s.unknown),
        ("mismatches", "Times a damaged block was met.", |s| s.mismatches),
        ("healed", "Damaged blocks written again from a copy.", |s| s.healed),
        ("untrusted", "Pages of checksums met that said nothing.", |s| s.untrusted),
    ];
    for (name, help, value) in values {
        let name = format!("dbs_store_checksums_{name}_total");
        let with = stores.iter().filter_map(|(labels, info)| Some((labels, info.checksums?)));
        for (at, (labels, sums)) in with.enumerate() {
            if at == 0 {
                out.head(&name, "counter", help);
            }
            out.line(&name, labels, value(&sums));
        }
    }
}

fn replica_metrics(out: &mut Text, replicas: &[&Source]) {
    out.head("dbs_replica_state", "gauge", "1 for the state the replica is in.");
    for replica in replicas {
        for state in STATES {
            let labels = format!("{},state=\"{state}\"", replica.labels());
            out.line("dbs_replica_state", &labels, u8::from(replica.state == state));
        }
    }
    type Value = fn(&Source) -> f64;
    let gauges: [(&str, &str, &str, Value); 4] = [
        ("dbs_replica_size_bytes", "gauge", "Size of the volume.", |r| r.size),
        ("dbs_replica_snapshots", "gauge", "Snapshots, without removed ones.", |r| r.snapshots),
        ("dbs_replica_head_bytes", "gauge", "Data in the head alone.", |r| r.head_bytes),
        ("dbs_replica_revision", "gauge", "Revision counter, 0 without one.", |r| r.revision),
    ];
    for (name, kind, help, value) in gauges {
        out.head(name, kind, help);
        for replica in replicas {
            out.line(name, &replica.labels(), value(replica));
        }
    }
}

/// Progress of jobs that run; one that does not has no series.
fn job_metrics(out: &mut Text, replicas: &[&Source]) {
    type Value = fn(&Source) -> Option<f64>;
    let jobs: [(&str, &str, Value); 2] = [
        ("dbs_replica_rebuild_percent", "Progress of the rebuild that runs.", |r| r.rebuild),
        ("dbs_replica_purge_percent", "Progress of the purge that runs.", |r| r.purge),
    ];
    for (name, help, value) in jobs {
        out.head(name, "gauge", help);
        for replica in replicas {
            if let Some(value) = value(replica) {
                out.line(name, &replica.labels(), value);
            }
        }
    }
}

fn data_metrics(out: &mut Text, replicas: &[&Source]) {
    type Counts = fn(&DataStats) -> &[u64; 5];
    let by_kind: [(&str, &str, Counts); 3] = [
        ("dbs_data_requests_total", "Requests answered.", |stats| &stats.requests),
        ("dbs_data_bytes_total", "Bytes read, written and freed.", |stats| &stats.bytes),
        ("dbs_data_errors_total", "Requests answered with an error.", |stats| &stats.errors),
    ];
    for (name, help, counts) in by_kind {
        out.head(name, "counter", help);
        for replica in replicas {
            for kind in Kind::ALL {
                let labels = format!("{},type=\"{}\"", replica.labels(), kind.name());
                out.line(name, &labels, DataStats::of(counts(&replica.data), kind));
            }
        }
    }
    type Value = fn(&DataStats) -> u64;
    let plain: [(&str, &str, &str, Value); 3] = [
        ("dbs_data_connections", "gauge", "Data connections.", |stats| stats.connected),
        ("dbs_data_connections_total", "counter", "Data connections ever made.", |stats| {
            stats.connections
        }),
        ("dbs_data_in_flight", "gauge", "Requests in flight.", |stats| stats.in_flight),
    ];
    for (name, kind, help, value) in plain {
        out.head(name, kind, help);
        for replica in replicas {
            out.line(name, &replica.labels(), value(&replica.data));
        }
    }
    let name = "dbs_data_request_seconds";
    out.head(name, "histogram", "From the reception of a request to its reply.");
    for replica in replicas {
        histogram(out, name, &replica.labels(), &replica.data);
    }
}

fn histogram(out: &mut Text, name: &str, labels: &str, stats: &DataStats) {
    let bucket = format!("{name}_bucket");
    let mut total = 0;
    for (bound, count) in LATENCY_BOUNDS.iter().zip(&stats.latency) {
        total += count;
        out.line(&bucket, &format!("{labels},le=\"{}\"", bound.as_secs_f64()), total);
    }
    total += stats.latency.last().copied().unwrap_or(0);
    out.line(&bucket, &format!("{labels},le=\"+Inf\""), total);
    out.line(&format!("{name}_sum"), labels, stats.latency_sum.as_secs_f64());
    out.line(&format!("{name}_count"), labels, total);
}

/// The text so far.
#[derive(Default)]
pub(crate) struct Text(String);

impl Text {
    pub(crate) fn into_string(self) -> String {
        self.0
    }

    pub(crate) fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    pub(crate) fn line(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels.is_empty() {
            true => writeln!(self.0, "{name} {value}"),
            false => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }
}

/// A label's value in quotes.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out + "\""
}
