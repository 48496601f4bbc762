//! `longhorn`: what Longhorn's manager and instance manager start, on DBS.

use std::process::ExitCode;

fn main() -> ExitCode {
    engine_adapter::cli::main(std::env::args_os())
}
