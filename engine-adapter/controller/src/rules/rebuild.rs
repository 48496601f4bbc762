//! The controller's share of a rebuild: whom it may begin with, what is removed before layers come in,
//! which files they are, and what is compared before the replica counts as complete.

use super::mode::Mode;
use super::sabotage::{Bug, is};
use std::collections::BTreeMap;

/// Whether any replica may be added to replicas in these modes: what upstream looks at before it asks the
/// replica.
///
/// # Errors
/// Why not, in upstream's words.
pub fn check_add(present: &[Mode], expanding: bool) -> Result<(), String> {
    if present.contains(&Mode::Wo) {
        return Err("can only have one WO replica at a time".to_owned());
    }
    if expanding {
        return Err("cannot add WO replica during expansion".to_owned());
    }
    Ok(())
}

/// Whether a replica may be added in this mode; asked when it is known to be closed.
///
/// # Errors
/// Why not.
pub fn check_mode(present: &[Mode], mode: Mode) -> Result<(), String> {
    match mode {
        Mode::Err => Err("cannot add a replica in mode ERR".to_owned()),
        // What the others hold is not known of it.
        Mode::Rw if present.contains(&Mode::Rw) => {
            Err("cannot add a replica as RW beside others; add it as WO and rebuild it".to_owned())
        }
        Mode::Wo | Mode::Rw => Ok(()),
    }
}

/// A file that a rebuild copies under its own name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its name on both sides.
    pub name: String,
    /// Bytes that it holds, for the progress.
    pub size: u64,
}

/// What is to be done before layers come in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Disks of the replica that the source lacks.
    pub remove: Vec<String>,
    /// What is copied then.
    pub files: Vec<File>,
}

/// The plan for a replica, given the disks (without head and backing file) of the source with their
/// sizes, and its own.
#[must_use]
pub fn plan(source: &BTreeMap<String, u64>, target: &BTreeMap<String, u64>) -> Plan {
    let extra = target.keys().filter(|disk| !source.contains_key(*disk)).cloned();
    let remove = if is(Bug::KeepExtraLayers) { Vec::new() } else { extra.collect() };
    let files = source
        .iter()
        .flat_map(|(disk, size)| {
            let image = File { name: disk.clone(), size: *size };
            [image, File { name: format!("{disk}.meta"), size: 0 }]
        })
        .collect();
    Plan { remove, files }
}

/// Which layers a replica has, and how they lie upon each other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tree {
    /// The disk below each, or nothing, by their disks; without the head.
    pub parents: BTreeMap<String, String>,
    /// The disk below the head.
    pub head: String,
}

/// Whether a rebuilt replica has exactly the layers of a complete one, in the same order.
///
/// # Errors
/// It has not.
pub fn compare(
    (source_address, source): (&str, &Tree),
    (target_address, target): (&str, &Tree),
) -> Result<(), String> {
    if is(Bug::SkipVerify) {
        return Ok(());
    }
    let (ours, theirs) = (&target.parents, &source.parents);
    if !theirs.keys().eq(ours.keys()) {
        let what = match theirs.len() == ours.len() {
            true => "chain not equal to",
            false => "disk number is not equal to that of",
        };
        let names =
            |tree: &BTreeMap<String, String>| tree.keys().cloned().collect::<Vec<_>>().join(" ");
        let (ours, theirs) = (names(ours), names(theirs));
        return Err(format!(
            "replica {target_address}'s {what} RW replica {source_address}: [{ours}] vs [{theirs}]"
        ));
    }
    let disks = ours.iter().map(|(disk, parent)| (disk.as_str(), parent));
    let disks = disks.chain([("its head", &target.head)]);
    let other = disks.zip(theirs.values().chain([&source.head])).find(|((_, a), b)| a != b);
    match other {
        None => Ok(()),
        Some(((disk, ours), theirs)) => Err(format!(
            "replica {target_address}'s chain not equal to RW replica {source_address}: {disk} lies on \
             {ours:?}, not on {theirs:?}"
        )),
    }
}

