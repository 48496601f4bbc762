//! The web page of `dbs serve` in a real browser, which `tests/web/browser.py` drives.

use crate::support::Place;
use dbs_core::{OpenOptions, Store};
use std::path::{Path, PathBuf};
use std::process::Command;

/// As many as the page must show without effort, those with names of their own included.
const VOLUMES: usize = 10_000;
const BROWSER: &str = "chromium-headless-shell";

/// What the test needs, or what is missing.
fn program(name: &str) -> Option<PathBuf> {
    let found = std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|directory| directory.join(name))
        .find(|path| path.exists());
    if found.is_none() {
        println!("SKIPPED the web page in a browser: {name} is missing");
    }
    found
}

/// A place in memory, where 10,000 commits take no time, if there is one.
fn place() -> Place {
    let shm = Path::new("/dev/shm");
    match tempfile::tempdir_in(shm) {
        Ok(dir) => Place { dir },
        Err(_) => Place::new(),
    }
}

fn fill(place: &Place) {
    let init = format!("init store.dbs --size 1GiB --max-volumes {VOLUMES} --max-snapshots 20000");
    place.dbs(&init).ok("init");
    let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
    for at in 0..VOLUMES - 2 {
        store.create_volume(&format!("v{at}"), 64 << 20).unwrap();
    }
    store.create_volume("<b onclick=x>", 1 << 20).unwrap();
    let volume = store.volume("v0").unwrap();
    volume.write_at(0, &vec![7; 8 << 20], true).unwrap();
    store.create_snapshot("v0", "monday", &Default::default()).unwrap();
    store.set_protected("v0", "monday", true).unwrap();
    volume.write_at(0, &vec![8; 2 << 20], true).unwrap();
    store.create_snapshot("v0", "tuesday", &Default::default()).unwrap();
    store.clone_volume("v0", "monday", "clone-of-monday").unwrap();
    drop(volume);
    store.close().unwrap();
}

#[test]
fn the_page_works_in_a_browser() {
    let (Some(browser), Some(python)) = (program(BROWSER), program("python3")) else { return };
    let place = place();
    fill(&place);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/web/browser.py");
    let url = |served: &crate::support::Served| served.ready["web"].as_str().unwrap().to_owned();
    // One that can only look, and then one that may change something.
    for (mode, args) in [("look", ""), ("change", " --web-admin")] {
        let served = place.serve(&format!("--web 0{args}"));
        place.json("check");
        let mut command = Command::new(&python);
        command.arg(&script).arg(mode).arg(&browser).arg(url(&served)).arg(VOLUMES.to_string());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let failed = String::from_utf8_lossy(&output.stderr).into_owned();
        let worked = output.status.success() && said.contains("the page works in a browser");
        assert!(worked, "{mode}: {said}\n{failed}");
        assert_eq!(served.stop().0, Some(0));
    }
}
