//! What requests cost when it was last accepted, and how that compares with now.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Instructions may grow by this share, in percent, and this many before they count as more: code
/// elsewhere changes what the compiler inlines.
const TOLERANCE_PERCENT: u64 = 3;
const TOLERANCE_INSTRUCTIONS: u64 = 10;
/// The others are exact but for rounding.
const ROUNDING: f64 = 0.011;

/// What one request costs on average.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Instructions, without the device's and the kernel's.
    pub instructions: u64,
    /// Heap allocations.
    pub allocations: f64,
    /// Ranges read from the device.
    pub reads: f64,
    /// Ranges written to the device.
    pub writes: f64,
    /// Flushes of the device.
    pub flushes: f64,
}

/// Costs by case, and what they depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Compiler, as it calls itself.
    pub compiler: String,
    /// Instruction set.
    pub architecture: String,
    /// Kernel: what it does at once and what later is visible in a server's turns, which are compared only
    /// on the same one.
    pub kernel: String,
    /// Costs by name of the case.
    pub cases: BTreeMap<String, Cost>,
}

/// How a cost compares with the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Lower by more than the tolerance, in one column, and in none higher.
    Better,
    /// The same.
    Same,
    /// Not in both.
    Unknown,
    /// Higher in some column.
    Worse,
}

impl Baseline {
    /// Of an empty baseline, made by the compiler of this program for this machine.
    #[must_use]
    pub fn here() -> Self {
        Self {
            compiler: env!("GUARD_COMPILER").to_owned(),
            architecture: std::env::consts::ARCH.to_owned(),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned()),
            cases: BTreeMap::new(),
        }
    }

    /// A table of this baseline against `now`, in the order of `names`, and the worst of its rows.
    #[must_use]
    pub fn compare(&self, now: &Self, names: &[&str]) -> (String, Verdict) {
        let mut table = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            table,
            "{:<30} {:>10} {:>10} {:>8}  {:>14}  device requests",
            "a request", "baseline", "now", "", "allocations"
        );
        let gone = self.cases.keys().filter(|name| !names.contains(&name.as_str()));
        let mut worst = Verdict::Better;
        for name in names.iter().copied().chain(gone.map(String::as_str)) {
            let (before, after) = (self.cases.get(name), now.cases.get(name));
            let verdict = verdict(before, after);
            worst = worst.max(verdict);
            let difference = match (before, after) {
                (Some(a), Some(b)) => {
                    let share = b.instructions as f64 / a.instructions.max(1) as f64;
                    format!("{:+.1} %", (share - 1.0) * 100.0)
                }
                _ => String::new(),
            };
            let cell = |of: &dyn Fn(&Cost) -> String| {
                let [a, b] = [before, after].map(|cost| cost.map_or("-".to_owned(), of));
                if a == b { a } else { format!("{a} > {b}") }
            };
            let count =
                |cost: Option<&Cost>| cost.map_or("-".to_owned(), |c| c.instructions.to_string());
            let _ = writeln!(
                table,
                "{name:<30} {:>10} {:>10} {difference:>8}  {:>14}  {:<24} {}",
                count(before),
                count(after),
                cell(&|cost| cost.allocations.to_string()),
                cell(&Cost::device),
                verdict.text(),
            );
        }
        (table, worst)
    }
}

impl Cost {
    /// Requests of the device that are not zero, as text.
    fn device(&self) -> String {
        let all = [(self.reads, "read"), (self.writes, "write"), (self.flushes, "flush")];
        let some = all.iter().filter(|(count, _)| *count != 0.0);
        some.map(|(count, name)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
    }
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Same => "",
            Self::Unknown => "NOT IN BOTH",
            Self::Worse => "WORSE",
        }
    }
}

fn verdict(before: Option<&Cost>, after: Option<&Cost>) -> Verdict {
    let (Some(before), Some(after)) = (before, after) else { return Verdict::Unknown };
    let slack = before.instructions * TOLERANCE_PERCENT / 100 + TOLERANCE_INSTRUCTIONS;
    let exact = [
        (before.allocations, after.allocations),
        (before.reads, after.reads),
        (before.writes, after.writes),
        (before.flushes, after.flushes),
    ];
    if after.instructions > before.instructions + slack
        || exact.iter().any(|(before, after)| *after > *before + ROUNDING)
    {
        Verdict::Worse
    } else if after.instructions + slack < before.instructions
        || exact.iter().any(|(before, after)| *after + ROUNDING < *before)
    {
        Verdict::Better
    } else {
        Verdict::Same
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Cost =
        Cost { instructions: 1000, allocations: 0.0, reads: 1.0, writes: 0.0, flushes: 0.0 };

    fn of(cases: &[(&str, Cost)]) -> Baseline {
        let cases = cases.iter().map(|(name, cost)| ((*name).to_owned(), *cost)).collect();
        Baseline { cases, ..Baseline::here() }
    }

    #[test]
    fn what_costs_more_is_worse() {
        let base = of(&[("a", COST)]);
        for (cost, expected) in [
            (COST, Verdict::Same),
            (Cost { instructions: 1040, ..COST }, Verdict::Same),
            (Cost { instructions: 1041, ..COST }, Verdict::Worse),
            (Cost { instructions: 959, ..COST }, Verdict::Better),
            (Cost { allocations: 0.02, ..COST }, Verdict::Worse),
            (Cost { reads: 2.0, instructions: 500, ..COST }, Verdict::Worse),
            (Cost { flushes: 0.5, ..COST }, Verdict::Worse),
            (Cost { reads: 0.5, ..COST }, Verdict::Better),
        ] {
            let (table, verdict) = base.compare(&of(&[("a", cost)]), &["a"]);
            assert_eq!(verdict, expected, "{table}");
            assert_eq!(table.contains("WORSE"), expected == Verdict::Worse, "{table}");
        }
    }

    #[test]
    fn cases_come_and_go_only_when_accepted() {
        let (one, two) = (of(&[("a", COST)]), of(&[("a", COST), ("b", COST)]));
        for (before, after, names) in [(&one, &two, &["a", "b"][..]), (&two, &one, &["a"])] {
            let (table, verdict) = before.compare(after, names);
            assert_eq!(verdict, Verdict::Unknown, "{table}");
            assert!(table.lines().any(|line| line.starts_with('b') && line.contains("NOT")));
        }
    }
}
