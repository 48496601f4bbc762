use super::export::ExportOptions;
use super::files::{Files, change_time};
use super::import::ImportOptions;
use super::*;
use crate::host::file::{StoreFile, StoreOptions};
use crate::replica::meta::{DiskMeta, VolumeMeta};
use crate::replica::{Disk, GENERATION, Replica, ReplicaOptions, StoreSource};
use dbs_core::info::LayerState;
use longhorn_sync::image::{HashOptions, Record, Source, SparseFile, hash, layer_stamp};
use longhorn_wire::names;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const SIZE: u64 = 4 << 20;
pub(super) const BLOCK: u64 = 4096;
pub(super) const HEAD: &str = "volume-head-003.img";
/// What a child process of a test is to do, where, and before which step it dies.
const TASK: &str = "UPSTREAM_TASK";

/// What one reads through each disk.
pub(super) type Views = BTreeMap<String, Vec<u8>>;

pub(super) fn disk(name: &str) -> String {
    names::snapshot_disk(name)
}

/// An image of `size` bytes with these runs of blocks, each filled with a byte, which may be 0.
fn image(path: &Path, size: u64, runs: &[(u64, u64, u8)]) {
    let file = File::create(path).unwrap();
    file.set_len(size).unwrap();
    for (first, count, byte) in runs {
        file.write_all_at(&vec![*byte; (count * BLOCK) as usize], first * BLOCK).unwrap();
    }
}

fn describe(dir: &Path, disk: &str, parent: &str, meta: DiskMeta) {
    let meta = DiskMeta { name: "volume-head-000.img".into(), parent: parent.to_owned(), ..meta };
    fs::write(dir.join(format!("{disk}.meta")), meta.to_bytes().unwrap()).unwrap();
}

/// A tree: `a` below all, `b` on it and removed, `c` on it and left by a revert, `d` on `b`, the head on `d`. `a` is
/// from before the volume was expanded.
pub(super) fn upstream_replica(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let meta = |user_created, removed, created: &str, labels: &[(&str, &str)]| DiskMeta {
        user_created,
        removed,
        created: created.to_owned(),
        labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        ..DiskMeta::default()
    };
    let rfc = "2026-08-21T10:00:00Z";
    image(&dir.join(disk("a")), SIZE / 2, &[(0, 300, 1), (400, 1, 2)]);
    describe(dir, &disk("a"), "", meta(true, false, rfc, &[("k", "v"), ("<", "&")]));
    image(&dir.join(disk("b")), SIZE, &[(10, 40, 0), (60, 5, 3), (1000, 24, 4)]);
    describe(dir, &disk("b"), &disk("a"), meta(false, true, "", &[]));
    image(&dir.join(disk("c")), SIZE, &[(5, 1, 5), (700, 300, 6)]);
    describe(dir, &disk("c"), &disk("a"), meta(true, false, "2026-08-21T10:00:00.5Z", &[]));
    image(&dir.join(disk("d")), SIZE, &[(62, 1, 0), (1020, 4, 7)]);
    describe(dir, &disk("d"), &disk("b"), meta(true, false, rfc, &[]));
    image(&dir.join(HEAD), SIZE, &[(0, 2, 0), (3, 2, 8), (400, 1, 9), (600, 1, 10)]);
    describe(dir, HEAD, &disk("d"), meta(false, false, rfc, &[]));
    let volume = VolumeMeta {
        size: SIZE,
        head: HEAD.into(),
        parent: disk("d"),
        sector_size: 512,
        ..VolumeMeta::default()
    };
    volume.write(dir).unwrap();
    let mut counter = b"1234".to_vec();
    counter.resize(4096, 0);
    fs::write(dir.join("revision.counter"), counter).unwrap();
    for (name, current) in [("a", true), ("b", false)] {
        let path = dir.join(disk(name));
        let change_time = if current { change_time(&path) } else { "before".to_owned() };
        let record = Record {
            method: "crc64".into(),
            checksum: hash_of(&SparseFile::source(&path).unwrap()),
            change_time,
            ..Record::default()
        };
        record.store(&path).unwrap();
    }
}

fn hash_of(source: &dyn Source) -> String {
    hash(source, &HashOptions { threads: 1, cancelled: &|| false, progress: &|_| {} }).unwrap()
}

/// What upstream's replica would read.
pub(super) fn upstream_views(dir: &Path) -> Views {
    let files = Files::read(dir).unwrap();
    let view = |disk: &String| {
        let (mut line, mut at) = (Vec::new(), disk);
        while let Some(meta) = files.disks.get(at) {
            line.push(at.clone());
            at = &meta.parent;
        }
        let mut view = vec![0; SIZE as usize];
        for disk in line.iter().rev() {
            let source = SparseFile::source(dir.join(disk)).unwrap();
            for run in source.intervals(0, usize::MAX).unwrap().iter().filter(|run| run.data) {
                let part = &mut view[run.offset as usize..run.end() as usize];
                source.read_at(run.offset, part).unwrap();
            }
        }
        view
    };
    files.disks.keys().map(|disk| (disk.clone(), view(disk))).collect()
}

