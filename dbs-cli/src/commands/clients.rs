//! `dbs clients`: who uses a served store.

use crate::context::{Context, typed};
use crate::output::{Table, time};
use crate::spec;
use clap::{Args, Subcommand};
use dbs_control::api::Request;
use dbs_core::{Result, format_size};
use dbs_server::clients::Client;
use std::time::Duration;

/// List who uses the volumes of a served store, or disconnect a client.
///
/// The list has NBD clients, virtual machines, block devices and replicas, with the volume or snapshot that
/// each has open, whether it is open for reading only, and since when. For an NBD client and a virtual machine it also
/// has the bytes read and written since the client connected, and the requests per second now.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Clients {
    /// How long to measure the requests per second; 0 measures nothing
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = spec::interval)]
    interval: Duration,
    #[command(subcommand)]
    command: Option<ClientsCommand>,
}

/// Commands on clients.
#[derive(Debug, Subcommand)]
enum ClientsCommand {
    Kick(Kick),
}

/// Disconnect an NBD client or a virtual machine.
///
/// Requests that the server has not answered yet may or may not be carried out. The client can connect
/// again. To keep an NBD client away, serve the store with `--export`, or with TLS.
#[derive(Debug, Args)]
struct Kick {
    /// Number of the client, as `dbs clients` shows it
    client: u64,
}

impl Clients {
    pub fn run(self, context: &Context) -> Result<()> {
        if let Some(ClientsCommand::Kick(kick)) = self.command {
            return kick.run(context);
        }
        let interval = u64::try_from(self.interval.as_millis()).ok().filter(|ms| *ms > 0);
        let value = context.call(&Request::ClientList { interval_ms: interval })?;
        context.show(value, |clients: Vec<Client>| table(&clients))
    }
}

impl Kick {
    fn run(self, context: &Context) -> Result<()> {
        let value = context.call(&Request::ClientKick { client: self.client })?;
        let client: Client = typed(value.clone())?;
        context.done(&value, &format!("disconnected {}", client.who))
    }
}

fn table(clients: &[Client]) -> String {
    let headings = ["ID", "CLIENT", "VOLUME", "ACCESS", "SINCE", ">READ", ">WRITTEN", ">IOPS"];
    let mut table = Table::new(&headings);
    for client in clients {
        let none = || "-".to_owned();
        let volume = client.volume.clone().unwrap_or_else(none);
        let spec = client.snapshot.iter().fold(volume, |volume, name| format!("{volume}@{name}"));
        let access = match client.volume {
            None => "-",
            Some(_) if client.read_only => "read",
            Some(_) => "read, write",
        };
        let bytes = |bytes: Option<u64>| bytes.map_or_else(none, format_size);
        table.row(vec![
            client.id.map_or_else(none, |id| id.to_string()),
            client.who.clone(),
            spec,
            access.to_owned(),
            time(client.since_ns),
            bytes(client.requests.map(|requests| requests.read_bytes)),
            bytes(client.requests.map(|requests| requests.written_bytes)),
            client.rates.map_or_else(none, |rates| format!("{:.0}", rates.iops)),
        ]);
    }
    table.text()
}
