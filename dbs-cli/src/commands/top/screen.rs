//! What is on the screen, and what keys do to it: all of it but the terminal.

use super::Usages;
use super::keys::Key;
use super::measure::Measured;
use super::table::{Cell, Column, Order, Row, View, filter, fit, layout, line};
use crate::output::printable;
use dbs_core::format_size;
use dbs_frontend::Times;
use dbs_server::top::Top;
use std::path::Path;
use std::time::Duration;

/// Lines that are neither rows nor the heading of a table: above it, and below.
const AROUND: usize = 7;

const HINTS: &str =
    "? help  q quit  Tab next screen  < > sort  r reverse  / filter  u space  p pause";

const HELP: &[&str] = &[
    "1 2 3, Tab   volumes; clients and block devices; jobs: long commands, and the",
    "             merge of deleted snapshots, which works in the background",
    "< >, arrows  sort by another column            r  reverse the order",
    "/            show only rows with a text; Enter keeps it, Esc shows all",
    "up down, PgUp PgDn, Home End                   move",
    "u            show the space of volumes, or no longer: it takes the server a look",
    "             at every layer, so it is computed twice a minute at most",
    "p, blank     pause, and go on                  + -  look less or more often",
    "?            this help                         q, Ctrl-C  quit",
    "",
    "IOPS R/s W/s requests, reads, writes a second  RB/s WB/s  their bytes",
    "P50 P99      how long half, and 99 of 100, of NBD clients' reads and writes took",
    "QD           NBD requests in flight            SNAPS  snapshots",
    "ALLOC        bytes of extents of its layers    EXCL   bytes that no other shows",
];

/// How a line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Plain,
    Title,
    Heading,
    Alert,
}

/// What a key asks for that the screen cannot do by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Todo {
    Nothing,
    Quit,
    Suspend,
}

/// The state of the screen.
#[derive(Debug)]
pub struct Screen {
    store: String,
    pub interval: Duration,
    pub paused: bool,
    /// The space of volumes is shown.
    pub spaces: bool,
    size: (usize, usize),
    view: usize,
    orders: [Order; 3],
    filter: String,
    /// The filter is being typed.
    typing: bool,
    help: bool,
    /// The first row that is shown.
    first: usize,
    measured: Option<Measured>,
    usages: Usages,
    /// Why nothing new is seen.
    trouble: Option<String>,
    /// Something to say until a key is pressed.
    note: Option<String>,
}

impl Screen {
    pub fn new(store: &Path, interval: Duration, order: Order) -> Self {
        Self {
            store: printable(&store.display().to_string()),
            interval,
            paused: false,
            spaces: false,
            size: (80, 24),
            view: 0,
            orders: [order, Order::by(2), Order::by(0)],
            filter: String::new(),
            typing: false,
            help: false,
            first: 0,
            measured: None,
            usages: Usages::new(),
            trouble: None,
            note: None,
        }
    }

    pub fn filter(&mut self, text: String) {
        self.filter = text;
    }

    pub fn resize(&mut self, width: usize, height: usize) {
        self.size = (width.max(1), height.max(1));
    }

    /// An answer of the server.
    pub fn take(&mut self, now: Top) {
        let before = self.measured.take();
        let restarted =
            before.as_ref().is_some_and(|before| before.now.started_ns != now.started_ns);
        self.measured = Some(Measured::new(before.as_ref().map(|before| &before.now), now));
        self.trouble = None;
        if restarted {
            self.note =
                Some("another server serves the store now; its counts begin anew".to_owned());
        }
    }

    /// The space of the volumes, or why it is not known.
    pub fn take_usages(&mut self, usages: Result<Usages, String>) {
        match usages {
            Ok(usages) => (self.usages, self.note) = (usages, None),
            Err(why) => self.note = Some(format!("the space is not known: {}", printable(&why))),
        }
    }

    /// Nothing is heard from the server.
    pub fn away(&mut self, why: &str) {
        self.trouble = Some(printable(why));
    }

