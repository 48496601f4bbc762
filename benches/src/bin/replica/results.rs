//! What was measured, run by run, and its medians.

use crate::load::Figures;
use crate::subject::Kind;
use dbs_benches::Outcome;
use serde::Serialize;

/// A run of one load against one replica, or a time in seconds.
#[derive(Debug, Serialize)]
pub struct Sample {
    pub cell: String,
    pub kind: Kind,
    pub figures: Figures,
    pub seconds: Option<f64>,
}

/// All samples.
#[derive(Debug, Default)]
pub struct Results {
    pub samples: Vec<Sample>,
}

impl Results {
    /// Adds a run, and says so on the standard error output.
    ///
    /// # Errors
    /// If the user asked for the end meanwhile.
    pub fn add(&mut self, cell: &str, kind: Kind, figures: Figures) -> Outcome<()> {
        dbs_benches::process::check_interrupted()?;
        progress(&format!(
            "{cell}, {}: {:.0} IOPS, {:.0} MB/s, {:.1} CPU s a million",
            kind.title(),
            figures.iops,
            figures.mb_per_s,
            figures.cpu_per_million
        ));
        self.samples.push(Sample { cell: cell.to_owned(), kind, figures, seconds: None });
        Ok(())
    }

    /// Adds a time.
    pub fn time(&mut self, cell: &str, kind: Kind, seconds: f64) {
        progress(&format!("{cell}, {}: {seconds:.2} s", kind.title()));
        let figures = Figures::default();
        self.samples.push(Sample { cell: cell.to_owned(), kind, figures, seconds: Some(seconds) });
    }

    /// The median of a figure of a cell.
    pub fn median(
        &self,
        cell: &str,
        kind: Kind,
        figure: impl Fn(&Sample) -> Option<f64>,
    ) -> Option<f64> {
        let samples = self.samples.iter().filter(|s| s.cell == cell && s.kind == kind);
        let mut values: Vec<_> = samples.filter_map(figure).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }
}

/// Tells the user where the measurement is.
pub fn progress(text: &str) {
    eprintln!("{} {text}", jiff::Timestamp::now().strftime("%H:%M:%S"));
}
