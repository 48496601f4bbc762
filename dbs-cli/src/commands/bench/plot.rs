//! The report as a picture: one panel for each group of tests, in SVG.

use super::table::micros;
use dbs_bench::{Group, Measurement, Operation, Pattern, Report};
use dbs_core::format_size;

/// Pixels.
const PANEL: (f64, f64) = (500.0, 210.0);
const MARGIN: f64 = 24.0;
const HEADER: f64 = 64.0;
/// In a panel: where bars begin, how long they can be, and where the first one is.
const BARS_LEFT: f64 = 145.0;
const BARS_LENGTH: f64 = 250.0;
const BARS_TOP: f64 = 42.0;
const ROW: f64 = 30.0;
const BAR: f64 = 18.0;
/// An entry of a legend.
const LEGEND: f64 = 74.0;

const READ: &str = "#3a6ea5";
const WRITE: &str = "#d07c2e";
const PERCENTILES: [(&str, &str); 3] =
    [("median", "#2b8a57"), ("99 %", "#c9a227"), ("99.9 %", "#b83a3a")];

/// Draws the report.
pub fn svg(report: &Report) -> String {
    let panels: Vec<_> = Group::ALL
        .into_iter()
        .filter_map(|group| {
            let of_group = report.results.iter().filter(|result| result.group == group);
            let results: Vec<_> = of_group.filter(|result| result.iops.is_some()).collect();
            (!results.is_empty()).then(|| panel(group, &results))
        })
        .collect();
    let columns = panels.len().clamp(1, 2);
    let rows = panels.len().div_ceil(columns);
    let width = MARGIN + columns as f64 * (PANEL.0 + MARGIN);
    let height = HEADER + rows as f64 * (PANEL.1 + MARGIN);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"Helvetica, Arial, sans-serif\" \
         font-size=\"12\" fill=\"#222\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    header(&mut out, report);
    for (index, panel) in panels.iter().enumerate() {
        let x = MARGIN + (index % columns) as f64 * (PANEL.0 + MARGIN);
        let y = HEADER + (index / columns) as f64 * (PANEL.1 + MARGIN);
        out += &format!("<g transform=\"translate({x} {y})\">\n{panel}</g>\n");
    }
    legend(&mut out, width - 2.0 * LEGEND - MARGIN, 28.0, &[("read", READ), ("write", WRITE)]);
    out + "</svg>\n"
}

fn header(out: &mut String, report: &Report) {
    let target = &report.target;
    let size = format_size(target.length);
    let title = format!("dbs bench: {}", shortened(&target.name));
    let facts = format!(
        "{size} through {}, {} s a test, dbs {}",
        target.driver, report.test_seconds, report.version
    );
    *out += &text(MARGIN, 28.0, "start", &title, " font-size=\"17\" font-weight=\"bold\"");
    *out += &text(MARGIN, 47.0, "start", &facts, " fill=\"#555\"");
}

/// The end of a long name, which says most.
fn shortened(name: &str) -> String {
    const MOST: usize = 60;
    let length = name.chars().count();
    if length <= MOST {
        return name.to_owned();
    }
    name.chars().skip(length - MOST).fold("...".to_owned(), |short, c| short + &c.to_string())
}

fn panel(group: Group, results: &[&Measurement]) -> String {
    let depth = results.first().map_or(0, |result| result.depth);
    let iops = |result: &Measurement| result.iops.unwrap_or(0.0);
    match group {
        Group::Iops => {
            bars(&format!("Requests a second, 4 KiB, {depth} in flight"), "IOPS", results, iops)
        }
        Group::Bandwidth => {
            bars(&format!("Bandwidth, {depth} in flight"), "MB/s", results, |result| {
                result.bandwidth.unwrap_or(0.0) / 1e6
            })
        }
        Group::Latency => percentiles("Latency, 4 KiB, one in flight", results),
        Group::Space => bars(
            &format!("Random writes by what was there, 4 KiB, {depth} in flight"),
            "IOPS",
            results,
            iops,
        ),
        Group::Flush => bars("Writes with a flush each, 4 KiB", "IOPS", results, iops),
        Group::Chain => bars(
            &format!("Random reads through snapshots, 4 KiB, {depth} in flight"),
            "IOPS",
            results,
            iops,
        ),
    }
}

