use super::*;
use crate::replica::{Replica, ReplicaOptions, StoreSource};
use crate::upstream::tests::*;
use crate::upstream::{IMPORT, export, import};
use dbs_core::ErrorKind;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

mod below;

fn begin_here(dir: &Path, told: Told<'_>) -> Result<()> {
    begin(dir, "v", base_of(dir).as_deref(), &StoreOptions::default(), told)
}

fn chain(dir: &Path) -> Arc<dyn Backing> {
    let files = Files::read(dir).unwrap();
    let below = open_below(base_of(dir).as_deref(), &files).unwrap();
    Arc::new(Chain::open(&files, below).unwrap())
}

fn base_below(dir: &Path) -> Option<Arc<dyn Backing>> {
    base_of(dir).map(|base| dbs_backing::open(&base).unwrap())
}

/// What a process does, from its start to the end of bringing everything over.
pub fn serve(dir: &Path, told: Told<'_>) {
    remove_gone(dir).unwrap();
    if is_upstream(dir).unwrap() {
        begin_here(dir, told).unwrap();
    }
    if dir.join(TAKEN).exists() {
        let files = find(dir, base_of(dir).as_deref()).unwrap().unwrap();
        let store = store(dir);
        let _attached = store.attach_backing(files.file());
        let _below = base_below(dir).map(|below| store.attach_backing(below));
        files.bring(&store, "v", told).unwrap();
        store.close().unwrap();
        told(Progress::default()).unwrap();
        files.remove().unwrap();
    }
}

/// Does something with the store, with upstream's files if they are still there.
fn with_store<T>(dir: &Path, act: impl FnOnce(&Store) -> T) -> T {
    let store = store(dir);
    let _attached = dir.join(TAKEN).exists().then(|| store.attach_backing(chain(&dir.join(TAKEN))));
    let _below = base_below(dir).map(|below| store.attach_backing(below));
    let done = act(&store);
    store.close().unwrap();
    done
}

fn write(dir: &Path, model: &mut [u8], block: u64, byte: u8) {
    with_store(dir, |store| {
        store.volume("v").unwrap().write_at(block * BLOCK, &[byte; BLOCK as usize], true).unwrap();
    });
    model[(block * BLOCK) as usize..][..BLOCK as usize].fill(byte);
}

fn shows(dir: &Path, spec: &str, model: &[u8], what: &str) {
    let mut view = vec![0; model.len()];
    with_store(dir, |store| store.volume(spec).unwrap().read_at(0, &mut view).unwrap());
    let differs = view.iter().zip(model).position(|(found, wanted)| found != wanted);
    assert_eq!(differs.map(|at| at as u64 / BLOCK), None, "{what}: block of {spec}");
}

#[test]
fn a_chain_shows_what_upstream_s_head_shows() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let chain = chain(dir);
    let view = &upstream_views(dir)[HEAD];
    assert_eq!(chain.size(), SIZE);
    let mut random = fastrand::Rng::with_seed(7);
    let whole = (0, SIZE / 512);
    let parts = (0..2000).map(|_| {
        let at = random.u64(0..SIZE / 512);
        (at, random.u64(1..=(SIZE / 512 - at).min(600)))
    });
    for (at, count) in std::iter::once(whole).chain(parts) {
        let mut buf = vec![0xee; (count * 512) as usize];
        chain.read_at(at * 512, &mut buf).unwrap();
        assert!(buf == view[(at * 512) as usize..][..buf.len()], "{count} sectors from {at} on");
    }
}

