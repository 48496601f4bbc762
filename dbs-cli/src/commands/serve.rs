//! `dbs serve`.

mod lazy;
mod web;

use super::mount::{MountOption, end_served, mount_served};
use crate::context::Context;
use crate::exit;
use crate::output::{print, print_json};
use crate::signals;
use crate::spec;
use crate::target::while_held;
use crate::terminal::leave_terminal;
use clap::{Args, FromArgMatches};
use dbs_client::any_store::find_server;
use dbs_control::Access;
use dbs_core::{Error, ErrorKind, OpenOptions, Result, Store};
use dbs_frontend::{ListenAddress, inherited_sockets};
use dbs_nbd::{ExportRule, ExportRules, Listen, TlsConfig};
use dbs_server::serve::{NvmeOptions, ServeOptions, Serving};
use dbs_service::log;
use dbs_service::memory;
use dbs_service::metrics::{self, MetricsServer};
use dbs_service::notify::notify;
use dbs_service::privileges::{self, Unprivileged};
use nix::unistd::Gid;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use web::Shown;

/// Serve the store's volumes over NBD, to virtual machines and over NVMe/TCP, until SIGINT, SIGTERM or SIGHUP.
///
/// The exports are `VOLUME`, and `VOLUME@SNAPSHOT` for reading. If the store has a single volume, the
/// empty export name means this volume. While the server runs, it answers all dbs commands on the
/// store. NBD clients also come in through sockets that systemd passes to the command (socket activation).
/// A second signal ends the server at once, which is safe.
///
/// Encrypted volumes are locked after each start, until `dbs volume unlock`. Clients of a locked volume are refused. A block
/// device that an earlier server has left waits for the volume. To have volumes unlocked when they are first used, until
/// `dbs volume lock`, give the server their secret: DBS_VOLUME_PASSPHRASE, DBS_VOLUME_PASSPHRASE_FILE (a file whose first line
/// is the passphrase) or DBS_VOLUME_KEY_FILE. If the secret cannot be read, the server does not start.
#[derive(Debug, Args)]
pub struct Serve {
    /// Listen for NBD clients: unix:PATH, tcp:HOST:PORT, or tcp:PORT for loopback; can be repeated
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Listen>,
    /// Serve virtual machines on this machine (vhost-user-blk), with sockets in this directory: VOLUME.sock for each
    /// volume, and VOLUME@SNAPSHOT.sock for reading each snapshot. The directory must be private to the user who
    /// serves. The sockets come and go with the volumes and snapshots, and obey --export
    #[arg(long, value_name = "DIR", conflicts_with = "user")]
    vhost_user: Option<PathBuf>,
    /// Listen for hosts of NVMe over TCP on this machine (Linux's nvme-tcp): tcp:PORT, or tcp:HOST:PORT with a HOST that
    /// is loopback (see --nvme-insecure-data), and a PORT below 1024, which not every user can take. Each volume and each snapshot is a subsystem, called after its uuid,
    /// and the discovery subsystem lists them. They obey --export. Can be repeated
    #[arg(long, value_name = "ADDRESS")]
    nvme: Vec<Listen>,
    /// Let in only hosts of NVMe that prove that they have a key (DH-HMAC-CHAP): each line of FILE has the NQN of a host, its key as
    /// `nvme gen-dhchap-key` prints it, and maybe the key by which the server proves to that host who it is. Nobody but its
    /// owner may read FILE
    #[arg(long, value_name = "FILE", requires = "nvme")]
    nvme_keys: Option<PathBuf>,
    /// Let --nvme listen for other machines, too. Whoever is on the way between them can read and change all data: keys
    /// say who connects, and protect nothing else
    #[arg(long, requires = "nvme_keys")]
    nvme_insecure_data: bool,
    /// Export only volumes whose names match PATTERN, and their snapshots. In PATTERN, * stands for any
    /// characters, ? for one. `,ro` makes the exports read-only. `,from=CLIENT` limits the rule to
    /// clients with such an address, as `tcp:10.0.*` or `unix:*`. Can be repeated: the first rule that
    /// fits the volume and the client counts
    #[arg(long, value_name = "PATTERN[,ro][,from=CLIENT]")]
    export: Vec<ExportRule>,
    /// Open the store read-only; all exports are read-only
    #[arg(long)]
    read_only: bool,
    /// Certificate chain of the server (PEM). NBD clients must then use TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the server's certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Certificates of the authorities that sign certificates of clients (PEM). Each client must then
    /// show such a certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Directory with server-cert.pem and server-key.pem, as for qemu and nbdkit. NBD clients must then
    /// use TLS. If the directory has a ca-cert.pem, each client must show a certificate signed by it
    #[arg(long, value_name = "DIR", conflicts_with_all = ["tls_cert", "tls_key", "tls_ca"])]
    tls_dir: Option<PathBuf>,
    /// Path of a second control socket, in addition to the one in the runtime directory
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Group whose members may use the control sockets, and so do anything to the store. By default
    /// only root and the server's user may
    #[arg(long, value_name = "GROUP", value_parser = privileges::group_of)]
    control_group: Option<Gid>,
    /// Mode of the control sockets, in octal; by default 0660 with --control-group, else 0600
    #[arg(long, value_name = "MODE", value_parser = spec::socket_mode)]
    control_mode: Option<u32>,
    /// Threads that serve connections; by default one for each core, at most 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    reactors: Option<u16>,
    /// How long a thread of --reactors polls for the next event before it sleeps, while events come
    /// quickly. Costs CPU, and lowers latency on some machines
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = spec::short_duration)]
    spin: Duration,
    /// Threads for requests of clients that have to wait: discards, commits of changed metadata, and requests
    /// for parts of blocks of 4 KiB
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: u16,
    /// Longest time until changed metadata is committed if no client flushes. A write over data that
    /// the volume has already changes no metadata: a flush makes it durable
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = spec::duration)]
    commit_interval: Duration,
    /// Memory for checksums of data, at least 256KiB; by default a 32nd of the memory of the machine or
    /// container, from 64MiB to 4GiB. 64MiB hold the checksums of about 64 GiB of data. Checksums that
    /// are not in memory are read from the store. A store without checksums uses no memory for them
    #[arg(long, value_name = "SIZE", value_parser = spec::checksum_cache)]
    checksum_cache: Option<u64>,
    /// Memory for two things: bitmaps of extents that are written in pieces, and what look-ups in volumes
    /// with snapshots have found. 64MiB are enough for 1.3 TiB of extents in pieces. A bitmap that is not in
    /// memory is read from the store. A look-up that is not in memory is made again, which costs a request
    /// more the more snapshots there are. By default all bitmaps stay in memory, up to 85 MiB for each
    /// TiB, and look-ups have a 32nd of the memory of the machine or container, from 64MiB to 4GiB
    #[arg(long, value_name = "SIZE", value_parser = spec::size)]
    metadata_memory: Option<u64>,
    /// Serve metrics of the store and its volumes over HTTP, for Prometheus
    #[arg(long, value_name = "[HOST]:PORT")]
    metrics: Option<ListenAddress>,
    #[command(flatten)]
    web: web::Web,
    #[command(flatten)]
    restoring: lazy::Restoring,
    /// Become this user once everything is open, and give up the rights of root. `dbs attach` does not
    /// work then
    #[arg(long, value_name = "NAME[:GROUP]", conflicts_with = "mount")]
    user: Option<Unprivileged>,
    /// Show volumes and snapshots as read-only files in this directory, as `dbs mount` does
    #[arg(long, value_name = "DIR")]
    mount: Option<PathBuf>,
    /// Options of the mount, separated by commas; can be repeated
    #[arg(long, value_name = "OPTION", value_enum, value_delimiter = ',', requires = "mount")]
    mount_options: Vec<MountOption>,
    /// In the background, and only as long as volumes are attached: what `dbs attach` starts
    #[arg(long, hide = true)]
    while_attached: bool,
}

