//! How much memory a server takes for checksums and for look-ups where nobody has said.

use std::fs;

/// Share of the machine's memory, or of what the process may have of it.
const SHARE: u64 = 32;
const LEAST: u64 = 64 << 20;
const MOST: u64 = 4 << 30;

/// Memory for what look-ups in a store have found, for a process that serves one.
#[must_use]
pub fn lookups() -> u64 {
    checksum_cache()
}

/// Memory for the checksums of a store, for a process that serves one.
#[must_use]
pub fn checksum_cache() -> u64 {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    of(&read("/proc/meminfo"), &read("/sys/fs/cgroup/memory.max"))
}

/// By what the system says of its memory, and of the limit of a container.
fn of(meminfo: &str, limit: &str) -> u64 {
    let total = meminfo.lines().find_map(|line| {
        let rest = line.strip_prefix("MemTotal:")?;
        rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let limit = limit.trim().parse::<u64>().ok();
    let memory = total.into_iter().chain(limit).min().unwrap_or(0);
    (memory / SHARE).clamp(LEAST, MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_memory_there_is() {
        let cases = [
            ("MemTotal:       24576000 kB\nMemFree: 1 kB", "", 24_576_000 * 1024 / 32),
            ("MemTotal: 24576000 kB", "max\n", 24_576_000 * 1024 / 32),
            ("MemTotal: 24576000 kB", "4294967296\n", 128 << 20),
            ("MemTotal: 524288 kB", "max", LEAST),
            ("MemTotal: 1073741824 kB", "max", MOST),
            ("", "", LEAST),
            ("MemTotal: much kB", "-1", LEAST),
        ];
        for (meminfo, limit, cache) in cases {
            assert_eq!(of(meminfo, limit), cache, "{meminfo} {limit}");
        }
        assert!((LEAST..=MOST).contains(&checksum_cache()));
    }
}
