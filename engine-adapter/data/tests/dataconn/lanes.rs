//! Connections that a client makes anew when they break, and what it sends again on them.

use crate::support::{DRIVERS, Raw, Replica, Setup, eventually};
use longhorn_data::Access;
use longhorn_wire::frame::{Header, Hello, Lane, PLACE_BITS, Standing, Type};
use std::io::Write;
use std::sync::atomic::Ordering;

const CLIENT: u64 = 77;

/// What the replica says to a connection of this epoch, new or not.
fn hello(raw: &mut Raw, epoch: u32) -> Option<Standing> {
    let lane = Some(Lane { client: CLIENT, epoch, number: 0, places: 16 });
    let hello = Hello { lane, ..Hello::of_client() }.encode();
    let (_, answer) = raw.ask(Header::with_payload(Type::Ping, 0, 0, hello.len() as u32), &hello);
    Hello::decode(&answer).unwrap().standing
}

fn number(uses: u32, place: u32) -> u32 {
    uses << PLACE_BITS | place
}

fn write(kind: Type, sequence: u32, offset: i64) -> Header {
    Header::with_payload(kind, sequence, offset, 4096)
}

fn counted(replica: &Replica) -> u64 {
    replica.events.revision.load(Ordering::SeqCst)
}

/// Also what it had begun, and what it had sent a part of.
#[test]
fn nothing_of_a_former_connection_runs_when_the_next_may_be_used() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let mut old = [replica.raw(), replica.raw()];
        for raw in &mut old {
            assert_eq!(hello(raw, 0), Some(Standing::Ready));
            raw.ask(write(Type::Write, number(1, 0), 8192), &[1; 4096]);
        }
        let mut new = replica.raw();
        {
            // As long as this is held, nothing is unmapped.
            let _held = replica.events.delay.lock().unwrap();
            old[0].send(Header::new(Type::Unmap, number(1, 1), 4096, 4096), &[]);
            old[0].send(Header::new(Type::Flush, number(1, 3), 0, 0), &[]);
            let late = write(Type::Write, number(1, 2), 8192).encode();
            old[1].stream.write_all(&[&late[..], &[9; 2000]].concat()).unwrap();
            let unmapping = &replica.events.unmapping;
            eventually("it is carried out", || unmapping.load(Ordering::SeqCst) == 1);
            for _ in 0..20 {
                assert_eq!(hello(&mut new, 1), Some(Standing::Busy));
            }
        }
        eventually("it has ended", || hello(&mut new, 1) == Some(Standing::Ready));
        // Whoever hears it late: the rest of the message leads nowhere.
        let _gone = old[1].stream.write_all(&[9; 2096]);
        assert!(old.iter_mut().all(Raw::is_closed));
        // The unmap was done, though nobody was told.
        let before = counted(&replica);
        let (reply, _) = new.ask(Header::new(Type::UnmapAgain, number(1, 1), 4096, 4096), &[]);
        assert_eq!((reply.kind(), reply.size), (Some(Type::Response), 4096));
        let (_, data) = new.ask(Header::new(Type::Read, 5, 8192, 4096), &[]);
        assert!(data == [1; 4096]);
        assert_eq!(counted(&replica), before);
        let (reply, _) = new.ask(write(Type::WriteAgain, number(1, 2), 8192), &[2; 4096]);
        assert_eq!((reply.kind(), reply.size), (Some(Type::Response), 4096));
        let (_, data) = new.ask(Header::new(Type::Read, 6, 8192, 4096), &[]);
        assert!(data == [2; 4096]);
        assert_eq!(counted(&replica), before + 1);
        // One that was on its way for too long.
        assert_eq!(hello(&mut replica.raw(), 0), Some(Standing::Unknown));
        drop(new);
        replica.finish();
    }
}

