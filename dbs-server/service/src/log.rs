//! One-line structured log on the standard error output: `key=value` pairs, times in UTC.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// Logs something that should be seen in normal operation.
pub fn info(event: &str, fields: &[(&str, &dyn Display)]) {
    write("info", event, fields);
}

/// Logs something that went wrong and was dealt with.
pub fn warn(event: &str, fields: &[(&str, &dyn Display)]) {
    write("warn", event, fields);
}

/// Logs something that went wrong and stays wrong.
pub fn error(event: &str, fields: &[(&str, &dyn Display)]) {
    write("error", event, fields);
}

fn write(level: &str, event: &str, fields: &[(&str, &dyn Display)]) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let line = line(now.as_millis(), level, event, fields);
    // One call, so that lines of several threads do not mix; nowhere to report a failure to.
    let _lost = std::io::stderr().write_all(line.as_bytes());
}

fn line(now_ms: u128, level: &str, event: &str, fields: &[(&str, &dyn Display)]) -> String {
    let mut line = format!("time={}.{:03}", now_ms / 1000, now_ms % 1000);
    let _ = write!(line, " level={level} event={event}");
    for (key, value) in fields {
        let value = value.to_string();
        let plain = !value.is_empty()
            && value.chars().all(|c| !c.is_whitespace() && !c.is_control() && c != '"' && c != '=');
        let _ =
            if plain { write!(line, " {key}={value}") } else { write!(line, " {key}={value:?}") };
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stays_a_line() {
        let text = line(12_345, "info", "ready", &[("a", &1), ("b", &"x y"), ("c", &"\n=")]);
        assert_eq!(text, "time=12.345 level=info event=ready a=1 b=\"x y\" c=\"\\n=\"\n");
    }
}
