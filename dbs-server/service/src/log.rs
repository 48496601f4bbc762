//! One-line structured log on the standard error output: `key=value` pairs, times in UTC.

use nix::poll::{PollFd, PollFlags, PollTimeout};
use std::fmt::{Display, Write as _};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
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
    LOG.send(line, std::io::stderr().lock());
}

/// A line has at most so many bytes: a pipe takes them whole or, if its reader stands still, says so before.
const LINE_MAX_BYTES: usize = 4096;

/// Whether writing a line would wait, as who should read does not. A closed one does not wait: writing fails then.
pub fn would_wait(to: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(to.as_fd(), PollFlags::POLLOUT)];
    nix::poll::poll(&mut fds, PollTimeout::ZERO) == Ok(0)
}

static LOG: Log = Log { left_out: AtomicU64::new(0) };

/// What became of lines.
struct Log {
    /// Lines since the last one that was written.
    left_out: AtomicU64,
}

impl Log {
    /// Writes a line, or leaves it out if that would wait: a thread that logs may be one that serves everybody. The next line
    /// says how many were left out.
    fn send(&self, mut line: String, mut to: impl io::Write + AsFd) {
        if would_wait(&to) {
            self.left_out.fetch_add(1, Relaxed);
            return;
        }
        let left_out = self.left_out.swap(0, Relaxed);
        let more = if left_out > 0 { format!(" left_out={left_out}\n") } else { "\n".to_owned() };
        line.truncate(line.floor_char_boundary(LINE_MAX_BYTES - more.len()));
        line.push_str(&more);
        // One call, so that lines of several threads do not mix; nowhere to report a failure to.
        let _lost = to.write_all(line.as_bytes());
    }
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
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn a_line_stays_a_line() {
        let text = line(12_345, "info", "ready", &[("a", &1), ("b", &"x y"), ("c", &"\n=")]);
        assert_eq!(text, "time=12.345 level=info event=ready a=1 b=\"x y\" c=\"\\n=\"");
    }

    /// Found by review: a server whose log nobody read served nobody any more.
    #[test]
    fn lines_that_nobody_reads_are_left_out_and_counted() -> io::Result<()> {
        let (mut reader, writer) = io::pipe()?;
        let (log, lines) = (Log { left_out: AtomicU64::new(0) }, 100);
        let (done, is_done) = std::sync::mpsc::channel();
        let sender = std::thread::spawn(move || {
            for _ in 0..lines {
                log.send("x".repeat(5000), &writer);
            }
            let _ = done.send(());
            (log, writer)
        });
        is_done.recv_timeout(std::time::Duration::from_secs(60)).expect("it waits for nobody");
        let (log, writer) = sender.join().expect("it has ended");
        let mut page = vec![0; LINE_MAX_BYTES];
        reader.read_exact(&mut page)?;
        assert!(page.ends_with(b"x\n"));
        log.send("next".to_owned(), &writer);
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest)?;
        let (whole, last) = (rest.len() / LINE_MAX_BYTES, rest.lines().last());
        let left_out = lines - 1 - whole;
        assert_eq!(last, Some(format!("next left_out={left_out}").as_str()));
        assert!(left_out > 0);
        Ok(())
    }
}