/// Compares what one reads; what differs is far too long to be shown.
pub(super) fn equal(what: &str, found: &Views, expected: &Views) {
    assert!(found.keys().eq(expected.keys()), "{what}: {:?}", found.keys());
    for (disk, view) in found {
        let blocks = view.chunks(BLOCK as usize).zip(expected[disk].chunks(BLOCK as usize));
        let differs = blocks.enumerate().find(|(_, (found, expected))| found != expected);
        assert!(differs.is_none(), "{what}: {disk}, block {:?}", differs.map(|(block, _)| block));
    }
}

pub(super) fn store(dir: &Path) -> Store {
    StoreFile::of(dir, StoreOptions::default()).open().unwrap()
}

/// What ours reads.
pub(super) fn our_views(dir: &Path) -> Views {
    let store = store(dir);
    let mut views = Views::new();
    for layer in store.layers("v").unwrap() {
        let spec = layer.name.as_ref().map_or("v".to_owned(), |name| format!("v@{name}"));
        let volume = store.volume(&spec).unwrap();
        let mut view = vec![0; SIZE as usize];
        volume.read_at(0, &mut view[..volume.size() as usize]).unwrap();
        views.insert(layer.name.map_or(HEAD.to_owned(), |name| disk(&name)), view);
    }
    store.close().unwrap();
    views
}

pub(super) fn our_disks(dir: &Path) -> (BTreeMap<String, Disk>, u64) {
    let store = store(dir);
    let options = ReplicaOptions::new(dir, "v");
    let replica = Replica::new(options, StoreSource::Own(store.clone())).unwrap();
    let found = (replica.disks().unwrap(), replica.export_state().unwrap().revision);
    drop(replica);
    store.close().unwrap();
    found
}

/// What is to stay of a description: not the name, which is stale, nor the time of a head.
pub(super) fn same(meta: &DiskMeta) -> DiskMeta {
    let is_head = meta.parent == disk("d");
    let created = if is_head { String::new() } else { meta.created.clone() };
    DiskMeta { name: String::new(), created, ..meta.clone() }
}

pub(super) fn importing(dir: &Path) -> ImportOptions {
    ImportOptions {
        dir: dir.to_owned(),
        volume: "v".into(),
        backing_file: None,
        store: StoreOptions::default(),
        keep: false,
    }
}

pub(super) fn exporting(dir: &Path, to: Option<&Path>) -> ExportOptions {
    let (volume, store) = (String::new(), StoreOptions::default());
    ExportOptions { dir: dir.to_owned(), volume, to: to.map(Path::to_owned), store }
}

pub(super) fn done(_: Progress) -> Result<()> {
    Ok(())
}

/// Writes and discards, as a replica in use does.
fn use_store(dir: &Path) {
    let store = store(dir);
    let volume = store.volume("v").unwrap();
    volume.write_at(20 * BLOCK, &[11; 8192], false).unwrap();
    // Over what `a` has, and over what nobody has.
    volume.discard(30 * BLOCK, 10 * BLOCK).unwrap();
    volume.discard(650 * BLOCK, 10 * BLOCK).unwrap();
    drop(volume);
    store.close().unwrap();
}

#[test]
fn a_replica_comes_over_and_goes_back() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let (names, views, metas) =
        (list(dir).unwrap(), upstream_views(dir), Files::read(dir).unwrap().disks);
    let modified = || fs::metadata(dir.join(HEAD)).unwrap().modified().unwrap();
    let written = modified();
    let moved = import(&importing(dir), &done).unwrap().unwrap();
    assert_eq!((moved.size, moved.snapshots), (SIZE, 4));
    equal("moved", &our_views(dir), &views);
    let checksum = format!("{}.checksum", disk("a"));
    let ours =
        ["volume.counters", "volume.dbs", "volume.generation", "volume.identity", "volume.meta"];
    let (disks, revision) = our_disks(dir);
    assert_eq!(revision, 1234);
    assert_eq!(list(dir).unwrap(), [&[&*checksum], &ours[..]].concat());
    for (name, meta) in metas.iter() {
        assert_eq!(same(&crate::agent::shelf::disk_meta(name, &disks[name])), same(meta), "{name}");
    }
    assert_eq!((disks[&disk("a")].size, disks[&disk("b")].size), (SIZE / 2, SIZE));
    {
        let store = store(dir);
        let stamp = longhorn_sync::image::layer_stamp(&store, "v", "a").unwrap();
        let record = Record::load(&dir.join(disk("a"))).unwrap().unwrap();
        let source = longhorn_sync::image::LayerSource::to_hash(&store, "v", "a").unwrap();
        assert!(record.tells(&stamp) && record.checksum == hash_of(&source));
        store.close().unwrap();
    }
    use_store(dir);
    let views = our_views(dir);
    export(&exporting(dir, None), &done).unwrap().unwrap();
    equal("moved", &upstream_views(dir), &views);
    assert_eq!(modified(), written, "which tells how fresh it is");
    let stale = format!("{}.checksum", disk("b"));
    assert_eq!(
        list(dir).unwrap(),
        names.into_iter().filter(|name| *name != stale).collect::<Vec<_>>()
    );
    let files = Files::read(dir).unwrap();
    assert_eq!((files.revision, &*files.meta.head, files.meta.dirty), (1234, HEAD, false));
    for (name, meta) in &files.disks {
        assert_eq!(same(meta), same(&metas[name]), "{name}");
    }
    let a = dir.join(disk("a"));
    let record = Record::load(&a).unwrap().unwrap();
    assert!(
        record.tells(&change_time(&a))
            && record.checksum == hash_of(&SparseFile::source(&a).unwrap())
    );
    // Nothing that was a hole takes room.
    assert!(
        fs::metadata(dir.join(HEAD)).map(|m| std::os::unix::fs::MetadataExt::blocks(&m)).unwrap()
            < 8 * 40
    );
    import(&importing(dir), &done).unwrap().unwrap();
    equal("moved", &our_views(dir), &views);
}