/// What upstream's process had begun to write when it was killed may be allocated and not written. Once the page cache has such
/// blocks, file systems say that there is data.
#[test]
fn blocks_that_were_never_written_do_not_become_data_by_reading_beside_them() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let file = File::options().write(true).open(dir.join(HEAD)).unwrap();
    // `a` has all of these blocks, and the head the first 16.
    file.write_all_at(&[0x77; 16 * BLOCK as usize], 100 * BLOCK).unwrap();
    let flags = nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let (at, length) = ((116 * BLOCK).cast_signed(), (150 * BLOCK).cast_signed());
    if nix::fcntl::fallocate(&file, flags, at, length).is_err() {
        println!("SKIPPED: the file system allocates no blocks ahead");
        return;
    }
    file.sync_all().unwrap();
    let all = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(&file, 0, 0, all).unwrap();
    let view = upstream_views(dir).remove(HEAD).unwrap();
    nix::fcntl::posix_fadvise(&file, 0, 0, all).unwrap();
    if view[(116 * BLOCK) as usize] == 0 {
        println!("SKIPPED: the file system takes allocated blocks for data");
        return;
    }
    let chain = chain(dir);
    for (first, count) in [(100, 4), (104, 4), (108, 8), (116, 150)] {
        let mut buf = vec![0xee; (count * BLOCK) as usize];
        chain.read_at(first * BLOCK, &mut buf).unwrap();
        assert!(buf == view[(first * BLOCK) as usize..][..buf.len()], "from block {first} on");
    }
}

#[test]
fn a_file_that_was_cut_shows_nothing_from_below() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let chain = chain(dir);
    // It has blocks 1000 to 1023, and the head has none of them.
    let file = File::options().write(true).open(dir.join(disk("b"))).unwrap();
    file.set_len(1010 * BLOCK).unwrap();
    let mut buf = [0; BLOCK as usize];
    chain.read_at(1009 * BLOCK, &mut buf).unwrap();
    assert_eq!(buf, [4; BLOCK as usize]);
    for block in [1010, 1015] {
        let failed = chain.read_at(block * BLOCK, &mut buf).unwrap_err();
        assert_eq!(failed.kind(), std::io::ErrorKind::UnexpectedEof, "{block}");
    }
}

#[test]
fn files_that_were_changed_are_others() {
    let place = tempfile::tempdir().unwrap();
    let cases: [Case; 5] = [
        ("nothing", |_| {}),
        ("a block", |dir| {
            let file = File::options().write(true).open(dir.join(HEAD)).unwrap();
            file.write_all_at(&[1; 4096], 900 * BLOCK).unwrap();
        }),
        ("a byte at another time, with the time put back", |dir| {
            let file = File::options().write(true).open(dir.join(disk("a"))).unwrap();
            let time = file.metadata().unwrap().modified().unwrap();
            file.write_all_at(&[99], 0).unwrap();
            file.set_modified(time).unwrap();
        }),
        ("a length", |dir| {
            let file = File::options().write(true).open(dir.join(disk("c"))).unwrap();
            let time = file.metadata().unwrap().modified().unwrap();
            file.set_len(SIZE - BLOCK).unwrap();
            file.set_modified(time).unwrap();
        }),
        ("a file more", |dir| fs::write(dir.join("volume-head-003.img.meta.tmp"), "x").unwrap()),
    ];
    for (what, change) in cases {
        let dir = &place.path().join(what);
        upstream_replica(dir);
        begin_here(dir, &done).unwrap();
        let taken = &dir.join(TAKEN);
        let before = chain(taken).identity().to_owned();
        change(taken);
        let now = chain(taken);
        assert_eq!(now.identity() == before, what == "nothing", "{what}");
        let store = store(dir);
        let replica = ReplicaOptions {
            store_file: Some(dir.join(STORE_FILE)),
            taken: find(dir, None).unwrap(),
            take_over: Some(1),
            ..ReplicaOptions::new(dir, "v")
        };
        let opened = Replica::new(replica, StoreSource::Own(store.clone()));
        let refused = opened.map(drop).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(refused.contains("not what they were"), what != "nothing", "{what}: {refused}");
        store.close().unwrap();
    }
}

