//! The arguments of `longhorn`: names and defaults are upstream's.

use super::backup_args::{Backups, SystemBackups};
use super::client_args::ClientCommand;
use super::controller::ControllerArgs;
use super::golang::BooleanOption as _;
use super::moves::{ExportArgs, ImportArgs};
use super::replica_args::{OURS, ReplicaArgs, SyncAgentArgs};
use super::serve::ServeArgs;
use clap::{Args, Parser, Subcommand};
use longhorn_wire::transport;
use std::ffi::OsString;
use std::path::PathBuf;

/// Longhorn's v1 data engine on DBS: replicas, controllers, and the commands for a volume.
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
    /// Name of the volume; the process refuses callers that name another volume
    #[arg(long, default_value = "", hide_default_value = true)]
    pub volume_name: String,
    /// Name of the engine's instance; the process refuses callers that name another instance
    #[arg(long, default_value = "", hide_default_value = true)]
    pub engine_instance_name: String,
    /// Accepted for upstream's sake
    #[arg(long, hide = true)]
    pub debug: bool,
    /// TLS between processes.
    #[command(flatten)]
    pub tls: TlsArgs,
}

/// How a process and the others of its volume meet.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = OURS)]
pub struct TlsArgs {
    /// Use TLS, with certificates on both sides, for gRPC, data and files between controller, replicas,
    /// sync agents and this command. The directory has ca-cert.pem, client-cert.pem and client-key.pem;
    /// for a process that serves also server-cert.pem and server-key.pem. Upstream's engine does not
    /// support this TLS
    #[arg(long, global = true, value_name = "DIRECTORY", env = "DBS_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Name in the certificates of servers, if it is not the host of their addresses
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
    /// Take over a stopped replica of upstream's: its files become a store in the directory
    ReplicaImport(ImportArgs),
    /// Make a stopped replica upstream's again: its store becomes files in the directory
    ReplicaExport(ExportArgs),
    /// Serve the sync agent of a running replica until SIGINT or SIGTERM
    SyncAgent(SyncAgentArgs),
    /// Serve a store that replicas share (`longhorn replica --store`), until SIGINT or SIGTERM
    Serve(Box<ServeArgs>),
    /// Print versions as JSON
    Version(VersionArgs),
    /// Back a volume up, restore it, and work with what is in a backup store
    #[command(visible_alias = "backup")]
    Backups(Box<Backups>),
    /// Work with the backups of Longhorn's settings in a backup store
    SystemBackup(Box<SystemBackups>),
    /// Commands for a volume.
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
    /// Keep the replica in this store, which a running `longhorn serve` has open, and not in a file of
    /// its own in DIRECTORY
    #[arg(long, value_name = "PATH", help_heading = OURS)]
    pub store: Option<PathBuf>,
}

/// `longhorn version`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct VersionArgs {
    /// Do not ask the engine for its version
    #[arg(long, boolean = "false")]
    pub client_only: bool,
}

#[cfg(test)]
mod tests {
    use super::super::client_args::{SnapshotCommand, Snapshots};
    use super::super::golang;
    use super::super::replica_args::DataProtocol;
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
        assert!(matches!(parse("longhorn export x").unwrap().command, Command::Other(_)));
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
        assert!(refused.contains("must be at least 256.0 KiB"), "{refused}");
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
}
