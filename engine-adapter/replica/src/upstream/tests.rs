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

mod changed;
mod elsewhere;
mod refused;

pub(super) const SIZE: u64 = 4 << 20;
pub(super) const BLOCK: u64 = 4096;
pub(super) const HEAD: &str = "volume-head-003.img";
/// What a child process of a test is to do, where, and before which step it dies.
const TASK: &str = "UPSTREAM_TASK";

/// An edit of a directory, and what is said then.
pub(super) type Case = (&'static str, fn(&Path));

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

/// The backing file that a volume of upstream's or ours is said to rest on.
pub(super) fn base_of(dir: &Path) -> Option<PathBuf> {
    let meta = VolumeMeta::read(dir).unwrap()?;
    Some(PathBuf::from(meta.backing_file_path)).filter(|path| path.exists())
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
        let mut view = base_of(dir).map_or_else(Vec::new, |base| fs::read(base).unwrap());
        view.resize(SIZE as usize, 0);
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
    let below = base_of(dir).map(|base| dbs_backing::open(&base).unwrap());
    let _below = below.map(|below| store.attach_backing(below));
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
    let options = ReplicaOptions { backing_file: base_of(dir), ..ReplicaOptions::new(dir, "v") };
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