/// What verifying comes to, by the mode of the replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verify {
    /// It is to be compared.
    Compare,
    /// It is complete already.
    Complete,
    /// It cannot be.
    Refuse(String),
}

/// What verifying a replica in this mode comes to.
#[must_use]
pub fn verify(address: &str, mode: Mode) -> Verify {
    match mode {
        Mode::Wo => Verify::Compare,
        Mode::Rw => Verify::Complete,
        Mode::Err => Verify::Refuse(format!("invalid mode ERR for replica {address} to check")),
    }
}

/// Whether a replica in this mode may be prepared.
///
/// # Errors
/// It may not.
pub fn check_prepare(address: &str, mode: Mode) -> Result<(), String> {
    match mode {
        Mode::Wo => Ok(()),
        other => Err(format!("invalid mode {other} for replica {address} to prepare rebuild")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disks(names: &[&str]) -> BTreeMap<String, u64> {
        names.iter().zip(1..).map(|(name, size)| ((*name).to_owned(), size)).collect()
    }

    #[test]
    fn one_at_a_time_and_not_while_the_volume_grows() {
        use Mode::{Err, Rw, Wo};
        assert_eq!(check_add(&[Rw, Err], false), Ok(()));
        assert_eq!(check_mode(&[Rw, Err], Wo), Ok(()));
        assert_eq!(check_mode(&[], Rw), Ok(()));
        let text = check_add(&[Rw, Wo], false).unwrap_err();
        assert_eq!(text, "can only have one WO replica at a time");
        let text = check_add(&[Rw], true).unwrap_err();
        assert_eq!(text, "cannot add WO replica during expansion");
        assert!(check_mode(&[Rw], Rw).is_err());
        assert!(check_mode(&[Rw], Err).is_err());
    }

    #[test]
    fn what_the_source_lacks_goes_and_what_it_has_comes() {
        let plan = plan(&disks(&["a", "c"]), &disks(&["a", "b", "d"]));
        assert_eq!(plan.remove, ["b", "d"]);
        let files: Vec<_> = plan.files.iter().map(|file| (file.name.as_str(), file.size)).collect();
        assert_eq!(files, [("a", 1), ("a.meta", 0), ("c", 2), ("c.meta", 0)]);
    }

    #[test]
    fn all_layers_have_to_be_there_and_no_others() {
        let tree = |names: &[&str]| Tree {
            parents: names.iter().map(|name| ((*name).to_owned(), String::new())).collect(),
            head: "b".to_owned(),
        };
        let source = tree(&["a", "b"]);
        let check = |target: &[&str]| compare(("s", &source), ("t", &tree(target)));
        assert_eq!(check(&["b", "a"]), Ok(()));
        assert!(check(&["a", "c"]).unwrap_err().contains("chain not equal to RW replica s: [a c]"));
        assert!(check(&["a"]).unwrap_err().contains("disk number is not equal"));
        assert!(check(&["a", "b", "c"]).is_err());
        // Found by review: only the names were compared.
        let mut other = source.clone();
        other.parents.insert("b".to_owned(), "a".to_owned());
        let text = compare(("s", &source), ("t", &other)).unwrap_err();
        assert!(text.ends_with("b lies on \"a\", not on \"\""), "{text}");
        let other = Tree { head: String::new(), ..source.clone() };
        let text = compare(("s", &source), ("t", &other)).unwrap_err();
        assert!(text.ends_with("its head lies on \"\", not on \"b\""), "{text}");
    }

    #[test]
    fn only_what_is_being_rebuilt_is_prepared_and_verified() {
        assert_eq!(verify("a", Mode::Wo), Verify::Compare);
        assert_eq!(verify("a", Mode::Rw), Verify::Complete);
        let Verify::Refuse(text) = verify("tcp://a:1", Mode::Err) else { panic!() };
        assert_eq!(text, "invalid mode ERR for replica tcp://a:1 to check");
        assert!(check_prepare("a", Mode::Wo).is_ok());
        assert!(check_prepare("a", Mode::Rw).unwrap_err().contains("invalid mode RW"));
    }
}
