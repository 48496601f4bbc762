//! Snapshots, reverts, expansions, removals, unmaps: how the chain looks and what reads give.

use crate::support::*;
use dbs_sim::Faults;
use longhorn_wire::proto::ptypes::Replica;
use std::collections::BTreeMap;
use tonic::{Code, Status};

fn unknown<T: std::fmt::Debug>(outcome: Outcome<T>) -> String {
    let status: Status = outcome.unwrap_err();
    assert_eq!(status.code(), Code::Unknown, "{status}");
    status.message().to_owned()
}

/// How a snapshot is refused that no replica could take: nothing has happened.
fn refused<T: std::fmt::Debug>(outcome: Outcome<T>) -> String {
    let status: Status = outcome.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    status.message().to_owned()
}

/// Disks and their parents, short: `h3`, `a`.
fn tree(replica: &Replica) -> BTreeMap<String, String> {
    let disks = replica.disks.values();
    let tree: BTreeMap<_, _> = disks.map(|d| (short(&d.name), short(&d.parent))).collect();
    for (name, disk) in &replica.disks {
        assert_eq!(*name, disk.name);
        let children: Vec<_> =
            replica.disks.values().filter(|d| d.parent == *name).map(|d| d.name.clone()).collect();
        assert_eq!(disk.children.len(), children.len());
        assert!(children.iter().all(|child| disk.children.get(child) == Some(&true)));
    }
    tree
}

fn short(disk: &str) -> String {
    let name = disk.strip_suffix(".img").unwrap_or(disk);
    match (name.strip_prefix("volume-head-"), name.strip_prefix("volume-snap-")) {
        (Some(number), _) => format!("h{}", number.parse::<u64>().unwrap()),
        (_, Some(name)) => name.to_owned(),
        _ => name.to_owned(),
    }
}

fn chain(replica: &Replica) -> Vec<String> {
    replica.chain.iter().map(|disk| short(disk)).collect()
}

fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[test]
fn snapshots_are_disks_of_a_chain() {
    let bench = Bench::opened();
    bench.write(0, 1);
    bench.write(1, 1);
    let first = bench.snapshot_as("a", true, NOW, &[("k", "v"), ("", "x")]).unwrap();
    assert_eq!(first.state, "dirty");
    assert_eq!(
        (first.head.as_str(), first.parent.as_str()),
        ("volume-head-001.img", "volume-snap-a.img")
    );
    assert_eq!(first.head_file_size, 0);
    bench.write(0, 2);
    let created = "2026-08-21T10:00:00.123456";
    let r = bench.snapshot_as("b", false, created, &[]).unwrap();
    assert_eq!(chain(&r), ["h2", "b", "a"]);
    assert_eq!(tree(&r), pairs(&[("a", ""), ("b", "a"), ("h2", "b")]));
    let (a, b) = (&r.disks[&disk("a")], &r.disks[&disk("b")]);
    assert_eq!((a.user_created, a.created.as_str(), a.size.as_str()), (true, NOW, "8192"));
    assert_eq!((a.labels.len(), a.labels["k"].as_str(), a.removed), (2, "v", false));
    assert_eq!((b.user_created, b.created.as_str(), b.size.as_str()), (false, created, "4096"));
    assert!(b.labels.is_empty());
    assert_eq!((r.snapshot_count_usage, r.snapshot_count_total, r.remain_snapshots), (2, 3, 248));
    assert_eq!(r.snapshot_size_usage, 8192 + 4096);
    for created in ["yesterday", "2026-08-21T12:00:00+02:00"] {
        let r = bench.snapshot_as(created, true, created, &[]).unwrap();
        assert_eq!(r.disks[&disk(created)].created, created);
    }
}

