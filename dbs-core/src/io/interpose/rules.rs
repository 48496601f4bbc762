//! Faults by rule.

use super::{Access, Fate, shortened};
use crate::error::{Error, Result};
use crate::format::geometry::SUPERBLOCK_REGION_BYTES;
use crate::format::{Geometry, RegionKind};
use crate::units::parse_size;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// What the chances of rules are measured in.
const CERTAIN: u64 = 1 << 32;
const DEFAULT_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// Rules, and what has happened under them.
#[derive(Debug)]
pub struct Rules {
    /// Looked at before each decision, so that faults can be switched while the server runs.
    file: Option<PathBuf>,
    geometry: OnceLock<Geometry>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    list: Vec<Rule>,
    random: u64,
    since: Instant,
    injected: u64,
    /// Of the file, when it was read.
    stamp: Option<(SystemTime, u64)>,
}

/// One rule: which requests, what becomes of them, and how often.
#[derive(Debug, Clone, PartialEq)]
struct Rule {
    operations: Vec<Operation>,
    effect: Effect,
    place: Place,
    chance: u64,
    /// Requests it spares first.
    after: u64,
    /// Requests it hits at most.
    count: u64,
    /// For how long, since the rules were read.
    time: Option<Duration>,
    matched: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    Allocate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    Errno(i32),
    Short,
    Delay(Duration),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Anywhere,
    Bytes(Range<u64>),
    Region(RegionKind),
    Superblock,
    /// Everything but the data region.
    Metadata,
}

impl Rules {
    /// Rules out of a text, separated by `;` or line ends, or `@FILE`: the file is then read again
    /// when it has changed (replace it by renaming). A rule is `OPERATIONS EFFECT [CONDITION...]`:
    ///
    /// - operations, separated by commas: `read`, `write`, `flush`, `discard`, `allocate`;
    /// - effect: `eio`, `enospc`, `short` (half of the bytes are moved), `delay=TIME`;
    /// - `in=REGION` (`superblock`, `volumes`, `snapshots`, `labels`, `journal`, `spares`,
    ///   `extents`, `data`, `metadata`: all but data) or `in=START-END` in bytes;
    /// - `chance=0.01`, `after=N` requests, at most `count=N` times, `for=TIME`.
    ///
    /// `seed=N` alone makes the chances repeatable. All rules that match apply; of errors the
    /// first.
    ///
    /// # Errors
    /// `Invalid` with the word that is wrong, `Io` if the file cannot be read.
    pub fn parse(text: &str) -> Result<Self> {
        let file = text.strip_prefix('@').map(PathBuf::from);
        let mut state = State {
            list: Vec::new(),
            random: DEFAULT_SEED,
            since: Instant::now(),
            injected: 0,
            stamp: None,
        };
        match &file {
            None => state.take(text)?,
            Some(file) => {
                let text = std::fs::read_to_string(file).map_err(|error| {
                    Error::io(error, format!("cannot read rules from `{}`", file.display()))
                })?;
                state.stamp = stamp(file);
                state.take(&text)?;
            }
        }
        Ok(Self { file, geometry: OnceLock::new(), state: Mutex::new(state) })
    }

    pub(super) fn injected(&self) -> u64 {
        self.state().injected
    }

    pub(super) fn set_geometry(&self, geometry: &Geometry) {
        let _ = self.geometry.set(*geometry);
    }

