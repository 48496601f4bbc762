//! A controller's metrics for Prometheus.

use super::{Control, Counters, DamageCount};
use dbs_service::metrics::{Text, quoted};
use longhorn_wire::proto::controller::ReplicaMode;
use std::time::Duration;

const MODES: [ReplicaMode; 3] = [ReplicaMode::Wo, ReplicaMode::Rw, ReplicaMode::Err];

/// How the controller is, in Prometheus' text format. Served by [`dbs_service::metrics::MetricsServer`].
#[must_use]
pub fn text(control: &dyn Control) -> String {
    let volume = control.volume();
    let of = format!("volume={}", quoted(&volume.name));
    let mut out = Text::default();
    for (name, help, value) in [
        ("dbs_volume_size_bytes", "Size of the volume.", volume.size),
        (
            "dbs_volume_frontend_up",
            "Whether the frontend is up.",
            i64::from(volume.frontend_state == "up"),
        ),
        ("dbs_volume_expanding", "Whether an expansion goes on.", i64::from(volume.is_expanding)),
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
    for (address, mode) in control.replicas() {
        for other in MODES {
            let (address, named) = (quoted(&address), other.as_str_name());
            let labels = format!("{of},replica={address},mode=\"{named}\"");
            out.line(name, &labels, u8::from(mode == other));
        }
    }
    counters(&mut out, &of, &control.counters());
    out.into_string()
}

fn counters(out: &mut Text, of: &str, counters: &Counters) {
    for (name, help, reads, writes) in [
        ("dbs_volume_requests_total", "Requests answered.", counters.reads, counters.writes),
        (
            "dbs_volume_bytes_total",
            "Bytes read and written.",
            counters.read_bytes,
            counters.write_bytes,
        ),
        (
            "dbs_volume_request_errors_total",
            "Requests answered with an error, among those answered.",
            counters.read_errors,
            counters.write_errors,
        ),
    ] {
        out.head(name, "counter", help);
        out.line(name, &format!("{of},type=\"read\""), reads);
        out.line(name, &format!("{of},type=\"write\""), writes);
    }
    let name = "dbs_volume_read_retries_total";
    out.head(name, "counter", "Reads that a replica failed and another was asked for.");
    out.line(name, of, counters.retries);
    let name = "dbs_volume_replica_faults_total";
    out.head(name, "counter", "Replicas that became ERR, by what for.");
    for (reason, count) in &counters.faults {
        out.line(name, &format!("{of},reason=\"{reason}\""), count);
    }
    for (name, help, value) in [
        (
            "dbs_volume_checksum_mismatches_total",
            "Requests that met data in the replica which is not what was written.",
            (|count| count.mismatches) as fn(&DamageCount) -> u64,
        ),
        (
            "dbs_volume_healed_total",
            "Damaged blocks of the replica that were healed from another one.",
            |count| count.healed,
        ),
    ] {
        out.head(name, "counter", help);
        for count in &counters.damage {
            out.line(name, &format!("{of},replica={}", quoted(&count.replica)), value(count));
        }
    }
    let name = "dbs_volume_request_seconds_total";
    out.head(name, "counter", "From the reception of a request to its reply, summed.");
    let seconds = |ns| Duration::from_nanos(ns).as_secs_f64();
    out.line(name, &format!("{of},type=\"read\""), seconds(counters.read_ns));
    out.line(name, &format!("{of},type=\"write\""), seconds(counters.write_ns));
}
