//! `longhorn controller`: arguments to what is to be served.

use super::golang::{self, BooleanOption as _};
use super::replica;
use super::replica_args::{ChecksumArgs, DataProtocol, DurabilityArg, Size};
use crate::process::{BlockDevice, Failed, FrontendOptions, LocalOptions, PageOptions, Process};
use clap::{ArgAction, Args};
use dbs_core::info::VolumeLimits;
use dbs_core::units::BLOCK_BYTES;
use dbs_core::{Error, Result, parse_size};
use dbs_frontend::Listen;
use dbs_frontend::ListenAddress;
use dbs_frontend::tls::TlsConfig;
use dbs_reactor::ublk::DEPTH_MAX;
use dbs_service::{log, privileges};
use dbs_ublk::QUEUES_MAX;
use dbs_web::WebAddress;
use longhorn_controller::frontend::{NvmeOptions, UblkOptions};
use longhorn_controller::path::{PathOptions, QUEUE_DEPTH_MAX};
use longhorn_controller::rules::limits::Limits;
use longhorn_controller::rules::start::Policy;
use longhorn_controller::rules::timeout;
use longhorn_controller::volume::Options;
use longhorn_controller::volume::file::BackendKind;
use longhorn_data::{COMMIT_BYTES, DataOptions};
use longhorn_replica::host::{options as host, sockets};
use longhorn_wire::transport;
use std::path::PathBuf;
use std::time::Duration;

/// Heading of the options upstream does not have.
const OURS: &str = "Options of DBS";
/// Ports for receiving files of a replica in the controller's process.
const RECEIVERS: u16 = 10;
/// Requests that the initiator has in flight for a disk: each may wait for the one before. And the time on top
/// of what they may take, after which `tgtd` or the kernel fails them.
const SCSI_DEPTH: u32 = 32;
const SCSI_SPARE: Duration = Duration::from_secs(30);
/// Longest name of a volume.
const NAME_MAX: usize = 64;

/// `longhorn controller`.
#[derive(Debug, Args)]
pub struct ControllerArgs {
    /// Name of the volume
    pub volume: String,
    /// Address to listen on for gRPC
    #[arg(long, value_name = "[HOST]:PORT", default_value = "localhost:9501")]
    pub listen: ListenAddress,
    /// Size of the volume: bytes, or 42kb, 42mb, 42gb
    #[arg(long, default_value = "", hide_default_value = true, value_parser = golang::size)]
    pub size: Size,
    /// Size that the volume had when it last ran
    #[arg(long, value_name = "SIZE", default_value = "", hide_default_value = true)]
    #[arg(value_parser = golang::size)]
    pub current_size: Size,
    /// Address of a replica: tcp://HOST:PORT; local:DIRECTORY for a replica in this process; or
    /// file://PATH for a plain file. Can be repeated
    #[arg(long, value_name = "ADDRESS", action = ArgAction::Append)]
    pub replica: Vec<String>,
    /// How users connect to the volume: `tgt-blockdev` (the block device /dev/longhorn/VOLUME, see
    /// --block-device), `ublk` (the same, through the kernel's ublk driver in any case), `tgt-iscsi` (an
    /// iSCSI target), `vhost-user` (the disk of a virtual machine of this machine), `nvme-tcp` (NVMe over
    /// TCP, for hosts of this machine), `nbd` or `socket`
    #[arg(long, default_value = "", hide_default_value = true)]
    pub frontend: String,
    /// Kind of replicas that the volume may have: `tcp` or `file`; can be repeated. With `file`,
    /// everybody who can reach the gRPC port can write any file of this machine
    #[arg(long, value_name = "KIND", action = ArgAction::Append, default_value = "tcp")]
    pub enable_backend: Vec<BackendKind>,
    /// Take the volume over from another engine that still runs
    #[arg(long, boolean = "false")]
    pub upgrade: bool,
    /// Do not count writes
    #[arg(long = "disableRevCounter", boolean = "false")]
    pub disable_rev_counter: bool,
    /// Start although all replicas have failed, with the best of them
    #[arg(long = "salvageRequested", boolean = "false")]
    pub salvage_requested: bool,
    /// Mark the snapshots that an unmap reaches as removed
    #[arg(long, boolean = "false")]
    pub unmap_mark_snap_chain_removed: bool,
    /// How to connect to the data ports of replicas
    #[arg(long, value_enum, default_value_t = DataProtocol::Tcp)]
    pub data_server_protocol: DataProtocol,
    /// Seconds without an answer after which a replica becomes ERR, 8 to 30; twice as long for the last
    /// complete replica
    #[arg(long, value_name = "SECONDS", default_value_t = 8)]
    pub engine_replica_timeout: i64,
    /// Seconds that a request of a file's transfer between replicas may take
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub file_sync_http_client_timeout: i32,
    /// Highest number of snapshots
    #[arg(long, value_name = "N", default_value_t = 250)]
    pub snapshot_max_count: u32,
    /// Highest size of all snapshots together: bytes, or 42kb, 42mb, 42gb; 0 stands for no limit
    #[arg(long, value_name = "SIZE", default_value = "", hide_default_value = true)]
    #[arg(value_parser = golang::size)]
    pub snapshot_max_size: Size,
    /// Highest number of replicas that send data at once when a replica is rebuilt
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub rebuild_sync_concurrent_limit: u32,
    /// How DBS is to do it.
    #[command(flatten)]
    pub ours: OurControllerArgs,
}