/// What to do once the server runs.
type Begin<'a> = &'a mut dyn FnMut(&Serving) -> Result<()>;

impl Serve {
    /// As `dbs attach` serves a store in its own process.
    pub fn for_attach(checksum_cache: Option<u64>) -> Self {
        let serve = Self::augment_args(clap::Command::new("serve"));
        let nothing =
            serve.try_get_matches_from(["serve"]).and_then(|m| Self::from_arg_matches(&m));
        let serve = nothing.expect("`serve` needs no arguments");
        Self { checksum_cache, ..serve }
    }

    pub fn run(self, context: &Context) -> Result<()> {
        self.run_with(context, &mut |_| Ok(()))
    }

    /// Serves, and does `begin` first; if that fails, no more.
    ///
    /// # Errors
    /// Those of `begin`, and of opening, serving and closing the store.
    pub fn run_with(self, context: &Context, begin: Begin<'_>) -> Result<()> {
        if self.while_attached {
            leave_terminal()?;
        }
        if self.user.is_some() {
            privileges::gain_none()?;
        }
        let inherited = inherited_sockets();
        let inherited = inherited.map_err(|e| Error::io(e, "listening for NBD clients"))?;
        let tls = self.tls()?;
        let web_tls = tls.clone();
        let keys = self.nvme_keys.as_deref();
        let nvme = NvmeOptions::load(self.nvme, keys, self.nvme_insecure_data)?;
        let mut open = context.serving_options(self.read_only)?;
        // Opening backups starts threads, which a server of devices must not have to wait for.
        dbs_ublk::serve_devices_from_here();
        let backups = lazy::Given::open(context);
        open.backing.extend(backups.files());
        let options = ServeOptions {
            store: context.store()?.to_owned(),
            open: OpenOptions {
                checksum_cache: self.checksum_cache.or_else(|| Some(memory::checksum_cache())),
                metadata_memory: self.metadata_memory,
                lookup_memory: Some(memory::lookups()),
                ..open
            },
            nbd: self.nbd,
            inherited,
            exports: ExportRules(self.export),
            vhost_user: self.vhost_user,
            nvme,
            tls,
            reactors: self.reactors.map(usize::from),
            spin: self.spin,
            workers: usize::from(self.workers),
            runtime_dir: context.runtime_dir(),
            control: self.control,
            access: Access {
                user: self.user.as_ref().map(Unprivileged::user),
                group: self.control_group,
                mode: self.control_mode,
            },
            commit_interval: self.commit_interval,
        };
        // Before the store is opened, so that no signal ends the process while it is open.
        let mut signals = signals::watch()?;
        let listener = self.metrics.as_ref().map(ListenAddress::bind).transpose();
        let listener = listener.map_err(|e| Error::io(e, "serving metrics"))?;
        let web = self.web.ready(context, web_tls)?;
        let serving = start(&options)?;
        let (serving, metrics) = serve_metrics(serving, listener)?;
        let (serving, mount) =
            mount_beside(context, serving, self.mount.as_deref(), &self.mount_options)?;
        let serving = become_user(serving, self.user.as_ref())?;
        // Nothing of it runs as root, and nothing that fails has to end it.
        let (serving, web) = web::serve(serving, web)?;
        let mounted = mount.as_ref().map(|mount| mount.point().display().to_string());
        let bringing = lazy::Bringing::start(&serving, backups, &self.restoring, self.read_only);
        let (serving, bringing) = or_stop(serving, bringing)?;
        announce(context, &serving, metrics.as_ref(), web.as_ref(), mounted.as_deref())?;
        let begun = begin(&serving);
        if begun.is_ok() {
            let why = match self.while_attached {
                true => wait_while_attached(&serving, &mut signals),
                false => signals.forever().next().unwrap_or(SIGTERM).to_string(),
            };
            log::info("stopping", &[("signal", &why)]);
        }
        notify("STOPPING=1");
        // Where no thread can be had, the store is closed all the same.
        if let Err(error) = exit_on_next(signals) {
            log::warn("signals", &[("error", &error)]);
        }
        if let Some(Err(error)) = mount.map(end_served) {
            log::warn("unmount", &[("error", &error)]);
        }
        drop((metrics, web));
        bringing.stop();
        serving.stop().map_err(|e| e.context("closing the store"))?;
        log::info("stopped", &[]);
        begun
    }

