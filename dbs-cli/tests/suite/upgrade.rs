//! Images of the Go prototype, version 1.0.0: read as they are, and upgraded.

use crate::support::Place;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const SIZE: u64 = 100 << 20;
const VOLUME_TABLE: u64 = 4096;
const SNAPSHOT_TABLE: u64 = 72192;
const EXTENT_TABLE: u64 = 729_088;
const DATA: u64 = 1 << 20;
const EXTENT: u64 = 1 << 20;

/// A volume `old` of 2 MiB: snapshot 1 holds blocks 0 and 1 of extent 0 and block 5 of extent 1;
/// the head, 2, has a copy of extent 0 in which block 1 is another.
fn image(path: &Path) -> [Vec<u8>; 2] {
    let file = File::create(path).unwrap();
    file.set_len(SIZE).unwrap();
    let put = |at: u64, bytes: &[u8]| file.write_all_at(bytes, at).unwrap();
    put(0, b"DBS@393!");
    put(8, &0x0001_0000u32.to_le_bytes());
    put(12, &3u32.to_le_bytes());
    put(16, &SIZE.to_le_bytes());
    put(VOLUME_TABLE, &2u16.to_le_bytes());
    put(VOLUME_TABLE + 2, &(2u64 << 20).to_le_bytes());
    put(VOLUME_TABLE + 10, b"old");
    for (slot, parent, created) in [(0, 0u16, 1_700_000_000i64), (1, 1, 1_700_000_100)] {
        put(SNAPSHOT_TABLE + slot * 10, &parent.to_le_bytes());
        put(SNAPSHOT_TABLE + slot * 10 + 2, &created.to_le_bytes());
    }
    let extent = |index: u64, snapshot: u16, logical: u32, blocks: &[(u64, u8)]| {
        let mut record = [0; 38];
        record[..2].copy_from_slice(&snapshot.to_le_bytes());
        record[2..6].copy_from_slice(&logical.to_le_bytes());
        for (block, fill) in blocks {
            record[6 + *block as usize / 8] |= 1 << (block % 8);
            put(DATA + index * EXTENT + block * 4096, &[*fill; 4096]);
        }
        put(EXTENT_TABLE + index * 38, &record);
    };
    extent(0, 1, 0, &[(0, b'a'), (1, b'b')]);
    extent(1, 1, 1, &[(5, b'c')]);
    extent(2, 2, 0, &[(0, b'a'), (1, b'd')]);

    let mut snapshot = vec![0; 2 << 20];
    snapshot[..4096].fill(b'a');
    snapshot[4096..8192].fill(b'b');
    let fifth = EXTENT as usize + 5 * 4096;
    snapshot[fifth..fifth + 4096].fill(b'c');
    let mut head = snapshot.clone();
    head[4096..8192].fill(b'd');
    [snapshot, head]
}

#[test]
fn an_image_is_read_as_it_is_and_upgraded() {
    let place = Place::new();
    let [snapshot, head] = image(&place.path("old.img"));
    let before = std::fs::read(place.path("old.img")).unwrap();

    let info = place.json("--store old.img info");
    assert!(info["format"].as_str().unwrap().starts_with('1'), "{info}");
    assert_eq!((info["volumes"].as_u64(), info["volumes_max"].as_u64()), (Some(1), Some(256)));
    let used = info["extents_total"].as_u64().unwrap() - info["extents_free"].as_u64().unwrap();
    assert!(used > 0 && info["allocated"] == used << 20, "{info}");
    let volumes = place.json("--store old.img volume list");
    assert_eq!(volumes[0]["name"], "old");
    assert_eq!(volumes[0]["size"], 2 << 20);
    let snapshots = place.json("--store old.img snapshot list old");
    assert_eq!(snapshots.as_array().unwrap().len(), 1);
    place.dbs("--store old.img volume export old head.img").ok("export");
    assert!(std::fs::read(place.path("head.img")).unwrap() == head);
    let refused = place.dbs("--store old.img volume create new 1MiB");
    assert!(refused.code != 0 && refused.stderr.contains("upgrade"), "{}", refused.stderr);

    place.dbs("upgrade old.img store.dbs").ok("upgrade");
    assert!(std::fs::read(place.path("old.img")).unwrap() == before, "the image is untouched");
    place.dbs("volume export old new-head.img").ok("export");
    assert!(std::fs::read(place.path("new-head.img")).unwrap() == head);
    for (command, seconds) in
        [("volume list", 1_700_000_000_u64), ("snapshot list old", 1_700_000_000)]
    {
        let made = place.json(command);
        assert_eq!(made[0]["created_ns"], seconds * 1_000_000_000, "{command}: {made}");
    }
    let snapshots = place.json("snapshot list old");
    let name = snapshots[0]["name"].as_str().unwrap().to_owned();
    place.dbs(&format!("volume export old@{name} new-snapshot.img")).ok("export");
    assert!(std::fs::read(place.path("new-snapshot.img")).unwrap() == snapshot);
    place.dbs("check").ok("check");
}
