//! What is in the tables: columns, cells, the order of rows, and how wide all of it is.

use super::Usages;
use super::measure::{Flow, Measured};
use crate::output::printable;
use crate::progress;
use std::cmp::Ordering;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Least cells of a column that shares what the others leave.
const SHARE_MIN: usize = 20;
/// What stands for what was cut out of a text.
const CUT: &str = "..";

/// A column of a table.
#[derive(Debug)]
pub struct Column {
    pub title: &'static str,
    /// Cells of a column of numbers; 0 for texts, which share what is left.
    width: usize,
    /// Where the terminal is narrow, columns with a low rank are shown.
    rank: u8,
    /// It is shown once the space of volumes is known.
    pub of_usage: bool,
}

const fn texts(title: &'static str) -> Column {
    Column { title, width: 0, rank: 0, of_usage: false }
}

const fn numbers(title: &'static str, width: usize, rank: u8) -> Column {
    Column { title, width, rank, of_usage: false }
}

/// Columns of volumes.
pub const VOLUMES: &[Column] = &[
    texts("NAME"),
    numbers("IOPS", 5, 1),
    numbers("R/s", 5, 5),
    numbers("W/s", 5, 5),
    numbers("RB/s", 5, 1),
    numbers("WB/s", 5, 1),
    numbers("P50", 5, 2),
    numbers("P99", 5, 1),
    numbers("QD", 4, 1),
    numbers("SNAPS", 5, 2),
    Column { title: "ALLOC", width: 5, rank: 3, of_usage: true },
    Column { title: "EXCL", width: 5, rank: 3, of_usage: true },
    numbers("SIZE", 5, 4),
    numbers("R50", 5, 6),
    numbers("R99", 5, 6),
    numbers("W50", 5, 6),
    numbers("W99", 5, 6),
    numbers("DEPTH", 5, 7),
    numbers("STATE", 10, 8),
];

const CLIENTS: &[Column] = &[
    texts("CLIENT"),
    texts("VOLUME"),
    numbers("IOPS", 5, 1),
    numbers("RB/s", 5, 1),
    numbers("WB/s", 5, 1),
    numbers("P50", 5, 4),
    numbers("P99", 5, 2),
    numbers("QD", 4, 2),
    numbers("MODE", 4, 3),
    numbers("ID", 6, 5),
    numbers("R/s", 5, 6),
    numbers("W/s", 5, 6),
    numbers("READ", 5, 7),
    numbers("WRITN", 5, 7),
];

const JOBS: &[Column] = &[
    texts("JOB"),
    texts("VOLUME"),
    numbers("DONE", 6, 2),
    numbers("TOTAL", 6, 2),
    numbers("%", 3, 1),
    numbers("LEFT", 12, 1),
    numbers("UNIT", 5, 3),
];

/// What is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    Volumes,
    Clients,
    Jobs,
}

/// What is in one place of a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    /// Not known.
    None,
    Text(String),
    /// A number, and how it is written.
    Number(f64, String),
}

/// A row, with a cell for each column.
pub type Row = Vec<Cell>;

/// How rows are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    pub column: usize,
    pub reversed: bool,
}

impl Default for Order {
    /// The busiest volume first.
    fn default() -> Self {
        Self::by(1)
    }
}

impl Order {
    pub fn by(column: usize) -> Self {
        Self { column, reversed: false }
    }

    /// Large numbers first, texts by the alphabet; rows that are alike by their names.
    pub fn sort(self, rows: &mut [Row]) {
        let order = |one: &Row, other: &Row| {
            let cells = one.get(self.column).zip(other.get(self.column));
            let order = cells.map_or(Ordering::Equal, |(one, other)| one.order(other));
            let order = if self.reversed { order.reverse() } else { order };
            let names = || one.first().zip(other.first()).map(|(one, other)| one.order(other));
            order.then_with(|| names().unwrap_or(Ordering::Equal))
        };
        rows.sort_by(order);
    }
}

impl Cell {
    pub fn text(&self) -> String {
        match self {
            Self::None => "-".to_owned(),
            Self::Text(text) | Self::Number(_, text) => text.clone(),
        }
    }

    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(one), Self::Text(other)) => one.cmp(other),
            (Self::Number(one, _), Self::Number(other, _)) => other.total_cmp(one),
            // What is not known comes last.
            (Self::None, Self::None) => Ordering::Equal,
            (Self::None, _) => Ordering::Greater,
            (_, Self::None) => Ordering::Less,
            (one, other) => one.text().cmp(&other.text()),
        }
    }

    fn count(value: f64) -> Self {
        Self::Number(value, scaled(value, 10_000.0, 1000.0))
    }

    fn bytes(value: f64) -> Self {
        Self::Number(value, scaled(value, 1000.0, 1024.0))
    }

    pub fn time(ns: Option<u64>) -> Self {
        ns.map_or(Self::None, |ns| Self::Number(ns as f64, short_time(ns)))
    }

    fn text_of(text: &str) -> Self {
        Self::Text(printable(text))
    }
}

