//! Block devices, as far as they go without the kernel's help: what is said where it is missing.
//! With it, `make vm` tests them.

use crate::support::Place;
use std::path::Path;
use std::time::Duration;

/// Where the kernel can make block devices, a test of refusals must not.
fn kernel_can() -> bool {
    let can = Path::new("/dev/ublk-control").exists();
    if can {
        println!("SKIPPED: this kernel has ublk; `make vm` tests what it does");
    }
    can
}

#[test]
fn preflight_says_what_is_missing_and_what_works() {
    let place = Place::new();
    let found = place.json("preflight");
    let way = |name: &str| {
        let ways = found["ways"].as_array().unwrap();
        ways.iter().find(|way| way["name"] == name).unwrap().clone()
    };
    assert_eq!(way("nbd")["works"], true, "it needs nothing of the kernel");
    let attach = way("attach");
    assert_eq!(attach["works"], attach["lacks"].as_array().unwrap().is_empty());
    let text = place.dbs("preflight").ok("preflight").text();
    for check in found["checks"].as_array().unwrap() {
        let name = check["name"].as_str().unwrap();
        assert!(text.contains(name), "{name}");
        if check["ok"] == false {
            assert!(text.contains(check["remedy"].as_str().unwrap()), "{name}");
        }
    }
}

#[test]
fn without_the_driver_the_way_out_is_named() {
    if kernel_can() {
        return;
    }
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    let refused = place.dbs("attach v --foreground").exits(1, "foreground");
    assert!(refused.stderr.contains("dbs: attaching v: "), "{}", refused.stderr);
    let served = place.serve("");
    for command in ["attach v", "--json attach v --queues 2 --depth 64 --read-only"] {
        let refused = place.dbs(command).exits(1, command);
        for word in ["modprobe ublk_drv", "preflight", "--nbd"] {
            assert!(refused.stderr.contains(word), "{command}: {}", refused.stderr);
        }
    }
    place.dbs("attach missing").exits(10, "missing");
    place.dbs("attach missing@s").exits(10, "missing snapshot");
    assert_eq!(place.json("attached"), serde_json::json!([]));
    // It goes on as if nothing had happened.
    place.dbs("volume resize v 32MiB").ok("resize");
    assert_eq!(served.stop().0, Some(0));
}

#[test]
fn a_server_started_for_nothing_ends() {
    if kernel_can() {
        return;
    }
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    let refused = place.dbs("attach v").exits(1, "attach");
    assert!(refused.stderr.contains("modprobe ublk_drv"), "{}", refused.stderr);
    let socket = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().path().extension().is_some_and(|extension| extension == "sock")
    };
    // It ends when it has said so, and has let the store go then.
    assert!(
        !std::fs::read_dir(place.path("run")).unwrap().any(socket),
        "the server is still there"
    );
    place.dbs("check").ok("check");
}

/// Found by a tester: the server that `dbs attach` starts ended under whoever used it for something else.
#[test]
fn a_server_started_for_devices_stays_as_long_as_it_is_used() {
    let served = |use_it: &dyn Fn(&Place)| {
        let place = Place::with_store();
        place.dbs("volume create v 16MiB").ok("create");
        let nbd = place.path("nbd");
        let server = place.serve(&format!("--while-attached --nbd unix:{}", nbd.display()));
        use_it(&place);
        // Nobody is left.
        assert_eq!(server.ended().0, Some(0));
    };
    // Longer than it waits for the first device.
    let long = Duration::from_secs(6);
    std::thread::scope(|threads| {
        threads.spawn(|| served(&|place| drop(place.dbs("clients --interval 6s").ok("command"))));
        served(&|place| {
            let options = dbs_nbd::ClientOptions::default();
            let mut client =
                dbs_nbd::Client::connect_unix(&place.path("nbd"), "v", &options).unwrap();
            std::thread::sleep(long);
            client.write_at(0, &[7; 4096], true).unwrap();
        });
    });
}

#[test]
fn what_is_not_attached_cannot_be_detached() {
    let place = Place::with_store();
    for target in ["v", "v@s", "/dev/ublkb77", "/dev/dbs/store.dbs/v"] {
        let refused = place.dbs(&format!("detach {target}")).exits(10, target);
        assert!(refused.stderr.contains(target), "{}", refused.stderr);
        place.dbs(&format!("detach --force {target}")).exits(10, target);
    }
    assert_eq!(place.json("attached"), serde_json::json!([]));
    let heads = place.dbs("attached").ok("attached").text();
    assert!(heads.starts_with("DEVICE"), "{heads}");
    for wrong in ["attach v --queues 0", "attach v --depth 5000", "attach v@", "attach v --id x"] {
        place.dbs(wrong).exits(2, wrong);
    }
}