/// The child process of [`killed`]; a test of its own for want of another program.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else { return };
    let [way, dir, steps] = task.split('|').collect::<Vec<_>>().try_into().unwrap();
    let (dir, steps) = (Path::new(dir), AtomicU64::new(steps.parse().unwrap()));
    let told = |_| {
        if steps.fetch_sub(1, Ordering::SeqCst) == 0 {
            let me = nix::unistd::Pid::this();
            nix::sys::signal::kill(me, nix::sys::signal::Signal::SIGKILL).unwrap();
        }
        Ok(())
    };
    match way {
        "import" => import(&importing(dir), &told).map(drop).unwrap(),
        "keep" => {
            import(&ImportOptions { keep: true, ..importing(dir) }, &told).map(drop).unwrap();
        }
        "serve" => serve::tests::serve(dir, &told),
        "to" => {
            let to = dir.with_extension("to");
            export(&exporting(dir, Some(&to)), &told).map(drop).unwrap();
        }
        _ => export(&exporting(dir, None), &told).map(drop).unwrap(),
    }
}

/// Whether a process that does this was killed before its step of this number.
pub(super) fn killed(way: &str, dir: &Path, steps: u64) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "upstream::tests::child", "--test-threads=1"]);
    let output = command.env(TASK, format!("{way}|{}|{steps}", dir.display())).output().unwrap();
    let killed = output.status.signal() == Some(9);
    let text = || String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(killed || output.status.success(), "{way} {steps}: {}", text());
    killed
}

fn is_settled(dir: &Path) -> bool {
    check_settled(dir).is_ok()
}

#[test]
fn an_import_is_killed_at_every_step() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model");
    upstream_replica(&model);
    let (names, views) = (list(&model).unwrap(), upstream_views(&model));
    for way in ["import", "keep"] {
        let mut steps = 0;
        loop {
            let dir = &place.path().join(format!("{way}{steps}"));
            upstream_replica(dir);
            if !killed(way, dir, steps) {
                break;
            }
            let (begun, ended) = (dir.join(IMPORT).exists(), dir.join(STORE_FILE).exists());
            assert!(begun && !is_settled(dir), "{steps}: no replica starts here");
            if !ended {
                equal(&format!("{steps}: upstream's is as it was"), &upstream_views(dir), &views);
            }
            // Once more, elsewhere in it, and then to the end.
            if killed(way, dir, steps * 5 % 7) {
                let options = ImportOptions { keep: way == "keep", ..importing(dir) };
                import(&options, &done).unwrap_or_else(|e| panic!("{way} {steps}: {e}"));
            }
            assert!(is_settled(dir));
            equal(&format!("{way} {steps}"), &our_views(dir), &views);
            assert_eq!(our_disks(dir).1, 1234, "{way} {steps}");
            assert!(list(dir).unwrap().iter().all(|name| !name.ends_with(".img")), "{steps}");
            if way == "keep" {
                assert_eq!(list(&dir.join(KEPT)).unwrap(), names, "{steps}");
                equal(&format!("kept {steps}"), &upstream_views(&dir.join(KEPT)), &views);
            }
            // Up to the turn they are the same.
            steps += if way == "keep" && !ended { 4 } else { 1 };
        }
        assert!(steps >= 16, "{way} {steps}");
    }
}

#[test]
fn an_export_is_killed_at_every_step() {
    let place = tempfile::tempdir().unwrap();
    for way in ["export", "to"] {
        let mut steps = 0;
        loop {
            let dir = &place.path().join(format!("{way}{steps}"));
            upstream_replica(dir);
            let names = list(dir).unwrap();
            import(&importing(dir), &done).unwrap();
            use_store(dir);
            let views = our_views(dir);
            let to = dir.with_extension("to");
            let target = if way == "to" { &to } else { dir };
            if !killed(way, dir, steps) {
                break;
            }
            assert!(!is_settled(target), "{way} {steps}: no replica starts here");
            if way == "to" || dir.join(STORE_FILE).exists() {
                equal(&format!("{way} {steps}: ours is as it was"), &our_views(dir), &views);
            }
            let options = exporting(dir, Some(&*to).filter(|_| way == "to"));
            if way == "to" && list(&to).unwrap() != [EXPORT] {
                let refused = export(&options, &done).unwrap_err();
                assert!(refused.to_string().contains("remove the directory"), "{refused}");
                fs::remove_dir_all(&to).unwrap();
            }
            if killed(way, dir, steps * 5 % 7) {
                export(&options, &done).unwrap_or_else(|e| panic!("{way} {steps}: {e}"));
            }
            assert!(is_settled(target));
            equal(&format!("{way} {steps}"), &upstream_views(target), &views);
            let stale = format!("{}.checksum", disk("b"));
            let expected: Vec<_> = names.into_iter().filter(|name| *name != stale).collect();
            assert_eq!(list(target).unwrap(), expected, "{way} {steps}");
            // The same steps elsewhere: some of them.
            steps += if way == "to" { 3 } else { 1 };
        }
        assert!(steps >= 16, "{way} {steps}");
    }
}