/// What upstream's controller has no options for.
#[derive(Debug, Args)]
#[command(next_help_heading = OURS)]
pub struct OurControllerArgs {
    /// Threads; the connections of the frontend and those to the replicas are spread over them
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    #[arg(env = "DBS_CONTROLLER_REACTORS")]
    pub reactors: u16,
    /// Connections to each replica, at least one for each reactor
    #[arg(long, value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    #[arg(env = "DBS_REPLICA_CONNECTIONS")]
    pub replica_connections: u16,
    /// Requests in flight on each reactor; further requests wait
    #[arg(long, value_name = "N", default_value_t = 1024)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=QUEUE_DEPTH_MAX as i64))]
    #[arg(env = "DBS_QUEUE_DEPTH")]
    pub queue_depth: u32,
    /// Most requests of clients in a second, 0 for no limit: reads, writes and discards
    #[arg(long, value_name = "N", default_value_t = 0, env = "DBS_IOPS")]
    pub iops: u32,
    /// Most bytes that clients read and write in a second, such as 100MiB; 0 for no limit
    #[arg(long, value_name = "SIZE", default_value = "0", env = "DBS_BANDWIDTH")]
    #[arg(value_parser = bandwidth)]
    pub bandwidth: u64,
    /// What --iops and --bandwidth allow in so many seconds may be used at once, after as many seconds
    /// without use
    #[arg(long, value_name = "SECONDS", default_value_t = 1, env = "DBS_BURST")]
    #[arg(value_parser = clap::value_parser!(u32).range(..=3600))]
    pub burst: u32,
    /// Seconds that a replica may take for a flush, for healing a block, or to answer a ping
    #[arg(long, value_name = "SECONDS", default_value_t = timeout::FLUSH_DEFAULT.as_secs())]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    #[arg(env = "DBS_FLUSH_TIMEOUT")]
    pub flush_timeout: u64,
    /// In place of --engine-replica-timeout, and any: for tests
    #[arg(long, value_name = "MILLISECONDS", hide = true)]
    pub replica_timeout_ms: Option<u64>,
    /// Read from a replica on this machine as long as one is complete
    #[arg(long, boolean = "false", env = "DBS_PREFER_LOCAL")]
    pub prefer_local: bool,
    /// Also serve the replica in DIRECTORY in this process, so that `add-replica` can add it; can be
    /// repeated
    #[arg(long, value_name = "DIRECTORY", action = ArgAction::Append)]
    pub local: Vec<PathBuf>,
    /// Address on which replicas in this process listen, for rebuilds and commands. Port 0 stands for
    /// any free ports; with another port, each replica takes 13 ports, counted from this one
    #[arg(long, value_name = "HOST:PORT", default_value = "localhost:0")]
    pub local_listen: ListenAddress,
    /// Checksums of replicas of this process.
    #[command(flatten)]
    pub checksums: ChecksumArgs,
    /// Serve metrics for Prometheus over HTTP
    #[arg(long, value_name = "[HOST]:PORT")]
    #[arg(env = "DBS_CONTROLLER_METRICS")]
    pub metrics: Option<ListenAddress>,
    /// Serve a web page that shows the volume, its replicas and snapshots, and what goes through it. With PORT
    /// alone it listens on loopback; another HOST needs TLS (--web-tls-dir). Whoever has the token (--web-token) is let in.
    /// Without --web-admin the page changes nothing. Port 0 stands for any free port, which the log names. If the page
    /// cannot be served, the volume is served all the same, and the log says why
    #[arg(long, value_name = "[HOST:]PORT")]
    #[arg(env = "DBS_CONTROLLER_WEB")]
    pub web: Option<WebAddress>,
    /// File with the token of the web page: --web is refused without one, since a log would have to tell it. If the file is
    /// not there, the controller makes it, with mode 0600
    #[arg(long, value_name = "FILE")]
    #[arg(env = "DBS_CONTROLLER_WEB_TOKEN")]
    pub web_token: Option<PathBuf>,
    /// Name under which browsers ask for the web page, beside localhost, the HOST of --web and addresses; can be
    /// repeated. Requests for other names are refused
    #[arg(long, value_name = "NAME", action = ArgAction::Append)]
    pub web_name: Vec<String>,
    /// Let the web page take, revert to, remove and purge snapshots
    #[arg(long, boolean = "false", env = "DBS_CONTROLLER_WEB_ADMIN")]
    pub web_admin: bool,
    /// Directory with server-cert.pem and server-key.pem for the web page, which is served over TLS then. If the
    /// directory has a ca-cert.pem, each browser must show a certificate signed by it. Use another directory
    /// than that of --tls-dir, whose certificates also give access to replicas
    #[arg(long, value_name = "DIRECTORY")]
    #[arg(env = "DBS_CONTROLLER_WEB_TLS_DIR")]
    pub web_tls_dir: Option<PathBuf>,
    /// What `tgt-blockdev` is made with. Over iSCSI, everybody who reaches port 3260 of this machine or pod can
    /// use the volume. A block device of ublk that is there when the frontend starts stays what it is
    #[arg(long, value_enum, value_name = "KIND", default_value_t = BlockDevice::Auto)]
    #[arg(env = "DBS_BLOCK_DEVICE")]
    pub block_device: BlockDevice,
    /// What a write survives when it is answered to a client that cannot ask for a flush: `tgtd`, or a client
    /// of `socket`. With `power`, it is answered when the replicas have made it durable [default: power over
    /// iSCSI, interval for `socket`]
    #[arg(long, value_enum, env = "DBS_DURABILITY")]
    pub durability: Option<DurabilityArg>,
    /// Queues of the block device of ublk [default: one for each reactor]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    #[arg(env = "DBS_FRONTEND_QUEUES")]
    pub frontend_queues: Option<u16>,
    /// Requests that a queue of the block device of ublk holds at a time
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(DEPTH_MAX)))]
    #[arg(env = "DBS_FRONTEND_DEPTH")]
    pub frontend_depth: u16,
    /// Further address on which the frontend `nbd` listens: tcp:PORT (loopback), tcp:HOST:PORT or
    /// unix:PATH; can be repeated
    #[arg(long, value_name = "ADDRESS", action = ArgAction::Append)]
    pub nbd_listen: Vec<Listen>,
    /// Directory with server-cert.pem and server-key.pem. NBD clients over TCP must then use TLS. If
    /// the directory has a ca-cert.pem, each client must show a certificate signed by it. Use another
    /// directory than that of --tls-dir, whose certificates also give access to replicas
    #[arg(long, value_name = "DIRECTORY")]
    pub nbd_tls_dir: Option<PathBuf>,
    /// Address on loopback (see --nvme-insecure-data) on which the frontend `nvme-tcp` listens: tcp:PORT, which should be below 1024, as
    /// any user may take another one while the controller is down; can be repeated [default: tcp:0, a free
    /// port, which the volume's next controller on this machine takes again]
    #[arg(long, value_name = "ADDRESS", action = ArgAction::Append)]
    pub nvme_listen: Vec<Listen>,
    /// The frontend `nvme-tcp` lets in only hosts that prove that they have a key (DH-HMAC-CHAP): each line of FILE has the NQN
    /// of a host, its key as `nvme gen-dhchap-key` prints it, and maybe the key by which the controller proves to that host
    /// who it is. Nobody but its owner may read FILE
    #[arg(long, value_name = "FILE")]
    pub nvme_keys: Option<PathBuf>,
    /// Let --nvme-listen listen for other machines, too. Whoever is on the way between them can read and change all
    /// data: keys say who connects, and protect nothing else
    #[arg(long, requires = "nvme_keys")]
    pub nvme_insecure_data: bool,
    /// Directory of the frontend's socket. Its subdirectory `longhorn` holds what the next controller
    /// must know [default: /var/run]
    #[arg(long, value_name = "DIRECTORY")]
    #[arg(env = "DBS_SOCKET_DIR")]
    pub socket_dir: Option<PathBuf>,
    /// Directory for the nodes of block devices
    #[arg(long, value_name = "DIRECTORY", default_value = "/dev/longhorn")]
    #[arg(env = "DBS_DEVICE_DIR")]
    pub device_dir: PathBuf,
    /// Answer requests without replicas: reads give zeros, and written data is lost. Only for measuring
    /// frontends
    #[arg(long, conflicts_with = "replica", requires = "size")]
    pub null_backend: bool,
}