#[test]
fn a_volume_stays_on_files_that_have_changed_while_they_were_read() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    begin_here(dir, &done).unwrap();
    let files = find(dir, None).unwrap().unwrap();
    let store = store(dir);
    let _attached = store.attach_backing(files.file());
    let change = |progress: Progress| {
        if progress.bytes > 0 {
            let file = File::options().write(true).open(dir.join(TAKEN).join(HEAD)).unwrap();
            file.write_all_at(&[1; 4096], 900 * BLOCK).unwrap();
        }
        Ok(())
    };
    let refused = files.bring(&store, "v", &change).unwrap_err().to_string();
    assert!(refused.contains("have changed while the volume rested on them"), "{refused}");
    assert_eq!(store.backing("v").unwrap().unwrap().identity, files.file().identity());
    assert!(has_source(&store) && dir.join(TAKEN).join(HEAD).exists());
    store.close().unwrap();
}

#[test]
fn room_is_looked_for_while_the_content_comes_over() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let model = upstream_views(dir).remove(HEAD).unwrap();
    begin_here(dir, &done).unwrap();
    let files = Files::read(&dir.join(TAKEN)).unwrap();
    let total = files.allocated();
    let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (store, chain, noted) = (store(dir), chain(&dir.join(TAKEN)), Arc::clone(&asked));
    let _attached = store.attach_backing(Arc::clone(&chain));
    // It runs short once.
    let room = Box::new(move |bytes| {
        let mut asked = noted.lock().unwrap();
        asked.push(bytes);
        if asked.len() == 2 { Err(Error::new(ErrorKind::NoSpace, "full")) } else { Ok(()) }
    });
    let served = Served { room, ..Served::new(dir, files, chain, None) };
    let full = served.bring(&store, "v", &done).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::NoSpace, "{full}");
    assert!(store.layers(SOURCE).unwrap().len() < 5, "it did not go on");
    served.bring(&store, "v", &done).unwrap();
    let asked = asked.lock().unwrap().clone();
    assert!(asked.len() >= 4 && asked[0] < total, "{asked:?} of {total}");
    assert!(asked[2] <= asked[1], "what was there is not asked for again: {asked:?}");
    assert!(asked[2..].is_sorted_by(|a, b| a > b), "{asked:?}");
    store.close().unwrap();
    served.remove().unwrap();
    shows(dir, "v", &model, "at the end");
}

/// What there is in a replica's directory: a store, files that were moved, and the second volume.
type State = (bool, bool, bool);

/// Files are being moved.
const MOVING: State = (false, true, false);
/// Served, with layers that have come.
const SERVING: State = (true, true, true);

/// Killed at each step, used in between, and killed again elsewhere: nothing is lost, and what was not upstream's stays.
#[test]
fn a_process_that_serves_upstream_s_files_is_killed_at_every_step() {
    let place = tempfile::tempdir().unwrap();
    let mut left = BTreeMap::<_, u32>::new();
    let mut steps = 0;
    loop {
        let dir = &place.path().join(format!("{steps}"));
        upstream_replica(dir);
        let Some(state) = killed_at(dir, steps) else { break };
        *left.entry(state).or_default() += 1;
        steps += 1;
    }
    has_states(&left, &[MOVING, SERVING, (true, true, false)]);
    assert!(steps > 30, "{steps} steps");
}

fn has_states(left: &BTreeMap<State, u32>, states: &[State]) {
    assert!(states.iter().all(|state| left.contains_key(state)), "{left:?}");
}

