//! What commands print, as upstream's do: JSON and tables on the standard output, the reason of a
//! failure in one line on the standard error output.

use dbs_core::Error;
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, Write};

/// A command that failed.
#[derive(Debug)]
pub struct Failure {
    /// What goes to the standard output.
    printed: Option<String>,
    message: String,
    /// Upstream has it in the message at times, and beside it mostly.
    error: Option<String>,
}

impl Failure {
    /// `doing` failed for this reason, which stands beside it.
    pub fn beside(doing: &str, error: impl Display) -> Self {
        Self { printed: None, message: doing.to_owned(), error: Some(error.to_string()) }
    }

    /// The same with the reason behind it.
    pub fn behind(doing: &str, error: impl Display) -> Self {
        Self { printed: None, message: format!("{doing}: {error}"), error: None }
    }

    /// The reason alone, which goes to the standard output too: Longhorn's manager reads it there.
    pub fn printed(error: Error) -> Self {
        let message = error.to_string();
        Self { printed: Some(message.clone()), message, error: None }
    }

    /// Prints it.
    pub fn report(&self) {
        if let Some(text) = &self.printed {
            // Nowhere to report that to.
            let _ = print(text);
        }
        // Nowhere to report that to.
        let _ = writeln!(io::stderr(), "{}", self.line(jiff::Timestamp::now()));
    }

    fn line(&self, now: impl Display) -> String {
        let line = format!("time=\"{now}\" level=fatal msg={:?}", self.message);
        match &self.error {
            Some(error) => format!("{line} error={error:?}"),
            None => line,
        }
    }
}

/// Prints lines.
///
/// # Errors
/// That it could not.
pub fn print(text: &str) -> Result<(), Error> {
    writeln!(io::stdout(), "{text}").map_err(|e| Error::io(e, "printing"))
}

/// Prints a value as JSON.
///
/// # Errors
/// That it could not.
pub fn print_json(value: &impl Serialize) -> Result<(), Error> {
    let text = json(value).map_err(|e| Error::io(e.into(), "encoding JSON"))?;
    print(&text)
}

/// Prints a value as JSON on one line.
///
/// # Errors
/// That it could not.
pub fn print_line(value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string(value).map_err(|e| Error::io(e.into(), "encoding JSON"))?;
    print(&escape(&text))
}

/// JSON as Go indents and escapes it.
pub fn json(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut text = Vec::new();
    let format = serde_json::ser::PrettyFormatter::with_indent(b"\t");
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, format))?;
    // The serializer writes UTF-8.
    Ok(escape(&String::from_utf8_lossy(&text)))
}

/// Escapes what Go does in JSON.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    // These characters occur in nothing but strings.
    for c in text.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                escaped += &format!("\\u{:04x}", u32::from(c));
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// Columns, each as wide as its longest cell and one space; the last one as it is.
pub fn table(rows: &[[String; 3]]) -> String {
    let width = |column: usize| {
        let widths = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        widths.max().unwrap_or(0) + 1
    };
    let (first, second) = (width(0), width(1));
    let line = |[a, b, c]: &[String; 3]| format!("{a:first$}{b:second$}{c}");
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn json_is_indented_and_escaped_as_go_does() {
        let value = BTreeMap::from([("a<b", vec!["&\u{2028}\"\n"]), ("c", vec![])]);
        let text = json(&value).unwrap();
        assert_eq!(
            text,
            "{\n\t\"a\\u003cb\": [\n\t\t\"\\u0026\\u2028\\\"\\n\"\n\t],\n\t\"c\": []\n}"
        );
    }

    #[test]
    fn columns_are_as_wide_as_they_must() {
        let row = |a: &str, b: &str, c: &str| [a.to_owned(), b.to_owned(), c.to_owned()];
        let text = table(&[
            row("ADDRESS", "MODE", "CHAIN"),
            row("tcp://a:1", "RW", "[x y]"),
            row("b", "ERR", ""),
        ]);
        assert_eq!(text, "ADDRESS   MODE CHAIN\ntcp://a:1 RW   [x y]\nb         ERR  ");
    }

    #[test]
    fn a_failure_is_a_line() {
        let failure = Failure::beside("Error running ls command", "a \"b\"\n");
        let line =
            "time=\"0\" level=fatal msg=\"Error running ls command\" error=\"a \\\"b\\\"\\n\"";
        assert_eq!(failure.line(0), line);
        let failure = Failure::behind("Error running info command", "x");
        assert_eq!(failure.line(0), "time=\"0\" level=fatal msg=\"Error running info command: x\"");
    }
}
