//! Markdown tables, and figures in them.

use crate::Outcome;
use serde::Serialize;
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

/// A table, printed when it is dropped or finished.
#[derive(Debug)]
pub struct Table {
    columns: usize,
    lines: Vec<String>,
}

impl Table {
    /// A table with a heading and columns.
    #[must_use]
    pub fn new(title: &str, columns: &[&str]) -> Self {
        let rule = vec!["---"; columns.len()].join(" | ");
        let lines = vec![
            format!("## {title}\n"),
            format!("| {} |", columns.join(" | ")),
            format!("| {rule} |"),
        ];
        Self { columns: columns.len(), lines }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If it has not as many cells as the table has columns: a bug.
    pub fn row(&mut self, cells: &[&dyn Display]) {
        assert_eq!(cells.len(), self.columns);
        let cells: Vec<_> = cells.iter().map(ToString::to_string).collect();
        self.lines.push(format!("| {} |", cells.join(" | ")));
    }

    /// The Markdown.
    #[must_use]
    pub fn finish(self) -> String {
        self.lines.join("\n") + "\n"
    }
}

/// A document with other text between the lines `<!-- MARK:begin -->` and `<!-- MARK:end -->`; none
/// if it has not both.
fn replace_between(document: &str, mark: &str, text: &str) -> Option<String> {
    let [begin, end] = ["begin", "end"].map(|side| format!("<!-- {mark}:{side} -->\n"));
    let (before, rest) = document.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}\n{}\n\n{end}{after}", text.trim()))
}

/// Writes what was measured, run by run, as JSON.
///
/// # Errors
/// If the file cannot be written.
pub fn write_json(path: &Path, runs: &impl Serialize) -> Outcome<()> {
    let text = serde_json::to_string_pretty(runs)?;
    Ok(std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))?)
}

/// Puts a text into a document, between its marks.
///
/// # Errors
/// If the document or its marks are not there, or it cannot be written.
pub fn rewrite(path: &Path, mark: &str, text: &str) -> Outcome<()> {
    let old = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let new = replace_between(&old, mark, text)
        .ok_or_else(|| format!("{} has no marks of {mark}", path.display()))?;
    std::fs::write(path, new).map_err(|e| format!("{}: {e}", path.display()).into())
}

/// A time in the unit that suits it.
#[must_use]
pub fn time(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.001 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.0} µs", s * 1e6),
    }
}

/// Bytes as MiB.
#[must_use]
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// Median, 99th percentile and maximum of some times.
#[must_use]
pub fn spread(mut times: Vec<Duration>) -> [Duration; 3] {
    times.sort_unstable();
    let at = |share: f64| {
        let index = (times.len() as f64 * share) as usize;
        times.get(index.min(times.len().saturating_sub(1))).copied().unwrap_or_default()
    };
    [at(0.5), at(0.99), at(1.0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let document = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n";
        let new = replace_between(document, "x", "new\n").unwrap();
        assert_eq!(new, "a\n<!-- x:begin -->\n\nnew\n\n<!-- x:end -->\nb\n");
        assert_eq!(replace_between(&new, "x", "new").as_ref(), Some(&new));
        assert_eq!(replace_between(document, "y", "new"), None);
        assert_eq!(replace_between("<!-- x:begin -->\n", "x", "new"), None);
    }
}
