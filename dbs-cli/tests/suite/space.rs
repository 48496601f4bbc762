//! `dbs volume trim VOLUME`, on an idle store and on a served one.

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
