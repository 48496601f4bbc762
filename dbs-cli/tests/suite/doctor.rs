//! `dbs doctor`: what is wrong is found, named with its way out, and told by the exit code.

use crate::support::{Place, noise};
use serde_json::Value;

/// What is found about something, with the exit code; notes and where the tests run left out.
fn found(place: &Place, about: &str, code: i32) -> Vec<(String, String)> {
    let run = place.dbs("--json doctor").exits(code, "doctor");
    let all = run.json()["findings"].as_array().unwrap().clone();
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    assert!(all.iter().all(|finding| !text(finding, "remedy").is_empty()), "{all:?}");
    let of = all.iter().filter(|finding| finding["about"] == about && finding["grade"] != "note");
    of.map(|finding| (text(finding, "grade"), text(finding, "found"))).collect()
}

#[test]
fn a_store_in_order_has_nothing_wrong_idle_and_served() {
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    let run = place.dbs("doctor");
    let text = run.text();
    if text.contains("tmpfs") {
        println!("SKIPPED: the tests' directory is in memory, which the doctor does not like");
        return;
    }
    run.ok("idle");
    assert!(text.contains("nobody serves it") && text.contains("nothing is wrong"), "{text}");
    let server = place.serve("");
    let served = place.json("doctor");
    assert_eq!((&served["served"], &served["served_by"]), (&true.into(), &server.pid().into()));
    assert_eq!(server.stop().0, Some(0));
}

#[test]
fn what_keeps_a_store_from_being_opened_is_named() {
    let place = Place::new();
    place.dbs("doctor").exits(10, "there is none");
    place.init();
    let server = place.serve("");
    let socket = dbs_control::store_key(&place.store()).unwrap() + ".sock";
    std::fs::remove_file(place.path("run").join(socket)).unwrap();
    let held = found(&place, "store", 3);
    assert!(held[0].1.contains(&server.pid().to_string()), "{held:?}");
    server.stop();
}

#[test]
fn a_full_store_and_a_volume_that_nobody_fills_are_problems() {
    let place = Place::new();
    place.dbs("init store.dbs --size 64MiB").ok("init");
    place.pipe("volume import v -", &noise(9, 100 << 20)).exits(12, "it does not fit");
    place.pipe("volume import full -", &noise(9, 20 << 20)).ok("import");
    while place.pipe("volume import more -", &noise(8, 1 << 20)).code == 0 {
        let name =
            format!("volume rename more m{}", place.json("volume list").as_array().unwrap().len());
        place.dbs(&name).ok("rename");
    }
    let space = found(&place, "space", 3);
    assert!(
        space.iter().any(|(_, text)| text.contains("full") || text.contains("only")),
        "{space:?}"
    );
    let other = Place::new();
    other.init();
    let store = dbs_core::Store::open(&other.store(), &dbs_core::OpenOptions::default()).unwrap();
    store.create_rebuilding("half", 1 << 20).unwrap();
    store.close().unwrap();
    let volumes = found(&other, "volumes", 3);
    assert_eq!(
        volumes,
        [("warning".to_owned(), "volume half is incomplete, and nobody fills it".to_owned())]
    );
}

#[test]
fn damage_comes_first() {
    let place = Place::with_store();
    place.dbs("volume create v 16MiB").ok("create");
    let file = std::fs::OpenOptions::new().write(true).open(place.store()).unwrap();
    // All copies of the superblock but one: that is healed. All of them: nothing can be read.
    for copy in [0, 4096, (256 << 20) - 4096] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 512], copy + 512).unwrap();
    }
    let damage = found(&place, "store", 4);
    assert_eq!(damage[0].0, "damage", "{damage:?}");
    assert!(place.dbs("doctor").text().contains("dbs check"));
}
