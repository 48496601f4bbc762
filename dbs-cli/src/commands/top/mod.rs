//! `dbs top`: what a served store does, as it does it.

mod keys;
mod live;
mod measure;
mod screen;
mod table;
mod terminal;
#[cfg(test)]
mod tests;

use crate::context::Context;
use crate::output::{self, print, print_json};
use crate::spec;
use clap::Args;
use dbs_client::any_store::find_server;
use dbs_client::remote::{RemoteStore, fill_usage};
use dbs_control::api::Request;
use dbs_core::info::{Usage, VolumeInfo};
use dbs_core::{Error, ErrorKind, Result};
use dbs_server::top;
use measure::Measured;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use table::{Order, VOLUMES, View};

/// Shortest time between two looks.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// The space of volumes, by their uuid.
type Usages = HashMap<String, Usage>;

/// Watch the volumes, clients and background work of a served store.
///
/// The screen shows what each volume is asked for in a second (IOPS, bytes read and written), how long half
/// (P50) and 99 of 100 (P99) of the requests of its NBD clients took, their requests in flight (QD), and its
/// snapshots. Wider terminals show more. Two more screens show clients with block devices, and long
/// commands with the time that is left. Press ? for the keys, q to quit.
///
/// The space of volumes (ALLOC and EXCL) is shown if asked for with the key u or --usage: to compute it, the
/// server looks at every layer. So it is computed once in half a minute at most.
///
/// A store that nobody serves is refused: exit code 1.
#[derive(Debug, Args)]
pub struct Top {
    /// Time between two looks at the server, from 100ms to a minute
    #[arg(long, short = 'd', value_name = "TIME", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// Measure once, print the table of volumes, and end; with --json print everything
    #[arg(long)]
    once: bool,
    /// Also show the space that volumes take
    #[arg(long)]
    usage: bool,
    /// Sort volumes by this column, such as P99 or NAME
    #[arg(long, value_name = "COLUMN", value_parser = column)]
    sort: Option<usize>,
    /// Show only what has this text in its name
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

fn interval(text: &str) -> std::result::Result<Duration, String> {
    let time = spec::interval(text).ok().filter(|time| *time >= INTERVAL_MIN);
    time.ok_or_else(|| "write a time from 100ms to a minute, such as 500ms or 5s".to_owned())
}

fn column(text: &str) -> std::result::Result<usize, String> {
    let titles = || VOLUMES.iter().map(|column| column.title);
    let found = titles().position(|title| title.eq_ignore_ascii_case(text));
    found.ok_or_else(|| format!("the columns are {}", titles().collect::<Vec<_>>().join(", ")))
}

impl Top {
    pub fn run(self, context: &Context) -> Result<()> {
        let place = Place { store: context.store()?.to_owned(), runtime: context.runtime_dir() };
        if self.once {
            return self.once(context, &place);
        }
        if context.json {
            return Err(Error::invalid("--json needs --once: the live screen is for people"));
        }
        terminal::check()?;
        let first = place.look(&place.find()?)?;
        let mut screen = screen::Screen::new(&place.store, self.interval, self.order());
        screen.filter(self.filter.unwrap_or_default());
        screen.take(first);
        live::watch(&place, screen, self.usage)
    }

    fn order(&self) -> Order {
        self.sort.map_or_else(Order::default, Order::by)
    }

    fn once(&self, context: &Context, place: &Place) -> Result<()> {
        let server = &place.find()?;
        let before = place.look(server)?;
        thread::sleep(self.interval);
        let measured = Measured::new(Some(&before), place.look(server)?);
        let usages = if self.usage { place.usages(server)? } else { Usages::new() };
        if context.json {
            return print_json(&measured.document(&usages));
        }
        let mut rows = View::Volumes.rows(&measured, &usages);
        table::filter(&mut rows, VOLUMES, self.filter.as_deref().unwrap_or_default());
        self.order().sort(&mut rows);
        let is_shown = |column: &&table::Column| self.usage || !column.of_usage;
        let titles: Vec<_> = VOLUMES.iter().filter(is_shown).map(table::Column::heading).collect();
        let mut table = output::Table::new(&titles.iter().map(String::as_str).collect::<Vec<_>>());
        for row in rows {
            let cells = VOLUMES.iter().zip(row).filter(|(column, _)| is_shown(column));
            table.row(cells.map(|(_, cell)| cell.text()).collect());
        }
        print(&table.text())
    }
}

/// Where the store and its server are.
#[derive(Debug, Clone)]
struct Place {
    store: PathBuf,
    runtime: PathBuf,
}

impl Place {
    /// The server of the store, wherever it listens now.
    ///
    /// # Errors
    /// `Unsupported` if there is none; those of looking at the store.
    fn find(&self) -> Result<RemoteStore> {
        find_server(&self.store, &self.runtime).map_err(|error| match error.kind() {
            ErrorKind::NotFound if self.store.exists() => not_served(&self.store),
            _ => error,
        })
    }

    fn look(&self, server: &RemoteStore) -> Result<top::Top> {
        self.ask(server, &Request::Top).map_err(|error| match error.kind() {
            ErrorKind::Invalid if error.to_string().contains("unknown variant") => {
                Error::unsupported(
                    "the server is older than `dbs top`: start it again with this version",
                )
            }
            _ => error,
        })
    }

    fn usages(&self, server: &RemoteStore) -> Result<Usages> {
        let volumes: Vec<VolumeInfo> = self.ask(server, &Request::VolumeList { usage: true })?;
        Ok(volumes.into_iter().map(|volume| (volume.uuid, volume.usage)).collect())
    }

    fn ask<T: DeserializeOwned>(&self, server: &RemoteStore, request: &Request) -> Result<T> {
        let mut value = server.call(request, &mut |_| true)?;
        fill_usage(&mut value);
        serde_json::from_value(value).map_err(|e| {
            Error::io(std::io::Error::other(e), "understanding the answer of the server")
        })
    }
}

fn not_served(store: &Path) -> Error {
    Error::unsupported(format!(
        "nobody serves {}, so there is nothing to watch: start `dbs serve`; `dbs volume list --usage` shows \
         the volumes of an idle store",
        store.display()
    ))
}