/// Serves a volume until a signal comes.
///
/// # Errors
/// Why it cannot be served, or has ended.
pub fn serve(args: &ControllerArgs, instance: &str) -> std::result::Result<(), Failed> {
    warn_of_plain_nbd(&args.ours);
    crate::process::run(&process(args, instance)?)
}

/// Tells who may think that NBD is with TLS, and it is not.
fn warn_of_plain_nbd(ours: &OurControllerArgs) {
    let tcp = ours.nbd_listen.iter().any(|address| matches!(address, Listen::Tcp(..)));
    let text = match (tcp, ours.nbd_tls_dir.is_some()) {
        (false, true) => "--nbd-tls-dir has no effect: it is for --nbd-listen tcp:...",
        (true, false) if transport::is_tls() => {
            "NBD over TCP is without TLS: --tls-dir is not for it, --nbd-tls-dir is"
        }
        _ => return,
    };
    log::warn("nbd", &[("message", &text)]);
}

/// A limit of bytes in a second.
fn bandwidth(text: &str) -> std::result::Result<u64, String> {
    match parse_size(text) {
        Ok(size @ 1..BLOCK_BYTES) => Err(format!("{size} bytes in a second are less than a block")),
        size => size.map_err(|error| error.to_string()),
    }
}

/// Whether it is a volume's name: letters, digits, `_`, `.` and `-`, the first a letter or digit.
fn is_name(name: &str) -> bool {
    let valid = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    (2..=NAME_MAX).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(valid)
}

