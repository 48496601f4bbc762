use super::*;
use crate::format::BlockFault;
use crate::format::sums::{PAGES_PER_GROUP, Stored, StoredSums};

const PAGE_BYTES: u64 = SUMS_PER_PAGE as u64 * BLOCK_BYTES;
/// Fewest pages kept in memory, if they are whole.
const PAGES_MIN: u32 = (SUMS_CACHE_MIN_BYTES / BLOCK_BYTES) as u32;

fn known(sum: u32) -> Stored {
    let sums = StoredSums::Known(Box::new([sum; SUMS_PER_PAGE]));
    Stored { sums, group_open: false }
}

fn silent(group_open: bool) -> Stored {
    Stored { sums: StoredSums::Silent, group_open }
}

fn damaged() -> Stored {
    Stored { sums: StoredSums::Damaged(BlockFault::Checksum), group_open: false }
}

fn empty() -> Sums {
    Sums::of(0, 4096, SUMS_CACHE_MIN_BYTES as usize)
}

/// Sums whose groups are what `leader` says, or blank.
fn with_groups(pages: u32, leader: Option<&Stored>, blank: bool) -> Sums {
    let mut sums = empty();
    let groups = sums.start_loading_groups(0..pages);
    assert_eq!(groups.len() as u32, pages.div_ceil(PAGES_PER_GROUP));
    assert!(sums.is_loading_group(0) && sums.start_loading_groups(0..pages).is_empty());
    groups.iter().for_each(|group| sums.group_loaded(*group, leader, blank));
    assert!(!sums.is_loading_group(0));
    sums
}

fn start_closing(sums: &mut Sums) -> Vec<u32> {
    sums.start_closing(u64::MAX, 9, &mut sums.busy_groups(), None, &Default::default())
}

fn load(sums: &mut Sums, pages: Range<u32>, stored: Option<&Stored>) -> usize {
    let reading = sums.start_loading(pages);
    reading.iter().for_each(|page| sums.loaded(*page, stored, 0));
    reading.len()
}

fn open(sums: &mut Sums, page: u32) {
    let (group, _) = sums.start_opening(page).unwrap().unwrap();
    assert_eq!(sums.claim(u64::from(page) * PAGE_BYTES, 1, Who::Waiting), Err(Need::Wait));
    sums.opened(group, true);
}

#[test]
fn a_block_is_claimed_once_its_group_is_open_and_no_page_is_needed() {
    let mut sums = with_groups(32, Some(&known(7)), false);
    assert_eq!(sums.claim(0, 1, Who::Waiting), Err(Need::Group(0)));
    assert_eq!(sums.start_opening(3).map(drop), Err(Need::Page(0)), "its leader is read first");
    assert_eq!(load(&mut sums, 0..1, Some(&known(7))), 1);
    open(&mut sums, 3);
    assert_eq!(sums.claim(3 * PAGE_BYTES, 2, Who::Waiting), Ok(()));
    assert_eq!(
        sums.claim(3 * PAGE_BYTES, 1, Who::Waiting),
        Err(Need::Wait),
        "by one write at a time"
    );
    assert_eq!(sums.claim(16 * PAGE_BYTES, 1, Who::Waiting), Err(Need::Group(16)));
    sums.written(3 * PAGE_BYTES, &[5, 6]);
    // What was written is known, and the rest of the page the device has.
    assert_eq!(sums.check(3 * PAGE_BYTES, &[5, 6], 0), Ok(0));
    assert_eq!(sums.check(3 * PAGE_BYTES, &[5, 9], 0), Err(Doubt::Block(1)));
    assert_eq!(sums.check(3 * PAGE_BYTES, &[5, 6, 7], 0), Err(Doubt::Page(3)));
    assert_eq!(load(&mut sums, 3..4, Some(&known(7))), 1);
    assert_eq!(sums.check(3 * PAGE_BYTES, &[5, 6, 7], 0), Ok(0));
    assert_eq!(sums.start_opening(3).map(|opening| opening.is_none()), Ok(true));
}

#[test]
fn a_group_that_was_never_written_is_written_to_at_once() {
    let mut sums = with_groups(16, Some(&known(7)), true);
    assert_eq!(sums.claim(0, 1, Who::Waiting), Ok(()));
    sums.written(0, &[5]);
    assert_eq!(load(&mut sums, 0..4, None), 0, "there is nothing to be read");
    assert_eq!(sums.check(0, &[5, 6], 0), Ok(1));
    // Its pages are written when it is open, or for good.
    assert_eq!(sums.start_writing(), [0]);
    assert_eq!(sums.closed_groups(&[0]), [0]);
    assert!(sums.pages_to_write(&[0]).is_empty() && !sums.are_open(&[0]));
    assert!(sums.start_opening_for(0, &[]).is_none(), "somebody else writes its leader");
    assert!(sums.start_opening_for(0, &[0]).is_some());
    sums.opened(0, true);
    let writing = sums.pages_to_write(&[0]);
    assert_eq!((writing.len(), writing[0].0, writing[0].2), (1, 0, true));
    sums.pages_written(&[0], &[0], true);
    assert!(sums.start_writing().is_empty());
}