#[test]
fn what_has_changed_since_is_taken_over_anew() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    assert!(killed("import", dir, 9));
    // Upstream's replica was started in between, as it may be.
    File::options().write(true).open(dir.join(HEAD)).unwrap().write_all_at(&[77; 4096], 0).unwrap();
    let views = upstream_views(dir);
    import(&importing(dir), &done).unwrap().unwrap();
    equal("moved", &our_views(dir), &views);

    let dir = &place.path().join("amid");
    upstream_replica(dir);
    let change = |progress: Progress| {
        if progress.bytes > 0 {
            File::options()
                .append(true)
                .open(dir.join("revision.counter"))
                .unwrap()
                .write_all(b"\0")
                .unwrap();
        }
        Ok(())
    };
    let refused = import(&importing(dir), &change).unwrap_err();
    assert!(
        refused.kind() == ErrorKind::Busy && refused.to_string().contains("have changed"),
        "{refused}"
    );
    import(&importing(dir), &done).unwrap().unwrap();
    equal("moved", &our_views(dir), &upstream_model());
}

/// Found by review: any store there was taken for that of the import, and upstream's files were removed.
#[test]
fn another_store_does_not_end_an_import() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let views = upstream_views(dir);
    for steps in 0.. {
        assert!(killed("import", dir, steps), "{steps}: it has gone past that");
        if exists(&dir.join(STORE_FILE)).unwrap() {
            break;
        }
        fs::write(dir.join(STORE_FILE), "another one").unwrap();
        let refused = import(&importing(dir), &done).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Exists, "{steps}: {refused}");
        fs::remove_file(dir.join(STORE_FILE)).unwrap();
        equal(&format!("upstream's, {steps}"), &upstream_views(dir), &views);
    }
    import(&importing(dir), &done).unwrap();
    equal("moved", &our_views(dir), &views);
}

