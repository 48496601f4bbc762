//! The report for people.

use crate::output::Table;
use dbs_bench::{AFTER_SNAPSHOT, CpuOf, FIRST_WRITE, Measurement, OVERWRITE, Report};
use dbs_core::format_size;

/// All of it.
pub fn text(report: &Report) -> String {
    let target = &report.target;
    let mut text = format!(
        "{}: {} measured through {}, {} s a test, seed {}\n\n",
        target.name,
        format_size(target.length),
        target.driver,
        report.test_seconds,
        report.seed
    );
    text += &table(report);
    let remarks = remarks(report);
    if !remarks.is_empty() {
        text += &format!("\n{}\n", remarks.join("\n"));
    }
    text
}

fn table(report: &Report) -> String {
    let mut headings = vec![
        "TEST",
        ">BLOCK",
        ">QD",
        ">IOPS",
        ">MB/s",
        ">MEAN us",
        ">P50 us",
        ">P99 us",
        ">P99.9 us",
    ];
    let has_cpu = report.results.iter().any(|result| result.cpu_per_100k().is_some());
    if has_cpu {
        headings.push(">CPU s/100k");
    }
    let mut table = Table::new(&headings);
    for result in &report.results {
        let (Some(iops), Some(bandwidth)) = (result.iops, result.bandwidth) else { continue };
        let Some(latency) = result.latency else { continue };
        let block = format!("{} KiB", result.block_size >> 10);
        let mut row = vec![
            result.name.to_owned(),
            block,
            result.depth.to_string(),
            format!("{iops:.0}"),
            format!("{:.1}", bandwidth / 1e6),
        ];
        let times = [latency.mean_ns, latency.p50_ns, latency.p99_ns, latency.p999_ns];
        row.extend(times.map(micros));
        if has_cpu {
            let cpu = result.cpu_per_100k();
            row.push(cpu.map(|cpu| format!("{cpu:.2}")).unwrap_or_default());
        }
        table.row(row);
    }
    table.text()
}

/// Nanoseconds as microseconds, with three digits at least where there are few.
pub fn micros(ns: u64) -> String {
    let us = ns as f64 / 1e3;
    if us < 100.0 { format!("{us:.1}") } else { format!("{us:.0}") }
}

/// What the figures mean, and what is missing among them.
fn remarks(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(ratio(report, FIRST_WRITE, OVERWRITE, "first write"));
    lines.extend(ratio(report, AFTER_SNAPSHOT, OVERWRITE, "write after a snapshot"));
    let chains: Vec<_> = report.results.iter().filter(|r| r.chain_depth.is_some()).collect();
    if let (Some(first), Some(last)) =
        (chains.first(), chains.iter().rev().find(|result| result.iops.is_some()))
    {
        lines.extend(ratio(report, last.name, first.name, last.name));
    }
    lines.extend(report.target.cpu_of.map(|cpu| match cpu {
        CpuOf::Server => "CPU: of the server, for 100,000 requests".to_owned(),
        CpuOf::Process => "CPU: of this process, load included, for 100,000 requests".to_owned(),
    }));
    lines.extend(skipped(&report.results));
    lines.extend(report.notes.iter().map(|note| format!("note: {note}")));
    lines
}

fn ratio(report: &Report, name: &str, of: &str, what: &str) -> Option<String> {
    let iops = |name| report.results.iter().find(|result| result.name == name)?.iops;
    let (value, base) = (iops(name)?, iops(of)?);
    (name != of && base > 0.0).then(|| format!("{what}: {:.2} of {of}", value / base))
}

/// Tests that did not run, by reason.
fn skipped(results: &[Measurement]) -> Vec<String> {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for result in results {
        let Some(why) = &result.skipped else { continue };
        match reasons.iter_mut().find(|(reason, _)| reason == why) {
            Some((_, names)) => names.push(result.name),
            None => reasons.push((why, vec![result.name])),
        }
    }
    let line =
        |(why, names): (&str, Vec<&str>)| format!("not measured: {}: {why}", names.join(", "));
    reasons.into_iter().map(line).collect()
}
