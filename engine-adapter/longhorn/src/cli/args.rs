//! The arguments of `longhorn`: names and defaults are upstream's, the last group of `replica` is
//! our own.

use super::client_args::ClientCommand;
use super::controller::ControllerArgs;
use super::golang::{self, BooleanOption as _};
use super::serve::ServeArgs;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use dbs_core::OpenOptions;
use dbs_server::frontend::ListenAddress;
use longhorn_replica::host::file::StoreOptions;
use longhorn_wire::transport;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Heading of the options upstream does not have.
pub(super) const OURS: &str = "Options of DBS";

/// Longhorn's v1 data engine on DBS: replicas, and what steers a volume.
#[derive(Debug, Parser)]
#[command(name = "longhorn", version, max_term_width = 100, args_override_self = true)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// Options in front of the command.
    #[command(flatten)]
    pub globals: Globals,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options in front of the command.
#[derive(Debug, Args)]
pub struct Globals {
    /// Address of the engine
    #[arg(long, default_value = "http://localhost:9501")]
    pub url: String,
    /// Name of the volume, which callers that name another are refused by
    #[arg(long, default_value = "", hide_default_value = true)]
    pub volume_name: String,
    /// Name of the engine's instance, likewise
    #[arg(long, default_value = "", hide_default_value = true)]
    pub engine_instance_name: String,
    /// Accepted for upstream's sake
    #[arg(long, hide = true)]
    pub debug: bool,
    /// How to meet others.
    #[command(flatten)]
    pub tls: TlsArgs,
}

/// How a process and the others of its volume meet.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = OURS)]
pub struct TlsArgs {
    /// TLS with certificates on both sides, for gRPC, data and files between controller, replicas, sync
    /// agents and this command: ca-cert.pem, client-cert.pem and client-key.pem in this directory, of
    /// who serves also server-cert.pem and server-key.pem. Upstream's engine does not speak it
    #[arg(long, global = true, value_name = "DIRECTORY", env = "DBS_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
    /// What the certificates of servers are for, if not for the hosts of their addresses
    #[arg(long, global = true, value_name = "NAME", env = "DBS_TLS_NAME")]
    pub tls_name: Option<String>,
}

impl TlsArgs {
    /// Makes the choice for this process, which serves others or not.
    ///
    /// # Errors
    /// `Invalid`, with the file that cannot be used, or for a name without a directory.
    pub fn choose(&self, serves: bool) -> dbs_core::Result<()> {
        match (&self.tls_dir, &self.tls_name) {
            (Some(dir), name) => transport::choose_tls(dir, name.as_deref(), serves),
            // Not clap's `requires`: one may be given before the command, the other after it.
            (None, Some(_)) => {
                let text =
                    "--tls-name (or DBS_TLS_NAME) needs --tls-dir: without it there is no TLS";
                Err(dbs_core::Error::invalid(text))
            }
            (None, None) => Ok(()),
        }
    }
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a volume over its replicas until SIGINT or SIGTERM
    Controller(Box<ControllerArgs>),
    /// Serve a replica until SIGINT or SIGTERM
    Replica(Box<LonghornReplica>),
    /// Serve the sync agent of a replica that runs, until SIGINT or SIGTERM
    SyncAgent(SyncAgentArgs),
    /// Serve a store that replicas share (`longhorn replica --store`), until SIGINT or SIGTERM
    Serve(Box<ServeArgs>),
    /// Print versions as JSON
    Version(VersionArgs),
    /// What steers a volume.
    #[command(flatten)]
    Client(ClientCommand),
    /// What upstream has besides.
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}

/// `longhorn replica`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct LonghornReplica {
    /// The replica.
    #[command(flatten)]
    pub replica: ReplicaArgs,
    /// Keep the replica in this store, which a running `longhorn serve` owns, and not in a file of its
    /// own in DIRECTORY
    #[arg(long, value_name = "PATH", help_heading = OURS)]
    pub store: Option<PathBuf>,
}