#[test]
fn snapshots_that_are_refused() {
    let bench = Bench::opened();
    bench.snapshot("a");
    bench.write(0, 1);
    let text = unknown(bench.snapshot_as("a", true, NOW, &[]));
    assert!(text.contains("snapshot volume-snap-a.img is already existing"), "{text}");
    for name in ["a/b", "a@b", ".incoming-a", " a", "\n"] {
        refused(bench.snapshot_as(name, true, NOW, &[]));
    }
    let long = "x".repeat(5000);
    refused(bench.snapshot_as("l", true, NOW, &[("a", &long), ("b", &long)]));
    refused(bench.snapshot_as(&"n".repeat(300), true, NOW, &[]));
    assert_eq!(chain(&bench.get()), ["h1", "a"], "nothing has changed");
    assert_eq!(bench.max_count(1).remain_snapshots, 0);
    assert_eq!(refused(bench.snapshot_as("b", true, NOW, &[])), "too many active disks: 2");
    // A removed one does not count.
    assert_eq!(bench.mark("a").unwrap().remain_snapshots, 1);
    assert_eq!(chain(&bench.snapshot("b")), ["h2", "b"]);
    assert_eq!(bench.max_count(0).remain_snapshots, -1);
    refused(bench.snapshot_as("c", true, NOW, &[]));
}

#[test]
fn reverts_leave_side_branches() {
    let bench = Bench::opened();
    bench.write(0, 1);
    bench.snapshot("a");
    bench.write(0, 2);
    bench.snapshot("b");
    bench.write(0, 3);
    bench.write(1, 3);
    let r = bench.revert("a");
    assert_eq!((r.state.as_str(), chain(&r)), ("dirty", vec!["h3".to_owned(), "a".to_owned()]));
    assert_eq!(tree(&r), pairs(&[("a", ""), ("b", "a"), ("h3", "a")]));
    assert_eq!((bench.read(0), bench.read(1)), (1, 0));
    assert_eq!((r.snapshot_count_usage, r.snapshot_count_total), (2, 3));
    assert_eq!(r.snapshot_size_usage, 4096, "of the live chain only");
    bench.write(1, 4);
    let r = bench.snapshot("c");
    assert_eq!(tree(&r), pairs(&[("a", ""), ("b", "a"), ("c", "a"), ("h4", "c")]));
    let r = bench.revert("b");
    assert_eq!(chain(&r), ["h5", "b", "a"]);
    assert_eq!((bench.read(0), bench.read(1)), (2, 0));
    bench.revert("c");
    assert_eq!((bench.read(0), bench.read(1)), (1, 4));

    // An unchanged replica stays `open`.
    bench.close();
    assert_eq!(bench.open().state, "open");
    assert_eq!(bench.revert("a").state, "open");
}

#[test]
fn reverts_that_are_refused() {
    let bench = Bench::opened();
    bench.write(0, 1);
    bench.snapshot("a");
    bench.write(0, 2);
    for name in ["a", "volume-snap-x.img", "volume-head-001.img", "..", "volume.meta"] {
        let text = unknown(bench.revert_to(name, NOW));
        assert!(text.contains(name), "{text}");
    }
    bench.mark("a").unwrap();
    let text = unknown(bench.revert_to(&disk("a"), NOW));
    assert!(text.contains("already marked as removed"), "{text}");
    assert_eq!(bench.read(0), 2);
    assert_eq!(bench.get().head, "volume-head-001.img");
}

/// Found by review: a controller took all of its replicas for unchanged, and went on.
#[test]
fn what_could_not_be_committed_for_want_of_space_is_not_told_as_a_full_disk() {
    type Change = fn(&Bench) -> Outcome<Replica>;
    let changes: [Change; 3] = [
        |bench| bench.revert_to(&disk("a"), NOW),
        |bench| bench.snapshot_as("b", true, NOW, &[]),
        |bench| bench.expand(2 * SIZE as i64),
    ];
    for change in changes {
        // Whatever of it the disk refuses.
        let refused = (1..).take_while(|nth| {
            let (bench, disk) = Bench::simulated();
            bench.create(&SIZE.to_string()).unwrap();
            bench.open();
            bench.snapshot("a");
            bench.write(0, 1);
            disk.arm(Faults { refused_at: Some(*nth), ..Faults::default() });
            let Err(status) = change(&bench) else { return false };
            let text = status.message();
            assert!(text.contains("os error 28"), "{nth}: {text}");
            assert!(!text.contains(longhorn_wire::frame::NO_SPACE_TEXT), "{nth}: {text}");
            // Room refused before the commit changed nothing: only then may it be told so.
            let unchanged = text.contains("RollbackSucceeded");
            let goes_on = bench.snapshot_as("after", true, NOW, &[]).is_ok();
            assert_eq!(unchanged, goes_on, "{nth}: {text}");
            true
        });
        assert!(refused.count() > 2, "the commit was not among it");
    }
}

