//! Runs a case under callgrind and reads what it counted.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::process::Command;

/// The function whose instructions are counted, with all it calls.
const MEASURED: &str = "*cases*measured*";
/// The device in memory and the client: what they do is not counted.
const OTHERS: [&str; 5] =
    ["device_read", "device_write", "client_header", "client_send", "client_receive"];
/// Functions of the C library that allocate.
const ALLOCATE: [&str; 6] =
    ["malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc", "memalign"];
/// Makes the C library copy with vectors instead of `rep movs`, of which every byte would count as
/// an instruction.
const TUNABLES: &str =
    "glibc.cpu.x86_rep_movsb_threshold=0x40000000:glibc.cpu.x86_rep_stosb_threshold=0x40000000";

/// What callgrind counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Instructions, without those of device and client.
    pub instructions: u64,
    /// Heap allocations, some from outside of what is measured among them: only the difference
    /// between two runs is exact.
    pub allocations: u64,
}

/// Runs `program` with `arguments`, writing the profile to `profile`. Returns its output, too.
///
/// # Errors
/// It fails, or its profile is none.
pub fn run(
    program: &Path,
    arguments: &[&str],
    profile: &Path,
) -> Result<(Counted, String), Box<dyn Error + Send + Sync>> {
    let output = Command::new("valgrind")
        .env("GLIBC_TUNABLES", TUNABLES)
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--toggle-collect={MEASURED}"))
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(program)
        .args(arguments)
        .output()
        .map_err(|error| format!("valgrind: {error}; `apt-get install valgrind`"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("it ends with {}: {text}{error}", output.status).into());
    }
    Ok((parse(&std::fs::read_to_string(profile)?)?, text))
}

/// Adds up a profile in callgrind's format.
///
/// # Errors
/// It is no profile.
fn parse(profile: &str) -> Result<Counted, Box<dyn Error + Send + Sync>> {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let (mut caller, mut callee, mut calls) = ("", "", None);
    let mut counted = Counted::default();
    let mut others = 0;
    for line in profile.lines() {
        if let Some(calls) = calls.take() {
            let cost: u64 = line.split(' ').nth(1).ok_or("a call without its cost")?.parse()?;
            if OTHERS.iter().any(|name| callee.contains(name)) {
                others += cost;
            }
            if ALLOCATE.contains(&callee) && !ALLOCATE.contains(&caller) {
                counted.allocations += calls;
            }
        } else if let Some(text) = line.strip_prefix("fn=") {
            caller = resolve(&mut names, text);
        } else if let Some(text) = line.strip_prefix("cfn=") {
            callee = resolve(&mut names, text);
        } else if let Some(text) = line.strip_prefix("calls=") {
            calls = Some(text.split(' ').next().unwrap_or_default().parse::<u64>()?);
        } else if let Some(text) = line.strip_prefix("totals: ") {
            counted.instructions = text.trim().parse()?;
        }
    }
    counted.instructions =
        counted.instructions.checked_sub(others).ok_or("the parts exceed the whole")?;
    Ok(counted)
}

/// A function's name, which is written out once and then abbreviated to a number: `(7) name`, `(7)`.
fn resolve<'a>(names: &mut HashMap<&'a str, &'a str>, text: &'a str) -> &'a str {
    match text.split_once(' ') {
        Some((number, name)) => {
            names.insert(number, name);
            name
        }
        None => names.get(text).copied().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_adds_up() {
        let profile = "version: 1\nevents: Ir\n\nfn=(1) guard::measured\n10 100\ncfn=(2) malloc\n\
                       calls=3 0\n+2 90\ncfn=(3) guard::device_read\ncalls=2 0\n* 500\n\nfn=(4) \
                       realloc\n0 10\ncfn=(2)\ncalls=1 0\n0 30\n\nfn=(2)\n0 120\n\ntotals: 860\n";
        let counted = parse(profile).unwrap();
        assert_eq!(counted, Counted { instructions: 360, allocations: 3 });
    }

    #[test]
    fn what_is_no_profile_is_an_error() {
        for profile in [
            "totals: x\n",
            "calls=x\n0 1\n",
            "calls=1 0\nfn=(1)\n",
            "cfn=(1) device_read\ncalls=1 0\n0 5\ntotals: 1\n",
        ] {
            assert!(parse(profile).is_err(), "{profile}");
        }
    }
}
