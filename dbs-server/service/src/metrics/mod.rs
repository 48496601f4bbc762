//! Metrics for Prometheus: the text, what a store contributes to it, and the [`MetricsServer`] it is read from.

mod server;

pub use server::{Collect, MetricsServer};

use dbs_core::Store;
use dbs_core::info::{ChecksumInfo, StoreInfo, VolumeInfo, VolumeIo};
use std::fmt::{Display, Write};

/// All metrics of a store.
#[must_use]
pub fn text(store: &Store) -> String {
    let mut out = Text::default();
    store_metrics(&mut out, &[(String::new(), store.info())]);
    volume_metrics(&mut out, &store.volume_io());
    out.into_string()
}

/// Name, kind, help and value of a metric of a store.
type Row = (&'static str, &'static str, &'static str, fn(&StoreInfo) -> u64);

/// The memory of their metadata.
const MEMORY: [Row; 4] = [
    (
        "dbs_store_lookups_memory_bytes",
        "gauge",
        "Memory that holds what look-ups in volumes with snapshots have found.",
        |info| info.lookups.memory,
    ),
    (
        "dbs_store_lookups_forgotten_total",
        COUNTER,
        "Pieces of 512 extents forgotten as others needed the memory.",
        |info| info.lookups.forgotten,
    ),
    ("dbs_store_bitmaps_memory_bytes", "gauge", "Memory that holds bitmaps of extents.", |info| {
        info.lookups.bitmap_memory
    }),
    (
        "dbs_store_bitmaps_read_total",
        COUNTER,
        "Metadata blocks read again for bitmaps that had left memory.",
        |info| info.lookups.bitmap_reads,
    ),
];

/// What stores contribute, each with the labels of its series.
pub fn store_metrics(out: &mut Text, stores: &[(String, StoreInfo)]) {
    let values: [Row; 11] = [
        ("dbs_store_size_bytes", "gauge", "Size of the store.", |info| info.size),
        ("dbs_store_allocated_bytes", "gauge", "Extents in use.", |info| info.allocated),
        ("dbs_store_free_bytes", "gauge", "Extents free.", |info| info.free),
        (
            "dbs_store_pending_bytes",
            "gauge",
            "Extents freed that cannot be used again yet.",
            |info| info.extents_pending * info.extent_size,
        ),
        ("dbs_store_volumes", "gauge", "Volumes.", |info| info.volumes),
        ("dbs_store_snapshots", "gauge", "Snapshots, without heads and deleted ones.", |info| {
            info.snapshots.saturating_sub(info.volumes + info.snapshots_deleting)
        }),
        (
            "dbs_store_snapshot_slots",
            "gauge",
            "Slots in use: by snapshots, heads and deleted snapshots.",
            |info| info.snapshots,
        ),
        (
            "dbs_store_snapshots_deleting",
            "gauge",
            "Deleted snapshots that are still being merged.",
            |info| info.snapshots_deleting,
        ),
        ("dbs_store_commits_total", "counter", "Durable commit groups, ever.", |info| {
            info.sequence
        }),
        (
            "dbs_store_tail",
            "gauge",
            "1 if there is a tail, with which writes survive kill -9 without a commit.",
            |info| u64::from(info.tail),
        ),
        (
            "dbs_store_warnings",
            "gauge",
            "Warnings about the store; the log has their texts.",
            |info| info.warnings.len() as u64,
        ),
    ];
    for (name, kind, help, value) in values.into_iter().chain(MEMORY) {
        for (at, (labels, info)) in stores.iter().enumerate() {
            if at == 0 {
                out.head(name, kind, help);
            }
            out.line(name, labels, value(info));
        }
    }
    checksum_metrics(out, stores);
}

/// Of the volumes of a store, whoever uses them.
pub fn volume_metrics(out: &mut Text, volumes: &[(VolumeInfo, VolumeIo)]) {
    type Value = fn(&VolumeInfo, &VolumeIo) -> u64;
    let values: [(&str, &str, &str, Value); 11] = [
        ("dbs_volume_size_bytes", "gauge", "Size of the volume.", |info, _| info.size),
        ("dbs_volume_snapshots", "gauge", "Its snapshots.", |info, _| info.snapshots),
        ("dbs_volume_open", "gauge", "Whether somebody has it open.", |info, _| {
            u64::from(info.open)
        }),
        (
            "dbs_volume_locked",
            "gauge",
            "Whether it is encrypted, and nobody has unlocked it.",
            |info, _| u64::from(info.encryption.as_ref().is_some_and(|how| how.locked)),
        ),
        ("dbs_volume_reads_total", "counter", "Reads of the volume and its snapshots.", |_, io| {
            io.reads
        }),
        ("dbs_volume_writes_total", "counter", "Writes of the volume.", |_, io| io.writes),
        ("dbs_volume_read_bytes_total", "counter", "Bytes read, in whole blocks.", |_, io| {
            io.read_bytes
        }),
        (
            "dbs_volume_written_bytes_total",
            "counter",
            "Bytes written, in whole blocks.",
            |_, io| io.written_bytes,
        ),
        (
            "dbs_volume_limit_iops",
            "gauge",
            "Most requests of its clients in a second; 0 without a limit.",
            |info, _| info.limits.iops.into(),
        ),
        (
            "dbs_volume_limit_bandwidth_bytes",
            "gauge",
            "Most bytes of its clients in a second; 0 without a limit.",
            |info, _| info.limits.bandwidth,
        ),
        (
            "dbs_volume_delayed_requests_total",
            "counter",
            "Requests that the limits of the volume have delayed.",
            |_, io| io.delayed,
        ),
    ];
    for (name, kind, help, value) in values {
        out.head(name, kind, help);
        for (info, io) in volumes {
            out.line(name, &format!("volume={}", quoted(&info.name)), value(info, io));
        }
    }
}

const COUNTER: &str = "counter";

/// Of those stores that have checksums.
fn checksum_metrics(out: &mut Text, stores: &[(String, StoreInfo)]) {
    type Value = fn(&ChecksumInfo) -> u64;
    let values: [(&str, &str, &str, Value); 11] = [
        ("verified_total", COUNTER, "Blocks read whose checksum was compared, and equal.", |s| {
            s.verified
        }),
        ("unknown_total", COUNTER, "Blocks read of which no checksum was known.", |s| s.unknown),
        ("mismatches_total", COUNTER, "How often a damaged block was met.", |s| s.mismatches),
        ("healed_total", COUNTER, "Damaged blocks written again from a copy.", |s| s.healed),
        (
            "untrusted_total",
            COUNTER,
            "Groups and pages of checksums that could not be used after a crash or damage.",
            |s| s.untrusted,
        ),
        ("hits_total", COUNTER, "How often checksums were found in memory.", |s| s.hits),
        ("misses_total", COUNTER, "Pages of checksums read from the device.", |s| s.misses),
        ("openings_total", COUNTER, "Groups of checksums opened for writing.", |s| s.openings),
        ("closings_total", COUNTER, "Groups of checksums closed.", |s| s.closings),
        ("memory_bytes", "gauge", "Memory that holds checksums.", |s| s.memory),
        ("open_groups", "gauge", "Groups of checksums that are open.", |s| s.open),
    ];
    for (name, kind, help, value) in values {
        let name = format!("dbs_store_checksums_{name}");
        let with = stores.iter().filter_map(|(labels, info)| Some((labels, info.checksums?)));
        for (at, (labels, sums)) in with.enumerate() {
            if at == 0 {
                out.head(&name, kind, help);
            }
            out.line(&name, labels, value(&sums));
        }
    }
}

/// The text so far.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// All of it.
    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }

    /// Begins a metric: the lines of its series follow.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// The value of one series, whose labels may be none.
    pub fn line(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels.is_empty() {
            true => writeln!(self.0, "{name} {value}"),
            false => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }
}

/// A label's value in quotes.
#[must_use]
pub fn quoted(text: &str) -> String {
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