    /// Adds to `fate` what the rules say.
    pub(super) fn decide(&self, offset: u64, access: Access<'_>, fate: &mut Fate) {
        let (operation, len) = match access {
            Access::Read(len) => (Operation::Read, len as u64),
            Access::Write(bytes) => (Operation::Write, bytes.len() as u64),
            Access::Flush => (Operation::Flush, 0),
            Access::Discard(len) => (Operation::Discard, len),
            Access::Allocate(len) => (Operation::Allocate, len),
            Access::SetSize(_) => return,
        };
        let mut state = self.state();
        let state = &mut *state;
        if let Some(file) = &self.file {
            let now = stamp(file);
            if now != state.stamp {
                state.stamp = now;
                // What is no rules, or gone, changes nothing.
                let text = std::fs::read_to_string(file).unwrap_or_default();
                let _ = state.take(&text);
            }
        }
        let (age, range) = (state.since.elapsed(), offset..offset + len);
        for rule in &mut state.list {
            if !rule.matches(operation, &range, self.geometry.get(), age, &mut state.random) {
                continue;
            }
            match rule.effect {
                Effect::Errno(errno) => fate.errno = fate.errno.or(Some(errno)),
                Effect::Delay(time) => fate.delay += time,
                Effect::Short => match shortened(len as usize) {
                    Some(len) => fate.len = fate.len.min(len),
                    None => continue,
                },
            }
            state.injected += 1;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stamp(file: &std::path::Path) -> Option<(SystemTime, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(file).ok()?;
    Some((metadata.modified().ok()?, metadata.ino()))
}

impl State {
    fn take(&mut self, text: &str) -> Result<()> {
        let mut list = Vec::new();
        let mut seed = None;
        for line in text.split([';', '\n']).map(str::trim).filter(|line| !line.is_empty()) {
            match line.strip_prefix("seed=") {
                Some(number) => seed = Some(number.parse().map_err(|_| wrong(line))?),
                None => list.push(Rule::parse(line)?),
            }
        }
        if let Some(seed) = seed {
            self.random = seed;
        }
        self.list = list;
        self.since = Instant::now();
        Ok(())
    }
}

impl Rule {
    fn parse(line: &str) -> Result<Self> {
        let mut words = line.split_whitespace();
        let (Some(operations), Some(effect)) = (words.next(), words.next()) else {
            return Err(wrong(line));
        };
        let mut rule = Self {
            operations: operations.split(',').map(Operation::parse).collect::<Result<_>>()?,
            effect: Effect::parse(effect)?,
            place: Place::Anywhere,
            chance: CERTAIN,
            after: 0,
            count: u64::MAX,
            time: None,
            matched: 0,
        };
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| wrong(word))?;
            match key {
                "in" => rule.place = Place::parse(value)?,
                "chance" => {
                    let chance: f64 = value.parse().map_err(|_| wrong(word))?;
                    if !(0.0..=1.0).contains(&chance) {
                        return Err(wrong(word));
                    }
                    rule.chance = (chance * CERTAIN as f64) as u64;
                }
                "after" => rule.after = value.parse().map_err(|_| wrong(word))?,
                "count" => rule.count = value.parse().map_err(|_| wrong(word))?,
                "for" => rule.time = Some(time(value)?),
                _ => return Err(wrong(word)),
            }
        }
        Ok(rule)
    }

    /// Whether it hits this request, which counts as one it has seen.
    fn matches(
        &mut self,
        operation: Operation,
        range: &Range<u64>,
        geometry: Option<&Geometry>,
        age: Duration,
        random: &mut u64,
    ) -> bool {
        if !self.operations.contains(&operation)
            || self.time.is_some_and(|time| age > time)
            || !self.place.overlaps(operation, range, geometry)
            || next(random) >> 32 >= self.chance
        {
            return false;
        }
        self.matched += 1;
        self.matched > self.after && self.matched - self.after <= self.count
    }
}

impl Operation {
    fn parse(word: &str) -> Result<Self> {
        Ok(match word {
            "read" => Self::Read,
            "write" => Self::Write,
            "flush" => Self::Flush,
            "discard" => Self::Discard,
            "allocate" => Self::Allocate,
            _ => return Err(wrong(word)),
        })
    }
}

impl Effect {
    fn parse(word: &str) -> Result<Self> {
        Ok(match word {
            "eio" => Self::Errno(libc::EIO),
            "enospc" => Self::Errno(libc::ENOSPC),
            "short" => Self::Short,
            _ => Self::Delay(time(word.strip_prefix("delay=").ok_or_else(|| wrong(word))?)?),
        })
    }
}

impl Place {
    fn parse(word: &str) -> Result<Self> {
        Ok(Self::Region(match word {
            "superblock" => return Ok(Self::Superblock),
            "metadata" => return Ok(Self::Metadata),
            "volumes" => RegionKind::Volumes,
            "snapshots" => RegionKind::Snapshots,
            "labels" => RegionKind::Labels,
            "journal" => RegionKind::Journal,
            "spares" => RegionKind::Spares,
            "extents" => RegionKind::Extents,
            "data" => RegionKind::Data,
            _ => {
                let (start, end) = word.split_once('-').ok_or_else(|| wrong(word))?;
                return Ok(Self::Bytes(parse_size(start)?..parse_size(end)?));
            }
        }))
    }