/// What a row of a panel is.
fn label(result: &Measurement) -> String {
    let pattern = match result.pattern {
        Pattern::Random | Pattern::RandomOnce => "random",
        Pattern::Sequential | Pattern::SequentialOnce => "sequential",
    };
    let operation = if result.operation == Operation::Read { "read" } else { "write" };
    match result.group {
        Group::Iops | Group::Latency => format!("{pattern} {operation}"),
        Group::Bandwidth => {
            format!(
                "{pattern} {operation}, {}",
                format_size(result.block_size.into()).replace(".0", "")
            )
        }
        Group::Space => result.name.replace('-', " "),
        Group::Flush => format!("{} in flight", result.depth),
        Group::Chain => match result.chain_depth.unwrap_or(1) {
            1 => "no snapshot".to_owned(),
            depth => format!("{} snapshots", depth - 1),
        },
    }
}

fn color(result: &Measurement) -> &'static str {
    if result.operation == Operation::Read { READ } else { WRITE }
}

fn bars(
    title: &str,
    unit: &str,
    results: &[&Measurement],
    value: impl Fn(&Measurement) -> f64,
) -> String {
    let highest = results.iter().map(|result| value(result)).fold(0.0, f64::max);
    let step = nice_step(highest);
    let end = (highest / step).ceil().max(1.0) * step;
    let x = |value: f64| BARS_LEFT + value / end * BARS_LENGTH;
    let mut out = heading(title);
    let bottom = BARS_TOP + results.len() as f64 * ROW;
    let ticks = (0..=(end / step).round() as u32).map(|tick| f64::from(tick) * step);
    axis(&mut out, bottom, unit, ticks.map(|tick| (x(tick), short(tick))));
    for (row, result) in results.iter().enumerate() {
        let y = BARS_TOP + row as f64 * ROW;
        let (end, color) = (x(value(result)), color(result));
        let (top, width, middle) = (y + 2.0, (end - BARS_LEFT).max(1.0), y + 15.0);
        out += &format!(
            "<rect x=\"{BARS_LEFT}\" y=\"{top}\" width=\"{width:.1}\" height=\"{BAR}\" \
             fill=\"{color}\"/>\n"
        );
        out += &text(BARS_LEFT - 8.0, middle, "end", &label(result), "");
        out += &text(end + 6.0, middle, "start", &exact(value(result)), " fill=\"#444\"");
    }
    out
}

/// A line from the median to the last percentile of each, on a logarithmic axis.
fn percentiles(title: &str, results: &[&Measurement]) -> String {
    let of = |result: &Measurement| {
        let latency = result.latency;
        latency.map_or([0; 3], |latency| [latency.p50_ns, latency.p99_ns, latency.p999_ns])
    };
    let all = || results.iter().flat_map(|result| of(result)).map(|ns| (ns.max(1) as f64).log10());
    let (low, high) = (all().fold(f64::MAX, f64::min).floor(), all().fold(0.0, f64::max).ceil());
    let high = high.max(low + 1.0);
    let x = |ns: f64| BARS_LEFT + (ns.log10() - low) / (high - low) * BARS_LENGTH;
    let mut out = heading(title);
    let bottom = BARS_TOP + results.len() as f64 * ROW;
    let ticks = (low as i32..=high as i32).map(|power| 10f64.powi(power));
    axis(&mut out, bottom, "us, logarithmic", ticks.map(|ns| (x(ns), short(ns / 1e3))));
    for (row, result) in results.iter().enumerate() {
        let (middle, values) = (BARS_TOP + row as f64 * ROW + 11.0, of(result));
        let (from, to) = (x(values[0].max(1) as f64), x(values[2].max(1) as f64));
        out += &format!(
            "<line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{middle}\" y2=\"{middle}\" \
             stroke=\"#bbb\" stroke-width=\"4\"/>\n"
        );
        for (ns, (_, color)) in values.iter().zip(PERCENTILES) {
            let at = x((*ns).max(1) as f64);
            out +=
                &format!("<circle cx=\"{at:.1}\" cy=\"{middle}\" r=\"5.5\" fill=\"{color}\"/>\n");
        }
        out += &text(BARS_LEFT - 8.0, middle + 4.0, "end", &label(result), "");
        let figures = values.map(micros).join(" / ");
        out += &text(PANEL.0, middle + 4.0, "end", &figures, " font-size=\"10\" fill=\"#444\"");
    }
    legend(&mut out, BARS_LEFT, bottom + 48.0, &PERCENTILES);
    out
}

