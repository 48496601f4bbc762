//! `longhorn serve`: a store that replicas share.

use super::golang;
use super::replica::{data_options, runtime_dir};
use super::replica_args::{OURS, Size, ThreadArgs, checksum_cache};
use clap::Args;
use dbs_control::Access;
use dbs_core::store::is_written_elsewhere;
use dbs_core::{Error, ErrorKind, OpenOptions, Result, Store};
use dbs_frontend::tls::TlsConfig;
use dbs_frontend::{Listen, ListenAddress};
use dbs_nbd::ExportRules;
use dbs_server::serve::{Extension, ServeOptions, Serving};
use dbs_service::log;
use dbs_service::memory;
use dbs_service::metrics::MetricsServer;
use dbs_service::notify::notify;
use dbs_service::privileges::{self, Unprivileged};
use longhorn_data::DataOptions;
use longhorn_replica::host::hosting::Hosting;
use longhorn_replica::host::signals;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

/// Between two looks whether the store can be written still.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Threads for what may block, of all replicas together.
const WORKERS: u16 = 16;

/// `longhorn serve`.
#[derive(Debug, Args)]
#[command(next_help_heading = OURS)]
pub struct ServeArgs {
    /// The store: a block device or file, made with `dbs init`. While it is served, this process
    /// answers `dbs` commands on the store
    #[arg(long, env = "DBS_STORE", value_name = "PATH")]
    pub store: PathBuf,
    /// How often to look whether a replica's directory was removed. When it is gone twice in a row, the
    /// replica's volume is deleted
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = golang::duration)]
    pub replica_check: Duration,
    /// Longest time until a write to a replica, or changed metadata, is committed
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = golang::duration)]
    pub commit_interval: Duration,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// Memory for checksums, at least 256kb; by default a 32nd of the memory of the machine or container,
    /// from 64mb to 4gb. 64mb hold the checksums of about 64 GiB of data
    #[arg(long, value_name = "SIZE", value_parser = checksum_cache)]
    #[arg(env = "DBS_CHECKSUM_CACHE")]
    pub checksum_cache: Option<Size>,
    /// Serve metrics of the store and its replicas for Prometheus over HTTP
    #[arg(long, value_name = "[HOST]:PORT")]
    pub metrics: Option<ListenAddress>,
    /// Serve the store's volumes over NBD as well: unix:PATH, tcp:HOST:PORT, or tcp:PORT for loopback; can
    /// be repeated. The volume of a replica that is served is read-only
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Vec<Listen>,
    /// Directory with server-cert.pem and server-key.pem. NBD clients must then use TLS. If the
    /// directory has a ca-cert.pem, each client must show a certificate signed by it
    #[arg(long, value_name = "DIRECTORY", requires = "nbd")]
    pub nbd_tls_dir: Option<PathBuf>,
    /// Path of a second control socket, in addition to the one in the runtime directory
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Become this user once everything is open, and give up the rights of root. This user must be able
    /// to write the directories of replicas
    #[arg(long, value_name = "NAME[:GROUP]")]
    pub user: Option<Unprivileged>,
}

/// Serves a store and the replicas in it until a signal comes, or the store can be written no longer.
///
/// # Errors
/// Those of opening, serving and closing the store; why it can be written no longer.
pub fn serve(args: &ServeArgs) -> Result<()> {
    if args.user.is_some() {
        privileges::gain_none()?;
    }
    let options = options(args)?;
    // Before the store is opened, so that no signal ends the process while it is open.
    let signals = signals::watch()?;
    let listener = args.metrics.as_ref().map(ListenAddress::bind).transpose();
    let listener = listener.map_err(|e| Error::io(e, "serving metrics"))?;
    let data = DataOptions {
        reactor: options.reactor(),
        stop_grace: DataOptions::default().stop_grace,
        ..data_options(&args.threads, WORKERS, args.commit_interval)
    };
    let hosting: OnceLock<Arc<Hosting>> = OnceLock::new();
    let extend = |store: &Store| -> Result<Arc<dyn Extension>> {
        let started = Hosting::start(store.clone(), data.clone(), args.replica_check)?;
        Ok(hosting.get_or_init(|| started).clone())
    };
    let serving = Serving::start_with(&options, Some(&extend))?;
    let begun = serve_metrics(listener, hosting.get()).and_then(|metrics| {
        args.user.as_ref().map_or(Ok(()), Unprivileged::become_it).map(|()| metrics)
    });
    let ended = begun.and_then(|metrics| {
        announce(args, &serving, metrics.as_ref());
        let ended = wait(&signals, &serving);
        notify("STOPPING=1");
        ended
    });
    let closed = serving.stop().map_err(|e| e.context("closing the store"));
    log::info("stopped", &[]);
    ended.and(closed)
}

