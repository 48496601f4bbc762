//! The arguments of processes that serve replicas: names and defaults are upstream's, the last group of `replica`
//! is our own.

use super::golang::{self, BooleanOption as _};
use clap::{ArgAction, Args, ValueEnum};
use dbs_core::OpenOptions;
use dbs_frontend::ListenAddress;
use longhorn_replica::host::file::StoreOptions;
use std::path::PathBuf;
use std::time::Duration;

/// Heading of the options upstream does not have.
pub(super) const OURS: &str = "Options of DBS";

/// A replica, on whatever store.
#[derive(Debug, Args)]
pub struct ReplicaArgs {
    /// Directory of the replica, made if absent
    pub directory: PathBuf,
    /// Address to listen on for gRPC. The next port is for data, the one after it for the sync agent,
    /// the ports after that for the sync agent's receivers
    #[arg(long, value_name = "[HOST]:PORT", default_value = "localhost:9502")]
    pub listen: ListenAddress,
    /// Size of the volume if the replica is new: bytes, or 42kb, 42mb, 42gb
    #[arg(long, default_value = "", hide_default_value = true, value_parser = golang::size)]
    pub size: Size,
    /// Backing image below the volume: a raw or qcow2 file, or a directory with nothing else in it
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub backing_file: String,
    /// Whether to serve the sync agent
    #[arg(long, boolean = "true")]
    pub sync_agent: bool,
    /// Number of ports for receiving files, after the sync agent's port
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub sync_agent_port_count: u16,
    /// Do not count writes
    #[arg(long = "disableRevCounter", boolean = "false")]
    pub disable_rev_counter: bool,
    /// How the engine connects for data
    #[arg(long, value_enum, default_value_t = DataProtocol::Tcp)]
    pub data_server_protocol: DataProtocol,
    /// Before an unmap, mark the snapshots below the head as removed
    #[arg(long, boolean = "false")]
    pub unmap_mark_disk_chain_removed: bool,
    /// Name of the replica's instance; the process refuses callers that name another instance
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
    /// Highest number of snapshots
    #[arg(long, value_name = "N", default_value_t = 250)]
    pub snapshot_max_count: i32,
    /// Highest size of all snapshots together: bytes, or 42kb, 42mb, 42gb; 0 stands for no limit
    #[arg(long, value_name = "SIZE", default_value = "", hide_default_value = true)]
    #[arg(value_parser = golang::size)]
    pub snapshot_max_size: Size,
    /// The volume is encrypted, and therefore 16 MiB larger
    #[arg(long, boolean = "false")]
    pub encrypted: bool,
    /// Upstream takes and ignores it, too
    #[arg(long, hide = true, default_value = "")]
    pub restore_from: String,
    /// Upstream takes and ignores it, too
    #[arg(long, hide = true, default_value = "")]
    pub restore_name: String,
    /// How DBS is to do it.
    #[command(flatten)]
    pub ours: OurArgs,
}

/// Bytes, if a size was given.
pub type Size = Option<u64>;

/// What upstream's replica has no options for.
#[derive(Debug, Args)]
#[command(next_help_heading = OURS)]
pub struct OurArgs {
    /// What an acknowledged write survives. `interval`: a crash of the process; a commit in the
    /// background makes the write survive power loss. `power`: power loss, as each write is committed
    /// before it is acknowledged
    #[arg(long, value_enum, default_value_t = DurabilityArg::Interval)]
    #[arg(env = "DBS_REPLICA_DURABILITY")]
    pub durability: DurabilityArg,
    /// Longest time until a write is committed
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = golang::duration)]
    #[arg(env = "DBS_COMMIT_INTERVAL")]
    pub commit_interval: Duration,
    /// Uncommitted bytes at which a commit begins earlier
    #[arg(long, value_name = "SIZE", default_value = "64mb", value_parser = golang::size)]
    #[arg(env = "DBS_COMMIT_BYTES")]
    pub commit_bytes: Size,
    /// Serve metrics for Prometheus over HTTP
    #[arg(long, value_name = "[HOST]:PORT", env = "DBS_REPLICA_METRICS")]
    pub metrics: Option<ListenAddress>,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// Extent size of a new store in DIRECTORY
    #[arg(long, value_name = "SIZE", default_value = "1mb", value_parser = golang::size)]
    #[arg(env = "DBS_EXTENT_SIZE")]
    pub extent_size: Size,
    /// If DIRECTORY has the files of an upstream replica: serve them at once, and bring their content into
    /// a new store there meanwhile, so many bytes a second; 0 for no limit. They are removed at the end
    #[arg(long, value_name = "BYTES", value_parser = golang::size)]
    #[arg(env = "DBS_TAKE_OVER")]
    pub take_over: Option<Size>,
    /// Checksums of data.
    #[command(flatten)]
    pub checksums: ChecksumArgs,
    /// Directory on tmpfs for changes that are not committed yet; by default a directory of the host,
    /// if the host's file system is below /host, else of this system
    #[arg(long, value_name = "DIRECTORY", env = "DBS_TAIL")]
    pub tail: Option<PathBuf>,
    /// Answer requests without touching data: reads give zeros, and written data is lost. Only for
    /// measuring the protocol
    #[arg(long)]
    pub null_storage: bool,
}

