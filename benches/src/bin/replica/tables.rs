//! The results as Markdown.

use crate::rebuild;
use crate::sections::{
    AFTER, CHAINS, CONNECTIONS, DEPTHS, OVERWRITE, chain_cell, random_cell, sequential_cell,
};
use crate::subject::Kind;
use dbs_benches::dataconn::Figures;
use dbs_benches::report::Table;
use dbs_benches::samples::{Results, Sample};

/// What is to be reached at queue depth 128.
const OVER_UPSTREAM: f64 = 3.0;
const CPU_OF_UPSTREAM: f64 = 1.0 / 3.0;

fn of(figure: fn(&Figures) -> f64) -> impl Fn(&Sample) -> Option<f64> {
    move |sample| Some(figure(&sample.figures))
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
}

fn ratio(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    a.zip(b).map(|(a, b)| a / b)
}

/// All tables that have something in them.
pub fn all(results: &Results) -> String {
    let has = |cell: &str| results.samples.iter().any(|s| s.cell == cell);
    let mut text = String::new();
    if has(&random_cell(false, 2, 1)) {
        text += &reach(results);
        text += &random(results);
        text += &sequential(results);
    }
    if has(AFTER) {
        text += &cells(results, "Replica: writes after a snapshot", &[OVERWRITE, AFTER]);
    }
    if has(&chain_cell(CHAINS[0])) {
        let names = CHAINS.map(chain_cell);
        let names = names.each_ref().map(String::as_str);
        text += &cells(results, "Replica: reads over chains of snapshots, QD 32", &names);
    }
    if has(rebuild::FULL) {
        text += &rebuilds(results);
    }
    text
}

fn reach(results: &Results) -> String {
    let mut table = Table::new(
        "Replica: what is to be reached",
        &["what", "target", "measured, 2 connections", "6 connections", ""],
    );
    for write in [false, true] {
        let kind = if write { "write" } else { "read" };
        let over = |figure: fn(&Figures) -> f64| {
            CONNECTIONS.map(|connections| {
                let cell = random_cell(write, connections, 128);
                let [ours, theirs] = [Kind::Dbs, Kind::Upstream]
                    .map(|kind| results.median(&cell, kind.title(), of(figure)));
                ratio(ours, theirs)
            })
        };
        let rows = [
            ("IOPS of upstream's", true, OVER_UPSTREAM, over(|f| f.iops)),
            ("CPU per request of upstream's", false, CPU_OF_UPSTREAM, over(|f| f.cpu_per_million)),
        ];
        for (what, least, target, values) in rows {
            let reached = values
                .iter()
                .flatten()
                .all(|value| if least { *value >= target } else { *value <= target });
            let sign = if least { "≥" } else { "≤" };
            table.row(&[
                &format!("random {kind}, QD 128: {what}"),
                &format!("{sign} {target:.2}"),
                &number(values[0], 2),
                &number(values[1], 2),
                &(if reached { "reached" } else { "**not reached**" }),
            ]);
        }
    }
    table.finish() + "\n"
}

fn random(results: &Results) -> String {
    let columns = [
        "4 KiB random",
        "DBS IOPS",
        "upstream IOPS",
        "ratio",
        "null storage IOPS",
        "p50 / p99 µs",
        "upstream p50 / p99 µs",
        "CPU s per 10⁶",
        "upstream",
        "null storage",
    ];
    let mut table = Table::new("Replica: random requests", &columns);
    for connections in CONNECTIONS {
        for write in [false, true] {
            for depth in DEPTHS {
                let cell = random_cell(write, connections, depth);
                let median = |kind: Kind, figure| results.median(&cell, kind.title(), of(figure));
                let iops = |kind| median(kind, |f| f.iops);
                let cpu = |kind| number(median(kind, |f| f.cpu_per_million), 1);
                let times = |kind| {
                    let [p50, p99] = [median(kind, |f| f.p50_us), median(kind, |f| f.p99_us)];
                    format!("{} / {}", number(p50, 0), number(p99, 0))
                };
                table.row(&[
                    &cell.trim_start_matches("random "),
                    &number(iops(Kind::Dbs), 0),
                    &number(iops(Kind::Upstream), 0),
                    &number(ratio(iops(Kind::Dbs), iops(Kind::Upstream)), 2),
                    &number(iops(Kind::Null), 0),
                    &times(Kind::Dbs),
                    &times(Kind::Upstream),
                    &cpu(Kind::Dbs),
                    &cpu(Kind::Upstream),
                    &cpu(Kind::Null),
                ]);
            }
        }
    }
    table.finish() + "\n"
}

fn sequential(results: &Results) -> String {
    let columns = ["", "DBS MB/s", "upstream MB/s", "ratio"];
    let mut table = Table::new("Replica: sequential requests, QD 16", &columns);
    for connections in CONNECTIONS {
        for write in [false, true] {
            let cell = sequential_cell(write, connections);
            let [ours, theirs] = [Kind::Dbs, Kind::Upstream]
                .map(|kind| results.median(&cell, kind.title(), of(|f| f.mb_per_s)));
            let over = ratio(ours, theirs);
            table.row(&[&cell, &number(ours, 0), &number(theirs, 0), &number(over, 2)]);
        }
    }
    table.finish() + "\n"
}

fn cells(results: &Results, title: &str, names: &[&str]) -> String {
    let columns = ["", "DBS IOPS", "upstream IOPS", "ratio", "p99 µs", "upstream p99 µs"];
    let mut table = Table::new(title, &columns);
    for cell in names {
        let median = |kind: Kind, figure| results.median(cell, kind.title(), of(figure));
        let iops = |kind| median(kind, |f| f.iops);
        table.row(&[
            cell,
            &number(iops(Kind::Dbs), 0),
            &number(iops(Kind::Upstream), 0),
            &number(ratio(iops(Kind::Dbs), iops(Kind::Upstream)), 2),
            &number(median(Kind::Dbs, |f| f.p99_us), 0),
            &number(median(Kind::Upstream, |f| f.p99_us), 0),
        ]);
    }
    table.finish() + "\n"
}

fn rebuilds(results: &Results) -> String {
    let columns = ["", "DBS s", "upstream s", "upstream / DBS"];
    let mut table = Table::new("Replica: rebuilds by upstream's engine", &columns);
    for cell in [rebuild::FULL, rebuild::DELTA] {
        let [ours, theirs] = [Kind::Dbs, Kind::Upstream]
            .map(|kind| results.median(cell, kind.title(), |sample| sample.seconds));
        let over = ratio(theirs, ours);
        table.row(&[&cell, &number(ours, 2), &number(theirs, 2), &number(over, 1)]);
    }
    table.finish() + "\n"
}
