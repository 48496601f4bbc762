//! Comparing all data with its checksums.

use crate::context::{Context, typed};
use crate::{exit, spec};
use clap::Args;
use dbs_control::api::Request;
use dbs_core::info::ScrubReport;
use dbs_core::{Result, format_size};
use std::process::ExitCode;

/// Compare all data with its checksums: exit code 4 for damage.
///
/// On a served store, a scrub that was stopped is continued where it stopped.
#[derive(Debug, Args)]
pub struct Scrub {
    /// Read at most this many bytes a second
    #[arg(long, value_parser = spec::size, value_name = "SIZE")]
    rate: Option<u64>,
    /// Read everything, also what a stopped scrub has read already
    #[arg(long)]
    restart: bool,
}

impl Scrub {
    pub fn run(self, context: &Context) -> Result<ExitCode> {
        let value = context.call(&Request::Scrub { rate: self.rate, restart: self.restart })?;
        let report: ScrubReport = typed(value.clone())?;
        context.show(value, |report: ScrubReport| describe(&report))?;
        Ok(if report.damaged == 0 { ExitCode::SUCCESS } else { ExitCode::from(exit::CORRUPT) })
    }
}

fn describe(report: &ScrubReport) -> String {
    let mut text = String::new();
    for range in &report.ranges {
        text += &format!("damaged: {} bytes from {} on\n", range.length, range.place);
    }
    let verdict = match report.damaged {
        0 => "nothing is damaged".to_owned(),
        bytes => format!("{} are DAMAGED", format_size(bytes)),
    };
    let (checked, learnt) = (format_size(report.checked), format_size(report.learnt));
    text + &format!("read {checked}, of which {learnt} had no checksum yet: {verdict}\n")
}
