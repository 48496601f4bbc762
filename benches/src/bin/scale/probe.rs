//! Opening a store in a process of its own, so that its memory is nobody else's.

use dbs_benches::machine::{cpu_time, forget_cached, resident};
use dbs_benches::{Outcome, open, timed};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What opening a store costs.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// Until it can be used.
    pub time: Duration,
    /// Of that, on the CPU.
    pub cpu: Duration,
    /// Bytes of memory it holds then.
    pub memory: u64,
    /// Bytes of memory it held at most on the way.
    pub peak: u64,
}

/// Opens a closed store, from its medium, in a process of its own.
///
/// # Errors
/// If that fails.
pub fn probe(store: &Path) -> Outcome<Probe> {
    forget_cached(store)?;
    let output =
        Command::new(std::env::current_exe()?).args(["--probe".as_ref(), store]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let text = String::from_utf8(output.stdout)?;
    let figures = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    match figures[..] {
        [time, cpu, memory, peak] => {
            let [time, cpu] = [time, cpu].map(Duration::from_nanos);
            Ok(Probe { time, cpu, memory, peak })
        }
        _ => Err(format!("unexpected answer {text:?}").into()),
    }
}

/// The other side of [`probe`]: prints the figures.
pub fn answer(store: &Path) -> Outcome<()> {
    let ([before, _], cpu_before) = (resident(), cpu_time());
    let (store, time) = timed(|| open(store))?;
    let ([after, peak], cpu) = (resident(), cpu_time() - cpu_before);
    let memory = after.saturating_sub(before);
    println!("{} {} {memory} {}", time.as_nanos(), cpu.as_nanos(), peak - before);
    Ok(store.close()?)
}