/// Threads that serve data connections.
#[derive(Debug, Args)]
#[command(next_help_heading = OURS)]
pub struct ThreadArgs {
    /// Threads that serve data connections; by default one for each core, at most 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    #[arg(env = "DBS_REPLICA_REACTORS")]
    pub reactors: Option<u16>,
    /// Threads for requests that have to wait; by default 8, with `longhorn serve` 16
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    #[arg(env = "DBS_WORKERS")]
    pub workers: Option<u16>,
    /// How long a thread of --reactors polls for the next request before it sleeps, while requests come
    /// quickly
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = golang::duration)]
    #[arg(env = "DBS_SPIN")]
    pub spin: Duration,
}

/// Checksums of data in the store of a replica's directory.
#[derive(Debug, Args)]
#[command(next_help_heading = OURS)]
pub struct ChecksumArgs {
    /// Whether a new store in DIRECTORY keeps a checksum of each block of data, and compares the
    /// checksum at each read
    #[arg(long, value_name = "BOOL", default_value = "true", value_parser = golang::boolean)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[arg(action = ArgAction::Set, env = "DBS_CHECKSUMS")]
    pub checksums: bool,
    /// Memory for checksums, at least 256kb; 64mb hold the checksums of about 64 GiB of data
    #[arg(long, value_name = "SIZE", default_value = "64mb", value_parser = checksum_cache)]
    #[arg(env = "DBS_CHECKSUM_CACHE")]
    pub checksum_cache: Size,
}

impl ChecksumArgs {
    /// A store with these, and else with defaults.
    #[must_use]
    pub fn store_options(&self) -> StoreOptions {
        let Self { checksums, checksum_cache } = *self;
        StoreOptions { checksums, checksum_cache, ..StoreOptions::default() }
    }
}

pub(super) fn checksum_cache(text: &str) -> Result<Size, String> {
    let checksum_cache = golang::size(text)?;
    let options = OpenOptions { checksum_cache, ..OpenOptions::default() };
    options.check_checksum_cache().map(|()| checksum_cache).map_err(|e| e.to_string())
}

/// How the engine connects for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DataProtocol {
    /// The port after the gRPC port
    Tcp,
    /// A unix socket named after the volume, in the host's Longhorn directory
    Unix,
}

/// What an acknowledged write survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DurabilityArg {
    /// The end of the process
    Interval,
    /// The loss of power
    Power,
}

/// `longhorn sync-agent`.
#[derive(Debug, Args)]
pub struct SyncAgentArgs {
    /// Address to listen on
    #[arg(long, value_name = "[HOST]:PORT", default_value = "localhost:9504")]
    pub listen: ListenAddress,
    /// Ports of receivers
    #[arg(long, value_name = "FIRST-LAST", default_value = "9700-9800", value_parser = port_range)]
    pub listen_port_range: (u16, u16),
    /// gRPC address of the replica, whose directory must be the current directory
    #[arg(long, value_name = "ADDRESS", default_value = "", hide_default_value = true)]
    pub replica: String,
    /// Name of the replica's instance; the process refuses callers that name another instance
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
}

fn port_range(text: &str) -> Result<(u16, u16), String> {
    let wrong = || format!("`{text}` is no range of ports; write FIRST-LAST");
    let (first, last) = text.split_once('-').ok_or_else(wrong)?;
    let port = |text: &str| text.trim().parse::<u16>().map_err(|_| wrong());
    let (first, last) = (port(first)?, port(last)?);
    if first == 0 || first > last { Err(wrong()) } else { Ok((first, last)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_ports() {
        assert_eq!(port_range("9700-9800"), Ok((9700, 9800)));
        for wrong in ["", "1", "2-1", "0-1", "a-b", "1-70000"] {
            assert!(port_range(wrong).is_err(), "{wrong}");
        }
    }
}