    /// What NBD clients are met with.
    fn tls(&self) -> Result<Option<TlsConfig>> {
        let loaded = match (&self.tls_dir, &self.tls_cert, &self.tls_key) {
            (Some(dir), ..) => TlsConfig::load_dir(dir),
            (None, Some(cert), Some(key)) => TlsConfig::load(cert, key, self.tls_ca.as_deref()),
            _ => return Ok(None),
        };
        loaded.map(Some).map_err(|e| Error::invalid(format!("TLS: {e}")))
    }
}

/// What was begun beside the store; if it could not be, that is served no longer.
fn or_stop<T>(serving: Serving, begun: Result<T>) -> Result<(Serving, T)> {
    match begun {
        Ok(begun) => Ok((serving, begun)),
        Err(error) => {
            serving.stop()?;
            Err(error)
        }
    }
}

/// Gives up the rights of root, if that is wanted; else the store is served no longer.
fn become_user(serving: Serving, user: Option<&Unprivileged>) -> Result<Serving> {
    let become_it = user.map_or(Ok(()), Unprivileged::become_it);
    or_stop(serving, become_it).map(|(serving, ())| serving)
}

/// Mounts the store that is served, if it is to be; else it is served no longer.
fn mount_beside(
    context: &Context,
    serving: Serving,
    directory: Option<&Path>,
    options: &[MountOption],
) -> Result<(Serving, Option<dbs_fuse::Mount>)> {
    let Some(directory) = directory else { return Ok((serving, None)) };
    let mount = mount_served(serving.store(), context.store()?, directory, options);
    or_stop(serving, mount.map(Some))
}