/// Killed at this step; what was left then, and nothing if there are not so many steps.
fn killed_at(dir: &Path, steps: u64) -> Option<State> {
    let views = upstream_views(dir);
    let mut model = views[HEAD].clone();
    if !killed("serve", dir, steps) {
        return None;
    }
    let served = dir.join(STORE_FILE).exists();
    let here = |name: &str| dir.join(name).exists();
    assert!(here(HEAD) || !here(&format!("{HEAD}.meta")), "{steps}: the head would be empty");
    assert!(served || upstream_is_whole(dir), "{steps}");
    upstream_in_between(dir, &mut model, 8);
    if served {
        shows(dir, "v", &model, &format!("{steps}"));
        write(dir, &mut model, 3, 0xa1);
        with_store(dir, |store| {
            store.create_snapshot("v", "own", &SnapshotOptions::default()).unwrap();
        });
    }
    let own = model.clone();
    let state = (served, dir.join(TAKEN).exists(), served && has_source_in(dir));
    if killed("serve", dir, steps * 5 % 11) {
        upstream_in_between(dir, &mut model, 9);
        write_if(dir, &mut model, 7, 0xa2);
        serve(dir, &done);
    }
    write(dir, &mut model, 5, 0xa3);
    shows(dir, "v", &model, &format!("{steps} at the end"));
    if served {
        shows(dir, "v@own", &own, &format!("{steps} at the end"));
    }
    let mut found = our_views(dir);
    found.retain(|name, _| views.contains_key(name) && name != HEAD);
    let expected = views.into_iter().filter(|(name, _)| name != HEAD).collect();
    equal(&format!("{steps}"), &found, &expected);
    assert_eq!(our_disks(dir).1, 1234, "{steps}");
    let names = list(dir).unwrap();
    // Where upstream's replica was started beside the store, it has made this.
    let ours = |name: &str| !is_upstreams(name) || [VOLUME_META, REVISION_FILE].contains(&name);
    assert!(names.iter().all(|name| ours(name) && !is_half_made(name)), "{names:?}");
    assert!(!dir.join(TAKEN).exists() && !dir.join(GONE).exists());
    with_store(dir, |store| {
        let on = store.backing("v").unwrap().map(|on| on.identity);
        assert_eq!(on, base_below(dir).map(|below| below.identity().to_owned()), "{steps}");
        assert_eq!(store.volumes(false).len(), 1);
    });
    Some(state)
}

/// Upstream's replica is started, and writes if it finds a head: it must be the one that there is.
fn upstream_in_between(dir: &Path, model: &mut [u8], block: u64) {
    let whole = dir.join(HEAD).exists();
    if !upstream_opens(dir) {
        return;
    }
    assert!(whole && !dir.join(STORE_FILE).exists());
    let head = File::options().write(true).open(dir.join(HEAD)).unwrap();
    head.write_all_at(&[0xb1; BLOCK as usize], block * BLOCK).unwrap();
    model[(block * BLOCK) as usize..][..BLOCK as usize].fill(0xb1);
    assert!(upstream_views(dir)[HEAD] == model);
}

/// What upstream's replica does to the files when it is opened, and whether it serves the volume then.
fn upstream_opens(dir: &Path) -> bool {
    let Some(meta) = VolumeMeta::read(dir).unwrap() else { return false };
    let counter = dir.join(REVISION_FILE);
    if !counter.exists() {
        fs::write(counter, [&b"0"[..], &[0; 4095]].concat()).unwrap();
    }
    let (mut line, mut at) = (Vec::new(), meta.head);
    while !at.is_empty() {
        let Ok(bytes) = fs::read(dir.join(format!("{at}.meta"))) else { return false };
        let parent = crate::replica::meta::DiskMeta::parse(&at, &bytes).unwrap().parent;
        line.push(std::mem::replace(&mut at, parent));
    }
    for disk in line {
        File::options().create(true).truncate(false).write(true).open(dir.join(disk)).unwrap();
    }
    true
}

fn has_source_in(dir: &Path) -> bool {
    with_store(dir, has_source)
}

fn write_if(dir: &Path, model: &mut [u8], block: u64, byte: u8) {
    if dir.join(STORE_FILE).exists() {
        write(dir, model, block, byte);
    }
}

/// All of upstream's files are there, in one place or two.
fn upstream_is_whole(dir: &Path) -> bool {
    let mut names = list(dir).unwrap();
    names.extend(if dir.join(TAKEN).exists() { list(&dir.join(TAKEN)).unwrap() } else { vec![] });
    let images = names.iter().filter(|name| name.ends_with(".img")).count();
    images == 5 && names.iter().filter(|name| name.ends_with(".img.meta")).count() == 5
}