/// A replica, on whatever store.
#[derive(Debug, Args)]
pub struct ReplicaArgs {
    /// Directory of the replica, made if absent
    pub directory: PathBuf,
    /// Where to listen: gRPC here, data on the next port, the sync agent on the one after that, its
    /// receivers on those behind
    #[arg(long, value_name = "[HOST]:PORT", default_value = "localhost:9502")]
    pub listen: ListenAddress,
    /// Size of the volume if the replica is new: bytes, or 42kb, 42mb, 42gb
    #[arg(long, default_value = "", hide_default_value = true, value_parser = golang::size)]
    pub size: Size,
    /// Backing images are not supported: only an empty value is
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub backing_file: String,
    /// Whether to serve the sync agent
    #[arg(long, boolean = "true")]
    pub sync_agent: bool,
    /// Ports for receiving files, behind the sync agent's
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub sync_agent_port_count: u16,
    /// Do not count writes
    #[arg(long = "disableRevCounter", boolean = "false")]
    pub disable_rev_counter: bool,
    /// How the engine connects for data
    #[arg(long, value_enum, default_value_t = DataProtocol::Tcp)]
    pub data_server_protocol: DataProtocol,
    /// Mark the snapshots under the head as removed before an unmap
    #[arg(long, boolean = "false")]
    pub unmap_mark_disk_chain_removed: bool,
    /// Name of the replica's instance, which callers that name another are refused by
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
    /// Most snapshots
    #[arg(long, value_name = "N", default_value_t = 250)]
    pub snapshot_max_count: i32,
    /// Most bytes in snapshots, without a limit if 0: bytes, or 42kb, 42mb, 42gb
    #[arg(long, value_name = "SIZE", default_value = "", hide_default_value = true)]
    #[arg(value_parser = golang::size)]
    pub snapshot_max_size: Size,
    /// The volume is encrypted, and 16 MiB larger for it
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
    /// What an acknowledged write survives: the end of the process (`interval`), with a commit for
    /// power loss in the background, or power loss (`power`), with a commit before each
    /// acknowledgement
    #[arg(long, value_enum, default_value_t = DurabilityArg::Interval)]
    pub durability: DurabilityArg,
    /// How long a write may stay uncommitted
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = golang::duration)]
    pub commit_interval: Duration,
    /// Bytes after which a commit begins earlier
    #[arg(long, value_name = "SIZE", default_value = "64mb", value_parser = golang::size)]
    pub commit_bytes: Size,
    /// Serve metrics for Prometheus over HTTP
    #[arg(long, value_name = "[HOST]:PORT")]
    pub metrics: Option<ListenAddress>,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// Extent size of a new store in DIRECTORY
    #[arg(long, value_name = "SIZE", default_value = "1mb", value_parser = golang::size)]
    pub extent_size: Size,
    /// Checksums of data.
    #[command(flatten)]
    pub checksums: ChecksumArgs,
    /// Directory on tmpfs for what is not committed yet; by default one of the host's, if it is to be
    /// seen under /host, else of this system
    #[arg(long, value_name = "DIRECTORY")]
    pub tail: Option<PathBuf>,
    /// Answer data requests without touching data: reads give zeros, writes are lost. To measure the
    /// protocol alone
    #[arg(long)]
    pub null_storage: bool,
}

/// Threads that serve data connections.
#[derive(Debug, Args)]
#[command(next_help_heading = OURS)]
pub struct ThreadArgs {
    /// Threads that serve data connections; by default one for each core, at most 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub reactors: Option<u16>,
    /// Threads that execute requests which have to wait; by default 8, of `serve` 16
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// How long a reactor looks for the next request before it sleeps, while they come quickly
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = golang::duration)]
    pub spin: Duration,
}