#[test]
fn expansion_keeps_the_size_of_older_layers() {
    let bench = Bench::opened();
    let last = SIZE / 4096 - 1;
    bench.write(last, 1);
    bench.snapshot("a");
    let grown = 2 * SIZE;
    let r = bench.expand(grown as i64).unwrap();
    let name = format!("expand-{grown}");
    assert_eq!(
        (r.size.as_str(), chain(&r)),
        ("8388608", vec!["h2".to_owned(), name.clone(), "a".to_owned()])
    );
    let snapshot = &r.disks[&disk(&name)];
    assert!(!snapshot.user_created);
    assert_eq!(snapshot.labels["replica-expansion"], grown.to_string());
    assert_eq!(snapshot.labels.len(), 1);
    assert_eq!(snapshot.created.len(), NOW.len());
    assert_eq!(bench.active().size(), grown);
    assert_eq!((bench.read(last), bench.read(last + 1)), (1, 0));
    bench.write(last + 1, 2);
    bench.write(2 * last, 2);
    let disks = bench.replica.disks().unwrap();
    assert_eq!((disks[&disk("a")].size, disks["volume-head-002.img"].size), (SIZE, grown));
    // Equal is nothing to do.
    assert_eq!(chain(&bench.expand(grown as i64).unwrap()).len(), 3);

    // Back behind the expansion: the size stays, what was written behind the old end is gone.
    let r = bench.revert("a");
    assert_eq!(r.size, grown.to_string());
    assert_eq!((bench.read(last), bench.read(last + 1), bench.read(2 * last)), (1, 0, 0));
    bench.close();
    let bench = Bench::on(bench.end(), |_| {});
    assert_eq!(bench.open().size, grown.to_string());
    assert_eq!((bench.read(last), bench.read(last + 1)), (1, 0));
}

/// Code, message and rollback message of a failed expansion.
fn expand_error(outcome: Outcome<Replica>) -> (String, String, String) {
    let status = outcome.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    let json: serde_json::Value = serde_json::from_str(status.message()).unwrap();
    let text = |key: &str| json[key].as_str().unwrap().to_owned();
    assert_eq!(json.as_object().unwrap().len(), 3);
    (text("code"), text("message"), text("rollbackMessage"))
}

/// No rebuild would bring a layer that ends within a block with a larger one on it.
#[test]
fn a_volume_that_ends_within_a_block_does_not_grow() {
    let bench = Bench::new();
    bench.create("5120").unwrap();
    bench.open();
    let (code, message, _) = expand_error(bench.expand(SIZE as i64));
    assert_eq!(code, "FunctionFailedWithoutRollback", "{message}");
    assert_eq!((bench.get().size.as_str(), chain(&bench.get()).len()), ("5120", 1));
}

#[test]
fn expansions_that_fail_say_how_far_they_got() {
    let bench = Bench::opened();
    bench.write(0, 1);
    for size in [SIZE as i64 + 512, SIZE as i64 - 4096, -4096, 0, i64::MAX, i64::MIN] {
        let (code, message, rollback) = expand_error(bench.expand(size));
        assert_eq!(code, "FunctionFailedWithoutRollback", "{size}: {message}");
        assert_eq!(rollback, "");
    }
    // Larger than any volume: only the store finds out, when there is a snapshot.
    let (code, message, rollback) = expand_error(bench.expand(1 << 50));
    assert_eq!((code.as_str(), rollback.as_str()), ("FunctionFailedRollbackSucceeded", ""));
    assert!(message.contains("expand-1125899906842624"), "{message}");
    let r = bench.get();
    assert_eq!((r.size.as_str(), chain(&r).len()), ("4194304", 1));
    assert_eq!(bench.read(0), 1);
    bench.work();
    assert_eq!(bench.read(0), 1);
    bench.max_count(0);
    // Refused before anything was done: the engine need not give it up.
    let (code, ..) = expand_error(bench.expand(2 * SIZE as i64));
    assert_eq!(code, "FunctionFailedRollbackSucceeded");
    bench.max_count(250);

    // What a crash between the two steps leaves is cleaned up; what a person made is not touched.
    let name = format!("expand-{}", 2 * SIZE);
    let size = (2 * SIZE).to_string();
    bench.snapshot_as(&name, false, NOW, &[("replica-expansion", &size)]).unwrap();
    bench.write(0, 2);
    let r = bench.expand(2 * SIZE as i64).unwrap();
    assert_eq!((r.size.as_str(), r.snapshot_count_usage), (size.as_str(), 1));
    assert_eq!(bench.read(0), 2);
    let name = format!("expand-{}", 3 * SIZE);
    bench.snapshot(&name);
    let (code, message, _) = expand_error(bench.expand(3 * SIZE as i64));
    assert_eq!(code, "FunctionFailedRollbackSucceeded");
    assert!(message.contains("is already existing"), "{message}");
}