fn heading(title: &str) -> String {
    text(0.0, 16.0, "start", title, " font-size=\"13\" font-weight=\"bold\"")
}

/// The line below the rows, with lines up from each tick.
fn axis(out: &mut String, bottom: f64, unit: &str, ticks: impl Iterator<Item = (f64, String)>) {
    let top = BARS_TOP - 4.0;
    for (x, name) in ticks {
        *out += &format!(
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"#e2e2e2\"/>\n"
        );
        *out += &text(x, bottom + 14.0, "middle", &name, " font-size=\"10\" fill=\"#555\"");
    }
    let end = BARS_LEFT + BARS_LENGTH;
    *out += &format!(
        "<line x1=\"{BARS_LEFT}\" x2=\"{end}\" y1=\"{bottom}\" y2=\"{bottom}\" stroke=\"#888\"/>\n"
    );
    let middle = BARS_LEFT + BARS_LENGTH / 2.0;
    *out += &text(middle, bottom + 29.0, "middle", unit, " font-size=\"11\" fill=\"#555\"");
}

fn legend(out: &mut String, x: f64, y: f64, entries: &[(&str, &str)]) {
    let mut x = x;
    for (name, color) in entries {
        let top = y - 9.0;
        *out += &format!(
            "<rect x=\"{x}\" y=\"{top}\" width=\"10\" height=\"10\" rx=\"2\" fill=\"{color}\"/>\n"
        );
        *out += &text(x + 15.0, y, "start", name, " font-size=\"11\"");
        x += LEGEND;
    }
}

/// A text; `more` are further attributes.
fn text(x: f64, y: f64, anchor: &str, content: &str, more: &str) -> String {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{more}>{content}</text>\n")
}

/// The distance of ticks that gives about five up to `highest`.
fn nice_step(highest: f64) -> f64 {
    let rough = (highest / 5.0).max(1e-3);
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= rough);
    factor.unwrap_or(10.0) * power
}

/// A number on an axis.
fn short(value: f64) -> String {
    let digits = |value: f64| {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match value {
        v if v >= 1e6 => format!("{}M", digits(v / 1e6)),
        v if v >= 1e3 => format!("{}k", digits(v / 1e3)),
        v => digits(v),
    }
}

/// A number at a bar, with its thousands apart.
fn exact(value: f64) -> String {
    if value < 100.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        for (highest, step) in [(0.0, 0.001), (9.0, 2.0), (51_234.0, 20_000.0), (1.1e6, 250_000.0)]
        {
            assert!(
                (nice_step(highest) / step - 1.0).abs() < 1e-9,
                "{highest}: {}",
                nice_step(highest)
            );
        }
        for (value, name) in [(0.0, "0"), (0.5, "0.5"), (2500.0, "2.5k"), (1e6, "1M")] {
            assert_eq!(short(value), name);
        }
        for (value, name) in
            [(1.25, "1.2"), (999.6, "1,000"), (51_234.0, "51,234"), (1e6, "1,000,000")]
        {
            assert_eq!(exact(value), name);
        }
        assert_eq!(shortened(&"ab".repeat(40)).len(), 63);
        assert!(text(0.0, 0.0, "start", "a<&", "").contains("a&lt;&amp;"));
    }
}