/// Found by review: an export whose container was made anew told to start the replica, and the replica to export.
#[test]
fn an_export_that_was_cut_off_needs_no_tail_of_its_own() {
    let Ok(elsewhere) = tempfile::Builder::new().prefix("dbs-").tempdir_in("/dev/shm") else {
        println!("SKIPPED: /dev/shm cannot be written to");
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    import(&importing(dir), &done).unwrap();
    let views = our_views(dir);
    assert!(killed("export", dir, 3));
    assert!(dir.join(EXPORT).exists() && dir.join(STORE_FILE).exists());
    let mut options = exporting(dir, None);
    options.store.tail = Some(elsewhere.path().to_owned());
    let lost = StoreFile::of(dir, options.store.clone()).look().unwrap().lost_tail().is_some();
    assert!(lost, "or there is nothing to go without");
    export(&options, &done).unwrap().unwrap();
    equal("upstream's", &upstream_views(dir), &views);
}

/// Imports up to where this holds.
fn import_until(dir: &Path, options: &ImportOptions, holds: &dyn Fn() -> bool) {
    let told = |_| if holds() { Err(Error::busy("stop")) } else { Ok(()) };
    import(options, &told).unwrap_err();
    assert!(dir.join(STORE_FILE).exists() && !is_settled(dir));
}

fn dirty(dir: &Path) {
    let meta = VolumeMeta { dirty: true, ..VolumeMeta::read(dir).unwrap().unwrap() };
    meta.write(dir).unwrap();
}

/// Nobody keeps Longhorn from starting upstream's replica where an import was cut off.
#[test]
fn what_upstream_has_written_after_the_turn_stays() {
    let place = tempfile::tempdir().unwrap();
    let written: Case = ("written", |dir| {
        let file = File::options().write(true).open(dir.join(HEAD)).unwrap();
        file.write_all_at(&[77; 4096], 0).unwrap();
    });
    for (name, edit) in [written, ("opened", dirty)] {
        for keep in [false, true] {
            let dir = &place.path().join(format!("{name}-{keep}"));
            upstream_replica(dir);
            let options = ImportOptions { keep, ..importing(dir) };
            import_until(dir, &options, &|| dir.join(STORE_FILE).exists());
            edit(dir);
            let before = list(dir).unwrap();
            let refused = import(&options, &done).unwrap_err();
            assert!(
                refused.kind() == ErrorKind::Exists && refused.to_string().contains("newer"),
                "{refused}"
            );
            assert_eq!(list(dir).unwrap(), before);
            // As the text says.
            fs::remove_file(dir.join(STORE_FILE)).unwrap();
            fs::remove_dir_all(dir.join(IMPORT)).unwrap();
            let views = upstream_views(dir);
            assert!(name == "opened" || views[HEAD][0] == 77);
            import(&options, &done).unwrap().unwrap();
            equal(name, &our_views(dir), &views);
        }
    }

    // Where the head is gone nothing can be taken over anew.
    for keep in [false, true] {
        let dir = &place.path().join(format!("amid-{keep}"));
        upstream_replica(dir);
        let (views, options) = (upstream_views(dir), ImportOptions { keep, ..importing(dir) });
        import_until(dir, &options, &|| !dir.join(HEAD).exists());
        dirty(dir);
        let before = list(dir).unwrap();
        let refused = import(&options, &done).unwrap_err().to_string();
        assert!(
            refused.contains("move `volume.meta` away") && !refused.contains("anew"),
            "{refused}"
        );
        assert_eq!(list(dir).unwrap(), before);
        fs::remove_file(dir.join("volume.meta")).unwrap();
        import(&options, &done).unwrap();
        equal("amid", &our_views(dir), &views);
    }

    // Started while they are being removed; and now.
    let dir = &place.path().join("meanwhile");
    upstream_replica(dir);
    let started = |_| {
        if dir.join(STORE_FILE).exists() && !dir.join("revision.counter").exists() {
            dirty(dir);
        }
        Ok(())
    };
    import(&importing(dir), &started).unwrap_err();
    assert!(dir.join(HEAD).exists());
    let dir = &place.path().join("open");
    upstream_replica(dir);
    import_until(dir, &importing(dir), &|| dir.join(STORE_FILE).exists());
    let open = File::options().append(true).open(dir.join(disk("c"))).unwrap();
    let refused = import(&importing(dir), &done).unwrap_err();
    assert!(refused.to_string().contains("open for writing"), "{refused}");
    drop(open);
    import(&importing(dir), &done).unwrap();
}

/// With `--to` the replica stays ours, and is used.
#[test]
fn an_export_elsewhere_is_of_the_replica_as_it_is() {
    let place = tempfile::tempdir().unwrap();
    let [dir, other] = ["r", "other"].map(|name| place.path().join(name));
    for dir in [&dir, &other] {
        upstream_replica(dir);
        import(&importing(dir), &done).unwrap().unwrap();
    }
    let ways: [(&str, &str); 3] =
        [("written", "volume.export/volume.meta"), ("named", HEAD), ("ended", "volume.meta")];
    for (name, file) in ways {
        let to = &place.path().join(name);
        let stop = |_| if to.join(file).exists() { Err(Error::busy("stop")) } else { Ok(()) };
        export(&exporting(&other, Some(to)), &stop).unwrap_err();
        // Not by chance what `other` has as well.
        use_store(&dir);
        let views = our_views(&dir);
        match export(&exporting(&dir, Some(to)), &done) {
            Ok(moved) => assert!(moved.is_some()),
            Err(refused) => {
                assert!(refused.to_string().contains("remove the directory"), "{name}: {refused}");
                fs::remove_dir_all(to).unwrap();
                export(&exporting(&dir, Some(to)), &done).unwrap().unwrap();
            }
        }
        equal(name, &upstream_views(to), &views);
    }
    // The same replica, used in between; nor does the target's own name end it.
    let to = &place.path().join("used");
    let stop = |_| {
        if to.join(EXPORT).join("volume.meta").exists() { Err(Error::busy("stop")) } else { Ok(()) }
    };
    export(&exporting(&other, Some(to)), &stop).unwrap_err();
    let refused = export(&exporting(to, None), &done).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
    use_store(&other);
    let views = our_views(&other);
    export(&exporting(&other, Some(to)), &done).unwrap().unwrap();
    equal("used", &upstream_views(to), &views);
}

/// Found by review: a rebuild in between left as much data in a snapshot, and the image from before was kept.
#[test]
fn an_export_elsewhere_is_not_of_what_a_rebuild_replaced() {
    let place = tempfile::tempdir().unwrap();
    let [dir, to] = &["r", "to"].map(|name| place.path().join(name));
    upstream_replica(dir);
    import(&importing(dir), &done).unwrap().unwrap();
    let stop = |_| {
        if to.join(EXPORT).join("volume.meta").exists() { Err(Error::busy("stop")) } else { Ok(()) }
    };
    export(&exporting(dir, Some(to)), &stop).unwrap_err();
    let store = store(dir);
    let layer = store.layer("v", Some("b")).unwrap();
    let before = layer_stamp(&store, "v", "b").unwrap();
    let held = layer.map(0, SIZE, 1000).unwrap();
    let at = held.iter().find(|next| next.state == LayerState::Data).unwrap().offset;
    store.set_rebuilding("v", true).unwrap();
    layer.write_at(at, &[99; 4096]).unwrap();
    store.set_rebuilding("v", false).unwrap();
    drop(layer);
    assert_eq!(layer_stamp(&store, "v", "b").unwrap(), before, "or this proves nothing");
    store.close().unwrap();
    // As the replica's process does at its first change.
    fs::write(dir.join(GENERATION), "1 boot 0\n").unwrap();
    export(&exporting(dir, Some(to)), &done).unwrap().unwrap();
    equal("rebuilt", &upstream_views(to), &our_views(dir));
}

/// Upstream takes every file for a disk that has the name of one.
#[test]
fn an_export_does_not_mix_with_other_files() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    import(&importing(dir), &done).unwrap().unwrap();
    let views = our_views(dir);
    let refused = |stray: &Path, told: Told<'_>| {
        let refused = export(&exporting(dir, None), told).unwrap_err();
        assert!(refused.to_string().contains("is no file of this replica"), "{refused}");
        assert!(dir.join(STORE_FILE).exists());
        fs::remove_file(stray).unwrap();
    };
    describe(dir, &disk("x"), "", DiskMeta::default());
    refused(&dir.join(disk("x") + ".meta"), &done);
    // The same name as one of ours, and one that comes later.
    for name in [&*disk("a"), HEAD] {
        let told = |_| {
            image(&dir.join(name), SIZE, &[(0, 1, 1)]);
            Ok(())
        };
        refused(&dir.join(name), &told);
    }
    fs::write(dir.join(disk("y")), "").unwrap();
    export(&exporting(dir, None), &done).unwrap().unwrap();
    equal("moved", &upstream_views(dir), &views);
    assert!(!dir.join(disk("y")).exists());
}

