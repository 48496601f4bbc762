//! The results as Markdown: rows are parts of the engine, columns the two sides.

use crate::bare::BARE;
use crate::loads::{
    CONNECTIONS, DEPTH, DEPTHS, LARGE_DEPTHS, bare_cell, large_cell, random_cell, sequential_cell,
};
use crate::stack::{Below, ROWS, Row, Side};
use dbs_benches::dataconn::Figures;
use dbs_benches::report::Table;
use dbs_benches::samples::Results;

/// What is to be reached with the full engine at queue depth 128.
const OVER_UPSTREAM: f64 = 5.0;

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
}

/// A figure of both sides.
fn both(results: &Results, cell: &str, figure: fn(&Figures) -> f64) -> [Option<f64>; 2] {
    [Side::Dbs, Side::Upstream]
        .map(|side| results.median(cell, side.title(), |sample| Some(figure(&sample.figures))))
}

fn ratio([ours, theirs]: [Option<f64>; 2]) -> Option<f64> {
    ours.zip(theirs).map(|(ours, theirs)| ours / theirs)
}

/// All tables that have something in them.
pub fn all(results: &Results) -> String {
    let has = |row: &&Row| {
        let cell = random_cell(row, false, CONNECTIONS[0], DEPTHS[0]);
        results.samples.iter().any(|sample| sample.cell == cell)
    };
    let rows: Vec<_> = ROWS.iter().filter(has).collect();
    reach(results, &rows)
        + &random(results, &rows)
        + &sequential(results, &rows)
        + &checksums(results, &rows)
}

/// What checksums of the replicas' data cost.
fn checksums(results: &Results, rows: &[&Row]) -> String {
    let columns = [
        "",
        "IOPS without",
        "with",
        "with over without",
        "p99 µs without",
        "with",
        "CPU s per 10⁶ without",
        "with",
    ];
    let mut table = Table::new("Engine: what checksums of data cost", &columns);
    for row in rows.iter().filter(|row| row.below == Below::Replicas) {
        for write in [false, true] {
            let small = DEPTHS.map(|depth| random_cell(row, write, CONNECTIONS[1], depth));
            let large = LARGE_DEPTHS.map(|depth| large_cell(row, write, depth));
            for cell in small.iter().chain(&large) {
                let of = |figure: fn(&Figures) -> f64| {
                    [Side::Dbs, Side::Unchecked].map(|side| {
                        results.median(cell, side.title(), |sample| Some(figure(&sample.figures)))
                    })
                };
                let (iops, p99, cpu) =
                    (of(|f| f.iops), of(|f| f.p99_us), of(|f| f.cpu_per_million));
                table.row(&[
                    cell,
                    &number(iops[1], 0),
                    &number(iops[0], 0),
                    &number(ratio(iops), 3),
                    &number(p99[1], 0),
                    &number(p99[0], 0),
                    &number(cpu[1], 1),
                    &number(cpu[0], 1),
                ]);
            }
        }
    }
    table.finish() + "\n"
}

fn reach(results: &Results, rows: &[&Row]) -> String {
    let columns = [
        "IOPS at QD 128 of upstream's",
        "target",
        "read",
        "write",
        "",
        "read of bare",
        "write of bare",
    ];
    let mut table = Table::new("Engine: what is to be reached", &columns);
    for row in rows.iter().filter(|row| row.below == Below::Replicas) {
        for connections in CONNECTIONS {
            let over = [false, true].map(|write| {
                let cell = random_cell(row, write, connections, DEPTH);
                ratio(both(results, &cell, |f| f.iops))
            });
            let of_bare = [false, true].map(|write| {
                let ours = random_cell(row, write, connections, DEPTH);
                let ours = results.median(&ours, Side::Dbs.title(), |s| Some(s.figures.iops));
                let cell = bare_cell(row, write);
                ratio([ours, results.median(&cell, BARE, |s| Some(s.figures.iops))])
            });
            let reached = over.iter().all(|over| over.is_some_and(|over| over >= OVER_UPSTREAM));
            table.row(&[
                &format!("{}, {connections} connections", row.name),
                &format!("≥ {OVER_UPSTREAM:.1}"),
                &number(over[0], 2),
                &number(over[1], 2),
                &(if reached { "reached" } else { "**not reached**" }),
                &number(of_bare[0], 2),
                &number(of_bare[1], 2),
            ]);
        }
    }
    table.finish() + "\n"
}

fn random(results: &Results, rows: &[&Row]) -> String {
    let columns = [
        "4 KiB random",
        "DBS IOPS",
        "upstream IOPS",
        "ratio",
        "p99 µs",
        "upstream p99 µs",
        "CPU s per 10⁶",
        "upstream",
    ];
    let mut table = Table::new("Engine: random requests through the socket frontend", &columns);
    for row in rows {
        for write in [false, true] {
            for connections in CONNECTIONS {
                for depth in DEPTHS {
                    let cell = random_cell(row, write, connections, depth);
                    let iops = both(results, &cell, |f| f.iops);
                    let p99 = both(results, &cell, |f| f.p99_us);
                    let cpu = both(results, &cell, |f| f.cpu_per_million);
                    table.row(&[
                        &cell,
                        &number(iops[0], 0),
                        &number(iops[1], 0),
                        &number(ratio(iops), 2),
                        &number(p99[0], 0),
                        &number(p99[1], 0),
                        &number(cpu[0], 1),
                        &number(cpu[1], 1),
                    ]);
                }
            }
        }
    }
    table.finish() + "\n"
}

fn sequential(results: &Results, rows: &[&Row]) -> String {
    let columns =
        ["1 MiB sequential, QD 16", "DBS MB/s", "upstream MB/s", "ratio", "bare files MB/s"];
    let mut table = Table::new("Engine: sequential requests through the socket frontend", &columns);
    for row in rows {
        for write in [false, true] {
            let cell = sequential_cell(row, write);
            let rate = both(results, &cell, |f| f.mb_per_s);
            let bare = results.median(&cell, BARE, |s| Some(s.figures.mb_per_s));
            let [ours, theirs] = rate.map(|rate| number(rate, 0));
            let over = number(ratio(rate), 2);
            table.row(&[&cell, &ours, &theirs, &over, &number(bare, 0)]);
        }
    }
    table.finish() + "\n"
}
