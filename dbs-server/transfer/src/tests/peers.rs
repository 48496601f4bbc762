//! Images in and out of a volume that another process serves.

use super::support::{DIFF, Disk, Server, pattern};
use crate::{BlockAccess, NbdAccess, export_stream, import_stream};
use dbs_core::ErrorKind;
use dbs_core::info::{MapRange, RangeState};
use dbs_nbd::export::BASE_ALLOCATION;
use dbs_nbd::{Client, ClientOptions, ServerOptions};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

fn connect(server: &Server, contexts: &[&str], extended: bool) -> NbdAccess<UnixStream> {
    let contexts = contexts.iter().map(|name| (*name).to_owned()).collect();
    let options = ClientOptions { contexts, extended };
    NbdAccess::new(Client::connect_unix(&server.path(), "disk", &options).unwrap())
}

#[test]
fn images_go_in_and_out_of_a_served_volume() {
    for extended in [false, true] {
        for contexts in [&[BASE_ALLOCATION][..], &[]] {
            let disk = Arc::new(Disk::new("disk", 8 * MIB));
            let server = Server::new([disk.clone()], ServerOptions::default());
            let access = connect(&server, contexts, extended);
            let mut image = vec![0; 8 << 20];
            image[MIB as usize..][..300_000].copy_from_slice(&pattern(7, 300_000));
            image[(8 << 20) - 512..].fill(9);
            let copied = import_stream(&image[..], &access, &mut |_, _| true).unwrap();
            assert_eq!(copied.length, 8 * MIB);
            assert!(disk.content() == image);
            let allocated = disk.allocated.lock().unwrap().iter().filter(|a| **a).count();
            assert_eq!(allocated, 300_000usize.div_ceil(4096) + 1);
            let mut bytes = Vec::new();
            let copied = export_stream(&access, &mut bytes, &mut |_, _| true).unwrap();
            assert!(bytes == image);
            assert_eq!(copied.data < MIB, !contexts.is_empty(), "holes are not read");
        }
    }
}

#[test]
fn differences_and_errors_come_through() {
    let mut disk = Disk::new("disk", MIB);
    disk.read_only = true;
    disk.data.write().unwrap()[4096..8192].fill(1);
    disk.baseline[4096..12288].fill(2);
    let server = Server::new([Arc::new(disk)], ServerOptions::default());
    let access = connect(&server, &[DIFF], false);
    let snapshot = DIFF.strip_prefix("dbs:diff:").unwrap();
    assert_eq!(
        access.differences(snapshot, 0, MIB).unwrap(),
        [
            MapRange { offset: 4096, length: 4096, state: RangeState::Data },
            MapRange { offset: 8192, length: 4096, state: RangeState::Zero },
        ]
    );
    let error = access.write_at(0, &[0; 512]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
    let error = access.read_at(MIB, &mut [0; 512]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(access.differences("unknown", 0, MIB).is_err());
}
