//! The measurements at small sizes: they still build, run and verify what they wrote.

use std::path::Path;
use std::process::Command;

#[test]
fn scale_runs() {
    if !ready() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_scale"))
        .args(["--quick", "--dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    for heading in [
        "## 24 snapshots of a volume of 8 MiB",
        "## 40 volumes, 200 clones of a snapshot",
        "## A store of 48 MiB filled, emptied, filled again",
        "## A volume with 500 extents of 1 MiB",
        "## Opening a store of 16 GiB, all of it in use",
        "## A store of growing size, nothing in it",
        "## A store with a growing number of extents (of 512 KiB), all in use",
        "## Volumes of a served store, each with an idle client",
        "## Clients of a volume, each with one request in flight",
        "## A chain of snapshots below a served volume",
    ] {
        assert!(text.contains(heading), "no `{heading}` in\n{text}");
    }
    let rows = text.lines().filter(|line| line.starts_with("| ")).count();
    assert!(rows > 40, "{rows} rows:\n{text}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "stores are left behind");
}

#[test]
fn peers_runs() {
    if !ready() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [document, json] = ["document.md", "runs.json"].map(|name| dir.path().join(name));
    std::fs::write(&document, "a\n<!-- peers:begin -->\n<!-- peers:end -->\nb\n").unwrap();
    let images = dir.path().join("images");
    std::fs::create_dir(&images).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_peers"))
        .args(["--quick", "--seconds", "1", "--size", "64"])
        .args(["--only", "sequential", "--only", "checksums", "--dir"])
        .arg(&images)
        .arg("--document")
        .arg(&document)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&document).unwrap();
    assert!(text.starts_with("a\n") && text.ends_with("b\n"), "{text}");
    assert!(text.contains("| 1 MiB sequential read, QD 4 | "), "{text}");
    assert!(text.contains("| 1 MiB overwrite, QD 128 | "), "{text}");
    assert!(text.contains("checksums, 4 KiB random read, QD 1: IOPS with over without"), "{text}");
    let raw = std::fs::read_to_string(&json).unwrap();
    assert!(raw.contains("\"cell\": \"sequential/write\""), "{raw}");
    assert_eq!(std::fs::read_dir(&images).unwrap().count(), 0, "images are left behind");
}

/// Whether what is measured, and with what, is there.
fn ready() -> bool {
    let dbs = Path::new(env!("CARGO_BIN_EXE_peers")).with_file_name("dbs");
    let ready = Command::new("fio").arg("--version").output().is_ok() && dbs.exists();
    if !ready {
        println!("SKIPPED: needs fio, and {} (cargo build -p dbs-cli)", dbs.display());
    }
    ready
}
