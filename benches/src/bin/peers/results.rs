//! What was measured, run by run, and its medians.

use crate::systems::System;
use dbs_benches::Outcome;
use dbs_benches::fio::Figures;
use serde::Serialize;
use std::collections::BTreeMap;

/// A run of one load against one system.
#[derive(Debug, Serialize)]
pub struct Sample {
    pub cell: String,
    pub system: System,
    pub round: u32,
    pub figures: Option<Figures>,
    pub error: Option<String>,
}

/// Median, least and greatest of the rounds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub greatest: f64,
}

/// All samples, and figures that are none of a single run.
#[derive(Debug, Default, Serialize)]
pub struct Results {
    pub samples: Vec<Sample>,
    /// By name; as seconds, or ratios.
    pub others: BTreeMap<String, Vec<f64>>,
}

impl Results {
    /// Adds a run, failed or not, and says so on the standard error output.
    ///
    /// # Errors
    /// If the user asked for the end meanwhile.
    pub fn add(
        &mut self,
        cell: &str,
        system: System,
        round: u32,
        outcome: Outcome<Figures>,
    ) -> Outcome<()> {
        dbs_benches::process::check_interrupted()?;
        let (figures, error) = match outcome {
            Ok(figures) => (Some(figures), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let shown = match (&figures, &error) {
            (Some(f), _) => format!("{:.0} IOPS, {:.0} MB/s", f.iops, f.mb_per_s),
            (_, error) => format!("failed: {}", error.as_deref().unwrap_or_default()),
        };
        progress(&format!("{cell}, {}, round {}: {shown}", system.title(), round + 1));
        self.samples.push(Sample { cell: cell.to_owned(), system, round, figures, error });
        Ok(())
    }

    /// Adds a figure that is no run's.
    pub fn note(&mut self, name: &str, value: f64) {
        progress(&format!("{name}: {value:.3}"));
        self.others.entry(name.to_owned()).or_default().push(value);
    }

    /// Median and spread of one figure of a cell.
    pub fn spread(
        &self,
        cell: &str,
        system: System,
        figure: impl Fn(&Figures) -> f64,
    ) -> Option<Spread> {
        let samples = self.samples.iter().filter(|s| s.cell == cell && s.system == system);
        spread(samples.filter_map(|s| s.figures.as_ref()).map(figure).collect())
    }

    /// The median alone.
    pub fn median(
        &self,
        cell: &str,
        system: System,
        figure: impl Fn(&Figures) -> f64,
    ) -> Option<f64> {
        self.spread(cell, system, figure).map(|spread| spread.median)
    }

    /// Median and spread of one system's figure over another's in the same round.
    pub fn round_by_round(
        &self,
        cell: &str,
        system: System,
        over: System,
        figure: impl Fn(&Figures) -> f64,
    ) -> Option<Spread> {
        let of = |system, round| {
            let found = |s: &&Sample| s.cell == cell && s.system == system && s.round == round;
            self.samples.iter().find(found)?.figures.as_ref().map(&figure)
        };
        let rounds = self.samples.iter().filter(|s| s.cell == cell && s.system == system);
        let ratio = |round| Some(of(system, round)? / of(over, round)?);
        spread(rounds.filter_map(|sample| ratio(sample.round)).collect())
    }

    /// Median and spread of a figure that is no run's.
    pub fn other(&self, name: &str) -> Option<Spread> {
        spread(self.others.get(name)?.clone())
    }

    /// Whether a cell was tried on a system, and failed each time.
    pub fn refused(&self, cell: &str, system: System) -> bool {
        let mut tried = self.samples.iter().filter(|s| s.cell == cell && s.system == system);
        tried.next().is_some() && self.spread(cell, system, |f| f.iops).is_none()
    }
}

/// Tells the user where the measurement is.
pub fn progress(text: &str) {
    eprintln!("{} {text}", jiff::Timestamp::now().strftime("%H:%M:%S"));
}

fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let median = match values[..] {
        [] => return None,
        _ if values.len().is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    };
    Some(Spread { median, least: values[0], greatest: values[values.len() - 1] })
}