#[test]
fn a_group_that_was_open_says_nothing_and_is_closed_without_what_it_said() {
    let mut sums = with_groups(16, Some(&silent(true)), false);
    assert_eq!(load(&mut sums, 2..3, Some(&known(7))), 0);
    assert!(sums.is_doubtful(2) && !sums.is_doubtful(40));
    assert_eq!(sums.check(2 * PAGE_BYTES, &[5], 0), Ok(1));
    assert_eq!(sums.claim(3 * PAGE_BYTES, 1, Who::Waiting), Ok(()), "it is open");
    sums.written(3 * PAGE_BYTES, &[9]);
    assert_eq!(start_closing(&mut sums), [0]);
    assert_eq!(sums.claim(3 * PAGE_BYTES, 1, Who::Waiting), Err(Need::Wait));
    assert_eq!(sums.needed_to_close(0), [0, 2, 3]);
    assert!(sums.take_closing(0).is_none(), "two of them are not in memory");
    assert_eq!(load(&mut sums, 0..4, None), 0);
    let closing = sums.take_closing(0).unwrap();
    // All pages but the leader, which comes last.
    let numbers: Vec<_> = closing.pages.iter().map(|(page, _)| *page).collect();
    assert_eq!(numbers, (1..16).collect::<Vec<_>>());
    let says = |page: usize| closing.pages[page - 1].1.as_ref().map(|sums| sums[0]);
    assert_eq!([says(1), says(2), says(3), says(4)], [Some(0), Some(5), Some(9), None]);
    assert!(closing.pages_first && closing.leader.is_some());
    sums.closed(&closing, Closed::Done);
    assert!(!sums.is_doubtful(2) && sums.open_groups() == 0);
    assert_eq!(sums.claim(3 * PAGE_BYTES, 1, Who::Waiting), Err(Need::Group(3)));
    assert!(start_closing(&mut sums).is_empty());
}

#[test]
fn a_group_that_may_be_closed_is_not_written_to() {
    for (how, claim) in [(Closed::NotBegun, Ok(())), (Closed::Unknown, Err(Need::Group(0)))] {
        let mut sums = with_groups(16, Some(&known(7)), false);
        load(&mut sums, 0..1, Some(&known(7)));
        open(&mut sums, 0);
        assert_eq!(sums.claim(0, 1, Who::Waiting), Ok(()));
        assert!(start_closing(&mut sums).is_empty(), "somebody writes to it");
        sums.written(0, &[5]);
        assert_eq!(start_closing(&mut sums), [0]);
        let closing = sums.take_closing(0).unwrap();
        sums.closed(&closing, how);
        assert_eq!(sums.claim(0, 1, Who::Waiting), claim);
        sums.unclaim(0, usize::from(claim.is_ok()));
        // It is tried again.
        assert_eq!(start_closing(&mut sums), [0]);
        assert!(sums.take_closing(0).unwrap().leader.is_some());
    }
}

#[test]
fn a_page_that_was_not_read_is_neither_learnt_nor_written() {
    let mut sums = with_groups(16, Some(&known(7)), false);
    load(&mut sums, 0..2, None);
    assert_eq!(sums.check(0, &[5, 6], u64::MAX), Ok(0));
    assert_eq!(sums.check(0, &[7, 8], u64::MAX), Ok(0));
    assert!(start_closing(&mut sums).is_empty());
    open(&mut sums, 0);
    assert_eq!(sums.claim(PAGE_BYTES, 1, Who::Waiting), Ok(()));
    sums.written(PAGE_BYTES, &[5]);
    assert_eq!(sums.check(PAGE_BYTES, &[6, 6], u64::MAX), Err(Doubt::Block(0)));
    assert_eq!(sums.check(PAGE_BYTES, &[5, 6], u64::MAX), Ok(1));
    // Nor is anything of a group whose leader was not read, which is opened first.
    let mut sums = with_groups(16, None, false);
    assert_eq!(load(&mut sums, 0..2, Some(&known(7))), 0);
    assert_eq!(sums.check(PAGE_BYTES, &[5], u64::MAX), Ok(0));
    assert!(start_closing(&mut sums).is_empty());
    assert_eq!(sums.claim(0, 1, Who::Waiting), Err(Need::Group(0)));
    // One that was read, but damaged, is learnt.
    let mut sums = with_groups(16, Some(&known(7)), false);
    load(&mut sums, 1..2, Some(&damaged()));
    assert_eq!(sums.check(PAGE_BYTES, &[5, 6], u64::MAX), Ok(2));
    assert_eq!(start_closing(&mut sums), [0]);
    let closing = sums.take_closing(0).unwrap();
    assert!(!closing.pages_first && closing.leader.is_none() && closing.pages.len() == 1);
}