/// A number in at most five characters.
fn scaled(value: f64, plain_below: f64, base: f64) -> String {
    if value < plain_below {
        return if value > 0.0 && value < 9.95 && value.fract() != 0.0 {
            format!("{value:.1}")
        } else {
            format!("{value:.0}")
        };
    }
    let mut value = value;
    for unit in ["", "K", "M", "G", "T", "P"] {
        if value < 999.5 {
            let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
            return format!("{value:.digits$}{unit}");
        }
        value /= base;
    }
    format!("{value:.0}E")
}

fn short_time(ns: u64) -> String {
    let us = ns as f64 / 1000.0;
    match us {
        0.0..9.95 => format!("{us:.1}us"),
        9.95..999.5 => format!("{us:.0}us"),
        999.5..9950.0 => format!("{:.1}ms", us / 1e3),
        9950.0..999_500.0 => format!("{:.0}ms", us / 1e3),
        _ => format!("{:.1}s", us / 1e6),
    }
}

impl Column {
    /// As [`Table`](crate::output::Table) takes it.
    pub fn heading(&self) -> String {
        format!("{}{}", if self.width > 0 { ">" } else { "" }, self.title)
    }
}

impl View {
    pub const ALL: [Self; 3] = [Self::Volumes, Self::Clients, Self::Jobs];

    pub fn columns(self) -> &'static [Column] {
        match self {
            Self::Volumes => VOLUMES,
            Self::Clients => CLIENTS,
            Self::Jobs => JOBS,
        }
    }

    /// All rows, in the order of the server's answer.
    pub fn rows(self, measured: &Measured, usages: &Usages) -> Vec<Row> {
        match self {
            Self::Volumes => volumes(measured, usages),
            Self::Clients => clients(measured),
            Self::Jobs => jobs(measured),
        }
    }
}

/// IOPS, reads, writes, bytes read, bytes written.
fn rates(flow: &Flow) -> [Cell; 5] {
    let Some(rates) = flow.rates else { return [const { Cell::None }; 5] };
    [
        Cell::count(rates.iops),
        Cell::count(rates.reads),
        Cell::count(rates.writes),
        Cell::bytes(rates.read_bytes),
        Cell::bytes(rates.written_bytes),
    ]
}

fn in_flight(flow: &Flow) -> Cell {
    flow.in_flight.map_or(Cell::None, |count| Cell::count(count as f64))
}

fn volumes(measured: &Measured, usages: &Usages) -> Vec<Row> {
    let row = |(volume, flow): (&dbs_server::top::VolumeLoad, &Flow)| {
        let (times, [iops, reads, writes, read, written]) = (flow.times(), rates(flow));
        let usage = usages.get(&volume.uuid);
        let space = |bytes: Option<u64>| bytes.map_or(Cell::None, |b| Cell::bytes(b as f64));
        let locked = volume.encryption.as_ref().is_some_and(|encryption| encryption.locked);
        let state = match (volume.rebuilding, locked, volume.open) {
            (true, ..) => "incomplete",
            (_, true, _) => "locked",
            (.., true) => "open",
            _ => "-",
        };
        vec![
            Cell::text_of(&volume.name),
            iops,
            reads,
            writes,
            read,
            written,
            Cell::time(times.percentile(50)),
            Cell::time(times.percentile(99)),
            in_flight(flow),
            Cell::count(volume.snapshots as f64),
            space(usage.map(|usage| usage.allocated)),
            space(usage.map(|usage| usage.exclusive)),
            space(Some(volume.size)),
            Cell::time(flow.reads.percentile(50)),
            Cell::time(flow.reads.percentile(99)),
            Cell::time(flow.writes.percentile(50)),
            Cell::time(flow.writes.percentile(99)),
            Cell::count(volume.depth as f64),
            Cell::text_of(state),
        ]
    };
    measured.now.volumes.iter().zip(&measured.volumes).map(row).collect()
}