#[test]
fn a_copy_that_has_no_room_is_not_begun() {
    let place = tempfile::tempdir().unwrap();
    check_room(place.path(), 1 << 20).unwrap();
    let refused = told_of_room(check_room(place.path(), 1 << 60).unwrap_err(), place.path());
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    let text = refused.to_string();
    assert!(text.contains("are needed") && text.contains("give the command again"), "{text}");
}

#[test]
fn a_place_of_work_that_is_another_s_stays() {
    let place = tempfile::tempdir().unwrap();
    let (dir, big) = (&place.path().join("r"), place.path().join("big"));
    upstream_replica(dir);
    fs::create_dir(&big).unwrap();
    fs::write(big.join("theirs"), "x").unwrap();
    let refused = |way: &str, text: &str| {
        let refused = match way {
            IMPORT => import(&importing(dir), &done).unwrap_err(),
            _ => export(&exporting(dir, None), &done).unwrap_err(),
        };
        assert!(refused.to_string().contains(text), "{way}: {refused}");
        assert!(big.join("theirs").exists());
    };
    for way in [IMPORT, EXPORT] {
        std::os::unix::fs::symlink(&big, dir.join(way)).unwrap();
        refused(way, "is no directory");
        fs::remove_file(dir.join(way)).unwrap();
        fs::create_dir(dir.join(way)).unwrap();
        fs::write(dir.join(way).join("theirs"), "x").unwrap();
        refused(way, "holds `theirs`");
        assert!(dir.join(way).join("theirs").exists());
        fs::remove_dir_all(dir.join(way)).unwrap();
        if way == IMPORT {
            import(&importing(dir), &done).unwrap().unwrap();
        }
    }
}

fn upstream_model() -> Views {
    let place = tempfile::tempdir().unwrap();
    upstream_replica(place.path());
    upstream_views(place.path())
}

#[test]
fn upstream_s_files_may_be_kept() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    upstream_replica(dir);
    let (names, views) = (list(dir).unwrap(), upstream_views(dir));
    import(&ImportOptions { keep: true, ..importing(dir) }, &done).unwrap().unwrap();
    equal("moved", &our_views(dir), &views);
    assert_eq!(list(&dir.join(KEPT)).unwrap(), names);
    equal("moved", &upstream_views(&dir.join(KEPT)), &views);
}