    pub fn key(&mut self, key: Key) -> Todo {
        self.note = None;
        match key {
            Key::Ctrl('c') => return Todo::Quit,
            Key::Ctrl('z') => return Todo::Suspend,
            _ if self.typing => self.type_filter(key),
            // Any other key ends it.
            _ if self.help && key != Key::Char('q') => self.help = false,
            Key::Char('q') => return Todo::Quit,
            Key::Char('?' | 'h') => self.help = true,
            Key::Char('/') => self.typing = true,
            Key::Escape => self.filter.clear(),
            Key::Char(digit @ '1'..='3') => self.show(digit as usize - '1' as usize),
            Key::Tab => self.show(self.view + 1),
            Key::BackTab => self.show(self.view + 2),
            Key::Char('>' | '.') | Key::Right => self.sort_by_next(1),
            Key::Char('<' | ',') | Key::Left => self.sort_by_next(usize::MAX),
            Key::Char('r') => self.orders[self.view].reversed ^= true,
            Key::Char('p' | ' ') => self.paused ^= true,
            Key::Char('+') => self.interval = (self.interval * 2).min(Duration::from_secs(60)),
            Key::Char('-') => self.interval = (self.interval / 2).max(super::INTERVAL_MIN),
            Key::Char('u') => {
                self.spaces ^= true;
                if self.spaces && self.usages.is_empty() {
                    self.note = Some("the server computes the space of the volumes".to_owned());
                }
            }
            key => self.scroll(key),
        }
        Todo::Nothing
    }

    fn type_filter(&mut self, key: Key) {
        match key {
            Key::Enter => self.typing = false,
            Key::Escape => {
                self.typing = false;
                self.filter.clear();
            }
            Key::Backspace => drop(self.filter.pop()),
            Key::Char(c) if self.filter.len() < 255 => self.filter.push(c),
            _ => {}
        }
        self.first = 0;
    }

    fn show(&mut self, view: usize) {
        (self.view, self.first) = (view % View::ALL.len(), 0);
    }

    /// Goes so many columns on, round the end, in those that are shown.
    fn sort_by_next(&mut self, step: usize) {
        let shown = self.layout();
        let now = shown.iter().position(|(at, _)| *at == self.order().column).unwrap_or(0);
        let next = (now + shown.len()).wrapping_add(step) % shown.len().max(1);
        if let Some((column, _)) = shown.get(next) {
            self.orders[self.view] = Order::by(*column);
        }
    }

    fn scroll(&mut self, key: Key) {
        let page = self.page();
        let last = self.rows().len().saturating_sub(page);
        let first = self.first.min(last);
        self.first = match key {
            Key::Up => first.saturating_sub(1),
            Key::Down => first + 1,
            Key::PageUp => first.saturating_sub(page),
            Key::PageDown => first + page,
            Key::Home => 0,
            Key::End => last,
            _ => return,
        }
        .min(last);
    }

    /// Rows that have room.
    fn page(&self) -> usize {
        self.size.1.saturating_sub(AROUND)
    }

    fn view(&self) -> View {
        View::ALL[self.view]
    }

    fn order(&self) -> Order {
        self.orders[self.view]
    }

    fn layout(&self) -> Vec<(usize, usize)> {
        layout(self.view().columns(), self.size.0, self.spaces)
    }

    fn rows(&self) -> Vec<Row> {
        let Some(measured) = &self.measured else { return Vec::new() };
        let mut rows = self.view().rows(measured, &self.usages);
        filter(&mut rows, self.view().columns(), &self.filter);
        self.order().sort(&mut rows);
        rows
    }

    /// All lines, none longer than the terminal is wide, and no more of them than it has.
    pub fn lines(&self) -> Vec<(Style, String)> {
        let (width, height) = self.size;
        let rows = self.rows();
        let mut lines = self.head(&rows);
        lines.truncate(height.saturating_sub(1));
        if self.help {
            lines.extend(HELP.iter().map(|text| (Style::Plain, (*text).to_owned())));
        } else {
            let (layout, columns) = (self.layout(), self.view().columns());
            let titles: Vec<_> =
                columns.iter().map(|column: &Column| column.title.to_owned()).collect();
            let heading = line(&titles, columns, &layout);
            lines.push((Style::Heading, format!("{heading:<width$}")));
            let first = self.first.min(rows.len().saturating_sub(self.page()));
            let shown = rows.iter().skip(first).take(self.page());
            let text = |row: &Row| {
                let cells: Vec<_> = row.iter().map(Cell::text).collect();
                line(&cells, columns, &layout)
            };
            lines.extend(shown.map(|row| (Style::Plain, text(row))));
        }
        lines.resize(height.saturating_sub(1), (Style::Plain, String::new()));
        lines.push(self.foot());
        for (_, text) in &mut lines {
            *text = start(text, width);
        }
        lines
    }