fn clients(measured: &Measured) -> Vec<Row> {
    let row = |(client, flow): (&dbs_server::clients::Client, &Flow)| {
        let (times, [iops, reads, writes, read, written]) = (flow.times(), rates(flow));
        let volume = client.volume.clone().unwrap_or_else(|| "-".to_owned());
        let spec = client.snapshot.iter().fold(volume, |volume, name| format!("{volume}@{name}"));
        let total = |bytes: Option<u64>| bytes.map_or(Cell::None, |b| Cell::bytes(b as f64));
        vec![
            Cell::text_of(&client.who),
            Cell::text_of(&spec),
            iops,
            read,
            written,
            Cell::time(times.percentile(50)),
            Cell::time(times.percentile(99)),
            in_flight(flow),
            Cell::text_of(if client.read_only { "r" } else { "rw" }),
            client.id.map_or(Cell::None, |id| Cell::Number(id as f64, id.to_string())),
            reads,
            writes,
            total(client.requests.map(|requests| requests.read_bytes)),
            total(client.requests.map(|requests| requests.written_bytes)),
        ]
    };
    measured.now.clients.iter().zip(&measured.clients).map(row).collect()
}

fn jobs(measured: &Measured) -> Vec<Row> {
    let row = |(job, left): (&dbs_server::jobs::Job, &Option<u64>)| {
        let amount = |n: u64| match job.unit.as_str() {
            "bytes" => Cell::bytes(n as f64),
            _ => Cell::count(n as f64),
        };
        let percent =
            |done: u64, total: u64| Cell::count((done as f64 * 100.0 / total as f64).floor());
        let known = job.elapsed_ns > 0 && job.total > 0;
        vec![
            Cell::text_of(&job.what),
            Cell::text_of(job.volume.as_deref().unwrap_or("-")),
            if known { amount(job.done) } else { Cell::None },
            amount(job.total),
            if known { percent(job.done.min(job.total), job.total) } else { Cell::None },
            left.map_or(Cell::None, |ns| {
                Cell::Number(ns as f64, progress::left(ns / 1_000_000_000))
            }),
            Cell::text_of(&job.unit),
        ]
    };
    measured.now.jobs.iter().zip(&measured.left).map(row).collect()
}

/// Leaves rows that have this text in a column of texts, in whatever case.
pub fn filter(rows: &mut Vec<Row>, columns: &[Column], wanted: &str) {
    let wanted = wanted.to_lowercase();
    rows.retain(|row| {
        let mut texts = row.iter().zip(columns).filter(|(_, column)| column.width == 0);
        texts.any(|(cell, _)| cell.text().to_lowercase().contains(&wanted))
    });
}

/// The columns that a terminal has room for, and how wide each is.
pub fn layout(columns: &[Column], width: usize, usage: bool) -> Vec<(usize, usize)> {
    let shares = columns.iter().filter(|column| column.width == 0).count();
    // Each but the first has a blank before it.
    let mut left = (width + 1).saturating_sub(shares * (SHARE_MIN + 1));
    let mut by_rank: Vec<_> = columns.iter().enumerate().collect();
    by_rank.sort_by_key(|(_, column)| column.rank);
    let mut shown: Vec<(usize, usize)> = Vec::new();
    for (at, column) in by_rank {
        let needed = column.width + 1;
        if column.width == 0 {
            shown.push((at, 0));
        } else if (usage || !column.of_usage) && needed <= left {
            left -= needed;
            shown.push((at, column.width));
        }
    }
    shown.sort_unstable();
    let more = SHARE_MIN + left / shares.max(1);
    shown.iter().map(|(at, width)| (*at, if *width == 0 { more } else { *width })).collect()
}

/// A row as text, cut to these columns.
pub fn line(cells: &[String], columns: &[Column], layout: &[(usize, usize)]) -> String {
    let mut line = String::new();
    for (at, width) in layout {
        let (Some(cell), Some(column)) = (cells.get(*at), columns.get(*at)) else { continue };
        let cell = fit(cell, *width);
        let blanks = " ".repeat(width.saturating_sub(cell.width()));
        if !line.is_empty() {
            line.push(' ');
        }
        line += &if column.width > 0 { blanks + &cell } else { cell + &blanks };
    }
    line
}

/// A text that takes so many cells at most: the middle of a longer one is left out, as names often differ at
/// their ends.
pub fn fit(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let room = width.saturating_sub(CUT.len());
    let head = taken(text.chars(), room.div_ceil(2));
    let tail: String = taken(text.chars().rev(), room / 2).chars().rev().collect();
    let cut = if width > CUT.len() { CUT } else { "" };
    format!("{head}{cut}{tail}")
}

/// As many characters as have room.
pub fn taken(chars: impl Iterator<Item = char>, width: usize) -> String {
    let mut used = 0;
    chars
        .take_while(|c| {
            used += c.width().unwrap_or(0);
            used <= width
        })
        .collect()
}
