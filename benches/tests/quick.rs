//! The measurements at small sizes: they still build, run and verify what they wrote.

use std::process::Command;

#[test]
fn scale_runs() {
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
    ] {
        assert!(text.contains(heading), "no `{heading}` in\n{text}");
    }
    let rows = text.lines().filter(|line| line.starts_with("| ")).count();
    assert!(rows > 40, "{rows} rows:\n{text}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "stores are left behind");
}