/// How often to see whether anything is attached still.
const ATTACHED_POLL: Duration = Duration::from_millis(200);
/// How long to wait for the first volume to be attached.
const ATTACHED_PATIENCE: Duration = Duration::from_secs(5);

/// Waits for a signal, or until nothing is attached and no command or NBD client uses the store any more; says
/// which it was. Who started the server for a device that there cannot be has no more use for it.
fn wait_while_attached(serving: &Serving, signals: &mut Signals) -> String {
    let mut last = Instant::now() + ATTACHED_PATIENCE;
    loop {
        if let Some(signal) = signals.pending().next() {
            return signal.to_string();
        }
        let now = Instant::now();
        if !serving.is_idle() {
            last = now;
        } else if now > last || serving.devices().were_asked_for() {
            return "nothing is attached".to_owned();
        }
        thread::sleep(ATTACHED_POLL);
    }
}

/// Serves the metrics of the store that is served, if they are to be; else it is served no longer.
fn serve_metrics(
    serving: Serving,
    listener: Option<TcpListener>,
) -> Result<(Serving, Option<MetricsServer>)> {
    let Some(listener) = listener else { return Ok((serving, None)) };
    let store = serving.store().clone();
    let metrics = MetricsServer::start(listener, Arc::new(move || metrics::text(&store)));
    or_stop(serving, metrics.map(Some))
}

/// Volumes that a warning names.
const NAMED: usize = 10;

/// Images that volumes rest on and that were not given; and these volumes, some of them by name.
fn missing_images(store: &Store) -> Vec<(String, String)> {
    let mut missing = BTreeMap::<String, Vec<String>>::new();
    for volume in store.volumes(false) {
        let below = store.backing(&volume.name).unwrap_or(None);
        if let Some(below) = below.filter(|below| !below.attached) {
            missing.entry(below.identity).or_default().push(volume.name);
        }
    }
    let text = |names: Vec<String>| match names.get(NAMED..) {
        Some(more @ [_, ..]) => format!("{} and {} more", names[..NAMED].join(", "), more.len()),
        _ => names.join(", "),
    };
    missing.into_iter().map(|(image, names)| (image, text(names))).collect()
}

