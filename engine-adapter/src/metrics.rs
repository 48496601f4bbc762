//! Metrics for Prometheus, as text over HTTP.

use crate::agent::jobs::Jobs;
use crate::data::{DataStats, Kind, LATENCY_BOUNDS};
use crate::replica::Replica;
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
    if let Some(store) = store {
        store_metrics(&mut out, store);
    }
    out.head("dbs_handovers_total", "counter", "Stores given up to a newer process.");
    out.line("dbs_handovers_total", "", released);
    replica_metrics(&mut out, replicas);
    job_metrics(&mut out, replicas);
    data_metrics(&mut out, replicas);
    out.0
}

fn store_metrics(out: &mut Text, store: &Store) {
    let info = store.info();
    let bytes = |extents: u64| extents * info.extent_size;
    for (name, kind, help, value) in [
        ("dbs_store_size_bytes", "gauge", "Size of the store.", info.size),
        ("dbs_store_allocated_bytes", "gauge", "Extents in use.", info.allocated),
        ("dbs_store_free_bytes", "gauge", "Extents free.", bytes(info.extents_free)),
        (
            "dbs_store_pending_bytes",
            "gauge",
            "Extents freed that cannot be used again yet.",
            bytes(info.extents_pending),
        ),
        ("dbs_store_volumes", "gauge", "Volumes.", info.volumes),
        ("dbs_store_snapshots", "gauge", "Snapshots and heads.", info.snapshots),
        (
            "dbs_store_snapshots_deleting",
            "gauge",
            "Deleted snapshots that are still being merged.",
            info.snapshots_deleting,
        ),
        ("dbs_store_commits_total", "counter", "Durable commit groups, ever.", info.sequence),
        ("dbs_store_tail", "gauge", "Whether there is a tail.", u64::from(info.tail)),
        (
            "dbs_store_warnings",
            "gauge",
            "Things that an operator should know; the log has them.",
            info.warnings.len() as u64,
        ),
    ] {
        out.head(name, kind, help);
        out.line(name, "", value);
    }
    let Some(sums) = info.checksums else { return };
    for (name, help, value) in [
        ("verified", "Blocks read whose checksum was compared, and equal.", sums.verified),
        ("unknown", "Blocks read of which no checksum was known.", sums.unknown),
        ("mismatches", "Times a damaged block was met.", sums.mismatches),
        ("healed", "Damaged blocks written again from a copy.", sums.healed),
        ("untrusted", "Pages of checksums met that said nothing.", sums.untrusted),
    ] {
        let name = format!("dbs_store_checksums_{name}_total");
        out.head(&name, "counter", help);
        out.line(&name, "", value);
    }
}

fn replica_metrics(out: &mut Text, replicas: &[Source]) {
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
fn job_metrics(out: &mut Text, replicas: &[Source]) {
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

fn data_metrics(out: &mut Text, replicas: &[Source]) {
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