/// Found by review: nobody was let back before it had ended, for which no controller waits. It changes nothing.
#[test]
fn a_flush_keeps_nobody_from_coming_back() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let mut old = replica.raw();
        assert_eq!(hello(&mut old, 0), Some(Standing::Ready));
        old.ask(write(Type::Write, number(1, 0), 8192), &[1; 4096]);
        let commits = &replica.events.commits;
        let before = commits.load(Ordering::SeqCst);
        let mut new = replica.raw();
        {
            // As long as this is held, nothing is committed.
            let _held = replica.events.delay.lock().unwrap();
            old.send(Header::new(Type::Flush, number(1, 1), 0, 0), &[]);
            eventually("it is carried out", || commits.load(Ordering::SeqCst) > before);
            eventually("the next is let in", || hello(&mut new, 1) == Some(Standing::Ready));
            assert!(old.is_closed());
            new.ask(write(Type::Write, number(1, 2), 4096), &[2; 4096]);
            new.send(Header::new(Type::Flush, number(2, 1), 0, 0), &[]);
            let (_, data) = new.ask(Header::new(Type::Read, 5, 8192, 4096), &[]);
            assert!(data == [1; 4096]);
        }
        // The one that ran says nothing of what was written since.
        let (reply, _) = new.receive();
        assert_eq!((reply.kind(), reply.sequence), (Some(Type::Response), number(2, 1)));
        assert!(commits.load(Ordering::SeqCst) > before + 1);
        drop(new);
        replica.finish();
    }
}

#[test]
fn a_change_that_was_done_is_not_done_again() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let mut raw = replica.raw();
        assert_eq!(hello(&mut raw, 0), Some(Standing::Ready));
        raw.ask(write(Type::Write, number(1, 3), 0), &[1; 4096]);
        raw.ask(write(Type::Write, number(2, 3), 0), &[2; 4096]);
        let failed = raw.error(write(Type::Write, number(1, 4), 1 << 40), &[3; 4096]);
        assert!(failed.contains("beyond the end"), "{failed}");
        let mut raw = replica.raw();
        eventually("it has ended", || hello(&mut raw, 1) == Some(Standing::Ready));
        // It would be seen if it were.
        let (reply, _) = raw.ask(write(Type::WriteAgain, number(2, 3), 0), &[9; 4096]);
        assert_eq!((reply.kind(), reply.size), (Some(Type::Response), 4096));
        let (_, data) = raw.ask(Header::new(Type::Read, 7, 0, 4096), &[]);
        assert!(data == [2; 4096]);
        assert_eq!(counted(&replica), 2);
        // What failed is tried again, and so is what never came.
        let text = raw.error(write(Type::WriteAgain, number(1, 4), 1 << 40), &[3; 4096]);
        assert_eq!(text, failed);
        raw.ask(write(Type::WriteAgain, number(1, 5), 0), &[4; 4096]);
        assert_eq!(counted(&replica), 3);
        // Bytes that were changed on their way: it was done somewhere else.
        let text = raw.error(write(Type::WriteAgain, number(2, 3), 4096), &[2; 4096]);
        assert!(text.contains("another change was done"), "{text}");
        drop(raw);
        replica.finish();
    }
}

#[test]
fn a_lane_does_not_outlive_its_session_nor_nonsense() {
    let replica = Setup::default().start().unwrap();
    let mut raw = replica.raw();
    assert_eq!(hello(&mut raw, 1), Some(Standing::Unknown));
    let mut raw = replica.raw();
    assert_eq!(hello(&mut raw, 0), Some(Standing::Ready));
    assert!(replica.gate.set(Access::not_open("closed")));
    assert_eq!(hello(&mut replica.raw(), 1), Some(Standing::Unknown));
    assert!(replica.gate.set(Access::Open(replica.active.clone())));
    assert_eq!(hello(&mut replica.raw(), 1), Some(Standing::Unknown));
    let mut raw = replica.raw();
    assert_eq!(hello(&mut raw, 0), Some(Standing::Ready));
    raw.stream.write_all(&[0; 26]).unwrap();
    assert!(raw.is_closed());
    assert_eq!(hello(&mut replica.raw(), 1), Some(Standing::Unknown));
    // Who has said nothing of lanes is not understood.
    let mut raw = replica.raw();
    raw.send(write(Type::WriteAgain, 1, 0), &[1; 4096]);
    let (reply, data) = raw.ask(Header::new(Type::Read, 2, 0, 4096), &[]);
    assert!(reply.sequence == 2 && data == [0; 4096]);
    drop(raw);
    replica.finish();
}