fn replica(dir: &Path, rate: u64) -> (Arc<Replica>, Store) {
    let store = store(dir);
    let options = ReplicaOptions {
        store_file: Some(dir.join(STORE_FILE)),
        backing_file: base_of(dir),
        taken: find(dir, base_of(dir).as_deref()).unwrap(),
        take_over: Some(rate),
        ..ReplicaOptions::new(dir, "v")
    };
    (Replica::new(options, StoreSource::Own(store.clone())).unwrap(), store)
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_replica_tells_of_snapshots_whose_content_is_still_to_come() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let (views, metas) = (upstream_views(dir), Files::read(dir).unwrap().disks);
    begin_here(dir, &done).unwrap();
    // A byte a second: it comes no further than the first piece.
    let (slow, store) = replica(dir, 1);
    assert_eq!((slow.state_name().unwrap().as_str(), slow.is_open()), ("closed", false));
    slow.open(false, 0).unwrap();
    let described = |replica: &Replica| {
        let disks = replica.disks().unwrap();
        // The head has another name once there is a snapshot of it.
        for (name, meta) in metas.iter().filter(|(name, _)| disks.contains_key(*name)) {
            let meant = crate::agent::shelf::disk_meta(name, &disks[name]);
            assert_eq!(same(&meant), same(meta), "{name}");
        }
        assert_eq!(disks[&disk("a")].size, SIZE / 2);
        disks
    };
    let disks = described(&slow);
    assert_eq!((disks.len(), slow.export_state().unwrap().revision), (5, 1234));
    assert_eq!(slow.head_disk().unwrap(), HEAD);
    let live = slow.get().unwrap();
    // `b` is removed.
    assert_eq!(live.chain, [HEAD.to_owned(), disk("d"), disk("a")]);
    assert!(live.disks[HEAD].size.parse::<u64>().unwrap() >= 6 * BLOCK, "{live:?}");

    let time = "2026-11-27T10:00:00Z";
    let mut model = views[HEAD].clone();
    store.volume("v").unwrap().write_at(0, &[0x5a; BLOCK as usize], false).unwrap();
    model[..BLOCK as usize].fill(0x5a);
    let exists = slow.snapshot("a", true, time, BTreeMap::new()).unwrap_err();
    assert_eq!(exists.kind(), ErrorKind::Exists, "{exists}");
    slow.snapshot("own", true, time, BTreeMap::new()).unwrap();
    let own = model.clone();
    store.volume("v").unwrap().write_at(BLOCK, &[0x5b; BLOCK as usize], false).unwrap();
    model[BLOCK as usize..2 * BLOCK as usize].fill(0x5b);
    assert_eq!(slow.disks().unwrap()[&disk("own")].parent, disk("d"));
    assert_eq!(slow.head_disk().unwrap(), "volume-head-004.img");

    let busy = |what: &str, error: Error| {
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::Busy && text.contains("still coming"), "{what}: {text}");
    };
    busy("revert", slow.revert(&disk("a"), time).unwrap_err());
    busy("mark", slow.mark_removed("a").unwrap_err());
    busy("prepare", slow.prepare_remove("b").unwrap_err());
    busy("remove", slow.remove(&disk("a"), false).unwrap_err());
    busy("replace", slow.replace(&disk("d"), &disk("b")).unwrap_err());
    busy("rebuild", slow.set_rebuilding(true).unwrap_err());
    busy("delete", slow.delete().unwrap_err());
    busy("content", slow.store().map(drop).unwrap_err());
    busy("restore", slow.incoming().begin_restore(&disk("x")).map(drop).unwrap_err());
    let grown = slow.expand((2 * SIZE).cast_signed()).unwrap_err().to_string();
    assert!(grown.contains("still coming"), "{grown}");
    for refused in
        [import(&importing(dir), &done).err(), export(&exporting(dir, None), &done).err()]
    {
        let refused = refused.unwrap();
        assert!(refused.to_string().contains("served from upstream's files"), "{refused}");
    }
    let progress = slow.taking_progress().unwrap();
    assert!(progress.total > 600 * BLOCK && progress.bytes < progress.total, "{progress:?}");
    assert!(!dir.join(IMPORT).exists());

    // The store goes to another process, and what was begun goes on there.
    slow.surrender(None).unwrap();
    store.close().unwrap();
    drop(slow);
    let (fast, store) = replica(dir, 0);
    while fast.taking_progress().is_some() {
        assert_eq!(fast.disks().unwrap().len(), 6, "at any time");
    }
    until("it ends", || !dir.join(TAKEN).exists());
    fast.open(false, 0).unwrap();
    let disks = described(&fast);
    assert_eq!((disks.len(), disks[&disk("own")].parent.clone()), (6, disk("d")));
    assert_eq!(fast.get().unwrap().chain.len(), 4);
    fast.set_rebuilding(true).unwrap();
    fast.set_rebuilding(false).unwrap();
    fast.surrender(None).unwrap();
    store.close().unwrap();
    shows(dir, "v", &model, "head");
    shows(dir, "v@own", &own, "own");
    let mut found = our_views(dir);
    found.retain(|name, _| metas.contains_key(name) && name != HEAD);
    let expected = views.into_iter().filter(|(name, _)| name != HEAD).collect();
    equal("snapshots", &found, &expected);
    let (replica, store) = replica(dir, 0);
    replica.open(false, 0).unwrap();
    replica.revert(&disk("a"), time).unwrap();
    replica.surrender(None).unwrap();
    store.close().unwrap();
}

