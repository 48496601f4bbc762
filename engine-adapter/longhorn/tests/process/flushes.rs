//! What is acknowledged as durable rests on a sync, on every way from a user to the store of a replica.

use crate::controller::{client, controller_with, replica};
use crate::support::*;
use crate::synced::Disk;
use dbs_nbd::{Client, ClientOptions};
use longhorn_testing::DataClient;
use std::fs::File;
use std::os::unix::net::UnixStream;

/// Flushes that come when there is something new in the metadata, and when there is only data.
fn flushes(disk: &Disk, data: &DataClient, way: &str, number: u64) {
    for (what, version) in [("a flush", 1), ("a flush of data alone", 2)] {
        data.write(number * BLOCK as u64, &block(number, version)).unwrap();
        disk.synced(&format!("{way}: {what}"), || data.flush().unwrap());
    }
}

#[test]
fn a_flush_of_a_volume_is_a_sync_of_its_replica() {
    let place = Place::new();
    replica(&place, "r").0.stop();
    let Some(disk) = Disk::before(&place.replica("r").join("volume.dbs")) else { return };
    let (mut served, address) = replica(&place, "r");
    let data = served.open();
    flushes(&disk, &data, "the replica", 0);
    data.write(0, &block(0, 3)).unwrap();
    disk.synced("a snapshot", || served.rpc().snapshot("s").unwrap());
    data.write(0, &block(0, 4)).unwrap();
    drop(data);
    disk.synced("closing", || served.rpc().close().unwrap());
    let mut engine = controller_with(&place, "socket", &[&address], &[]).ready();
    flushes(&disk, &client(&place), "the frontend socket", 1);
    engine.stop();
    let mut engine = controller_with(&place, "nbd", &[&address], &[]).ready();
    let stream = UnixStream::connect(place.path().join("longhorn/nbd-vol.sock")).unwrap();
    let mut nbd = Client::over(stream, "vol", &ClientOptions::default()).unwrap();
    for (what, version) in [("allocating", 1), ("in place", 2)] {
        let content = block(2, version);
        disk.synced(&format!("the frontend nbd: FUA, {what}"), || {
            nbd.write_at(2 * BLOCK as u64, &content, true).unwrap();
        });
        nbd.write_at(3 * BLOCK as u64, &content, false).unwrap();
        disk.synced(&format!("the frontend nbd: a flush, {what}"), || nbd.flush().unwrap());
    }
    drop(nbd);
    engine.stop();
    served.stop();
    let local = format!("local:{}", place.replica("r").display());
    let mut engine = controller_with(&place, "socket", &[&local], &[]).ready();
    flushes(&disk, &client(&place), "a replica in the controller's process", 4);
    engine.stop();
}

#[test]
fn a_flush_of_a_volume_is_a_sync_of_its_file() {
    let place = Place::new();
    let path = place.path().join("file");
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    let Some(disk) = Disk::before(&path) else { return };
    let address = format!("file://{}", path.display());
    let more = ["--enable-backend", "file", "--disableRevCounter=false"];
    let mut engine = controller_with(&place, "socket", &[&address], &more).ready();
    flushes(&disk, &client(&place), "a file", 0);
    engine.stop();
}
