//! `dbs volume trim VOLUME` and `dbs volume compress`, on an idle store and on a served one.

use crate::support::{Place, noise};
use dbs_nbd::{Buffered, Client, ClientOptions};
use std::os::unix::net::UnixStream;

const MIB: usize = 1 << 20;

#[test]
fn blocks_of_zeros_are_released_on_idle_and_served_stores() {
    let place = Place::with_store();
    place.json("volume create v 64MiB");
    let server = place.serve("--nbd unix:nbd.sock");
    let stream = UnixStream::connect(place.path("nbd.sock")).unwrap();
    let mut client = Client::over(Buffered::new(stream), "v", &ClientOptions::default()).unwrap();
    let data = noise(1, 2 * MIB);
    client.write_at(0, &data, false).unwrap();
    client.write_at(8 * MIB as u64, &vec![0; 6 * MIB], true).unwrap();
    let numbers = |args: &str| {
        let found = place.json(args);
        ["checked", "zeros", "freed"].map(|name| found[name].as_u64().unwrap() / MIB as u64)
    };
    let allocated = || place.json("volume show v")["usage"]["allocated"].as_u64().unwrap();
    let before = allocated();
    assert_eq!(numbers("volume trim v --dry-run"), [8, 6, 6], "served");
    assert_eq!(allocated(), before);
    assert_eq!(numbers("volume trim v"), [8, 6, 6], "served");
    assert_eq!(before - allocated(), 6 * MIB as u64);
    client.write_at(20 * MIB as u64, &vec![0; 3 * MIB], true).unwrap();
    drop(client);
    server.stop();

    let told = place.dbs("volume trim v -n").ok("idle");
    let text = "volume v: would release 3.0 MiB of zeros in 5.0 MiB of data, and free 3.0 MiB\n";
    assert_eq!(told.text(), text);
    let told = place.dbs("volume trim v").ok("idle");
    assert_eq!(told.text(), text.replace("would release", "released").replace("free ", "freed "));
    assert_eq!(numbers("volume trim v"), [2, 0, 0]);
    let exported = place.dbs("volume export v -").ok("export").stdout;
    assert!(exported[..2 * MIB] == data && exported[2 * MIB..].iter().all(|byte| *byte == 0));

    place.json("snapshot create v@s");
    place.dbs("volume trim v@s").exits(10, "a snapshot");
    place.dbs("volume trim w").exits(10, "no such volume");
    place.dbs("volume trim -n").exits(2, "no volume");
}

/// Clients read what was written before and after, and write.
#[test]
fn volumes_are_compressed_on_idle_and_served_stores() {
    let place = Place::with_store();
    place.json("volume create v 64MiB");
    let server = place.serve("--nbd unix:nbd.sock");
    let stream = UnixStream::connect(place.path("nbd.sock")).unwrap();
    let mut client = Client::over(Buffered::new(stream), "v", &ClientOptions::default()).unwrap();
    let mut data: Vec<u8> = b"seldom read, and much alike\n".repeat(8 * MIB / 28);
    data.resize(8 * MIB, 7);
    data[..MIB].copy_from_slice(&noise(1, MIB));
    client.write_at(0, &data, true).unwrap();
    place.json("snapshot create v@s");
    client.write_at(4 * MIB as u64, &data[..2 * MIB], true).unwrap();
    let numbers = |args: &str| {
        let found = place.json(args);
        ["checked", "compressed", "stored"].map(|name| found[name].as_u64().unwrap())
    };
    let mib = MIB as u64;
    let [checked, compressed, stored] = numbers("volume compress v@s");
    assert_eq!([checked, compressed], [8 * mib, 7 * mib], "served");
    assert!(stored < mib, "{stored}");
    let mut wanted = data.clone();
    wanted.copy_within(..2 * MIB, 4 * MIB);
    let mut found = vec![0; 8 * MIB];
    client.read_at(0, &mut found).unwrap();
    assert!(found == wanted);
    let info = place.json("info");
    assert_eq!([&info["compressed"], &info["compressed_stored"]], [compressed, stored]);
    client.write_at(5 * mib + 512, &[9; 512], true).unwrap();
    wanted[5 * MIB + 512..][..512].fill(9);
    drop(client);
    server.stop();

    let told = place.dbs("volume compress v").ok("idle").text();
    assert!(told.starts_with("v: compressed 1.0 MiB of 3.0 MiB of data, to "), "{told}");
    let exported = place.dbs("volume export v -").ok("export").stdout;
    assert!(exported[..8 * MIB] == wanted);
    place.dbs("volume export v@s s.img").ok("export");
    assert!(std::fs::read(place.path("s.img")).unwrap()[..8 * MIB] == data);
    place.dbs("volume compress v@t").exits(10, "no such snapshot");
    place.dbs("check").ok("check");
}
