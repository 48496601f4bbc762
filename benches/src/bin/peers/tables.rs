//! The results as Markdown.

use crate::beside;
use crate::depth::{self, DEPTHS};
use crate::first;
use crate::results::{Results, Spread};
use crate::steady::{CHECKED, FLUSHED, Load, RANDOM, SEQUENTIAL};
use crate::systems::{SYSTEMS, System};
use dbs_benches::fio::Figures;
use dbs_benches::report::Table;
use std::fmt::Display;

/// Cells with nothing in them.
const NONE: &str = "-";

type Figure = fn(&Figures) -> f64;

/// A row: the name of its figures, and its title.
type Row = (String, String);

/// All tables that have anything in them.
pub fn all(results: &Results) -> String {
    let steady = |loads: &[Load]| -> Vec<Row> {
        loads.iter().map(|load| (load.cell.to_owned(), load.title.to_owned())).collect()
    };
    let random = [steady(&RANDOM), steady(&FLUSHED)].concat();
    let first = first::ROWS.map(|(cell, title)| (cell.to_owned(), format!("{title}, QD 32")));
    let chains: Vec<_> = DEPTHS
        .map(|depth| (depth::cell(depth), format!("read at chain depth {depth}, QD 32")))
        .to_vec();
    let rates = [random.clone(), first.to_vec(), chains].concat();
    let sequential = steady(&SEQUENTIAL);
    let mut text = String::new();
    text += &table(results, "IOPS", &rates, |results, cell, system| {
        rate(results, cell, system, |f| f.iops)
    });
    text += &table(results, "MB/s", &sequential, |results, cell, system| {
        rate(results, cell, system, |f| f.mb_per_s)
    });
    text += &table(results, "Latency, µs: p50 / p99", &rates, latency);
    text += &table(results, "CPU seconds per 100,000 requests", &rates, |results, cell, system| {
        // Of the bare file it is fio's own.
        show(results.spread(cell, system, Figures::cpu_per_100k), 2)
    });
    text + &checksums(results) + &beside(results)
}

/// What checksums cost.
fn checksums(results: &Results) -> String {
    let (with, without) = (System::Dbs, System::Unchecked);
    let measured = |load: &&Load| results.median(load.cell, without, |f| f.iops).is_some();
    let loads: Vec<_> = CHECKED.iter().filter(measured).collect();
    if loads.is_empty() {
        return String::new();
    }
    let columns = [
        "",
        "IOPS without",
        "with",
        "with over without, each round",
        "p99 µs without",
        "with",
        "CPU s per 100,000 without",
        "with",
    ];
    let mut table = Table::new("Peers: what checksums of data cost dbs", &columns);
    for Load { cell, title, .. } in loads {
        let [iops, p99, cpu]: [[String; 2]; 3] = [
            [without, with].map(|system| show(results.spread(cell, system, |f| f.iops), 0)),
            [without, with].map(|system| show(results.spread(cell, system, |f| f.p99_us), 0)),
            [without, with]
                .map(|system| show(results.spread(cell, system, Figures::cpu_per_100k), 2)),
        ];
        let over = show(results.round_by_round(cell, with, without, |f| f.iops), 3);
        let cells: [&dyn Display; 8] =
            [title, &iops[0], &iops[1], &over, &p99[0], &p99[1], &cpu[0], &cpu[1]];
        table.row(&cells);
    }
    table.finish() + "\n"
}

fn table(
    results: &Results,
    title: &str,
    rows: &[Row],
    show: impl Fn(&Results, &str, System) -> String,
) -> String {
    let measured = |system: &System| results.samples.iter().any(|s| s.system == *system);
    let systems: Vec<_> = SYSTEMS.into_iter().filter(measured).collect();
    let rows: Vec<_> = rows
        .iter()
        .filter(|(cell, _)| results.samples.iter().any(|sample| sample.cell == *cell))
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let titles = systems.iter().map(|system| system.title());
    let columns: Vec<_> = std::iter::once("").chain(titles).collect();
    let mut table = Table::new(&format!("Peers: {title}"), &columns);
    for (cell, title) in rows {
        let shown = systems.iter().map(|system| match results.refused(cell, *system) {
            true => "refused".to_owned(),
            false => show(results, cell, *system),
        });
        let cells: Vec<_> = std::iter::once(title.clone()).chain(shown).collect();
        table.row(&cells.iter().map(|cell| cell as &dyn Display).collect::<Vec<_>>());
    }
    table.finish() + "\n"
}

/// Median, spread, and ratio to the bare file.
fn rate(results: &Results, cell: &str, system: System, figure: Figure) -> String {
    let shown = show(results.spread(cell, system, figure), 0);
    let bare = results.median(cell, System::Bare, figure);
    match results.median(cell, system, figure).zip(bare) {
        Some((rate, bare)) if system != System::Bare => format!("{shown}, ×{:.2}", rate / bare),
        _ => shown,
    }
}

fn latency(results: &Results, cell: &str, system: System) -> String {
    let p50 = results.median(cell, system, |f| f.p50_us);
    let p99 = results.median(cell, system, |f| f.p99_us);
    p50.zip(p99).map_or(NONE.to_owned(), |(p50, p99)| format!("{p50:.0} / {p99:.0}"))
}

/// The median, and least and greatest where there were several rounds.
fn show(spread: Option<Spread>, digits: usize) -> String {
    match spread {
        None => NONE.to_owned(),
        Some(Spread { median, least, greatest }) if least == greatest => {
            format!("{median:.digits$}")
        }
        Some(Spread { median, least, greatest }) => {
            format!("{median:.digits$} ({least:.digits$}–{greatest:.digits$})")
        }
    }
}

fn beside(results: &Results) -> String {
    let names = [
        beside::SNAPSHOT_LATENCY,
        beside::SNAPSHOT_GAP,
        beside::CLONE_LATENCY,
        beside::CLONE_GAP,
        beside::ALONE_LATENCY,
        beside::ALONE_GAP,
        beside::DELETE_BEFORE,
        beside::DELETE_DURING,
        beside::DELETE_RATIO,
        beside::DELETE_SECONDS,
    ];
    if !names.iter().any(|name| results.other(name).is_some()) {
        return String::new();
    }
    let title = "Snapshots, clones and deletions of dbs beside running I/O (QD 32)";
    let mut table = Table::new(title, &["what", "median of the rounds"]);
    for name in names {
        if let Some(spread) = results.other(name) {
            table.row(&[&name, &show(Some(spread), if spread.greatest < 100.0 { 2 } else { 0 })]);
        }
    }
    table.finish() + "\n"
}
