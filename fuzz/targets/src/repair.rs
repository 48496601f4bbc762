//! Repair: what it makes of a damaged store, what it says is lost, and putting back what was there.

use crate::disk::{BLOCK, Disk};
use crate::exercise::{assert_detected, survive};
use crate::hostile::Hostile;
use crate::input::Input;
use crate::sample::{CONTENT_MAX_BYTES, FixedEnv, contents, open};
use dbs_core::format::BlockKind;
use dbs_core::format::crc::crc32c;
use dbs_core::info::{LostRange, RepairKind, RepairReport};
use dbs_core::io::TailMemory;
use dbs_core::store::Repair;
use dbs_core::{ErrorKind, Result, Store, Volume};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Bits of the flags.
const LOSE_JOURNAL: u8 = 4;
const WITH_TAIL: u8 = 16;
const SPOIL_SAVED: u8 = 32;
/// Bytes of the header of what is saved, and where its checksum is.
const SAVED_HEADER: usize = 240;
const SAVED_CRC: std::ops::Range<usize> = 12..16;
/// What a page of checksums begins with.
const PAGE: [u8; 4] = (BlockKind::Sums as u32).to_le_bytes();

/// Bytes laid over a store, as of [`crate::image()`]; it is repaired, used, and what was there is put
/// back.
///
/// The input: flags (those of `image`, but bit 2: the journal may be lost, bit 4: the tail of the
/// last process is there, bit 5: what was saved is changed as well), how many changes (one byte), the
/// changes, and the rest says how it is used.
pub fn repair(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let hostile = Hostile::new(flags, &mut input);
    let disk = &hostile.disk;
    let before = disk.fork();
    let mut tail = (flags & WITH_TAIL != 0).then(|| hostile.sample.tail());
    let lose_journal = flags & LOSE_JOURNAL != 0;
    let planned = plan(disk, tail.as_deref_mut(), lose_journal);
    assert!(disk.is_same(&before), "a plan changes the store");
    let plan = match planned {
        Ok(plan) => plan,
        Err(error) => return assert_detected(&error, "plan"),
    };
    if plan.report().steps.is_empty() {
        let check = Store::check_on(&**disk).unwrap();
        assert!(check.is_clean(), "nothing is done about {check:?}");
        let store = open(disk, None, 7, true).expect("a store without damage opens");
        if hostile.is_comparable() && tail.is_none() {
            hostile.assert_right(&store);
        }
        return;
    }
    let saved = saved();
    let Some(report) = carry_out(disk, plan, &saved) else { return };
    let journal = report.steps.iter().any(|step| step.region == "journal");
    {
        let store = open(disk, None, 7, true).expect("a repaired store opens");
        // Of the group before, or with what only the tail knew: that is another content.
        let comparable = hostile.is_comparable() && !journal && tail.is_none();
        look(&store, &report, &hostile, comparable);
    }
    let saves = saved.metadata().unwrap().len() > 0;
    if saves && flags & SPOIL_SAVED != 0 {
        spoil(disk, &saved, &mut input);
    }
    let used = Arc::new(disk.fork());
    assert!(survive(&used, || None, &mut input), "a repaired store cannot be written");
    if saves {
        put_back(disk, &saved, &before);
    }
}

/// What somebody changed of what was saved is refused as a whole, or is all there.
fn spoil(disk: &Disk, saved: &File, input: &mut Input<'_>) {
    let (mut header, copy) = ([0; SAVED_HEADER], disk.fork());
    saved.read_exact_at(&mut header, 0).unwrap();
    let before = header;
    let at = input.below(SAVED_HEADER as u64) as usize;
    let bytes = input.bytes(SAVED_HEADER.min(at + 8) - at);
    header[at..at + bytes.len()].copy_from_slice(bytes);
    header[SAVED_CRC].fill(0);
    let crc = crc32c(&header);
    header[SAVED_CRC].copy_from_slice(&crc.to_le_bytes());
    saved.write_all_at(&header, 0).unwrap();
    if let Err(error) = Store::undo_repair_on(&copy, saved, false) {
        assert!(copy.is_same(disk), "what is refused changes the store: {error}");
    }
    saved.write_all_at(&before, 0).unwrap();
}