/// Waits for a signal. A store that can be written no longer is an error: opening it again mends that, which is for whoever
/// starts this process. All replicas in it would be of no use until then.
fn wait(signals: &mpsc::Receiver<i32>, serving: &Serving) -> Result<()> {
    loop {
        match signals.recv_timeout(LOOK_INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {
                if let Some(why) = serving.failure() {
                    log::error("stopping", &[("error", &why)]);
                    let kind = match is_written_elsewhere(why) {
                        true => ErrorKind::Elsewhere,
                        false => ErrorKind::Poisoned,
                    };
                    return Err(Error::new(kind, why));
                }
            }
            // An error: the thread that watches for signals is gone, and nothing else ends this.
            signal => {
                log::info("stopping", &[("signal", &signal.unwrap_or_default())]);
                return Ok(());
            }
        }
    }
}

fn options(args: &ServeArgs) -> Result<ServeOptions> {
    let tls = args.nbd_tls_dir.as_deref().map(TlsConfig::load_dir).transpose();
    let checksum_cache = args.checksum_cache.flatten().or_else(|| Some(memory::checksum_cache()));
    let lookup_memory = Some(memory::lookups());
    let open = OpenOptions { checksum_cache, lookup_memory, ..OpenOptions::default() };
    Ok(ServeOptions {
        store: args.store.clone(),
        open,
        nbd: args.nbd.clone(),
        inherited: Vec::new(),
        exports: ExportRules::default(),
        vhost_user: None,
        nvme: Default::default(),
        tls: tls.map_err(|e| Error::invalid(format!("TLS: {e}")))?,
        reactors: args.threads.reactors.map(usize::from),
        spin: args.threads.spin,
        workers: usize::from(args.threads.workers.unwrap_or(WORKERS)),
        runtime_dir: runtime_dir(),
        control: args.control.clone(),
        access: Access { user: args.user.as_ref().map(Unprivileged::user), ..Access::default() },
        commit_interval: args.commit_interval,
    })
}

fn serve_metrics(
    listener: Option<TcpListener>,
    hosting: Option<&Arc<Hosting>>,
) -> Result<Option<MetricsServer>> {
    let (Some(listener), Some(hosting)) = (listener, hosting) else { return Ok(None) };
    let hosting = Arc::clone(hosting);
    MetricsServer::start(listener, Arc::new(move || hosting.metrics())).map(Some)
}

fn announce(args: &ServeArgs, serving: &Serving, metrics: Option<&MetricsServer>) {
    let control: Vec<_> = serving.control().map(|path| path.display().to_string()).collect();
    let nbd: Vec<_> = serving.nbd().iter().map(ToString::to_string).collect();
    let info = serving.store().info();
    for warning in &info.warnings {
        log::warn("store", &[("warning", warning)]);
    }
    log::info(
        "ready",
        &[
            ("store", &args.store.display()),
            ("uuid", &info.uuid),
            ("driver", &info.driver),
            ("tail", &info.tail),
            ("nbd", &nbd.join(",")),
            ("control", &control.join(",")),
            ("metrics", &metrics.map_or_else(|| "none".to_owned(), MetricsServer::address)),
            ("pid", &std::process::id()),
        ],
    );
    notify("READY=1");
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    /// As `DBS_CHECKSUM_CACHE=` in a unit file gives it.
    #[test]
    fn an_empty_size_of_the_checksum_cache_is_the_default() {
        for (given, bytes) in [("", memory::checksum_cache()), ("1mb", 1 << 20)] {
            let line = ["serve", "--store", "s", "--checksum-cache", given];
            let command = ServeArgs::augment_args(clap::Command::new("serve"));
            let args = ServeArgs::from_arg_matches(&command.get_matches_from(line)).unwrap();
            assert_eq!(options(&args).unwrap().open.checksum_cache, Some(bytes), "`{given}`");
        }
    }
}
