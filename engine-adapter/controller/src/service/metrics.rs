//! A controller's metrics for Prometheus.

use crate::path::{PathKind, PathStats, ReplicaStats};
use crate::rules::Mode;
use crate::volume::Controller;
use dbs_service::metrics::{Text, quoted};

const MODES: [Mode; 3] = [Mode::Wo, Mode::Rw, Mode::Err];

/// How the controller is, in Prometheus' text format. Served by [`dbs_service::metrics::MetricsServer`].
#[must_use]
pub fn text(controller: &Controller) -> String {
    let volume = controller.volume();
    let of = format!("volume={}", quoted(&volume.name));
    let mut out = Text::default();
    for (name, help, value) in [
        ("dbs_volume_size_bytes", "Size of the volume.", volume.size),
        (
            "dbs_volume_frontend_up",
            "Whether the frontend is up.",
            i64::from(volume.frontend_state == "up"),
        ),
        (
            "dbs_volume_expanding",
            "Whether an expansion is in progress.",
            i64::from(volume.is_expanding),
        ),
        (
            "dbs_volume_expansion_failed",
            "Whether the last expansion failed.",
            i64::from(!volume.last_expansion_error.is_empty()),
        ),
    ] {
        out.head(name, "gauge", help);
        out.line(name, &of, value);
    }
    let name = "dbs_volume_replica_mode";
    out.head(name, "gauge", "1 for the mode the replica is in.");
    for member in controller.replicas() {
        for mode in MODES {
            let address = quoted(&member.target.address);
            let labels = format!("{of},replica={address},mode=\"{mode}\"");
            out.line(name, &labels, u8::from(member.mode == mode));
        }
    }
    counters(&mut out, &of, &controller.stats());
    let name = "dbs_volume_replica_faults_total";
    out.head(name, "counter", "Replicas that became ERR, by reason.");
    for (fault, count) in controller.faults() {
        out.line(name, &format!("{of},reason=\"{}\"", fault.name()), count);
    }
    out.into_string()
}

fn counters(out: &mut Text, of: &str, stats: &PathStats) {
    let kinds = [PathKind::Read, PathKind::Write];
    for (name, help, counts) in [
        ("dbs_volume_requests_total", "Requests answered.", stats.requests),
        ("dbs_volume_bytes_total", "Bytes read and written.", stats.bytes),
        (
            "dbs_volume_request_errors_total",
            "Requests answered with an error, among those answered.",
            stats.errors,
        ),
    ] {
        out.head(name, "counter", help);
        for kind in kinds {
            out.line(name, &format!("{of},type=\"{}\"", kind.name()), counts[kind as usize]);
        }
    }
    let name = "dbs_volume_request_seconds_total";
    out.head(name, "counter", "From the reception of a request to its reply, summed.");
    for kind in kinds {
        let seconds = stats.time[kind as usize].as_secs_f64();
        out.line(name, &format!("{of},type=\"{}\"", kind.name()), seconds);
    }
    let name = "dbs_volume_read_retries_total";
    out.head(name, "counter", "Reads that failed on the replica and were repeated on another one.");
    out.line(name, of, stats.retries);
    for (name, help, value) in [
        (
            "dbs_volume_checksum_mismatches_total",
            "Requests that met damaged data in the replica.",
            (|replica| replica.mismatches) as fn(&ReplicaStats) -> u64,
        ),
        (
            "dbs_volume_healed_total",
            "Damaged blocks of the replica that were healed from another one.",
            |replica| replica.healed,
        ),
        (
            "dbs_volume_reconnects_total",
            "Times that connections of a reactor to the replica broke and were made anew.",
            |replica| replica.reconnected,
        ),
    ] {
        out.head(name, "counter", help);
        for replica in &stats.replicas {
            out.line(name, &format!("{of},replica={}", quoted(&replica.name)), value(replica));
        }
    }
}