    /// A flush is everywhere. Regions are nowhere as long as it is not known where they are.
    fn overlaps(
        &self,
        operation: Operation,
        range: &Range<u64>,
        geometry: Option<&Geometry>,
    ) -> bool {
        let touches = |place: &Range<u64>| range.start < place.end && place.start < range.end;
        let region = |kind| {
            let region = geometry?.region(kind);
            Some(region.offset..region.offset + region.length)
        };
        match self {
            _ if operation == Operation::Flush => true,
            Self::Anywhere => true,
            Self::Bytes(place) => touches(place),
            Self::Region(kind) => region(*kind).is_some_and(|place| touches(&place)),
            Self::Superblock => {
                touches(&(0..SUPERBLOCK_REGION_BYTES))
                    || region(RegionKind::Data).is_some_and(|data| range.start >= data.end)
            }
            Self::Metadata => region(RegionKind::Data).is_some_and(|place| !touches(&place)),
        }
    }
}

fn time(text: &str) -> Result<Duration> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number = number.parse().map_err(|_| wrong(text))?;
    match unit {
        "us" => Ok(Duration::from_micros(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        _ => Err(wrong(text)),
    }
}

fn wrong(word: &str) -> Error {
    Error::invalid(format!("rules for faults: `{word}` is not understood"))
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::InitOptions;

    fn fate(rules: &Rules, offset: u64, access: Access<'_>) -> Fate {
        let mut fate = Fate { delay: Duration::ZERO, errno: None, len: usize::MAX, ticket: 0 };
        rules.decide(offset, access, &mut fate);
        fate
    }

    #[test]
    fn rules_hit_what_they_name_as_often_as_they_say() {
        let text =
            "write eio in=journal after=2 count=1; read delay=5ms; read,write short in=1M-2M";
        let rules = Rules::parse(text).unwrap();
        let geometry = Geometry::plan(256 << 20, &InitOptions::default()).unwrap();
        let journal = geometry.region(RegionKind::Journal).offset;
        let bytes = [0; 16384];
        let write = |offset| fate(&rules, offset, Access::Write(&bytes)).errno;
        assert_eq!(write(journal), None, "nobody knows where that is");
        rules.set_geometry(&geometry);
        let hits: Vec<_> = (0..5).map(|_| write(journal).is_some()).collect();
        assert_eq!(hits, [false, false, true, false, false]);
        assert_eq!(write(geometry.region(RegionKind::Data).offset), None);
        let read = fate(&rules, (1 << 20) - 4096, Access::Read(8192));
        assert_eq!((read.delay, read.len), (Duration::from_millis(5), 4096));
        assert_eq!(fate(&rules, 1 << 20, Access::Read(4096)).len, usize::MAX, "cannot be cut");
        assert_eq!(fate(&rules, 2 << 20, Access::Read(8192)).len, usize::MAX);
    }

    #[test]
    fn chances_follow_from_the_seed() {
        let hits = |seed| {
            let rules = Rules::parse(&format!("seed={seed}; flush eio chance=0.1")).unwrap();
            (0..1000).map(|_| fate(&rules, 0, Access::Flush).errno.is_some()).collect::<Vec<_>>()
        };
        let one = hits(1);
        assert_eq!(one, hits(1));
        assert_ne!(one, hits(2));
        assert!((50..200).contains(&one.iter().filter(|hit| **hit).count()));
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "write",
            "wrote eio",
            "write emfile",
            "write eio in=nowhere",
            "write eio chance=2",
            "write eio after=x",
            "write eio today",
            "read delay=1",
            "seed=x",
            "@/nonexistent/rules",
        ] {
            assert!(Rules::parse(text).is_err(), "{text}");
        }
        assert_eq!(Rules::parse("").unwrap().state().list, []);
    }

    #[test]
    fn a_file_of_rules_is_read_again_when_it_changes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules");
        let write = |text: &str| {
            let new = directory.path().join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::rename(&new, &path).unwrap();
        };
        write("");
        let rules = Rules::parse(&format!("@{}", path.display())).unwrap();
        let flush = || fate(&rules, 0, Access::Flush).errno;
        assert_eq!(flush(), None);
        write("flush eio");
        assert_eq!(flush(), Some(libc::EIO));
        write("");
        assert_eq!((flush(), rules.injected()), (None, 1));
    }
}
