//! Tables, sizes and times for people; JSON for programs.

use dbs_core::{Error, Result, format_size, is_hidden};
use dbs_frontend::output_was_closed;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use nix::errno::Errno;
use serde::Serialize;
use std::io::{self, Write};

/// How errors of writing our own output begin.
pub const STDOUT: &str = "writing the output";

/// Whether what is written to the standard output gets anywhere.
///
/// # Errors
/// It was closed when the process began.
pub fn check_open() -> io::Result<()> {
    match output_was_closed() {
        true => Err(Errno::EBADF.into()),
        false => Ok(()),
    }
}

/// Prints text on the standard output.
///
/// # Errors
/// `Io`, beginning with [`STDOUT`].
pub fn print(text: &str) -> Result<()> {
    check_open().map_err(|e| Error::io(e, STDOUT))?;
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| Error::io(e, STDOUT))
}

/// Prints one JSON document.
///
/// # Errors
/// As [`print()`].
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::io(io::Error::other(e), "encoding the result"))?;
    print(&(text + "\n"))
}

/// Says on the standard error output what went wrong without ending the command.
pub fn warn(text: &str) {
    // Nowhere to report a failure to.
    let _ = writeln!(io::stderr(), "dbs: warning: {}", printable(text));
}

/// A table whose columns are as wide as their widest cell.
pub struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings; one that starts with `>` heads a column of numbers.
    pub fn new(headings: &[&str]) -> Self {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        let row = headings.iter().map(|h| h.trim_start_matches('>').to_owned()).collect();
        Self { right, rows: vec![row] }
    }

    /// Appends a row with one cell for each heading.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.right.len());
        self.rows.push(cells.into_iter().map(|cell| printable(&cell)).collect());
    }

    /// The whole table.
    pub fn text(&self) -> String {
        let mut widths = vec![0; self.right.len()];
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).zip(&self.right).map(|((cell, width), right)| {
                if *right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// Facts about one thing, one a line.
pub fn facts(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:<width$}  {}\n", printable(value))).collect()
}

/// Bytes for people, with the exact number where that says more.
pub fn exact_size(bytes: u64) -> String {
    if bytes < 1024 {
        format_size(bytes)
    } else {
        format!("{} ({bytes} bytes)", format_size(bytes))
    }
}

/// Local time in RFC 3339, seconds; nothing if it is 0, which says that it is not known.
pub fn time(ns: u64) -> String {
    if ns == 0 {
        return "-".to_owned();
    }
    let seconds = i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX);
    match Timestamp::from_second(seconds) {
        Ok(time) => time.to_zoned(TimeZone::system()).strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
        Err(_) => format!("{seconds} s after 1970"),
    }
}

/// Text without anything that moves a terminal's cursor, or turns what stands beside it.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_hidden(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["NAME", ">SIZE", "X"]);
        table.row(vec!["ä".into(), "10.0 GiB".into(), String::new()]);
        table.row(vec!["longer\u{1b}".into(), "1 B".into(), "y".into()]);
        let text = table.text();
        assert_eq!(text, "NAME         SIZE  X\nä        10.0 GiB\nlonger\u{fffd}       1 B  y\n");
    }

    #[test]
    fn times_are_rfc3339() {
        let text = time(1_700_000_000_999_999_999);
        assert_eq!(text.len(), "2023-11-14T22:13:20+00:00".len(), "{text}");
        assert!(text.starts_with("2023-11-1"), "{text}");
        assert!(time(u64::MAX).starts_with("2554-"));
    }

    #[test]
    fn sizes_say_both() {
        assert_eq!(exact_size(512), "512 B");
        assert_eq!(exact_size(4096), "4.0 KiB (4096 bytes)");
    }
}
