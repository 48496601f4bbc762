//! Time a process has spent on the CPU.

use nix::unistd::{SysconfVar, sysconf};
use std::time::Duration;

/// A process whose CPU time can be read.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    process: u32,
    ticks_per_second: u64,
}

impl Cpu {
    /// The CPU time of a process; `None` where it cannot be read.
    #[must_use]
    pub fn of(process: u32) -> Option<Self> {
        let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten()?;
        let cpu = Self { process, ticks_per_second: u64::try_from(ticks).ok()?.max(1) };
        cpu.used().map(|_| cpu)
    }

    /// What it has used so far, in user and kernel mode; `None` once it is gone.
    #[must_use]
    pub fn used(&self) -> Option<Duration> {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.process)).ok()?;
        let ticks = parse(&text)?;
        Some(Duration::from_secs_f64(ticks as f64 / self.ticks_per_second as f64))
    }
}

/// Fields 14 and 15; the name in field 2 may contain anything.
fn parse(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut field = || fields.next()?.parse::<u64>().ok();
    field()?.checked_add(field()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_read_and_grows() {
        assert_eq!(parse("1 (a) b) S 1 1 1 0 -1 0 0 0 0 0 7 5 0 0"), Some(12));
        assert_eq!(parse("1 (a"), None);
        let cpu = Cpu::of(std::process::id()).unwrap();
        let before = cpu.used().unwrap();
        let begun = std::time::Instant::now();
        while cpu.used().unwrap() == before {
            assert!(begun.elapsed() < Duration::from_secs(120));
        }
        assert!(Cpu::of(u32::MAX).is_none());
    }
}
