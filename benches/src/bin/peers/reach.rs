//! What DBS is to reach, and whether it does.

use crate::beside;
use crate::depth::{self, DEPTHS};
use crate::results::Results;
use crate::steady::CHECKED;
use crate::systems::{SYSTEMS, System};
use dbs_benches::fio::Figures;
use dbs_benches::report::Table;

/// Over the best peer, and of the bare file.
const OVER_PEER: f64 = 1.5;
const OF_BARE: f64 = 0.85;
/// More than the bare file's median at queue depth 1, µs.
const MORE_LATENCY: f64 = 25.0;
/// First writes, and writes after a snapshot, of overwrites; and their 99th percentiles.
const OF_OVERWRITE: f64 = 0.8;
const OVERWRITE_P99: f64 = 2.0;
/// From the best to the worst chain depth.
const DEPTHS_APART: f64 = 0.03;
const FLUSHED_OF_BARE: f64 = 0.8;
const SEQUENTIAL_OF_BARE: f64 = 0.95;
const CPU_OF_PEER: f64 = 0.5;
/// What checksums may cost if they are to be the default.
const WITH_CHECKSUMS: f64 = 0.95;
const STALL_MS: f64 = 5.0;
const DELETE_OF_BEFORE: f64 = 0.8;

/// One claim: what was to hold, and what did.
struct Claim {
    what: String,
    least: bool,
    target: f64,
    value: Option<f64>,
}

/// The table of targets; those without a measurement are not in it.
pub fn table(results: &Results) -> String {
    let claims = claims(results).into_iter();
    let claims = claims.filter_map(|claim| Some((claim.value?, claim))).collect::<Vec<_>>();
    if claims.is_empty() {
        return String::new();
    }
    let columns = ["what", "target", "measured", ""];
    let mut table = Table::new("Peers: what is to be reached", &columns);
    for (value, claim) in claims {
        let (sign, reached) = match claim.least {
            true => ("≥", value >= claim.target),
            false => ("≤", value <= claim.target),
        };
        table.row(&[
            &claim.what,
            &format!("{sign} {}", claim.target),
            &format!("{value:.2}"),
            &(if reached { "reached" } else { "**not reached**" }),
        ]);
    }
    table.finish() + "\n"
}

fn claims(results: &Results) -> Vec<Claim> {
    let mut list = random(results);
    list.extend(first(results));
    list.extend(against_bare(results));
    list.extend(cpu(results));
    list.extend(checksums(results));
    list.extend(beside(results));
    list
}

fn claim(what: impl Into<String>, least: bool, target: f64, value: Option<f64>) -> Claim {
    Claim { what: what.into(), least, target, value }
}

/// Median of ours over another's.
fn over(
    results: &Results,
    (cell, system): (&str, System),
    (other, other_system): (&str, System),
    figure: impl Fn(&Figures) -> f64 + Copy,
) -> Option<f64> {
    Some(results.median(cell, system, figure)? / results.median(other, other_system, figure)?)
}

/// The least (or greatest) median among the peers.
fn of_peers(
    results: &Results,
    cell: &str,
    least: bool,
    figure: impl Fn(&Figures) -> f64 + Copy,
) -> Option<f64> {
    let peers = SYSTEMS.into_iter().filter(|system| system.is_peer());
    let medians = peers.filter_map(|system| results.median(cell, system, figure));
    medians.reduce(if least { f64::min } else { f64::max })
}

fn random(results: &Results) -> Vec<Claim> {
    let mut list = Vec::new();
    for kind in ["read", "overwrite"] {
        for depth in [32, 128] {
            let cell = format!("{kind}/{depth}");
            let ours = results.median(&cell, System::Dbs, |f| f.iops);
            let best = of_peers(results, &cell, false, |f| f.iops);
            let ratio = ours.zip(best).map(|(ours, best)| ours / best);
            let what = format!("random {kind}, QD {depth}, IOPS: of the best peer's");
            list.push(claim(what, true, OVER_PEER, ratio));
            let ratio = over(results, (&cell, System::Dbs), (&cell, System::Bare), |f| f.iops);
            let what = format!("random {kind}, QD {depth}, IOPS: of the bare file's");
            list.push(claim(what, true, OF_BARE, ratio));
        }
        let cell = format!("{kind}/1");
        let [ours, bare] =
            [System::Dbs, System::Bare].map(|system| results.median(&cell, system, |f| f.p50_us));
        let more = ours.zip(bare).map(|(ours, bare)| ours - bare);
        let what = format!("random {kind}, QD 1, p50: more than the bare file's, µs");
        list.push(claim(what, false, MORE_LATENCY, more));
        let ours = results.median(&cell, System::Dbs, |f| f.p99_us);
        let best = of_peers(results, &cell, true, |f| f.p99_us);
        let ratio = ours.zip(best).map(|(ours, best)| ours / best);
        let what = format!("random {kind}, QD 1, p99: of the best peer's");
        list.push(claim(what, false, 1.0, ratio));
    }
    list
}

