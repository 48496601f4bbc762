//! What replicas contribute to the metrics of a process.

use crate::agent::jobs::Jobs;
use crate::replica::Replica;
use dbs_core::Store;
use dbs_service::metrics::{Text, quoted, store_metrics, volume_metrics};
use longhorn_data::{DataStats, Kind, LATENCY_BOUNDS};

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
    taking: Option<f64>,
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
            taking: replica.taking_progress().map(|progress| {
                // What is left to do after the last byte is not nothing.
                let percent = progress.bytes as f64 * 100.0 / (progress.total as f64).max(1.0);
                percent.min(99.0).floor()
            }),
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

/// All metrics, of a store if it is here and of replicas. `released` counts stores handed
/// over to newer processes.
#[must_use]
pub fn text(store: Option<&Store>, replicas: &[Source], released: u64) -> String {
    let mut out = Text::default();
    let stores: Vec<_> = store.map(|store| (String::new(), store.info())).into_iter().collect();
    store_metrics(&mut out, &stores);
    volume_metrics(&mut out, &store.map(Store::volume_io).unwrap_or_default());
    out.head("dbs_handovers_total", "counter", "Stores handed over to a newer process.");
    out.line("dbs_handovers_total", "", released);
    let replicas: Vec<_> = replicas.iter().collect();
    replica_metrics(&mut out, &replicas);
    job_metrics(&mut out, &replicas);
    data_metrics(&mut out, &replicas);
    out.into_string()
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
    out.into_string()
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
    let jobs: [(&str, &str, Value); 3] = [
        ("dbs_replica_rebuild_percent", "Progress of the rebuild that runs.", |r| r.rebuild),
        (
            "dbs_replica_take_over_percent",
            "How much of upstream's files has come into the store, while the volume rests on them.",
            |r| r.taking,
        ),
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
