//! Which replicas a volume starts with.

use super::sabotage::{Bug, is};
use std::collections::BTreeSet;
use std::fmt;

/// How much older than the newest a replica's last change may be to be salvaged.
const SALVAGE_WINDOW_NS: i64 = 5_000_000_000;
/// How far the clocks of nodes may be apart.
const CLOCKS_NS: i64 = 60_000_000_000;
/// Exit code of a controller that found no good replica: `ENODATA`.
pub const EXIT_NO_REPLICA: i32 = 61;
/// Exit code for everything else.
pub const EXIT_FAILURE: i32 = 1;

/// Why a volume did not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartError {
    /// No replica is good, and another attempt will not change that.
    NoReplica(Vec<String>),
    /// No replica is good, but one could not be reached.
    Unavailable(Vec<String>),
    /// Anything else.
    Other(String),
}

impl StartError {
    /// The exit code by which managers tell them apart.
    #[must_use]
    pub const fn exit_code(&self) -> i32 {
        match self {
            Self::NoReplica(_) => EXIT_NO_REPLICA,
            Self::Unavailable(_) | Self::Other(_) => EXIT_FAILURE,
        }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (why, addresses) = match self {
            Self::NoReplica(addresses) => ("replica error", addresses),
            Self::Unavailable(addresses) => ("service unavailable", addresses),
            Self::Other(text) => return f.write_str(text),
        };
        let addresses = addresses.join(" ");
        write!(f, "no available backend due to {why} from the addresses [{addresses}]")
    }
}

impl std::error::Error for StartError {}

/// State of a replica, as it says itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing was created.
    Initial,
    /// Not open.
    Closed,
    /// Open and not written.
    Open,
    /// Open and written.
    Dirty,
    /// Open and not complete.
    Rebuilding,
    /// Open and broken.
    Error,
}

impl State {
    /// The state with this name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "initial" => Self::Initial,
            "closed" => Self::Closed,
            "open" => Self::Open,
            "dirty" => Self::Dirty,
            "rebuilding" => Self::Rebuilding,
            "error" => Self::Error,
            _ => return None,
        })
    }

    /// Whether a replica in this state is complete.
    #[must_use]
    pub const fn is_complete(self) -> bool {
        matches!(self, Self::Open | Self::Dirty)
    }

    /// Whether a replica in this state knows its snapshots.
    #[must_use]
    pub const fn counts_snapshots(self) -> bool {
        matches!(self, Self::Open | Self::Dirty | Self::Rebuilding)
    }
}

/// What is known of a replica after it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// It is open.
    Open {
        /// As it says.
        state: State,
        /// Bytes of the volume.
        size: u64,
        /// Bytes of a sector.
        sector_size: u64,
    },
    /// It failed.
    Failed(String),
    /// It could not be reached.
    Unavailable(String),
}

/// How a volume starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Bytes of the volume.
    pub size: u64,
    /// Bytes of a sector.
    pub sector_size: u64,
    /// For each probe: nothing, or why the replica becomes `ERR`.
    pub refused: Vec<Option<String>>,
}

/// Whether an address comes twice.
///
/// # Errors
/// It does.
pub fn check_addresses(addresses: &[String]) -> Result<(), StartError> {
    let mut seen = BTreeSet::new();
    match addresses.iter().find(|address| !seen.insert(*address)) {
        Some(twice) => Err(StartError::Other(format!(
            "invalid ReplicaAddress: duplicate replica addresses {twice}"
        ))),
        None => Ok(()),
    }
}

/// The size of a volume that is to have `size` bytes and had `current` when it was last seen; 0 if
/// that is not known. An expansion that nobody noticed has changed all replicas.
#[must_use]
pub fn volume_size(size: u64, current: u64, replicas: &BTreeSet<u64>) -> u64 {
    let all_expanded = replicas.len() == 1 && replicas.contains(&size);
    if current == 0 || all_expanded { size } else { current }
}

