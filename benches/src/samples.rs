//! What was measured, run by run, and its medians.

use crate::Outcome;
use crate::dataconn::Figures;
use serde::Serialize;

/// A run of one load against one subject, or a time.
#[derive(Debug, Serialize)]
pub struct Sample {
    /// What was measured.
    pub cell: String,
    /// With whom.
    pub subject: &'static str,
    /// Of a load.
    pub figures: Figures,
    /// The time.
    pub seconds: Option<f64>,
}

/// All samples.
#[derive(Debug, Default)]
pub struct Results {
    /// In the order they were taken.
    pub samples: Vec<Sample>,
}

impl Results {
    /// Adds a run, and says so on the standard error output.
    ///
    /// # Errors
    /// If the user asked for the end meanwhile.
    pub fn add(&mut self, cell: &str, subject: &'static str, figures: Figures) -> Outcome<()> {
        crate::process::check_interrupted()?;
        progress(&format!(
            "{cell}, {subject}: {:.0} IOPS, {:.0} MB/s, {:.1} CPU s a million",
            figures.iops, figures.mb_per_s, figures.cpu_per_million
        ));
        self.samples.push(Sample { cell: cell.to_owned(), subject, figures, seconds: None });
        Ok(())
    }

    /// Adds a time.
    pub fn time(&mut self, cell: &str, subject: &'static str, seconds: f64) {
        progress(&format!("{cell}, {subject}: {seconds:.2} s"));
        let (cell, figures) = (cell.to_owned(), Figures::default());
        self.samples.push(Sample { cell, subject, figures, seconds: Some(seconds) });
    }

    /// The median of a figure of a cell.
    #[must_use]
    pub fn median(
        &self,
        cell: &str,
        subject: &str,
        figure: impl Fn(&Sample) -> Option<f64>,
    ) -> Option<f64> {
        let samples = self.samples.iter().filter(|s| s.cell == cell && s.subject == subject);
        let mut values: Vec<_> = samples.filter_map(figure).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }
}

/// Tells the user where the measurement is.
pub fn progress(text: &str) {
    eprintln!("{} {text}", jiff::Timestamp::now().strftime("%H:%M:%S"));
}