#[test]
fn encrypted_volumes_grow_by_their_header_when_opened() {
    let room = 16 * MIB;
    let expected = (SIZE + room) as i64;
    let plain = Bench::opened();
    plain.close();
    assert_eq!(plain.open_as(false, expected).unwrap().size, SIZE.to_string());

    let bench = Bench::with(|options| options.encrypted = true);
    bench.create(&SIZE.to_string()).unwrap();
    for (is_upgrade, expected) in [(true, expected), (false, 0), (false, SIZE as i64), (false, -1)]
    {
        assert_eq!(bench.open_as(is_upgrade, expected).unwrap().size, SIZE.to_string());
        bench.close();
    }
    let r = bench.open_as(false, expected).unwrap();
    assert_eq!((r.size.as_str(), r.state.as_str()), (expected.to_string().as_str(), "dirty"));
    assert_eq!(chain(&r), ["h1".to_owned(), format!("expand-{expected}")]);
    bench.close();
    assert_eq!(bench.open_as(false, expected).unwrap().size, expected.to_string());
    // A failure leaves it closed.
    let full = Bench::with(|options| {
        options.encrypted = true;
        options.snapshot_max_count = 0;
    });
    full.create(&SIZE.to_string()).unwrap();
    unknown(full.open_as(false, expected));
    assert_eq!(full.get().state, "closed");
    assert_eq!(full.open().state, "open");
}

#[test]
fn removed_disks_leave_the_chain_but_not_the_disks() {
    let bench = Bench::opened();
    for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
        bench.write(0, byte);
        bench.write(u64::from(byte), byte);
        bench.snapshot(name);
    }
    assert_eq!(chain(&bench.mark("b").unwrap()), ["h3", "c", "a"], "by its bare name");
    let r = bench.mark(&disk("a")).unwrap();
    assert_eq!(chain(&r), ["h3", "c"]);
    assert_eq!(tree(&r), pairs(&[("a", ""), ("b", "a"), ("c", "b"), ("h3", "c")]));
    assert!(r.disks[&disk("a")].removed && r.disks[&disk("b")].removed);
    assert_eq!((r.snapshot_count_usage, r.snapshot_count_total, r.remain_snapshots), (1, 4, 249));
    assert_eq!(r.snapshot_size_usage, 2 * 4096);
    assert_eq!(bench.mark("b").unwrap(), r, "again");
    assert_eq!(bench.mark("unknown").unwrap(), r);
    assert_eq!(
        unknown(bench.mark("volume-head-003.img")),
        "cannot mark the active differencing disk as removed"
    );
    bench.close();
    let bench = Bench::on(bench.end(), |_| {});
    assert_eq!(chain(&bench.open()), ["h3", "c"]);
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [3, 1, 2, 3]);
}

