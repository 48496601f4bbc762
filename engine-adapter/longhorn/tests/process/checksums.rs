//! Replicas whose own stores have checksums: damage is found, healed, and not rebuilt from.

use crate::PROGRAM;
use crate::controller::{check, client, controller, free_ports, modes, replica_with, run, write};
use crate::support::*;
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

const TEXT_SIZE: &str = crate::controller::TEXT_SIZE;

/// Changes a bit of each copy of a block in the store of a replica's directory; how many there were.
fn damage(directory: &Path, content: &[u8]) -> usize {
    let path = directory.join("volume.dbs");
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (mut at, mut found) = (0, 0);
    // Most of the file is a hole.
    while let Ok(data) = lseek(&file, at, Whence::SeekData) {
        at = lseek(&file, data, Whence::SeekHole).unwrap();
        let mut bytes = vec![0; (at - data) as usize];
        file.read_exact_at(&mut bytes, data as u64).unwrap();
        for (number, block) in bytes.chunks(BLOCK).enumerate() {
            if block == content {
                let bit = [block[100] ^ 1];
                file.write_all_at(&bit, data as u64 + (number * BLOCK) as u64 + 100).unwrap();
                found += 1;
            }
        }
    }
    // It may be read around the page cache.
    file.sync_all().unwrap();
    found
}

/// Longhorn's manager passes no option for them; a variable that a template leaves empty says nothing.
#[test]
fn damage_in_stores_of_their_own_is_healed() {
    let place = Place::new();
    let (a, a_address) = replica_with(&place, "a", &[]);
    let port = free_ports();
    let listen = format!("127.0.0.1:{port}");
    let mut command = place.program();
    command.env("DBS_CHECKSUMS", "").env("DBS_CHECKSUM_CACHE", "1mb");
    command.args(crate::REPLICA).arg(place.replica("b"));
    command.args(["--size", TEXT_SIZE, "--disableRevCounter", "--listen", &listen]);
    let b = Process::spawn(command).ready();
    let mut engine = controller(&place, &[&a_address, &format!("tcp://{listen}")], &[]).ready();
    let data = client(&place);
    write(&data, 1);
    for (name, number) in [("a", 7), ("b", 9)] {
        assert_eq!(damage(&place.replica(name), &block(number, 1)), 1);
    }
    eventually("both are healed", || {
        // One more than an even number, so that each block comes from both.
        check(&data, 1);
        data.read(0, BLOCK as u32).unwrap();
        engine.log().matches("healed=").count() >= 2
    });
    assert_eq!(modes(&engine), ["RW", "RW"]);
    drop(data);
    engine.stop();
    for replica in [a, b] {
        check(&replica.open(), 1);
    }
}

/// The engine asks one replica at a time unless it is told otherwise, here the one that is damaged.
#[test]
fn a_replica_is_not_rebuilt_from_damage() {
    let place = Place::new();
    let (_a, a_address) = replica_with(&place, "a", &[]);
    let (_b, b_address) = replica_with(&place, "b", &[]);
    let mut engine = controller(&place, &[&a_address, &b_address], &[]).ready();
    let data = client(&place);
    write(&data, 1);
    run(&engine, &["snapshots", "create", "one"]);
    write(&data, 2);
    assert_eq!(damage(&place.replica("b"), &block(7, 1)), 1);
    let (_c, c_address) = replica_with(&place, "c", &[]);
    run(&engine, &["add-replica", &c_address, "--size", TEXT_SIZE, "--current-size", TEXT_SIZE]);
    assert_eq!(modes(&engine), ["RW", "RW", "RW"]);
    run(&engine, &["rm-replica", &a_address]);
    run(&engine, &["rm-replica", &c_address]);

    // Where nobody else has it, the rebuild says what is the matter.
    let (_d, d_address) = replica_with(&place, "d", &[]);
    let url = format!("http://{}", engine.field("grpc"));
    let mut command = Command::new(PROGRAM);
    command.args(["--url", &url, "--volume-name", "vol", "add-replica", &d_address]);
    command.args(["--size", TEXT_SIZE, "--current-size", TEXT_SIZE]);
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let damaged = format!("byte {} of `vol@one` is damaged", 7 * BLOCK);
    assert!(text.contains(&damaged), "{text}");
    check(&data, 2);
    drop(data);
    engine.stop();

    // What the good one has given is right.
    let mut engine = controller(&place, &[&c_address], &[]).ready();
    check(&client(&place), 2);
    run(&engine, &["frontend", "shutdown"]);
    run(&engine, &["snapshots", "revert", "one"]);
    run(&engine, &["frontend", "start", "socket"]);
    check(&client(&place), 1);
    engine.stop();
}
