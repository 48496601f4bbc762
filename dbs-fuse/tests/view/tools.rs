//! What people use on files, used on images. Every program runs against the clock.

use crate::server::{Server, can_mount, noise};
use serde_json::json;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs a program for ten minutes at most; what it prints, if it succeeds.
pub fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new("timeout")
        .args(["-k", "5", "600", program])
        .args(arguments)
        .env("PATH", path)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(text) } else { Err(format!("{}: {error}", output.status)) }
}

#[track_caller]
pub fn must(program: &str, arguments: &[&str]) -> String {
    let outcome = run(program, arguments);
    outcome.unwrap_or_else(|error| panic!("{program} {arguments:?}: {error}"))
}

/// Whether a program is there; says so if not.
pub fn has(program: &str) -> bool {
    let found = run("sh", &["-c", &format!("command -v {program}")]).is_ok();
    if !found {
        println!("SKIPPED a part: needs {program}");
    }
    found
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn programs_copy_compare_and_count() {
    let true = can_mount() else { return };
    let server = Server::new(128 << 20);
    server.ask(&json!(["create", "v", 64 << 20]));
    for (index, at) in [0, 5 << 20, (33 << 20) + 4096, (64 << 20) - 65536].into_iter().enumerate() {
        server.ask(&json!(["write", "v", at, index, 64 << 10]));
    }
    server.ask(&json!(["snapshot", "v", "s"]));
    let mut wanted = vec![0; 64 << 20];
    for (index, at) in [0, 5 << 20, (33 << 20) + 4096, (64 << 20) - 65536].into_iter().enumerate() {
        wanted[at..at + (64 << 10)].copy_from_slice(&noise(index as u64, 64 << 10));
    }
    let plain = server.dir.path().join("plain");
    fs::write(&plain, &wanted).unwrap();
    let sum = |path: &Path| must("md5sum", &[text(path)]).split(' ').next().unwrap().to_owned();
    let right = sum(&plain);
    for name in ["volumes/v/head.raw", "volumes/v/snapshots/s.raw", "volumes/v/latest"] {
        let image = server.path(name);
        assert_eq!(sum(&image), right, "{name}");
        let copy = server.dir.path().join("copy");
        must("cp", &["--sparse=auto", "-L", text(&image), text(&copy)]);
        assert_eq!(sum(&copy), right);
        assert!(fs::metadata(&copy).unwrap().blocks() * 512 < 2 << 20, "holes are not copied");
        must("cp", &["--sparse=always", "-L", text(&image), text(&copy)]);
        assert_eq!(sum(&copy), right);
        let (from, to) = (format!("if={}", text(&image)), format!("of={}", text(&copy)));
        must("dd", &[&from, &to, "bs=100001", "status=none"]);
        assert_eq!(sum(&copy), right);
        must("dd", &[&from, &to, "bs=1M", "iflag=direct", "status=none"]);
        assert_eq!(sum(&copy), right);
        assert_eq!(
            must("du", &["-L", "--block-size=1", text(&image)]).split('\t').next(),
            Some("262144")
        );
        if has("qemu-img") {
            let info =
                must("qemu-img", &["info", "-U", "--output=json", "-f", "raw", text(&image)]);
            let info: serde_json::Value = serde_json::from_str(&info).unwrap();
            assert_eq!(info["virtual-size"], 64 << 20);
            assert_eq!(info["actual-size"], 256 << 10);
            must(
                "qemu-img",
                &["compare", "-U", "-f", "raw", "-F", "raw", text(&image), text(&plain)],
            );
        }
    }
    let whole = server.path("");
    let found = must("find", &[text(&whole), "-name", "*.raw", "-size", "64M"]);
    assert_eq!(found.lines().count(), 2, "{found}");
    let archive = server.dir.path().join("archive.tar");
    must("tar", &["-cSf", text(&archive), "-C", text(&whole), "volumes/v/snapshots", "store.json"]);
    assert!(fs::metadata(&archive).unwrap().len() < 1 << 20, "holes are not archived");
    let out = server.dir.path().join("out");
    fs::create_dir(&out).unwrap();
    must("tar", &["-xf", text(&archive), "-C", text(&out)]);
    assert_eq!(sum(&out.join("volumes/v/snapshots/s.raw")), right);
    assert_eq!(must("find", &[text(&whole), "-type", "d"]).lines().count(), 4);
}
