//! What is left when the power fails, and what a host is told when something is not.

use super::Place;
use super::host::{Command, FLUSH, Host, Options};
use dbs_core::Store;
use dbs_reactor::Driver;

/// A store whose tail holds what is acknowledged and not durable: without one there is nothing to be lost.
fn place() -> Option<Place> {
    let place = Place::new();
    if !place.store.info().tail {
        println!("SKIPPED: no directory on tmpfs for the tail of a store");
        return None;
    }
    Some(place)
}

fn content(store: &Store, offset: u64) -> Vec<u8> {
    let mut content = vec![0; 4096];
    store.volume("v").unwrap().read_at(offset, &mut content).unwrap();
    content
}

/// Shuts the controller down, and waits until it is.
fn shut_down(host: &mut Host) {
    host.admin.run(&Command::property_set(0x14, 0x0046_4001)).ok();
    assert_eq!(host.admin.run(&Command::property_get(0x1c, false)).ok().result, 1 | 2 << 2);
}

#[test]
fn what_was_written_before_a_flush_survives_a_loss_of_power() {
    let Some(place) = place() else { return };
    let mut host = place.host(Options::default());
    host.queues[0].run(&Command::write(0, vec![1; 4096])).ok();
    host.queues[0].run(&Command::write(8192, vec![2; 65536])).ok();
    host.queues[0].run(&Command::new(FLUSH, 1)).ok();
    let left = place.after_power_loss();
    assert_eq!((content(&left, 0)[0], content(&left, 8192)[0]), (1, 2));
}

#[test]
fn what_is_written_with_fua_survives_a_loss_of_power() {
    // In the capsule, and asked for; content, and zeros in its place.
    for (command, byte) in [
        (Command::write(0, vec![1; 4096]), 1),
        (Command::write(0, vec![2; 65536]), 2),
        (Command::zeroes(0, 65536, true), 0),
        (Command::zeroes(0, 65536, false), 0),
    ] {
        let Some(place) = place() else { return };
        let mut host = place.host(Options::default());
        if byte == 0 {
            host.queues[0].run(&Command::write(0, vec![3; 65536])).ok();
            host.queues[0].run(&Command::new(FLUSH, 1)).ok();
            // Zeros in place of content last as soon as they are written: these get new space.
            host.queues[0].run(&Command::deallocate(&[(0, 65536)])).ok();
        }
        host.queues[0].run(&command.clone().durable()).ok();
        assert_eq!(content(&place.after_power_loss(), 0), vec![byte; 4096], "{command:?}");
    }
}

#[test]
fn what_was_written_survives_a_loss_of_power_when_a_controller_is_shut_down() {
    let Some(place) = place() else { return };
    let mut host = place.host(Options::default());
    host.queues[0].run(&Command::write(0, vec![1; 4096])).ok();
    shut_down(&mut host);
    assert_eq!(content(&place.after_power_loss(), 0), vec![1; 4096]);
}

#[test]
fn a_host_is_told_once_that_acknowledged_writes_were_lost() {
    let Some(before) = place() else { return };
    before.host(Options::default()).queues[0].run(&Command::write(0, vec![1; 4096])).ok();
    let store = before.after_power_loss();
    assert!(store.lost_tail().is_some());
    assert_eq!(content(&store, 0), vec![0; 4096]);
    let place = Place::serving(tempfile::tempdir().unwrap(), store, Driver::Auto);
    // Who only looks, and shuts down, does not use the news up: that nobody tells to an application.
    let mut host = place.host(Options::default());
    shut_down(&mut host);
    drop(host);
    let mut host = place.host(Options::default());
    let done = host.queues[0].run(&Command::new(FLUSH, 1));
    assert_eq!((done.status, done.no_retry), (0x280, true));
    host.queues[0].run(&Command::new(FLUSH, 1)).ok();
    shut_down(&mut host);
}
