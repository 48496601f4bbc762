//! Exit codes, and the way errors leave.

use crate::output::printable;
use dbs_control::Failure;
use dbs_core::{Error, ErrorKind};
use serde_json::json;
use std::error::Error as _;
use std::io::{self, Write};
use std::process::ExitCode;

/// Something failed.
const FAILED: u8 = 1;
/// The arguments are wrong.
pub const USAGE: u8 = 2;
/// A check found leaks, or a look around a problem.
pub const FINDINGS: u8 = 3;
/// The store is damaged.
pub const CORRUPT: u8 = 4;
/// No such store, volume or snapshot.
const NOT_FOUND: u8 = 10;
/// Somebody else holds it.
const BUSY: u8 = 11;
/// No space is left.
const NO_SPACE: u8 = 12;
/// The name is taken.
const EXISTS: u8 = 13;
/// Another machine writes the store, too. Units of systemd do not start what ended so again.
const ELSEWHERE: u8 = 14;
/// The user or a signal stopped it.
pub const INTERRUPTED: u8 = 130;

/// For `--help` and the manual.
pub const HELP: &str = "Exit codes:
  0    success
  1    failed
  2    wrong usage, or --yes is missing
  3    check found leaked space, or doctor a problem
  4    the store, or data in it, is damaged
  10   no such store, volume or snapshot
  11   busy: in use, open or protected
  12   no space left
  13   the name is taken: such a volume, snapshot or file exists already
  14   another machine writes the store, too
  130  interrupted";

/// The exit code for an error.
fn code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Invalid => USAGE,
        ErrorKind::Corrupt | ErrorKind::Damaged => CORRUPT,
        ErrorKind::NotFound => NOT_FOUND,
        ErrorKind::Busy => BUSY,
        ErrorKind::NoSpace => NO_SPACE,
        ErrorKind::Exists => EXISTS,
        ErrorKind::Elsewhere => ELSEWHERE,
        ErrorKind::Interrupted => INTERRUPTED,
        _ => FAILED,
    }
}

/// The kind of error that another `dbs` left with; `Io` where several have the code.
pub fn kind(code: i32) -> ErrorKind {
    match u8::try_from(code) {
        Ok(USAGE) => ErrorKind::Invalid,
        Ok(CORRUPT) => ErrorKind::Corrupt,
        Ok(NOT_FOUND) => ErrorKind::NotFound,
        Ok(BUSY) => ErrorKind::Busy,
        Ok(NO_SPACE) => ErrorKind::NoSpace,
        Ok(EXISTS) => ErrorKind::Exists,
        Ok(ELSEWHERE) => ErrorKind::Elsewhere,
        Ok(INTERRUPTED) => ErrorKind::Interrupted,
        _ => ErrorKind::Io,
    }
}

/// Reports an error and returns its exit code.
pub fn report(error: &Error, json: bool) -> ExitCode {
    if reader_is_gone(error) {
        return ExitCode::SUCCESS;
    }
    let failure = Failure::from(error);
    print_failure(&failure.kind, &failure.message, json);
    ExitCode::from(code(error.kind()))
}

/// Prints `dbs: message`, or the JSON form, on the standard error output.
pub fn print_failure(kind: &str, message: &str, json: bool) {
    let text = if json {
        json!({ "error": { "kind": kind, "message": message } }).to_string()
    } else {
        // What it names may come from a file.
        format!("dbs: {}", printable(message))
    };
    // Nowhere to report that to.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Whether a table or other text of ours was cut short, as `| head` does, which is no failure. Data is never
/// written so: who takes a part of an image or a dump for the whole must be told.
fn reader_is_gone(error: &Error) -> bool {
    error.to_string().starts_with(crate::output::STDOUT)
        && error
            .source()
            .and_then(|source| source.downcast_ref::<io::Error>())
            .is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_kinds_agree() {
        for number in
            [FAILED, USAGE, CORRUPT, NOT_FOUND, BUSY, NO_SPACE, EXISTS, ELSEWHERE, INTERRUPTED]
        {
            assert_eq!(code(kind(number.into())), number);
        }
    }

    /// Started again, one of two machines that write a store would have it as soon as the other pauses.
    #[test]
    fn units_do_not_start_again_what_was_refused_for_another_machine() {
        for unit in [
            include_str!("../../contrib/dbs@.service"),
            include_str!("../../contrib/longhorn@.service"),
        ] {
            let line = format!("RestartPreventExitStatus={ELSEWHERE}");
            assert!(unit.lines().any(|found| found == line), "{line}");
        }
    }

    #[test]
    fn every_code_is_documented() {
        let codes = [FAILED, USAGE, FINDINGS, CORRUPT, NOT_FOUND, BUSY, NO_SPACE, EXISTS];
        for code in codes.into_iter().chain([ELSEWHERE, INTERRUPTED]) {
            assert!(HELP.contains(&format!("\n  {code} ")), "{code}");
        }
    }
}