#[test]
fn what_cannot_be_served_at_once_is_refused_and_stays() {
    let place = tempfile::tempdir().unwrap();
    let cases: [Case; 4] = [
        ("ends within a block", |dir| {
            let file = File::options().write(true).open(dir.join(HEAD)).unwrap();
            file.set_len(SIZE - 512).unwrap();
        }),
        ("being rebuilt", |dir| edit(dir, |meta| meta.rebuilding = true)),
        ("is missing", |dir| fs::remove_file(dir.join(disk("b"))).unwrap()),
        ("was cut off", |dir| fs::create_dir(dir.join(IMPORT)).unwrap()),
    ];
    for (text, change) in cases {
        let dir = &place.path().join(text.replace(['`', ' '], "-"));
        upstream_replica(dir);
        change(dir);
        let names = list(dir).unwrap();
        let refused = begin_here(dir, &done).unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
        assert_eq!(list(dir).unwrap(), names, "{text}");
    }
    let dir = &place.path().join("written");
    upstream_replica(dir);
    let writer = File::options().write(true).open(dir.join(HEAD)).unwrap();
    let refused = begin_here(dir, &done).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    drop(writer);
    let served = Held::shared(dir).unwrap();
    let refused = begin_here(dir, &done).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    drop(served);
    begin_here(dir, &done).unwrap();
}

/// Names in the replica's directory, and with upstream's files that were moved.
fn names(dir: &Path) -> [Vec<String>; 2] {
    let taken = dir.join(TAKEN);
    [list(dir).unwrap(), if taken.exists() { list(&taken).unwrap() } else { vec![] }]
}

#[test]
fn what_fails_fails_before_a_file_is_moved() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let before = names(dir);
    for (name, text) in [("a@b", "name"), (SOURCE, "cannot be called")] {
        let refused =
            begin(dir, name, None, &StoreOptions::default(), &done).unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
        assert_eq!(names(dir), before, "{name}");
    }
    let tail = Some(place.path().join("none"));
    let options = StoreOptions { tail, ..StoreOptions::default() };
    begin(dir, "v", None, &options, &done).unwrap_err();
    assert_eq!(names(dir), before);
    begin_here(dir, &done).unwrap();
}