/// Which replicas are fit: open, complete, of one sector size and of the volume's size.
///
/// # Errors
/// None is.
pub fn choose(
    size: u64,
    current: u64,
    addresses: &[String],
    probes: &[Probe],
) -> Result<Start, StartError> {
    let start = weigh(size, current, probes);
    let addresses = addresses.to_vec();
    if start.refused.iter().any(Option::is_none) {
        Ok(start)
    } else if probes.iter().any(|probe| matches!(probe, Probe::Unavailable(_))) {
        Err(StartError::Unavailable(addresses))
    } else {
        Err(StartError::NoReplica(addresses))
    }
}

/// The same where none may be: why each is refused that is.
#[must_use]
pub fn weigh(size: u64, current: u64, probes: &[Probe]) -> Start {
    let fit = |probe: &Probe| match probe {
        Probe::Open { state, size, sector_size } if state.is_complete() => {
            Some((*size, *sector_size))
        }
        _ => None,
    };
    let sector_size = probes.iter().find_map(fit).map_or(0, |(_, sector_size)| sector_size);
    let sizes = probes.iter().filter_map(fit).filter(|(_, sector)| *sector == sector_size);
    let size = volume_size(size, current, &sizes.map(|(size, _)| size).collect());
    let refused: Vec<_> = probes
        .iter()
        .map(|probe| match probe {
            Probe::Open { state, .. } if !state.is_complete() => {
                Some(format!("it is in the invalid state {state:?}").to_lowercase())
            }
            Probe::Open { sector_size: its, .. } if *its != sector_size => Some(format!(
                "its sector size is {its}, the sector size of the others is {sector_size}"
            )),
            Probe::Open { size: its, .. } if *its != size && !is(Bug::IgnoreSize) => {
                Some(format!("its size is {its}, the size of the volume is {size}"))
            }
            Probe::Open { .. } => None,
            Probe::Failed(why) | Probe::Unavailable(why) => Some(why.clone()),
        })
        .collect();
    Start { size, sector_size, refused }
}

/// What tells replicas apart that are all fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts<'a> {
    /// Whether it counts its changes.
    pub counter_disabled: bool,
    /// Changes that it counted.
    pub counter: i64,
    /// When its head was last changed, in nanoseconds since the epoch.
    pub modified_ns: i64,
    /// Bytes that its head holds.
    pub head_bytes: i64,
    /// The disk below its head, or nothing; `None` if that is not known.
    pub parent: Option<&'a str>,
    /// The revert that made its head, or nothing if it was made in another way; `None` if that is not known.
    pub revert: Option<&'a str>,
    /// All disks that it has.
    pub disks: &'a [&'a str],
}

impl Facts<'_> {
    fn has(&self, disk: &str) -> bool {
        disk.is_empty() || self.disks.contains(&disk)
    }

    /// Whether a snapshot or more were taken here that the other one has missed, whatever the clocks say: its head
    /// lies on a disk that the other one lacks, and the other one's on one that is here. The other one must not have
    /// gone back to that by a revert, which may have come later.
    fn is_later_than(&self, other: &Self) -> bool {
        let (Some(its), Some(others)) = (self.parent, other.parent) else { return false };
        !other.has(its) && self.has(others) && other.revert == Some("")
    }
}

/// How a volume is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Another controller still serves it: counters do not agree for a moment, and nothing is compared.
    pub upgrade: bool,
    /// Changes are not counted.
    pub counter_disabled: bool,
    /// All replicas had failed, and the best one is to be kept.
    pub salvage: bool,
}

