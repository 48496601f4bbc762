//! Why reads failed: for people who see no more than an input/output error.

use jiff::Timestamp;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Lines that are kept.
const LINES: usize = 200;
/// Bytes of a line.
const LENGTH: usize = 2000;
/// The same is said once in this time: whoever reads a damaged block tries again and again.
const REPEAT: Duration = Duration::from_secs(60);

/// The last errors.
pub struct Log {
    warn: Box<dyn Fn(&str) + Send + Sync>,
    lines: Mutex<VecDeque<Line>>,
    begun: SystemTime,
}

struct Line {
    text: String,
    at: Instant,
    time: Timestamp,
}

impl Log {
    /// An empty one; `warn` is told each line, too.
    pub fn new(warn: Box<dyn Fn(&str) + Send + Sync>) -> Self {
        Self { warn, lines: Mutex::default(), begun: SystemTime::now() }
    }

    fn lines(&self) -> MutexGuard<'_, VecDeque<Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an error, unless it was noted a moment ago.
    pub fn add(&self, text: &str) {
        let plain = |c: char| if dbs_core::is_hidden(c) { '\u{fffd}' } else { c };
        let text: String = text.chars().take(LENGTH).map(plain).collect();
        let mut lines = self.lines();
        if lines.iter().any(|line| line.text == text && line.at.elapsed() < REPEAT) {
            return;
        }
        if lines.len() >= LINES {
            lines.pop_front();
        }
        lines.push_back(Line { text: text.clone(), at: Instant::now(), time: Timestamp::now() });
        drop(lines);
        (self.warn)(&text);
    }

    /// All lines, each with its time.
    pub fn text(&self) -> Vec<u8> {
        let line =
            |line: &Line| format!("{} {}\n", line.time.strftime("%Y-%m-%dT%H:%M:%SZ"), line.text);
        self.lines().iter().map(line).collect::<String>().into_bytes()
    }

    /// When the last line was written.
    pub fn written(&self) -> SystemTime {
        self.lines().back().map_or(self.begun, |line| line.time.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_same_is_said_once_and_little_is_kept() {
        let said = Arc::new(Mutex::new(0));
        let count = Arc::clone(&said);
        let log = Log::new(Box::new(move |_| *count.lock().unwrap() += 1));
        for _ in 0..3 {
            log.add("one\u{1b}");
        }
        assert_eq!((*said.lock().unwrap(), log.lines().len()), (1, 1));
        assert!(String::from_utf8(log.text()).unwrap().ends_with("Z one\u{fffd}\n"));
        for number in 0..2 * LINES {
            log.add(&number.to_string());
        }
        log.add(&"x".repeat(1 << 20));
        assert_eq!(log.lines().len(), LINES);
        assert!(log.text().len() < LINES * (LENGTH + 30));
    }
}