/// An edit of a directory, and what is said then.
pub(super) type Case = (&'static str, fn(&Path));

#[test]
fn what_upstream_would_not_serve_is_refused() {
    type Edit = fn(&mut VolumeMeta);
    let change = |dir: &Path, edit: Edit| {
        let mut meta = VolumeMeta::read(dir).unwrap().unwrap();
        edit(&mut meta);
        meta.write(dir).unwrap();
    };
    let metas: [(&str, Edit); 6] = [
        ("it was being rebuilt", |meta| meta.rebuilding = true),
        ("tells of an error: broken", |meta| meta.error = "broken".into()),
        ("is missing", |meta| meta.head = "volume-head-004.img".into()),
        ("no size of a volume", |meta| meta.size = 0),
        ("bytes, and the volume", |meta| meta.size = SIZE / 4),
        ("name it with --backing-file", |meta| meta.backing_file_path = "/image".into()),
    ];
    let place = tempfile::tempdir().unwrap();
    let mut number = 0;
    let mut refused = |text: &str, edit: &dyn Fn(&Path)| {
        number += 1;
        let dir = &place.path().join(number.to_string());
        upstream_replica(dir);
        edit(dir);
        let before = list(dir).unwrap();
        let error = import(&importing(dir), &done).unwrap_err();
        assert!(error.to_string().contains(text), "{text}: {error}");
        assert_eq!(list(dir).unwrap(), before, "{text}");
    };
    for (text, edit) in metas {
        refused(text, &|dir| change(dir, edit));
    }
    let files: [Case; 18] = [
        ("8000 bytes", |dir| {
            // Short enough without the one for a time that is more than a second's.
            let labels = [("k".to_owned(), "v".repeat(7980))].into();
            let created = "2026-08-21T10:00:00.5Z".to_owned();
            let meta = DiskMeta { created, labels, ..DiskMeta::default() };
            describe(dir, &disk("c"), &disk("a"), meta);
        }),
        ("no file of upstream's replica", |dir| {
            let name = "volume-snap-x\n1 1 1 1 volume.dbs\n.img.checksum";
            fs::write(dir.join(name), "").unwrap();
        }),
        ("no file of upstream's replica", |dir| {
            fs::write(dir.join(disk("a") + ".meta "), "").unwrap();
        }),
        ("is the parent of volume-snap-b.img, which needs it", |dir| {
            fs::remove_file(dir.join(disk("a") + ".meta")).unwrap();
        }),
        ("is the parent of volume-head-003.img, which needs it", |dir| {
            fs::remove_file(dir.join(disk("d") + ".meta")).unwrap();
        }),
        ("its parent volume-snap-x.img is missing", |dir| {
            describe(dir, &disk("c"), &disk("x"), DiskMeta::default());
        }),
        ("form a loop", |dir| describe(dir, &disk("a"), &disk("d"), DiskMeta::default())),
        ("its parent volume-snap-d.img is larger", |dir| {
            image(&dir.join(disk("e")), SIZE / 2, &[]);
            describe(dir, &disk("e"), &disk("d"), DiskMeta::default());
        }),
        ("the file is missing", |dir| fs::remove_file(dir.join(disk("c"))).unwrap()),
        ("cut off has left it so. Move it away", |dir| image(&dir.join(disk("e")), SIZE, &[])),
        ("a restore that was cut off", |dir| {
            image(&dir.join(disk("a") + ".snap_tmp"), SIZE, &[]);
        }),
        ("a restore that was cut off", |dir| image(&dir.join("volume-delta-b1.img"), SIZE, &[])),
        ("no file of upstream's replica", |dir| {
            fs::write(dir.join("volume-snapx.img"), "").unwrap()
        }),
        ("it has content", |dir| {
            image(&dir.join("volume-head-002.img"), SIZE, &[(0, 1, 1)]);
            describe(dir, "volume-head-002.img", "", DiskMeta::default());
        }),
        ("same file as the head", |dir| {
            fs::hard_link(dir.join(HEAD), dir.join(disk("e"))).unwrap();
            describe(dir, &disk("e"), &disk("d"), DiskMeta::default());
        }),
        ("replica of DBS", |dir| fs::write(dir.join(STORE_FILE), "").unwrap()),
        ("volume.meta is damaged", |dir| fs::write(dir.join("volume.meta"), "{").unwrap()),
        ("it has no number", |dir| fs::write(dir.join("revision.counter"), "x").unwrap()),
    ];
    for (text, edit) in files {
        refused(text, &edit);
    }
    refused("open for writing", &|dir| {
        // For as long as the process lives.
        std::mem::forget(File::options().append(true).open(dir.join(disk("c"))).unwrap());
    });
    let nothing = place.path().join("nothing");
    fs::create_dir(&nothing).unwrap();
    let error = import(&importing(&nothing), &done).unwrap_err();
    assert!(error.to_string().contains("holds no replica"), "{error}");
}

#[test]
fn what_upstream_left_over_does_no_harm() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    upstream_replica(dir);
    let views = upstream_views(dir);
    // A snapshot that was cut off before and behind its turning point, one removal, and files being replaced.
    image(&dir.join("volume-head-004.img"), SIZE, &[]);
    describe(dir, "volume-head-004.img", &disk("z"), DiskMeta::default());
    fs::hard_link(dir.join(disk("d")), dir.join("volume-head-002.img")).unwrap();
    describe(dir, "volume-head-002.img", &disk("b"), DiskMeta::default());
    fs::write(dir.join("volume.meta.tmp"), "").unwrap();
    fs::write(dir.join("volume-snap-a.img.meta.tmp"), "").unwrap();
    fs::write(dir.join("volume-snap-gone.img.checksum"), "").unwrap();
    let mut meta = VolumeMeta::read(dir).unwrap().unwrap();
    meta.dirty = true;
    meta.write(dir).unwrap();
    import(&importing(dir), &done).unwrap().unwrap();
    equal("moved", &our_views(dir), &views);
    assert!(VolumeMeta::read(dir).unwrap().unwrap().dirty, "as upstream shows it");
    let left: Vec<_> = list(dir).unwrap();
    assert!(left.iter().all(|name| !name.contains("head") && !name.ends_with(".tmp")), "{left:?}");
}