fn process(args: &ControllerArgs, instance: &str) -> Result<Process> {
    if !is_name(&args.volume) {
        return Err(Error::invalid(format!(
            "`{}` is no name of a volume: 2 to {NAME_MAX} letters, digits, `_`, `.` and `-`, the \
             first a letter or digit",
            args.volume
        )));
    }
    let data_socket = match args.data_server_protocol {
        DataProtocol::Tcp => None,
        DataProtocol::Unix => {
            let control = std::env::var_os("LONGHORN_CONTROL_PATH").map(PathBuf::from);
            Some(sockets::unix_path(control.as_deref(), &args.volume)?)
        }
    };
    let ours = &args.ours;
    let short_timeout = match ours.replica_timeout_ms {
        None => timeout::short(args.engine_replica_timeout),
        Some(millis) => Duration::from_millis(millis.max(1)),
    };
    let flush_timeout = Duration::from_secs(ours.flush_timeout);
    Ok(Process {
        options: Options {
            volume: args.volume.clone(),
            policy: Policy {
                upgrade: args.upgrade,
                counter_disabled: args.disable_rev_counter,
                salvage: args.salvage_requested,
            },
            unmap_mark: args.unmap_mark_snap_chain_removed,
            limits: Limits {
                count: args.snapshot_max_count,
                size: args.snapshot_max_size.unwrap_or(0),
            },
            sync_limit: args.rebuild_sync_concurrent_limit,
            frontend: Some(args.frontend.clone()).filter(|frontend| !frontend.is_empty()),
            sync_before_snapshot: !args.frontend.is_empty(),
            short_timeout,
        },
        path: PathOptions {
            reactors: usize::from(ours.reactors),
            connections_per_replica: usize::from(ours.replica_connections),
            queue_depth: ours.queue_depth as usize,
            short_timeout,
            flush_timeout,
            prefer_local: ours.prefer_local,
            limits: VolumeLimits {
                iops: ours.iops,
                bandwidth: ours.bandwidth,
                burst_seconds: ours.burst,
            },
            ..PathOptions::default()
        },
        instance: instance.to_owned(),
        size: args.size.unwrap_or(0),
        current_size: args.current_size.unwrap_or(0),
        replicas: args.replica.clone(),
        backends: args.enable_backend.clone(),
        local: local(args),
        null_backend: ours.null_backend,
        data_socket,
        http_timeout_s: args.file_sync_http_client_timeout,
        listen: args.listen.clone(),
        metrics: ours.metrics.clone(),
        web: web(ours)?,
        frontends: frontends(ours, short_timeout)?,
    })
}