fn plan(
    disk: &Disk,
    tail: Option<&mut (dyn TailMemory + 'static)>,
    lose_journal: bool,
) -> Result<Repair> {
    Store::plan_repair_on(disk, tail, &FixedEnv::new(9), lose_journal)
}

/// Saves what is there and repairs: all is well afterwards. `None` if it is refused, which changes
/// nothing.
pub(crate) fn carry_out(disk: &Arc<Disk>, plan: Repair, saved: &File) -> Option<RepairReport> {
    let before = disk.fork();
    if plan.report().steps.iter().any(|step| step.kind == RepairKind::Refused) {
        let error = plan.carry_out(&**disk).expect_err("what is refused is not done");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(disk.is_same(&before), "what is refused changes the store");
        return None;
    }
    plan.save(&**disk, saved).expect("the metadata is saved");
    assert!(disk.is_same(&before), "saving changes the store");
    let report = plan.carry_out(&**disk).expect("the storage does not fail");
    assert!(report.done, "{report:?}");
    let check = Store::check_on(&**disk).expect("a repaired store can be checked");
    assert!(check.is_clean(), "{check:?} after {report:?}");
    let again = self::plan(disk, None, false).expect("a repaired store can be repaired");
    assert!(again.report().steps.is_empty(), "left: {:?} of {report:?}", again.report());
    Some(report)
}

/// What was there is there again, but for damaged pages of checksums, which were emptied.
pub(crate) fn put_back(disk: &Disk, saved: &File, before: &Disk) {
    Store::undo_repair_on(disk, saved, false).expect("what was saved is put back");
    if disk.is_same(before) {
        return;
    }
    // One that was never written is begun too, if the first page of its group is damaged.
    let begun = |then: &[u8]| then[..4] == PAGE || then.iter().all(|byte| *byte == 0);
    let same = |now: &[u8], then: &[u8]| now == then || (now[..4] == PAGE && begun(then));
    let (now, then) = (disk.bytes(), before.bytes());
    let mut blocks = now.chunks(BLOCK).zip(then.chunks(BLOCK));
    let all = now.len() == then.len() && blocks.all(|(now, then)| same(now, then));
    assert!(all, "not all was put back");
}

/// A file for what a repair saves.
pub(crate) fn saved() -> File {
    File::from(memfd_create(c"saved", MFdFlags::MFD_CLOEXEC).unwrap())
}

/// What cannot be read is what the report says is lost, and what can be read is as it was, if it is `comparable`. What is
/// not there any more was told, and where nothing was lost all is as it was.
fn look(store: &Store, report: &RepairReport, hostile: &Hostile, comparable: bool) {
    let told = |kind| report.steps.iter().any(|step| step.kind == kind);
    if comparable {
        let (shown, known) = (contents(store), &hostile.sample.contents);
        if report.lost.is_empty() && !hostile.data {
            let same = |spec: &&String| shown.get(*spec) == known.get(*spec);
            let gone: Vec<_> = known.keys().filter(|spec| !same(spec)).collect();
            let is_told = gone.is_empty() || told(RepairKind::Lost);
            assert!(is_told, "{gone:?} went without a word: {:?}", report.steps);
        }
        if !told(RepairKind::Lost) && !told(RepairKind::Renamed) && !hostile.data {
            assert_eq!(&shown, known, "nothing was lost by {:?}", report.steps);
        }
    }
    for volume in store.volumes(false) {
        // Damage makes no keys, and neither does a repair.
        let locked = volume.encryption.as_ref().is_some_and(|key| key.locked);
        assert!(hostile.mended || volume.encryption.is_none(), "{volume:?}");
        let snapshots = store.snapshots(&volume.name, false).expect("its snapshots are listed");
        let snapshots = snapshots.iter().map(|s| Some(s.name.clone()));
        for snapshot in snapshots.chain([None]) {
            let is_of =
                |range: &&LostRange| range.volume == volume.name && range.snapshot == snapshot;
            let lost = lost_blocks(report.lost.iter().filter(is_of));
            let spec = match &snapshot {
                Some(snapshot) => format!("{}@{snapshot}", volume.name),
                None => volume.name.clone(),
            };
            let open = store.volume(&spec).expect("what is listed is there");
            let known = hostile.sample.shown.get(&spec).filter(|_| comparable);
            let known = Known { content: known.map(Vec::as_slice), lost, locked };
            compare(&open, &spec, &known, hostile.data);
        }
    }
}

/// What is known of a volume or snapshot.
struct Known<'a> {
    content: Option<&'a [u8]>,
    lost: BTreeSet<u64>,
    locked: bool,
}

/// The blocks of the part that is looked at.
fn lost_blocks<'a>(ranges: impl Iterator<Item = &'a LostRange>) -> BTreeSet<u64> {
    let block = BLOCK as u64;
    let of = |range: &LostRange| {
        let end = (range.offset + range.length).min(CONTENT_MAX_BYTES);
        range.offset / block..end.div_ceil(block)
    };
    ranges.flat_map(of).collect()
}

fn compare(open: &Volume, spec: &str, known: &Known<'_>, data: bool) {
    let end = open.size().min(CONTENT_MAX_BYTES);
    for (index, at) in (0u64..).zip((0..end).step_by(BLOCK)) {
        let mut block = [0; BLOCK];
        let found = &mut block[..(end - at).min(BLOCK as u64) as usize];
        match open.read_at(at, found) {
            Ok(()) => {
                assert!(
                    !known.lost.contains(&index),
                    "{spec} {at} was reported as lost, and is not"
                );
                assert!(!known.locked, "{spec} {at}: shown without a key");
                let content = known.content.and_then(|content| content.get(at as usize..));
                let same = content.is_none_or(|content| {
                    let length = content.len().min(found.len());
                    content[..length] == found[..length]
                });
                assert!(same, "{spec} {at}: wrong data taken for right");
            }
            Err(error) if known.lost.contains(&index) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            }
            // Nobody has its key.
            Err(error) if known.locked => assert_eq!(error.kind(), ErrorKind::Locked, "{error}"),
            Err(error) => {
                let damaged = data && error.kind() == ErrorKind::Damaged;
                assert!(damaged, "{spec} {at}: not reported as lost: {error}");
            }
        }
    }
}