#[test]
fn what_prepare_remove_says() {
    let bench = Bench::opened();
    for name in ["a", "b", "c"] {
        bench.snapshot(name);
    }
    let list = |actions: &[(&str, &str, &str)]| -> Vec<(String, String, String)> {
        let owned = |(a, s, t): &(&str, &str, &str)| {
            let name =
                |n: &str| if n.is_empty() || n.contains('-') { n.to_owned() } else { disk(n) };
            ((*a).to_owned(), name(s), name(t))
        };
        actions.iter().map(owned).collect()
    };
    assert_eq!(unknown(bench.prepare("b")), "disk volume-snap-b.img hasn't been marked as removed");
    assert_eq!(
        unknown(bench.prepare("volume-head-003.img")),
        "cannot delete the active differencing disk"
    );
    assert_eq!(bench.prepare("unknown").unwrap(), []);
    bench.mark("b").unwrap();
    let fold = list(&[("coalesce", "b", "c"), ("replace", "b", "c")]);
    assert_eq!(bench.prepare("b").unwrap(), fold);
    assert_eq!(bench.prepare(&disk("b")).unwrap(), fold);
    bench.mark("c").unwrap();
    assert_eq!(bench.prepare("c").unwrap(), list(&[("prune", "c", "volume-head-003.img")]));
    bench.mark("a").unwrap();
    // A side branch: no child, and several.
    let bench = Bench::opened();
    bench.snapshot("a");
    bench.snapshot("b");
    bench.revert("a");
    bench.mark("a").unwrap();
    bench.mark("b").unwrap();
    assert_eq!(bench.prepare("b").unwrap(), list(&[("remove", "b", "")]));
    assert_eq!(bench.prepare("a").unwrap(), []);
}

#[test]
fn removing_a_disk_moves_what_it_holds_to_its_child() {
    let bench = Bench::opened();
    for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
        bench.write(0, byte);
        bench.write(u64::from(byte), byte);
        bench.snapshot(name);
    }
    assert_eq!(
        unknown(bench.remove("volume-head-003.img", true)),
        "cannot delete the active differencing disk"
    );
    let r = bench.remove(&disk("b"), false).unwrap();
    assert_eq!(tree(&r), pairs(&[("a", ""), ("c", "a"), ("h3", "c")]));
    assert_eq!(bench.remove(&disk("b"), false).unwrap(), r, "gone already");
    bench.work();
    let r = bench.get();
    assert_eq!(tree(&r), pairs(&[("a", ""), ("c", "a"), ("h3", "c")]));
    assert_eq!(r.disks[&disk("c")].size, (3 * 4096).to_string());
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [3, 1, 2, 3]);
    // Right under the head.
    let r = bench.remove(&disk("c"), false).unwrap();
    assert_eq!((chain(&r), r.parent), (vec!["h3".to_owned(), "a".to_owned()], disk("a")));
    bench.work();
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [3, 1, 2, 3]);
    bench.remove(&disk("a"), false).unwrap();
    bench.work();
    let r = bench.get();
    assert_eq!((chain(&r), r.parent.as_str()), (vec!["h3".to_owned()], ""));
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [3, 1, 2, 3]);
}

#[test]
fn several_children_keep_a_disk_unless_forced() {
    let bench = Bench::opened();
    bench.write(0, 1);
    bench.snapshot("a");
    bench.write(0, 2);
    bench.snapshot("b");
    bench.revert("a");
    bench.write(1, 3);
    assert_eq!(
        unknown(bench.remove(&disk("a"), false)),
        "cannot remove snapshot volume-snap-a.img with 2 children"
    );
    let text = unknown(bench.replace(&disk("b"), &disk("a")));
    assert!(text.contains("2 children"), "{text}");
    let r = bench.remove(&disk("a"), true).unwrap();
    assert_eq!(tree(&r), pairs(&[("b", ""), ("h3", "")]));
    bench.work();
    assert_eq!((bench.read(0), bench.read(1)), (1, 3));
    bench.revert("b");
    assert_eq!((bench.read(0), bench.read(1)), (2, 0));
}

#[test]
fn replacing_folds_the_parent_into_its_child() {
    let bench = Bench::opened();
    for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
        bench.write(0, byte);
        bench.write(u64::from(byte), byte);
        bench.snapshot(name);
    }
    assert_eq!(
        unknown(bench.replace("volume-head-003.img", &disk("c"))),
        "cannot replace the active differencing disk"
    );
    let text = unknown(bench.replace(&disk("b"), &disk("x")));
    assert_eq!(text, format!("cannot find source of replacing: {}", disk("x")));
    unknown(bench.replace(&disk("c"), "volume-head-003.img"));
    unknown(bench.replace(&disk("c"), &disk("a")));
    unknown(bench.replace("nowhere", &disk("a")));
    assert_eq!(chain(&bench.get()).len(), 4);
    let r = bench.replace(&disk("b"), &disk("a")).unwrap();
    assert_eq!(tree(&r), pairs(&[("b", ""), ("c", "b"), ("h3", "c")]));
    bench.work();
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [3, 1, 2, 3]);
    bench.revert("b");
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [2, 1, 2, 0]);
}