#[test]
fn two_commands_or_a_command_and_a_replica_exclude_each_other() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    upstream_replica(dir);
    let serving = [Held::shared(dir).unwrap(), Held::shared(dir).unwrap()];
    assert_eq!(import(&importing(dir), &done).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(export(&exporting(dir, None), &done).unwrap_err().kind(), ErrorKind::Busy);
    drop(serving);
    let told = |_| {
        assert_eq!(Held::shared(dir).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(import(&importing(dir), &done).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(export(&exporting(dir, None), &done).unwrap_err().kind(), ErrorKind::Busy);
        Ok(())
    };
    import(&importing(dir), &told).unwrap().unwrap();
    assert_eq!(export(&exporting(dir, Some(dir)), &done).unwrap_err().kind(), ErrorKind::Busy);
    Held::shared(dir).unwrap();
}

#[test]
fn other_volumes_of_the_store_stay() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    import(&importing(dir), &done).unwrap().unwrap();
    let views = our_views(dir);
    {
        let store = store(dir);
        store.clone_volume("v", "c", "other").unwrap();
        store.close().unwrap();
    }
    let error = export(&exporting(dir, None), &done).unwrap_err();
    assert!(error.to_string().contains("other volumes, too (other, v)"), "{error}");
    let to = &place.path().join("to");
    let error = export(&exporting(dir, Some(to)), &done).unwrap_err();
    assert!(error.to_string().contains("--volume-name"), "{error}");
    let named = |volume: &str| ExportOptions { volume: volume.into(), ..exporting(dir, Some(to)) };
    let error = export(&named("other"), &done).unwrap_err();
    assert!(error.to_string().contains("flatten"), "{error}");
    export(&named("v"), &done).unwrap().unwrap();
    equal("elsewhere", &upstream_views(to), &views);
    equal("as it was", &our_views(dir), &views);
    let error = export(&named("v"), &done).unwrap_err();
    assert!(error.to_string().contains("is not empty"), "{error}");

    // A volume that has come while the files were complete, but not in their places.
    let dir = &place.path().join("amid");
    upstream_replica(dir);
    import(&importing(dir), &done).unwrap().unwrap();
    let amid = |_| {
        let moved = dir.join(EXPORT).join(STORE_FILE);
        if moved.exists() { Err(Error::busy("stop")) } else { Ok(()) }
    };
    export(&exporting(dir, None), &amid).unwrap_err();
    let file =
        StoreFile { path: dir.join(EXPORT).join(STORE_FILE), options: StoreOptions::default() };
    let store = file.open().unwrap();
    store.create_volume("late", SIZE).unwrap();
    store.close().unwrap();
    let error = export(&exporting(dir, None), &done).unwrap_err();
    assert!(error.to_string().contains("other volumes, too"), "{error}");
    assert!(file.path.exists());
}

#[test]
fn a_volume_comes_over_with_its_backing_file() {
    let place = tempfile::tempdir().unwrap();
    let (dir, base) = (&place.path().join("r"), place.path().join("base"));
    upstream_replica(dir);
    fs::write(&base, vec![42; 1 << 20]).unwrap();
    let mut meta = VolumeMeta::read(dir).unwrap().unwrap();
    meta.backing_file_path = base.display().to_string();
    meta.write(dir).unwrap();
    let mut head = upstream_views(dir).remove(HEAD).unwrap();
    let large = place.path().join("large");
    image(&large, SIZE / 2 + BLOCK, &[]);
    let options = ImportOptions { backing_file: Some(large), ..importing(dir) };
    let refused = import(&options, &done).unwrap_err();
    assert!(refused.to_string().contains("and the backing file below it"), "{refused}");
    assert!(is_settled(dir));
    import(&ImportOptions { backing_file: Some(base.clone()), ..importing(dir) }, &done).unwrap();
    {
        let store = store(dir);
        let _file = store.attach_backing(dbs_backing::open(&base).unwrap());
        let volume = store.volume("v").unwrap();
        // `a` has all that the file has: what is seen of that is what a discard does not show.
        volume.discard(0, 4 * BLOCK).unwrap();
        head[..4 * BLOCK as usize].fill(0);
        let mut seen = vec![0; SIZE as usize];
        volume.read_at(0, &mut seen).unwrap();
        assert!(seen == head);
        drop(volume);
        store.close().unwrap();
    }
    let meta = fs::read(dir.join("volume.meta")).unwrap();
    for damage in [None, Some("{")] {
        match damage {
            None => fs::remove_file(dir.join("volume.meta")).unwrap(),
            Some(text) => fs::write(dir.join("volume.meta"), text).unwrap(),
        }
        let refused = export(&exporting(dir, None), &done).unwrap_err();
        assert!(refused.to_string().contains("does not say on which"), "{refused}");
        assert!(dir.join(STORE_FILE).exists());
    }
    fs::write(dir.join("volume.meta"), meta).unwrap();
    export(&exporting(dir, None), &done).unwrap().unwrap();
    assert!(upstream_views(dir)[HEAD] == head);
    assert_eq!(Files::read(dir).unwrap().meta.backing_file_path, base.display().to_string());
}
