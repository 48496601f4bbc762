//! `longhorn`: what Longhorn's manager and instance manager start, on DBS.

use std::process::ExitCode;

fn main() -> ExitCode {
    longhorn::cli::main(std::env::args_os())
}