/// Where and to whom the page is served.
fn web(ours: &OurControllerArgs) -> Result<Option<PageOptions>> {
    let Some(address) = ours.web.clone() else { return Ok(None) };
    let Some(token) = ours.web_token.clone() else {
        let text = "nobody would be told the token of the web page: give --web-token FILE (environment variable \
                    DBS_CONTROLLER_WEB_TOKEN)";
        return Err(Error::invalid(text));
    };
    Ok(Some(PageOptions {
        address,
        token,
        names: ours.web_name.clone(),
        admin: ours.web_admin,
        tls_dir: ours.web_tls_dir.clone(),
    }))
}

/// Where hosts come in, and which.
fn nvme(ours: &OurControllerArgs) -> Result<NvmeOptions> {
    let (listen, keys) = (ours.nvme_listen.clone(), ours.nvme_keys.as_deref());
    if keys.is_some() {
        privileges::hide_memory()?;
    }
    NvmeOptions::load(listen, keys, ours.nvme_insecure_data)
}

/// Settings of frontends.
fn frontends(ours: &OurControllerArgs, short_timeout: Duration) -> Result<FrontendOptions> {
    let nbd_tls = ours.nbd_tls_dir.as_deref().map(TlsConfig::load_dir).transpose();
    let nbd_tls = nbd_tls.map_err(|e| Error::invalid(e.to_string()))?;
    Ok(FrontendOptions {
        sockets: ours.socket_dir.clone(),
        nbd: ours.nbd_listen.clone(),
        nvme: nvme(ours)?,
        nbd_tls,
        device: UblkOptions {
            // No more threads than it has do anything for it.
            queues: ours.frontend_queues.unwrap_or(ours.reactors).min(QUEUES_MAX),
            depth: ours.frontend_depth,
        },
        nodes: ours.device_dir.clone(),
        block_device: ours.block_device,
        durable_writes: ours.durability.map(|durability| durability == DurabilityArg::Power),
        request_timeout: timeout::long(short_timeout) * SCSI_DEPTH + SCSI_SPARE,
        // A write may wait for replicas that hang, the last one, and then for a flush.
        disk_timeout: timeout::long(short_timeout) * 2
            + Duration::from_secs(ours.flush_timeout)
            + SCSI_SPARE,
    })
}

/// Replicas in the controller's process, with what its own options say.
fn local(args: &ControllerArgs) -> LocalOptions {
    LocalOptions {
        standby: args.ours.local.clone(),
        listen: args.ours.local_listen.clone(),
        options: host::Options {
            dir: PathBuf::new(),
            volume_name: args.volume.clone(),
            instance_name: String::new(),
            size: args.size,
            revision_counter: !args.disable_rev_counter,
            unmap_mark: args.unmap_mark_snap_chain_removed,
            snapshot_max_count: i32::try_from(args.snapshot_max_count).unwrap_or(i32::MAX),
            snapshot_max_size: args.snapshot_max_size.unwrap_or(0),
            encrypted: false,
            durable_writes: false,
            commit_bytes: COMMIT_BYTES,
            null_storage: false,
            backing_file: None,
        },
        receivers: RECEIVERS,
        data: DataOptions {
            reactors: 1,
            workers: 4,
            stop_grace: Duration::from_secs(2),
            ..DataOptions::default()
        },
        runtime_dir: replica::runtime_dir(),
        store: args.ours.checksums.store_options(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_volumes() {
        for name in ["v1", "pvc-0a.b_C", &"x".repeat(64)] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "v", "-v", ".v", "a b", "a/b", &"x".repeat(65)] {
            assert!(!is_name(name), "{name}");
        }
    }
}