#[test]
fn what_is_learnt_of_a_group_with_a_damaged_leader_waits_for_its_opening() {
    let mut sums = with_groups(16, Some(&damaged()), false);
    assert_eq!(load(&mut sums, 0..2, Some(&known(7))), 0, "it may have been open");
    assert_eq!(sums.check(PAGE_BYTES, &[5], 0), Ok(1));
    assert_eq!(sums.start_writing(), [1]);
    assert_eq!(sums.closed_groups(&[1]), [0]);
    assert!(sums.pages_to_write(&[1]).is_empty());
    sums.pages_written(&[1], &[], true);
    // Or all of it is written, the leader last.
    assert_eq!(start_closing(&mut sums), [0]);
    let closing = sums.take_closing(0).unwrap();
    assert!(closing.pages_first && closing.leader.is_some());
    assert_eq!(closing.pages.len(), 15);
}

#[test]
fn neighbours_are_loaded_too_unless_they_push_out_others() {
    let mut sums = with_groups(PAGES_MIN * 2, Some(&known(7)), false);
    assert_eq!(sums.window(100), 96..112);
    load(&mut sums, 0..PAGES_MIN, Some(&known(7)));
    assert_eq!((sums.window(100), sums.window(PAGES_MIN + 2)), (100..101, 66..67));
    assert_eq!(sums.window(PAGES_MIN), PAGES_MIN..PAGES_MIN + 16, "in order it goes on so");
}

#[test]
fn a_page_given_up_is_loaded_by_the_next() {
    let mut sums = with_groups(16, Some(&known(7)), false);
    assert_eq!(sums.start_loading(0..2), [0, 1]);
    sums.not_loaded(&[0]);
    assert_eq!((sums.claim_to_read(0), sums.is_loading(1)), (Err(Need::Page(0)), true));
    assert_eq!(sums.claim_to_read(PAGE_BYTES), Err(Need::Wait));
    assert_eq!(sums.start_loading(0..2), [0]);
    let mut sums = empty();
    assert_eq!(sums.start_loading_groups(0..40), [0, 1, 2]);
    sums.groups_not_loaded(&[1]);
    assert_eq!(sums.claim(16 * PAGE_BYTES, 1, Who::Waiting), Err(Need::Group(16)));
    assert_eq!(sums.claim(0, 1, Who::Waiting), Err(Need::Wait));
    assert_eq!(sums.start_loading_groups(0..40), [1]);
}

#[test]
fn what_was_forgotten_is_not_learnt_from_before_and_the_device_not_believed() {
    let mut sums = with_groups(16, Some(&known(7)), false);
    load(&mut sums, 0..1, Some(&known(7)));
    open(&mut sums, 0);
    assert_eq!(sums.claim(PAGE_BYTES, 1, Who::Waiting), Ok(()));
    sums.written(PAGE_BYTES, &[9]);
    assert_eq!(sums.learn_from, 0);
    sums.forget_all(7);
    assert!(sums.bytes == 0);
    assert_eq!((sums.bytes, sums.changed, sums.learn_from), (0, 0, 7));
    assert_eq!(load(&mut sums, 1..2, Some(&known(7))), 0, "it is of before");
    // The first began before.
    for (found, fence) in [(8, 6), (9, 7), (9, 8)] {
        assert!(sums.check(PAGE_BYTES, &[found], fence).is_ok());
    }
    assert_eq!(sums.check(PAGE_BYTES, &[8], 8), Err(Doubt::Block(0)));
    // Of its neighbour nothing was forgotten.
    assert_eq!(load(&mut sums, 2..3, Some(&known(7))), 1);
    assert_eq!(sums.check(2 * PAGE_BYTES, &[8], 8), Err(Doubt::Block(0)));
    // Closed, it says what is known by then.
    load(&mut sums, 0..1, Some(&known(7)));
    assert_eq!(start_closing(&mut sums), [0]);
    let closing = sums.take_closing(0).unwrap();
    assert_eq!(closing.pages.len(), 1);
    assert_eq!(closing.pages[0].1.as_ref().unwrap()[..2], [9, 0]);
}