#[test]
fn unmaps_touch_whole_blocks() {
    let bench = Bench::opened();
    (0..4).for_each(|block| bench.write(block, 1));
    bench.snapshot("a");
    bench.write(1, 2);
    let active = bench.active();
    let unmap = |offset, length| active.events().unmap(offset, length).unwrap();
    assert_eq!(unmap(0, 0), 0);
    assert_eq!(unmap(1, 4096), 0);
    assert_eq!(unmap(100, 8000), 0);
    assert_eq!(bench.read(1), 2);
    assert_eq!(unmap(1, 3 * 4096 - 2), 4096);
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [1, 0, 1, 1]);
    assert_eq!(unmap(0, SIZE), 0, "the head holds nothing there");
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [0; 4]);
    assert_eq!(
        bench.get().disks[&disk("a")].size,
        (4 * 4096).to_string(),
        "not removed, not touched"
    );
    assert_eq!(bench.get().disks["volume-head-001.img"].size, "0");
    // The end of a volume that is no multiple of a block.
    let bench = Bench::new();
    bench.create("5120").unwrap();
    bench.open();
    bench.write(0, 1);
    bench.active().volume().unwrap().write_at(4096, &[1; 1024], false).unwrap();
    bench.active().events().unmap(4096, 1024).unwrap();
    assert_eq!(bench.read(0), 1);
    let mut tail = [9; 1024];
    bench.active().volume().unwrap().read_at(4096, &mut tail).unwrap();
    assert_eq!(tail, [0; 1024]);
}

#[test]
fn unmaps_reach_the_removed_snapshots_below() {
    let bench = Bench::opened();
    for (name, byte) in [("a", 1), ("b", 2)] {
        (0..4).for_each(|block| bench.write(block, byte));
        bench.snapshot(name);
    }
    bench.write(0, 3);
    bench.mark("b").unwrap();
    let active = bench.active();
    assert_eq!(active.events().unmap(0, 2 * 4096).unwrap(), 3 * 4096);
    let r = bench.get();
    assert_eq!(r.disks[&disk("b")].size, (2 * 4096).to_string());
    assert_eq!(r.disks[&disk("a")].size, (4 * 4096).to_string());
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [0, 0, 2, 2]);
    bench.revert("a");
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [1; 4]);
}

#[test]
fn the_unmap_mark_removes_what_only_the_head_needs() {
    let bench = Bench::opened();
    (0..4).for_each(|block| bench.write(block, 1));
    bench.snapshot("fork");
    bench.snapshot("side");
    bench.revert("fork");
    (0..4).for_each(|block| bench.write(block, 2));
    bench.snapshot("a");
    (0..2).for_each(|block| bench.write(block, 3));
    bench.snapshot("b");
    bench.unmap_mark(true);
    let active = bench.active();
    assert_eq!(active.events().unmap(1, 10).unwrap(), 0);
    assert_eq!(bench.get().snapshot_count_usage, 4, "no whole block, no mark");
    assert_eq!(active.events().unmap(0, 4096).unwrap(), 2 * 4096);
    let r = bench.get();
    assert!(r.disks[&disk("a")].removed && r.disks[&disk("b")].removed);
    assert!(!r.disks[&disk("fork")].removed && !r.disks[&disk("side")].removed, "two children");
    assert_eq!(chain(&r)[1..], ["fork"]);
    assert_eq!([0, 1, 2].map(|block| bench.read(block)), [0, 3, 2]);
    // A new snapshot is marked by the next unmap.
    bench.snapshot("c");
    active.events().unmap(3 * 4096, 4096).unwrap();
    assert!(bench.get().disks[&disk("c")].removed);
    // So is one that has lost its other child.
    bench.remove(&disk("side"), false).unwrap();
    bench.work();
    active.events().unmap(3 * 4096, 4096).unwrap();
    assert!(bench.get().disks[&disk("fork")].removed);
    assert_eq!([0, 1, 2, 3].map(|block| bench.read(block)), [0, 3, 2, 0]);
}