/// `volume.taken` being there says nothing of what is beside it.
#[test]
fn files_that_were_given_back_are_looked_at_anew() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    let taken = &dir.join(TAKEN);
    upstream_replica(dir);
    fs::create_dir(taken).unwrap();
    // What `mv -n` leaves, of another time.
    let old =
        VolumeMeta { size: SIZE, head: "volume-head-001.img".into(), ..VolumeMeta::default() };
    old.write(taken).unwrap();
    let before = names(dir);
    let writer = File::options().write(true).open(dir.join(HEAD)).unwrap();
    let refused = begin_here(dir, &done).unwrap_err();
    assert_eq!((refused.kind(), names(dir)), (ErrorKind::Busy, before), "{refused}");
    drop(writer);
    // Upstream's replica opens it when everything was looked at.
    let writer = std::cell::OnceCell::new();
    let late = |_| {
        if dir.join(TAKEN).join(format!("{HEAD}.meta")).exists() && dir.join(HEAD).exists() {
            writer.get_or_init(|| File::options().write(true).open(dir.join(HEAD)).unwrap());
        }
        Ok(())
    };
    let refused = begin_here(dir, &late).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    assert!(refused.to_string().contains("to give up"), "{refused}");
    assert!(!dir.join(STORE_FILE).exists());
    writer.get().unwrap().write_all_at(&[0xb2; BLOCK as usize], 9 * BLOCK).unwrap();
    drop(writer);
    let views = upstream_views(taken);
    begin_here(dir, &done).unwrap();
    shows(dir, "v", &views[HEAD], "what it has written");
}

#[test]
fn no_file_that_was_moved_is_overwritten() {
    fn copied(dir: &Path, of: &dyn Fn(&str) -> bool) {
        let taken = dir.join(TAKEN);
        fs::create_dir(&taken).unwrap();
        for name in list(dir).unwrap().into_iter().filter(|name| is_upstreams(name) && of(name)) {
            fs::copy(dir.join(&name), taken.join(name)).unwrap();
        }
    }
    let place = tempfile::tempdir().unwrap();
    let cases: [Case; 5] = [
        // Upstream's replica has served what was copied back, and taken a snapshot.
        ("names another head", |dir| {
            copied(dir, &|name| name == VOLUME_META || name.starts_with(HEAD));
            for name in [HEAD.to_owned(), format!("{HEAD}.meta")] {
                fs::remove_file(dir.join(name)).unwrap();
            }
            edit(dir, |meta| meta.head = "volume-head-004.img".into());
        }),
        ("`revision.counter` is in both", |dir| copied(dir, &|_| true)),
        ("has `revision.counter`, and not", |dir| {
            copied(dir, &|name| [VOLUME_META, REVISION_FILE].contains(&name));
        }),
        ("`volume.meta` is missing", |dir| copied(dir, &|name| name == REVISION_FILE)),
        ("`volume-head-003.img` is in both", |dir| {
            copied(dir, &|name| name == VOLUME_META || name.starts_with(HEAD));
            fs::remove_file(dir.join(format!("{HEAD}.meta"))).unwrap();
        }),
    ];
    for (text, make) in cases {
        let dir = &place.path().join(text.replace(['`', ' '], "-"));
        upstream_replica(dir);
        make(dir);
        let before = names(dir);
        let refused = begin_here(dir, &done).unwrap_err();
        assert!(
            refused.kind() == ErrorKind::Exists && refused.to_string().contains(text),
            "{refused}"
        );
        assert_eq!(names(dir), before, "{text}");
    }
}

/// A second process finds no store, and is held up until the first one has served and ended.
#[test]
fn a_store_that_is_there_stays() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_replica(dir);
    let mut model = upstream_views(dir).remove(HEAD).unwrap();
    begin_here(dir, &done).unwrap();
    write(dir, &mut model, 3, 0xa1);
    begin_here(dir, &done).unwrap();
    shows(dir, "v", &model, "what was acknowledged");
}

fn edit(dir: &Path, change: impl Fn(&mut VolumeMeta)) {
    let mut meta = VolumeMeta::read(dir).unwrap().unwrap();
    change(&mut meta);
    meta.write(dir).unwrap();
}