/// Whether to keep checksums; an empty variable, as a template may leave it, is no wish.
fn if_given(text: &str) -> Result<bool, String> {
    if text.is_empty() { Ok(StoreOptions::default().checksums) } else { golang::boolean(text) }
}

/// Checksums of data in the store of a replica's directory.
#[derive(Debug, Args)]
#[command(next_help_heading = OURS)]
pub struct ChecksumArgs {
    /// Whether a new store in DIRECTORY keeps a checksum of each block of data and compares it at each read
    #[arg(long, value_name = "BOOL", default_value = "true", value_parser = if_given)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[arg(action = ArgAction::Set, env = "DBS_CHECKSUMS")]
    pub checksums: bool,
    /// Memory for checksums, at least 256kb; 64mb hold those of about 64 GiB of data
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
#[command(args_override_self = true)]
pub struct SyncAgentArgs {
    /// Where to listen
    #[arg(long, value_name = "[HOST]:PORT", default_value = "localhost:9504")]
    pub listen: ListenAddress,
    /// Ports of receivers
    #[arg(long, value_name = "FIRST-LAST", default_value = "9700-9800", value_parser = port_range)]
    pub listen_port_range: (u16, u16),
    /// gRPC address of the replica; it is the one of the present directory
    #[arg(long, value_name = "ADDRESS", default_value = "", hide_default_value = true)]
    pub replica: String,
    /// Name of the replica's instance, which callers that name another are refused by
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub replica_instance_name: String,
}

/// `longhorn version`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct VersionArgs {
    /// Do not ask the engine for its version
    #[arg(long, boolean = "false")]
    pub client_only: bool,
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
    use super::super::client_args::{SnapshotCommand, Snapshots};
    use super::*;
    use clap::CommandFactory;
    use dbs_core::limits::SUMS_CACHE_BYTES;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        let args = line.split(' ').map(|a| OsString::from(if a == "''" { "" } else { a }));
        Cli::try_parse_from(golang::double_dashes(args))
    }

    fn replica(line: &str) -> ReplicaArgs {
        match parse(line).unwrap().command {
            Command::Replica(replica) => replica.replica,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn an_instance_manager_s_command_line() {
        let line = "longhorn --volume-name v replica /host/r/v-1 --size 1073741824 \
            --disableRevCounter --data-server-protocol unix --unmap-mark-disk-chain-removed \
            --replica-instance-name v-r-1 --snapshot-max-count 7 --snapshot-max-size 2gb \
            --encrypted --sync-agent-port-count 7 --listen :10000";
        let line: Vec<_> = line.split_ascii_whitespace().collect();
        let args = replica(&line.join(" "));
        assert_eq!(args.directory, PathBuf::from("/host/r/v-1"));
        assert_eq!((args.size, args.snapshot_max_size), (Some(1 << 30), Some(2 << 30)));
        assert!(args.disable_rev_counter && args.unmap_mark_disk_chain_removed && args.encrypted);
        assert!(args.sync_agent);
        assert_eq!(args.data_server_protocol, DataProtocol::Unix);
        assert_eq!((args.snapshot_max_count, args.sync_agent_port_count), (7, 7));
        assert_eq!(args.listen.to_string(), ":10000");
    }

    #[test]
    fn flags_as_go_takes_them() {
        let args = replica("longhorn replica -listen=:1 -sync-agent=false d -listen :2 -size ''");
        assert_eq!((args.listen.port, args.sync_agent, args.size), (2, false, None));
        assert!(!args.disable_rev_counter);
        let args = replica("longhorn replica d --disableRevCounter=F --encrypted=1");
        assert!(!args.disable_rev_counter && args.encrypted);
        for wrong in ["replica", "replica a b", "replica d --size 1x", "replica d --listen 1"] {
            assert!(parse(&format!("longhorn {wrong}")).is_err(), "{wrong}");
        }
        assert!(matches!(parse("longhorn backup ls").unwrap().command, Command::Other(_)));
    }

    #[test]
    fn checksums_are_kept_unless_told_otherwise() {
        let given = |line: &str| {
            let options = replica(line).ours.checksums.store_options();
            (options.checksums, options.checksum_cache)
        };
        assert_eq!(given("longhorn replica d"), (true, Some(SUMS_CACHE_BYTES)));
        assert_eq!(
            given("longhorn replica d -checksums=0 -checksum-cache 1gb"),
            (false, Some(1 << 30))
        );
        assert!(given("longhorn replica d --checksums").0);
        assert!(given("longhorn replica d --checksums=").0);
        let refused = parse("longhorn replica d --checksum-cache 255kb").unwrap_err().to_string();
        assert!(refused.contains("it takes 256.0 KiB at least"), "{refused}");
    }

    fn client(line: &str) -> ClientCommand {
        match parse(line).unwrap().command {
            Command::Client(command) => command,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn commands_that_steer_a_volume() {
        let line = "longhorn -url http://h:1 --volume-name v add tcp://h:2 --size 42mb \
            --current-size=42mb -fast-sync --replica-instance-name r";
        let line: Vec<_> = line.split_ascii_whitespace().collect();
        let ClientCommand::AddReplica(add) = client(&line.join(" ")) else { panic!() };
        assert_eq!((&*add.replica[0], &*add.sizes.size), ("tcp://h:2", "42mb"));
        assert!(add.fast_sync && !add.restore);
        assert_eq!((add.sync.file_sync_http_client_timeout, add.sync.grpc_timeout_seconds), (5, 0));
        let ClientCommand::Snapshots(all) = client("longhorn snapshot") else { panic!() };
        assert!(all.command.is_none());
        let create =
            client("longhorn snapshots create --label a=b s --label c=d --freeze-fs=false");
        let ClientCommand::Snapshots(Snapshots { command: Some(SnapshotCommand::Create(create)) }) =
            create
        else {
            panic!()
        };
        assert_eq!(
            (create.name, create.label),
            (vec!["s".to_owned()], vec!["a=b".into(), "c=d".into()])
        );
        for (name, command) in [
            ("ls", "LsReplica"),
            ("rm x", "RmReplica"),
            ("update x --mode ERR", "UpdateReplica"),
            ("verify-rebuild x", "VerifyRebuildReplica"),
            ("rebuild-status", "ReplicaRebuildStatus"),
            ("start a b --size 1 --current-size 1", "StartWithReplicas"),
            ("hash-status x", "HashStatus"),
            ("expand --size 8192", "Expand"),
            ("frontend start socket", "Frontend"),
            ("unmap-mark-snap --enable", "UnmapMarkSnapChainRemoved"),
            ("journal --limit -1", "Journal"),
            ("profiler enable --port 30001", "Profiler"),
            ("sync-agent-server-reset", "SyncAgentServerReset"),
            ("info", "Info"),
        ] {
            let parsed = format!("{:?}", client(&format!("longhorn {name}")));
            assert!(parsed.starts_with(command), "{name}: {parsed}");
        }
        for wrong in ["expand --size 1m", "snapshots bogus", "frontend bogus", "ls --bogus"] {
            assert!(parse(&format!("longhorn {wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_name_for_certificates_needs_certificates() {
        let tls = TlsArgs { tls_dir: None, tls_name: Some("peers".to_owned()) };
        assert!(tls.choose(false).unwrap_err().to_string().contains("--tls-dir"));
        let tls = parse("longhorn --tls-name n ls --tls-dir d").unwrap().globals.tls;
        assert_eq!((tls.tls_name.as_deref(), tls.tls_dir), (Some("n"), Some(PathBuf::from("d"))));
    }

    #[test]
    fn ranges_of_ports() {
        assert_eq!(port_range("9700-9800"), Ok((9700, 9800)));
        for wrong in ["", "1", "2-1", "0-1", "a-b", "1-70000"] {
            assert!(port_range(wrong).is_err(), "{wrong}");
        }
    }
}