/// Opens the store and serves it. Commands that read an idle store have it for a moment, and are waited for; another server
/// is not.
fn start(options: &ServeOptions) -> Result<Serving> {
    let waits = || {
        let is_served = find_server(&options.store, &options.runtime_dir).is_ok();
        if !is_served {
            log::info("waiting", &[("store", &options.store.display()), ("why", &"it is in use")]);
        }
        !is_served
    };
    while_held(|| Serving::start(options), waits)
}

/// Tells where clients can connect: on the standard output, in the log and to systemd.
fn announce(
    context: &Context,
    serving: &Serving,
    metrics: Option<&MetricsServer>,
    web: Option<&Shown>,
    mount: Option<&str>,
) -> Result<()> {
    let control: Vec<_> = serving.control().map(|path| path.display().to_string()).collect();
    let nbd: Vec<_> = serving.nbd().iter().map(ToString::to_string).collect();
    let nvme: Vec<_> = serving.nvme().iter().map(ToString::to_string).collect();
    let metrics = metrics.map(MetricsServer::address);
    let vhost_user = serving.vhost_user().map(|directory| directory.display().to_string());
    let info = serving.store().info();
    for warning in &info.warnings {
        log::warn("store", &[("warning", warning)]);
    }
    for (image, volumes) in missing_images(serving.store()) {
        let text = "reads of these volumes fail: the image or backup that they rest on was not given with --backing-file or \
                    --backing-backup, cannot be read, or is not what it was";
        log::warn("backing", &[("warning", &text), ("volumes", &volumes), ("image", &image)]);
    }
    log::info(
        "ready",
        &[
            ("store", &context.store()?.display()),
            ("uuid", &info.uuid),
            ("driver", &info.driver),
            ("tail", &info.tail),
            ("read_only", &info.read_only),
            ("nbd", &nbd.join(",")),
            ("vhost_user", &vhost_user.as_deref().unwrap_or_default()),
            ("nvme", &nvme.join(",")),
            ("control", &control.join(",")),
            ("metrics", &metrics.as_deref().unwrap_or_default()),
            // Without the token, which logs are no place for.
            ("web", &web.map_or("", |web| web.server.url())),
            ("mount", &mount.unwrap_or_default()),
            ("pid", &std::process::id()),
        ],
    );
    // The log says it too. Nobody may be there to read it: that is no reason to end, nor to wait with no ear for signals.
    let told = if log::would_wait(&io::stdout()) {
        Err(Error::new(ErrorKind::Io, "nobody reads the output"))
    } else if context.json {
        print_json(&json!({
            "control": control, "nbd": nbd, "vhost_user": vhost_user, "nvme": nvme, "metrics": metrics,
            "web": web.map(|web| &web.url), "mount": mount,
        }))
    } else if context.quiet {
        Ok(())
    } else {
        let lines = control.iter().map(|path| format!("control {path}\n"));
        let nbd = nbd.iter().map(|address| format!("nbd {address}\n"));
        let vhost_user = vhost_user.map(|directory| format!("vhost-user {directory}\n"));
        let nvme = nvme.iter().map(|address| format!("nvme {address}\n"));
        let metrics = metrics.map(|address| format!("metrics {address}\n"));
        let web = web.map(|web| format!("web {}\n", web.url));
        let mount = mount.map(|point| format!("mount {point}\n"));
        let lines = lines.chain(nbd).chain(vhost_user).chain(nvme);
        print(&lines.chain(metrics).chain(web).chain(mount).collect::<String>())
    };
    if let Err(error) = told {
        log::warn("announce", &[("error", &error)]);
    }
    notify("READY=1");
    Ok(())
}

/// A second signal, other than SIGHUP, ends the process at once; the store survives that.
fn exit_on_next(mut signals: Signals) -> Result<()> {
    thread::Builder::new()
        .name("dbs-signals".to_owned())
        .spawn(move || {
            if signals.forever().any(|signal| signal != SIGHUP) {
                std::process::exit(i32::from(exit::INTERRUPTED));
            }
        })
        .map(drop)
        .map_err(|e| Error::io(e, "starting the signal thread"))
}