fn first(results: &Results) -> Vec<Claim> {
    let overwrite = ("first/overwrite", System::Dbs);
    let ratio = |cell: &str, figure: fn(&Figures) -> f64| {
        over(results, (cell, System::Dbs), overwrite, figure)
    };
    let mut list = Vec::new();
    for (cell, what) in [
        ("first/written", "first write (medium written before)"),
        ("first/sparse", "first write (sparse file)"),
        ("after/written", "write right after a snapshot (medium written before)"),
        ("after/sparse", "write right after a snapshot (sparse file)"),
    ] {
        let title = format!("{what}, IOPS: of overwrite's");
        list.push(claim(title, true, OF_OVERWRITE, ratio(cell, |f| f.iops)));
        if cell.starts_with("after") {
            let title = format!("{what}, p99: of overwrite's");
            list.push(claim(title, false, OVERWRITE_P99, ratio(cell, |f| f.p99_us)));
        }
    }
    let depths: Option<Vec<_>> = DEPTHS
        .iter()
        .map(|depth| results.median(&depth::cell(*depth), System::Dbs, |f| f.iops))
        .collect();
    let apart = depths.map(|rates| {
        let worst = rates.iter().copied().fold(f64::INFINITY, f64::min);
        1.0 - worst / rates.iter().copied().fold(0.0, f64::max)
    });
    list.push(claim("chain depths 1 to 256: best to worst IOPS", false, DEPTHS_APART, apart));
    list
}

fn against_bare(results: &Results) -> Vec<Claim> {
    let ratio = |cell: &str, figure: fn(&Figures) -> f64| {
        over(results, (cell, System::Dbs), (cell, System::Bare), figure)
    };
    let mut list = Vec::new();
    for depth in [1, 16] {
        let value = ratio(&format!("flushed/{depth}"), |f| f.iops);
        let what = format!("write + flush each, QD {depth}, IOPS: of the bare file's");
        list.push(claim(what, true, FLUSHED_OF_BARE, value));
    }
    for kind in ["read", "write"] {
        let value = ratio(&format!("sequential/{kind}"), |f| f.mb_per_s);
        let what = format!("1 MiB sequential {kind}, MB/s: of the bare file's");
        list.push(claim(what, true, SEQUENTIAL_OF_BARE, value));
    }
    list
}

fn cpu(results: &Results) -> Vec<Claim> {
    let cells = [("read/32", "random read"), ("overwrite/32", "overwrite")];
    let claims = cells.map(|(cell, what)| {
        let ours = results.median(cell, System::Dbs, Figures::cpu_per_100k);
        let best = of_peers(results, cell, true, Figures::cpu_per_100k);
        let ratio = ours.zip(best).map(|(ours, best)| ours / best);
        let what = format!("server CPU per request, {what}, QD 32: of the best peer's");
        claim(what, false, CPU_OF_PEER, ratio)
    });
    claims.into()
}

fn checksums(results: &Results) -> Vec<Claim> {
    let claims = CHECKED.iter().map(|load| {
        let over = results.round_by_round(load.cell, System::Dbs, System::Unchecked, |f| f.iops);
        let what = format!("checksums, {}: IOPS with over without", load.title);
        claim(what, true, WITH_CHECKSUMS, over.map(|over| over.median))
    });
    claims.collect()
}

fn beside(results: &Results) -> Vec<Claim> {
    let median = |name: &str| results.other(name).map(|spread| spread.median);
    vec![
        claim(beside::SNAPSHOT_GAP, false, STALL_MS, median(beside::SNAPSHOT_GAP)),
        claim(beside::SNAPSHOT_LATENCY, false, STALL_MS, median(beside::SNAPSHOT_LATENCY)),
        claim(beside::CLONE_GAP, false, STALL_MS, median(beside::CLONE_GAP)),
        claim(beside::CLONE_LATENCY, false, STALL_MS, median(beside::CLONE_LATENCY)),
        claim(beside::DELETE_RATIO, true, DELETE_OF_BEFORE, median(beside::DELETE_RATIO)),
    ]
}
