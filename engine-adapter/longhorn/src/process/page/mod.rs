//! The web page of a volume: its controller, its replicas, and what goes through it.

mod asking;
mod orders;
mod rates;

use crate::client::{DiskInfo, disks};
use asking::{Asking, Known};
use dbs_core::{Error, Result};
use dbs_frontend::lock;
use dbs_frontend::tls::TlsConfig;
use dbs_service::log;
use dbs_web::{
    Order, Subject, Token, View, WebAddress, WebOptions, WebServer, WebSocket, encode, host,
};
use longhorn_controller::path::ReplicaStats;
use longhorn_controller::rules::Mode;
use longhorn_controller::volume::{Controller, Event, Member};
use rates::Rates;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// How long after a page has asked replicas are asked, too.
const LOOKED: Duration = Duration::from_secs(10);

/// How long to wait for an address that an older controller of the volume may have still.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where and to whom the page is served.
#[derive(Debug, Clone)]
pub struct PageOptions {
    /// Where it listens.
    pub address: WebAddress,
    /// File with the token, which is made if it is not there.
    pub token: PathBuf,
    /// Names under which it may be asked for.
    pub names: Vec<String>,
    /// Whether it may change something.
    pub admin: bool,
    /// Directory with its certificate.
    pub tls_dir: Option<PathBuf>,
}

/// Serves the page, if it is to be. What keeps it from being served is in the log: volumes matter more.
pub(super) fn serve(
    options: Option<&PageOptions>,
    controller: &Arc<Controller>,
    runtime: &Handle,
) -> Option<WebServer> {
    let options = options?;
    let served = serve_as(options, controller, runtime);
    served.inspect_err(|error| log::error("web", &[("error", error)])).ok()
}

fn serve_as(
    options: &PageOptions,
    controller: &Arc<Controller>,
    runtime: &Handle,
) -> Result<WebServer> {
    let tls = options.tls_dir.as_deref().map(TlsConfig::load_dir).transpose();
    let tls = tls.map_err(|e| Error::invalid(format!("TLS: {e}")))?;
    let WebAddress(address) = &options.address;
    let names = options.names.iter().chain([&address.host]).cloned().collect();
    let token = Token::from_file(&options.token)?;
    let socket = WebSocket::take(address).map_err(|e| Error::io(e, "serving the web page"))?;
    let web = WebOptions { tls, names, token, admin: options.admin, patience: PATIENCE };
    let page = VolumePage::new(Arc::clone(controller), runtime.clone());
    WebServer::start(Arc::new(page), socket, web)
}

/// A volume, as its page shows it.
struct VolumePage {
    controller: Arc<Controller>,
    runtime: Handle,
    host: String,
    volume: String,
    started: Instant,
    /// Which process this is, in cursors.
    server: String,
    rates: Mutex<Rates>,
    asking: Arc<Asking>,
    looked: Mutex<Option<Instant>>,
}

impl VolumePage {
    fn new(controller: Arc<Controller>, runtime: Handle) -> Self {
        let volume = controller.volume().name;
        Self {
            asking: Arc::new(Asking::new(volume.clone())),
            controller,
            runtime,
            host: host(),
            volume,
            started: Instant::now(),
            server: format!("{}-{}-", longhorn_wire::time::now_ns(), std::process::id()),
            rates: Mutex::default(),
            looked: Mutex::default(),
        }
    }

    /// Asks the replicas that are used how they are. Nobody waits for their answers.
    fn ask(&self) {
        self.asking.ask(&self.controller.replicas(), &self.runtime);
    }

    fn volume(&self) -> Value {
        let volume = self.controller.volume();
        json!({
            "name": volume.name,
            "size": volume.size,
            "frontend": volume.frontend,
            "frontend_state": volume.frontend_state,
            "endpoint": volume.endpoint,
            "block_device": volume.block_device,
            "expanding": volume.is_expanding,
            "expansion_error": volume.last_expansion_error,
            "expansion_failed_at": volume.last_expansion_failed_at,
            "snapshot_max_count": volume.snapshot_max_count,
            "snapshot_max_size": volume.snapshot_max_size,
        })
    }
}

impl Subject for VolumePage {
    fn view(&self) -> View {
        View::Volume
    }

    fn not_served(&self, why: &Error) {
        log::error("web", &[("error", why)]);
    }

    fn tick(&self) {
        lock(&self.rates).take(self.started.elapsed(), self.controller.stats());
        if lock(&self.looked).is_some_and(|at| at.elapsed() < LOOKED) {
            self.ask();
        }
    }

    fn live(&self, cursor: Option<&str>, admin: bool) -> Result<Vec<u8>> {
        // The first page of some time has not to wait for the next second.
        if lock(&self.looked).replace(Instant::now()).is_none_or(|at| at.elapsed() > LOOKED) {
            self.ask();
        }
        let told = cursor.and_then(|cursor| cursor.strip_prefix(&self.server)?.parse::<u64>().ok());
        let (turn, samples, stats) = {
            let rates = lock(&self.rates);
            (rates.turn(), rates.since(told.unwrap_or(0)), rates.replicas().to_vec())
        };
        let members = self.controller.replicas();
        let known = self.asking.known(&members);
        let snapshots = chain(&members, &known);
        encode(&json!({
            "cursor": format!("{}{turn}", self.server),
            "all": told.is_none(),
            "admin": admin,
            "host": self.host,
            "path": self.volume,
            "volume": self.volume(),
            "replicas": members.iter().map(|of| replica(of, &stats, &known)).collect::<Vec<_>>(),
            "snapshots": snapshots.map(|disks| disks.into_values().collect::<Vec<_>>()),
            "events": self.controller.events().iter().rev().map(event).collect::<Vec<_>>(),
            "samples": samples,
        }))
    }

    fn order(&self, wire: Value) -> std::result::Result<Order, String> {
        orders::order(&self.controller, &self.runtime, wire)
    }
}

fn event(event: &Event) -> Value {
    let Event { at_ns, error, event, text } = event;
    json!({ "at_ns": at_ns, "error": error, "event": event, "text": text })
}

/// A replica: what the controller knows of it, and what it has said itself.
fn replica(member: &Member, stats: &[ReplicaStats], known: &BTreeMap<String, Known>) -> Value {
    let seen = stats.iter().find(|stats| stats.id == member.id);
    let mut shown = json!({
        "address": member.target.address,
        "mode": member.mode.to_string(),
        "why": seen.and_then(|seen| seen.why.clone()),
        "mismatches": seen.map_or(0, |seen| seen.mismatches),
        "healed": seen.map_or(0, |seen| seen.healed),
    });
    if let (Some(known), Some(fields)) = (known.get(&member.target.address), shown.as_object_mut())
    {
        fields.append(&mut known.document());
    }
    shown
}

/// The layers of the volume, as the complete replica with the most of them has them; `None` if that is not known.
fn chain(
    members: &[Member],
    known: &BTreeMap<String, Known>,
) -> Option<BTreeMap<String, DiskInfo>> {
    let complete = members.iter().filter(|member| member.mode == Mode::Rw);
    let said = complete.filter_map(|member| known.get(&member.target.address)?.replica());
    // One whose layers have names of another kind is not of this volume's chain.
    said.filter_map(|replica| disks(replica.clone()).ok()).max_by_key(BTreeMap::len)
}