#[test]
fn room_is_made_by_one_while_others_go_on() {
    let mut sums = with_groups(4096, Some(&known(7)), true);
    let mut page = 0;
    while sums.claim(page * PAGE_BYTES, 1, Who::Waiting).is_ok() {
        sums.written(page * PAGE_BYTES, &[9]);
        page += 1;
    }
    assert_eq!(sums.claim(page * PAGE_BYTES, 1, Who::Waiting), Err(Need::Room));
    assert!(page > 512, "a block that is written costs far less than a page");
    assert!(sums.start_making_room() && !sums.start_making_room());
    let before = page;
    while sums.claim(page * PAGE_BYTES, 1, Who::Waiting).is_ok() {
        sums.written(page * PAGE_BYTES, &[9]);
        page += 1;
    }
    assert!(page > before);
    assert_eq!(sums.claim(page * PAGE_BYTES, 1, Who::Waiting), Err(Need::Wait));
    assert_eq!(
        sums.claim(page * PAGE_BYTES, 1, Who::Served),
        Ok(()),
        "who has tried is let through"
    );
    let all: Vec<u32> = (0..page as u32).collect();
    let mut writing = Vec::new();
    loop {
        let some = sums.start_writing();
        if some.is_empty() {
            break;
        }
        writing.extend(some);
    }
    writing.sort_unstable();
    assert_eq!(writing, all, "each once, and none that is claimed");
    sums.pages_written(&writing, &writing, true);
    assert_eq!((sums.changed, sums.pauses_writing()), (0, false));
    assert!(!sums.pauses_writing());
    sums.pages_written(&[0], &[], false);
    assert!(sums.pauses_writing());
}

/// What a reactor may not do it hands over: once, and not each of the requests that it has until a worker
/// has begun.
#[test]
fn one_request_is_handed_over_so_that_room_is_made() {
    let mut sums = with_groups(4096, Some(&known(7)), true);
    let write = |sums: &mut Sums, page: u64| {
        let claimed = sums.claim(page * PAGE_BYTES, 1, Who::Passing);
        match claimed {
            Ok(()) => sums.written(page * PAGE_BYTES, &[9]),
            Err(Need::Room) => sums.ask_for_room(),
            Err(_) => {}
        }
        claimed
    };
    let refused = |sums: &mut Sums, from: u64| {
        (from..4000).find_map(|page| Some((page, write(sums, page).err()?))).unwrap()
    };
    let (first, need) = refused(&mut sums, 0);
    assert_eq!(need, Need::Room);
    let (second, need) = refused(&mut sums, first);
    assert_eq!(need, Need::Room, "if nobody comes, somebody is asked again");
    assert!(second > first + first / 8, "{first} {second}");
    // Whoever may wait makes room, whether or not he was the one that was asked.
    assert_eq!(sums.claim(0, 1, Who::Waiting), Err(Need::Room));
    assert!(sums.start_making_room());
    let writing = sums.start_writing();
    // What is being written counts as written, though it takes memory for a while.
    load(&mut sums, 0..writing.len() as u32, Some(&known(7)));
    assert_eq!(write(&mut sums, second), Ok(()));
    sums.pages_written(&writing, &writing, true);
    sums.end_making_room();
    assert_eq!(write(&mut sums, second + 1), Err(Need::Room), "there is more to write");
}

#[test]
fn a_block_that_differs_is_carried_with_the_sum_that_is_known() {
    let mut sums = with_groups(16, Some(&silent(false)), false);
    load(&mut sums, 0..1, Some(&silent(false)));
    assert_eq!(sums.check(0, &[5, 6], 0), Ok(2));
    let mut found = [5, 7, 8];
    assert_eq!(sums.carry(0, &mut found), Err(Doubt::Block(1)));
    assert_eq!(found, [5, 6, 8]);
    assert_eq!(sums.carry(0, &mut found), Ok(()));
    assert_eq!(sums.carry(PAGE_BYTES, &mut found), Err(Doubt::Page(1)));
}