/// For each fit replica: nothing, or why it becomes `ERR`.
#[must_use]
pub fn agree(policy: Policy, replicas: &[Facts<'_>]) -> Vec<Option<String>> {
    if policy.upgrade {
        return vec![None; replicas.len()];
    }
    let matching = |facts: &&Facts| facts.counter_disabled == policy.counter_disabled;
    let highest = replicas.iter().filter(matching).map(|facts| facts.counter).max().unwrap_or(0);
    let best = match policy.counter_disabled && policy.salvage {
        true => salvage(policy, replicas),
        false => None,
    };
    let judge = |(index, facts): (usize, &Facts)| {
        if facts.counter_disabled != policy.counter_disabled {
            let counts = |disabled: bool| if disabled { "does not count" } else { "counts" };
            let (its, ours) = (counts(facts.counter_disabled), counts(policy.counter_disabled));
            Some(format!("it {its} revisions, and the engine {ours} them"))
        } else if !policy.counter_disabled {
            let conflict = facts.counter != highest && !is(Bug::IgnoreCounters);
            conflict.then(|| format!("its revision is {}, the newest is {highest}", facts.counter))
        } else {
            let other = best.filter(|best| *best != index);
            other.map(|_| "another replica is salvaged".to_owned())
        }
    };
    let mut refused: Vec<_> = replicas.iter().enumerate().map(judge).collect();
    part_at_heads(policy, replicas, &mut refused);
    part_at_reverts(replicas, &mut refused);
    refused
}

/// Refuses replicas whose head lies on another disk than that of the one changed last: a controller that ended
/// amid a revert or a snapshot has left some with it and others without. A revert counts no revision. Which one was
/// changed last is by the clocks of their nodes, unless all have counted as many changes and one has missed snapshots of
/// another one.
fn part_at_heads(policy: Policy, replicas: &[Facts<'_>], refused: &mut [Option<String>]) {
    let known = replicas.iter().zip(&*refused).filter(|(_, refused)| refused.is_none());
    let known = known.filter_map(|(facts, _)| Some((facts, facts.parent?)));
    let known: Vec<_> = known.collect();
    let missed = |facts: &Facts<'_>| known.iter().any(|(other, _)| other.is_later_than(facts));
    let order = |facts: &Facts<'_>| {
        let is_current = policy.counter_disabled || !missed(facts);
        (is_current, facts.modified_ns)
    };
    // Of equal ones the first.
    let last = known.iter().rev().max_by_key(|(facts, _)| order(facts));
    let Some((_, newest)) = last.copied() else { return };
    for (facts, refused) in replicas.iter().zip(refused).filter(|(_, refused)| refused.is_none()) {
        if let Some(parent) = facts.parent.filter(|parent| *parent != newest) {
            *refused = Some(format!(
                "its head lies on {parent:?}, that of the replica changed last on {newest:?}: a revert or a \
                 snapshot was cut off"
            ));
        }
    }
}

/// Refuses replicas whose head was not made by the revert that made those of most, though all lie on the same disk: a
/// revert to where heads lay already was cut off. Among as many the one changed last counts; that is by the clocks of
/// their nodes, and so comes second. Only those count that were changed about when that one was: others may have failed in
/// a revert, and it alone has what was acknowledged since. Those that do not know are left alone.
fn part_at_reverts(replicas: &[Facts<'_>], refused: &mut [Option<String>]) {
    let known = replicas.iter().zip(&*refused).filter(|(_, refused)| refused.is_none());
    let known = known.filter_map(|(facts, _)| Some((facts.modified_ns, facts.revert?)));
    let mut known: Vec<_> = known.collect();
    let newest = known.iter().map(|(modified, _)| *modified).max().unwrap_or(0);
    known.retain(|(modified, _)| newest.saturating_sub(*modified) <= CLOCKS_NS);
    let have = |revert: &str| known.iter().filter(|(_, its)| *its == revert).count();
    // Of equal ones the first.
    let best = known.iter().rev().max_by_key(|(modified, revert)| (have(revert), *modified));
    let Some((_, kept)) = best else { return };
    for (facts, refused) in replicas.iter().zip(refused).filter(|(_, refused)| refused.is_none()) {
        if facts.revert.is_some_and(|revert| revert != *kept) {
            *refused = Some(
                "its head is not from the revert that made those of most replicas, or that of the one changed last, or is \
                 from one that made no other: a revert was cut off"
                    .to_owned(),
            );
        }
    }
}

/// Why a volume with revision counters is not to start: a replica that is refused for its size alone, or for the mark
/// of a rebuild, has counted more than those that are left. A rebuild begins with a count of 0 and counts what others
/// count, too: one that counted more was complete, and whoever was to take its mark away did not.
#[must_use]
pub fn ahead(
    policy: Policy,
    probes: &[Probe],
    replicas: &[Facts<'_>],
    start: &Start,
) -> Option<usize> {
    if policy.upgrade || policy.counter_disabled {
        return None;
    }
    let counts = |index: &usize| {
        let facts = replicas.get(*index).filter(|facts| !facts.counter_disabled);
        facts.map(|facts| facts.counter)
    };
    let left = start.refused.iter().enumerate().filter(|(_, why)| why.is_none());
    let highest = left.filter_map(|(index, _)| counts(&index)).max()?;
    let other = |probe: &Probe| match probe {
        Probe::Open { state: State::Rebuilding, .. } => true,
        Probe::Open { state, size, .. } => state.is_complete() && *size != start.size,
        Probe::Failed(_) | Probe::Unavailable(_) => false,
    };
    let mut others = probes.iter().enumerate().filter(|(_, probe)| other(probe));
    others.find_map(|(index, _)| counts(&index).filter(|its| *its > highest).map(|_| index))
}

/// The replica to keep: of those changed within 5 s of the newest change the one whose head holds most;
/// of equal ones the newest, and of those the first.
fn salvage(policy: Policy, replicas: &[Facts<'_>]) -> Option<usize> {
    let candidates = || {
        let all = replicas.iter().enumerate();
        all.filter(|(_, facts)| facts.counter_disabled == policy.counter_disabled)
    };
    let newest = candidates().map(|(_, facts)| facts.modified_ns).max()?;
    candidates()
        .filter(|(_, facts)| newest.saturating_sub(facts.modified_ns) < SALVAGE_WINDOW_NS)
        .max_by_key(|(index, facts)| {
            (facts.head_bytes, facts.modified_ns, std::cmp::Reverse(*index))
        })
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(state: State, size: u64) -> Probe {
        Probe::Open { state, size, sector_size: 512 }
    }

    fn refused(start: &Start) -> Vec<usize> {
        let all = start.refused.iter().enumerate();
        all.filter(|(_, why)| why.is_some()).map(|(index, _)| index).collect()
    }

    #[test]
    fn replicas_of_another_state_sector_size_or_size_are_refused() {
        let probes = [
            open(State::Open, 100),
            open(State::Rebuilding, 100),
            Probe::Open { state: State::Open, size: 100, sector_size: 4096 },
            open(State::Dirty, 200),
            open(State::Dirty, 100),
            Probe::Unavailable("gone".to_owned()),
            open(State::Error, 100),
        ];
        let start = choose(100, 100, &[], &probes).unwrap();
        assert_eq!((start.size, start.sector_size), (100, 512));
        assert_eq!(refused(&start), [1, 2, 3, 5, 6]);
        assert_eq!(
            start.refused[3].as_deref(),
            Some("its size is 200, the size of the volume is 100")
        );
    }

    #[test]
    fn the_size_is_the_present_one_unless_all_replicas_were_expanded() {
        let sizes = |list: &[u64]| list.iter().copied().collect::<BTreeSet<_>>();
        for (size, current, replicas, chosen) in [
            (100, 0, &[50][..], 100),
            (100, 50, &[50], 50),
            (100, 50, &[100], 100),
            (100, 50, &[50, 100], 50),
            (100, 50, &[70], 50),
            (100, 100, &[], 100),
        ] {
            assert_eq!(volume_size(size, current, &sizes(replicas)), chosen, "{replicas:?}");
        }
    }

    #[test]
    fn without_a_good_replica_it_counts_whether_one_was_out_of_reach() {
        let addresses = ["tcp://a:1".to_owned(), "tcp://b:1".to_owned()];
        let failed = || Probe::Failed("replica must be closed".to_owned());
        let error = choose(1, 1, &addresses, &[failed(), open(State::Open, 2)]).unwrap_err();
        assert_eq!(error.exit_code(), 61);
        let text =
            "no available backend due to replica error from the addresses [tcp://a:1 tcp://b:1]";
        assert_eq!(error.to_string(), text);
        let gone = Probe::Unavailable("refused".to_owned());
        let error = choose(1, 1, &addresses, &[failed(), gone]).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().starts_with("no available backend due to service unavailable"));
    }

    #[test]
    fn addresses_come_once() {
        let list = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(check_addresses(&list(&["a", "b"])), Ok(()));
        let error = check_addresses(&list(&["a", "b", "a"])).unwrap_err();
        assert!(error.to_string().contains("duplicate replica addresses a"));
        assert_eq!(error.exit_code(), 1);
    }

    const COUNTED: Facts<'static> = Facts {
        counter_disabled: false,
        counter: 5,
        modified_ns: 0,
        head_bytes: 0,
        parent: None,
        revert: None,
        disks: &[],
    };
    const COUNTS: Policy = Policy { upgrade: false, counter_disabled: false, salvage: false };
    const SALVAGE: Policy = Policy { upgrade: false, counter_disabled: true, salvage: true };

    fn errors(policy: Policy, replicas: &[Facts<'_>]) -> Vec<usize> {
        let all = agree(policy, replicas).into_iter().enumerate();
        all.filter(|(_, why)| why.is_some()).map(|(index, _)| index).collect()
    }

    #[test]
    fn only_the_highest_counter_stays() {
        let with = |counter| Facts { counter, ..COUNTED };
        assert_eq!(errors(COUNTS, &[with(5), with(7), with(7), with(6)]), [0, 3]);
        // One that does not count says nothing of how many there are.
        let mut other = with(9);
        other.counter_disabled = true;
        assert_eq!(errors(COUNTS, &[with(5), other]), [1]);
        assert_eq!(errors(Policy { salvage: true, ..COUNTS }, &[with(5), with(6)]), [0]);
        assert!(errors(Policy { upgrade: true, ..COUNTS }, &[with(5), with(6)]).is_empty());
        let uncounted = Policy { counter_disabled: true, ..COUNTS };
        assert_eq!(errors(uncounted, &[other, other, with(5)]), [2]);
    }

    #[test]
    fn the_largest_head_of_the_newest_is_salvaged() {
        let replica = |seconds: i64, head_bytes| Facts {
            counter_disabled: true,
            counter: 0,
            modified_ns: seconds * 1_000_000_000,
            head_bytes,
            parent: None,
            revert: None,
            disks: &[],
        };
        for (replicas, kept) in [
            (&[replica(10, 1), replica(14, 2), replica(12, 3)][..], 2),
            (&[replica(10, 9), replica(15, 2)], 1),
            (&[replica(11, 9), replica(15, 2)], 0),
            (&[replica(11, 2), replica(15, 2)], 1),
            (&[replica(15, 2), replica(15, 2)], 0),
        ] {
            let errors = errors(SALVAGE, replicas);
            assert!(!errors.contains(&kept), "{replicas:?} {errors:?}");
            assert_eq!(errors.len(), replicas.len() - 1);
        }
        assert!(errors(SALVAGE, &[]).is_empty());
    }

    /// Found by review: after a revert that was cut off, replicas with different content were all complete.
    #[test]
    fn heads_that_lie_on_different_disks_are_told_apart() {
        let on = |modified_ns, parent| Facts { modified_ns, parent, ..COUNTED };
        for (replicas, refused) in [
            (&[on(1, Some("a")), on(1, Some("a"))][..], &[][..]),
            (&[on(1, Some("a")), on(2, Some("b")), on(1, Some("a"))], &[0, 2]),
            (&[on(2, Some("a")), on(2, Some("")), on(1, None)], &[1]),
            // One that is left out anyway decides nothing.
            (&[Facts { counter: 4, ..on(9, Some("b")) }, on(1, Some("a"))], &[0]),
        ] {
            assert_eq!(errors(COUNTS, replicas), refused, "{replicas:?}");
            assert!(errors(Policy { upgrade: true, ..COUNTS }, replicas).is_empty());
        }
    }

    /// Found by review: a clock that was ahead cost an acknowledged snapshot.
    #[test]
    fn a_snapshot_that_one_lacks_counts_for_more_than_clocks() {
        let made = Facts { revert: Some(""), ..COUNTED };
        let (s1, s2) = (Some("s1"), Some("s2"));
        let later = Facts { modified_ns: 10, disks: &["s1", "s2"], parent: s2, ..made };
        let missed = Facts { modified_ns: 99, disks: &["s1"], parent: s1, ..made };
        assert_eq!(errors(COUNTS, &[later, missed]), [1]);
        assert_eq!(errors(COUNTS, &[missed, later, missed]), [0, 2]);
        // As one that has none at all.
        let empty = Facts { parent: Some(""), disks: &[], ..missed };
        assert_eq!(errors(COUNTS, &[empty, later]), [0]);
        // It went back to there, and what it left was deleted: that may have been later.
        for revert in [Some("r"), None] {
            assert_eq!(errors(COUNTS, &[later, Facts { revert, ..missed }]), [0]);
        }
        // Each has what the other one lacks.
        let other = Facts { parent: Some("s3"), disks: &["s1", "s3"], ..missed };
        assert_eq!(errors(COUNTS, &[later, other]), [0]);
        // Both have both: one of them went back.
        assert_eq!(errors(COUNTS, &[later, Facts { disks: later.disks, ..missed }]), [0]);
        // Without counts the last change says who has the last writes.
        let uncounted = Policy { counter_disabled: true, ..COUNTS };
        let both = [later, missed].map(|facts| Facts { counter_disabled: true, ..facts });
        assert_eq!(errors(uncounted, &both), [0]);
    }

    /// Found by review: after a revert to where heads lay already, cut off, all were complete as well.
    #[test]
    fn heads_of_different_reverts_are_told_apart() {
        let by = |modified_ns, revert| Facts { modified_ns, revert, parent: Some("a"), ..COUNTED };
        for (replicas, refused) in [
            (&[by(1, Some("r")), by(2, Some("r"))][..], &[][..]),
            (&[by(1, Some("")), by(2, Some("r")), by(1, Some(""))], &[1]),
            (&[by(2, Some("")), by(1, Some("r"))], &[1]),
            (&[by(2, Some("q")), by(1, Some("r"))], &[1]),
            // Most count for more than a clock that is ahead, but not for more than what one did alone.
            (&[by(9, Some("")), by(1, Some("r")), by(2, Some("r"))], &[0]),
            (&[by(1, Some("")), by(61_000_000_000, Some("r")), by(2, Some(""))], &[0, 2]),
            (&[by(1, Some("")), by(61_000_000_000, Some("r")), by(61_000_000_001, Some(""))], &[1]),
            // Who does not know is left alone, and decides nothing.
            (&[by(9, None), by(1, Some("")), by(2, Some("r"))], &[1]),
            (&[by(9, None), by(1, None), by(2, Some("r"))], &[]),
            (&[Facts { counter: 4, ..by(9, Some("q")) }, by(1, Some("r"))], &[0]),
        ] {
            assert_eq!(errors(COUNTS, replicas), refused, "{replicas:?}");
            assert!(errors(Policy { upgrade: true, ..COUNTS }, replicas).is_empty());
        }
    }

    /// Found by review: a stale replica of the size that was last seen beat the newest, and one that was marked.
    #[test]
    fn one_that_counted_more_is_in_the_way() {
        let probes =
            [open(State::Dirty, 50), open(State::Dirty, 100), open(State::Rebuilding, 100)];
        let start = weigh(100, 50, &probes);
        assert_eq!(refused(&start), [1, 2]);
        let with = |counter| Facts { counter, ..COUNTED };
        let ahead =
            |policy, counters: [i64; 3]| ahead(policy, &probes, &counters.map(with), &start);
        assert_eq!(ahead(COUNTS, [5, 6, 1]), Some(1));
        assert_eq!(ahead(COUNTS, [5, 5, 5]), None);
        assert_eq!(ahead(COUNTS, [5, 5, 9]), Some(2));
        assert_eq!(ahead(Policy { upgrade: true, ..COUNTS }, [5, 6, 1]), None);
        assert_eq!(ahead(SALVAGE, [5, 6, 1]), None);
    }

    #[test]
    fn states_have_upstreams_names() {
        for (text, complete, counts) in [
            ("initial", false, false),
            ("closed", false, false),
            ("open", true, true),
            ("dirty", true, true),
            ("rebuilding", false, true),
            ("error", false, false),
        ] {
            let state = State::parse(text).unwrap();
            assert_eq!(
                (state.is_complete(), state.counts_snapshots()),
                (complete, counts),
                "{text}"
            );
        }
        assert_eq!(State::parse("Open"), None);
    }
}