    /// What is above the table.
    fn head(&self, rows: &[Row]) -> Vec<(Style, String)> {
        let Some(measured) = &self.measured else { return Vec::new() };
        let now = &measured.now;
        let title = format!(", served by process {}", now.pid);
        let room = self.size.0.saturating_sub(title.len() + "dbs top: ".len());
        let store = &now.store;
        let mut lines = vec![(Style::Title, format!("dbs top: {}{title}", fit(&self.store, room)))];
        let part = store.allocated as f64 * 100.0 / (store.allocated + store.free).max(1) as f64;
        lines.push((
            Style::Plain,
            format!(
                "Space    {} of {} in use ({part:.0} %), {} free",
                format_size(store.allocated),
                format_size(store.size),
                format_size(store.free)
            ),
        ));
        lines.push(self.things(measured));
        lines.push((Style::Plain, load(measured)));
        let tab = |(at, name): (usize, &str)| match at == self.view {
            true => format!("[{} {name}]", at + 1),
            false => format!(" {} {name} ", at + 1),
        };
        let names = ["Volumes", "Clients", "Jobs"];
        let tabs: String = names.into_iter().enumerate().map(tab).collect();
        let sorted = self.view().columns().get(self.order().column);
        let mut state = format!("{} by {}", rows.len(), sorted.map_or("", |column| column.title));
        state += if self.order().reversed { " reversed" } else { "" };
        state += &format!(", every {:?}", self.interval);
        if !self.filter.is_empty() {
            state += &format!(", with `{}`", fit(&printable(&self.filter), 20));
        }
        state += if self.paused { ", PAUSED" } else { "" };
        lines.push((Style::Plain, format!("{tabs}  {state}")));
        lines
    }

    fn things(&self, measured: &Measured) -> (Style, String) {
        let (now, store) = (&measured.now, &measured.now.store);
        let is_busy =
            |flow: &&super::measure::Flow| flow.rates.is_some_and(|rates| rates.iops > 0.0);
        let busy = measured.volumes.iter().filter(is_busy).count();
        let snapshots: u64 = now.volumes.iter().map(|volume| volume.snapshots).sum();
        let mut text = format!(
            "Volumes  {} ({busy} busy), {snapshots} snapshots, {} being merged, {} clients, {} jobs",
            now.volumes.len(),
            store.snapshots_deleting,
            now.clients.len(),
            now.jobs.len()
        );
        if store.checksums.is_some_and(|sums| sums.mismatches > 0) {
            text += "; DAMAGED DATA: see dbs doctor";
        } else if !store.warnings.is_empty() {
            text += "; warnings: see dbs doctor";
        } else {
            return (Style::Plain, text);
        }
        (Style::Alert, text)
    }

    /// The last line.
    fn foot(&self) -> (Style, String) {
        if self.typing {
            return (Style::Title, format!("show only what has: {}_", printable(&self.filter)));
        }
        match (&self.trouble, &self.note) {
            (Some(trouble), _) => (Style::Alert, format!("nothing new from the server: {trouble}")),
            (None, Some(note)) => (Style::Title, note.clone()),
            (None, None) => (Style::Plain, HINTS.to_owned()),
        }
    }
}

/// What all volumes together are asked for.
fn load(measured: &Measured) -> String {
    let Some(rates) = measured.volumes.iter().map(|flow| flow.rates).collect::<Option<Vec<_>>>()
    else {
        return "Load     being measured".to_owned();
    };
    let sum = |of: fn(&super::measure::Rates) -> f64| rates.iter().map(of).sum::<f64>();
    let bytes = |sum: f64| format_size(sum as u64);
    let in_flight: u64 = measured.volumes.iter().filter_map(|flow| flow.in_flight).sum();
    let times = measured.volumes.iter().fold(Times::default(), |all, flow| all.and(&flow.times()));
    let p99 = match Cell::time(times.percentile(99)) {
        Cell::None => String::new(),
        p99 => format!(", P99 {}", p99.text()),
    };
    format!(
        "Load     {:.0} R/s {}/s, {:.0} W/s {}/s, {in_flight} in flight{p99}",
        sum(|rates| rates.reads),
        bytes(sum(|rates| rates.read_bytes)),
        sum(|rates| rates.writes),
        bytes(sum(|rates| rates.written_bytes)),
    )
}

/// As much of the start as has room.
fn start(text: &str, width: usize) -> String {
    super::table::taken(text.chars(), width)
}
