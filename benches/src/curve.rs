//! How figures grow along one quantity: as a table, and as a plot.

use crate::plot::{Panel, figure};
use crate::report::{Table, time};
use std::fmt::Display;
use std::time::Duration;

/// What a figure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Given in seconds, shown in what suits.
    Time,
    /// Given in bytes.
    Memory,
    /// Requests a second.
    Rate,
    /// Seconds of CPU per 100,000 requests.
    Cpu,
}

impl Unit {
    const ALL: [Self; 4] = [Self::Time, Self::Memory, Self::Rate, Self::Cpu];

    fn title(self) -> &'static str {
        match self {
            Self::Time => "time, ms",
            Self::Memory => "memory, MiB",
            Self::Rate => "IOPS",
            Self::Cpu => "CPU, s per 100,000 requests",
        }
    }

    /// The value in the unit of the plot.
    fn plotted(self, value: f64) -> f64 {
        match self {
            Self::Time => value * 1e3,
            Self::Memory => value / f64::from(1 << 20),
            Self::Rate | Self::Cpu => value,
        }
    }

    fn shown(self, value: f64) -> String {
        match self {
            Self::Time => time(Duration::from_secs_f64(value.max(0.0))),
            Self::Memory => format!("{:.1} MiB", self.plotted(value)),
            Self::Rate => format!("{value:.0}"),
            Self::Cpu => format!("{value:.2}"),
        }
    }
}

/// Figures along one quantity.
#[derive(Debug, Clone)]
pub struct Curve {
    title: String,
    x: String,
    columns: Vec<(&'static str, Unit)>,
    rows: Vec<(f64, Vec<f64>)>,
}

impl Curve {
    /// A curve without points; `x` is the quantity, with its unit.
    #[must_use]
    pub fn new(title: &str, x: &str, columns: &[(&'static str, Unit)]) -> Self {
        let columns = columns.to_vec();
        Self { title: title.to_owned(), x: x.to_owned(), columns, rows: Vec::new() }
    }

    /// Adds a point of each column.
    ///
    /// # Panics
    /// If there are not as many as columns: a bug.
    pub fn add(&mut self, x: f64, values: Vec<f64>) {
        assert_eq!(values.len(), self.columns.len());
        self.rows.push((x, values));
    }

    /// The figures as a table.
    #[must_use]
    pub fn table(&self) -> Table {
        let titles = self.columns.iter().map(|(title, _)| *title);
        let columns: Vec<_> = std::iter::once(self.x.as_str()).chain(titles).collect();
        let mut table = Table::new(&self.title, &columns);
        for (x, values) in &self.rows {
            let shown = self.columns.iter().zip(values).map(|((_, unit), v)| unit.shown(*v));
            let cells: Vec<_> = std::iter::once(format!("{x}")).chain(shown).collect();
            table.row(&cells.iter().map(|cell| cell as &dyn Display).collect::<Vec<_>>());
        }
        table
    }

    /// The figures as SVG, a panel for each unit.
    #[must_use]
    pub fn svg(&self) -> String {
        let panels = Unit::ALL.iter().filter_map(|unit| {
            let columns = self.columns.iter().enumerate().filter(|(_, column)| column.1 == *unit);
            let lines: Vec<_> = columns
                .map(|(index, (title, _))| {
                    let point = |row: &(f64, Vec<f64>)| (row.0, unit.plotted(row.1[index]));
                    ((*title).to_owned(), self.rows.iter().map(point).collect())
                })
                .collect();
            let title = unit.title().to_owned();
            (!lines.is_empty()).then(|| Panel { title, x: self.x.clone(), lines })
        });
        figure(&panels.collect::<Vec<_>>())
    }
}