/// A page of a group that was never written may be on the device, if writing it has failed: what it said then
/// is old by the time the group is closed.
#[test]
fn a_page_that_could_not_be_written_and_was_forgotten_is_written_anew() {
    let mut sums = with_groups(16, Some(&known(7)), true);
    sums.written(0, &[1]);
    sums.written(3 * PAGE_BYTES, &[5]);
    assert_eq!(sums.start_writing(), [0, 3]);
    assert!(sums.start_opening_for(0, &[0, 3]).is_none(), "its leader is not whole");
    load(&mut sums, 0..4, None);
    assert!(sums.start_opening_for(0, &[0, 3]).is_some());
    sums.opened(0, true);
    assert!(sums.start_opening_for(0, &[0, 3]).is_none(), "it is open");
    sums.pages_written(&[0, 3], &[0, 3], false);
    sums.claim(3 * PAGE_BYTES, 1, Who::Waiting).unwrap();
    sums.written(3 * PAGE_BYTES, &[6]);
    sums.forget_all(1);
    assert_eq!(start_closing(&mut sums), [0]);
    load(&mut sums, 0..1, None);
    let closing = sums.take_closing(0).unwrap();
    assert_eq!(closing.pages.iter().map(|(page, _)| *page).collect::<Vec<_>>(), [3]);
    assert!(closing.pages[0].1.is_none() && closing.leader.is_some());
}

/// As long as its leader may say nothing, each of its pages would count from when the device has it.
#[test]
fn a_fresh_group_whose_opening_failed_is_closed_after_the_flush() {
    let mut sums = with_groups(16, Some(&known(7)), true);
    load(&mut sums, 0..2, None);
    sums.written(PAGE_BYTES, &[5]);
    assert_eq!(sums.start_writing(), [1]);
    assert!(sums.start_opening_for(0, &[1]).is_some());
    sums.opened(0, false);
    sums.pages_written(&[1], &[], false);
    assert_eq!(start_closing(&mut sums), [0]);
    let closing = sums.take_closing(0).unwrap();
    assert!(!closing.pages_first && closing.leader.is_some());
}

/// The device may have the leader as it was while the group was open, with sums of before.
#[test]
fn a_leader_that_was_not_closed_is_not_believed_when_it_is_read() {
    let mut sums = with_groups(16, Some(&known(7)), false);
    load(&mut sums, 0..1, Some(&known(7)));
    open(&mut sums, 0);
    sums.claim(0, 1, Who::Waiting).unwrap();
    sums.written(0, &[5]);
    assert_eq!(start_closing(&mut sums), [0]);
    let closing = sums.take_closing(0).unwrap();
    sums.closed(&closing, Closed::Unknown);
    sums.forget_all(1);
    assert_eq!(load(&mut sums, 0..1, Some(&known(7))), 0, "it says nothing");
    assert_eq!(sums.check(0, &[5], 1), Ok(1));
}

/// Readers that began before it did may have seen what was there before the last write.
#[test]
fn a_page_that_is_found_damaged_is_learnt_by_those_who_read_later() {
    let mut sums = with_groups(16, Some(&known(7)), false);
    assert_eq!(sums.start_loading(1..2), [1]);
    sums.loaded(1, Some(&damaged()), 9);
    assert_eq!(sums.check(PAGE_BYTES, &[5], 8), Ok(0));
    assert_eq!(sums.known(PAGE_BYTES), None);
    assert_eq!(sums.check(PAGE_BYTES, &[6], 9), Ok(1));
    assert_eq!(sums.known(PAGE_BYTES), Some(6));
}

/// However many groups there are that are not to be closed yet.
#[test]
fn all_groups_are_looked_at() {
    let groups = 2 * LOOKS as u32;
    let mut sums = Sums::of(0, groups * PAGES_PER_GROUP, SUMS_CACHE_MIN_BYTES as usize);
    for group in sums.start_loading_groups(0..groups * PAGES_PER_GROUP) {
        sums.tick(u64::from(group < groups - 1));
        sums.group_loaded(group, Some(&silent(true)), false);
    }
    let (mut looks, mut closing) = (sums.busy_groups(), Vec::new());
    while looks > 0 {
        closing.extend(sums.start_closing(0, 128, &mut looks, None, &Default::default()));
    }
    assert_eq!(closing, [groups - 1]);
}

/// Found by review: after the clock was set back, what had been written before stayed open until the clock was there again.
#[test]
fn a_clock_that_is_set_back_keeps_no_group_open() {
    let (hour, idle) = (3_600, 30);
    let mut sums = with_groups(16, Some(&silent(true)), false);
    sums.tick(12 * hour);
    sums.note_busy(0);
    let mut close = |now: u64| {
        sums.tick(now);
        let mut looks = sums.busy_groups();
        sums.start_closing(now - idle, 9, &mut looks, None, &Default::default())
    };
    assert!(close(12 * hour + 10).is_empty(), "it changed a moment ago");
    assert!(close(hour).is_empty(), "nobody knows how long ago");
    assert_eq!(close(hour + idle), [0]);
}
