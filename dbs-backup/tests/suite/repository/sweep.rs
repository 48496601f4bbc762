//! Writers and collections beside each other.

use super::*;
use std::sync::Mutex;

/// Dead chunks that a backup would like to use again: of a backup that was deleted, all old.
fn dead(volume: &Snapshots) -> (Arc<Memory>, BackupStore) {
    let (objects, store) = fresh(None);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    remove(&store, "backup-1").unwrap();
    objects.age_by(LONG);
    (objects, store)
}

/// The same, but another volume still needs one of them: a collection rewrites the pack.
fn nearly_dead(volume: &Snapshots) -> (Arc<Memory>, BackupStore) {
    let (objects, store) = fresh(None);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let few = few(volume);
    let options = CreateOptions { volume: "other".to_owned(), ..options("backup-0", "few") };
    let source = few.get("few");
    store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
    remove(&store, "backup-1").unwrap();
    objects.age_by(LONG);
    (objects, store)
}

/// The first chunk alone.
fn few(volume: &Snapshots) -> Snapshots {
    let mut content = volume.get("one").content().to_vec();
    content[BLOCK as usize..].fill(0);
    Snapshots(vec![("few".to_owned(), content)])
}

/// Calls of collections at the puts of a backup: at one it condemns, at a later one it removes.
#[test]
fn a_collection_at_each_moment_of_a_backup() {
    let mut volume = volume(11, 6);
    volume.push("two", BLOCK, &[6; BLOCK as usize]);
    let content = volume.get("two").content();
    let rewritten = Arc::new(Mutex::new(0));
    for first in 0..6 {
        for second in first..8 {
            for live in [false, true] {
                let (objects, store) = if live { nearly_dead(&volume) } else { dead(&volume) };
                let done = Arc::clone(&rewritten);
                let (count, sweeps) = (Mutex::new(0), Arc::new(Mutex::new(0)));
                let (sweeper, swept) = (Arc::clone(&objects), Arc::clone(&sweeps));
                objects.at_put(move |path, _| {
                    let mut count = count.lock().unwrap();
                    // Between the last look and the manifest no long time goes by: that is the argument's assumption.
                    let may_remove = !path.contains("/manifests/");
                    if *count == first || (*count == second && may_remove) {
                        if may_remove {
                            sweeper.age_by(LONG);
                        }
                        *swept.lock().unwrap() += 1;
                        *done.lock().unwrap() += collect(&open(&sweeper, None)).unwrap().rewritten;
                    }
                    *count += 1;
                });
                let created = create(&store, "backup-2", &volume.get("two"));
                objects.at_put(|_, _| {});
                let case = format!("{first} {second}, {} collections", sweeps.lock().unwrap());
                created.expect(&case);
                for _ in 0..3 {
                    let store = open(&objects, None);
                    check(&store, "backup-2", content);
                    if live {
                        let disk = Disk::new(vec![0; content.len()]);
                        let restoration = store.restore("other", "backup-0").expect(&case);
                        let mut progress = |_, _| true;
                        restoration
                            .run(&disk, Onto::Empty, &mut Work::new(&mut progress))
                            .expect(&case);
                        assert!(disk.content() == few(&volume).get("few").content(), "{case}");
                    }
                    objects.age_by(LONG);
                    collect(&store).expect(&case);
                }
            }
        }
    }
    assert!(*rewritten.lock().unwrap() > 10);
}

/// The same with what a backup has in the base that it builds on, which somebody deletes meanwhile.
#[test]
fn a_base_that_is_deleted_meanwhile() {
    let mut volume = volume(12, 6);
    volume.push("two", BLOCK, &[6; BLOCK as usize]);
    let content = volume.get("two").content();
    for put in 0..3 {
        let (objects, store) = fresh(None);
        create(&store, "backup-1", &volume.get("one")).unwrap();
        let (count, sweeper) = (Mutex::new(0), Arc::clone(&objects));
        objects.at_put(move |path, _| {
            let mut count = count.lock().unwrap();
            if *count == put && !path.contains("/manifests/") {
                let other = open(&sweeper, None);
                remove(&other, "backup-1").unwrap();
                for _ in 0..2 {
                    sweeper.age_by(LONG);
                    collect(&other).unwrap();
                }
            }
            *count += 1;
        });
        let source = volume.get("two");
        let created = create(&store, "backup-2", &source).unwrap();
        objects.at_put(|_, _| {});
        assert_eq!(created.base.as_deref(), Some("backup-1"));
        check(&open(&objects, None), "backup-2", content);
    }
}

/// It would take for ever if each look found that everything has gone again.
#[test]
fn a_backup_gives_up_in_the_end() {
    let volume = volume(13, 4);
    let (objects, store) = fresh(None);
    let sweeper = Arc::clone(&objects);
    objects.at_put(move |path, _| {
        if path.contains("/index/") {
            // Behind the writer's back, before it looks.
            for path in packs(&sweeper) {
                sweeper.set(&path, None);
            }
        }
    });
    let error = create(&store, "backup-2", &volume.get("one")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    objects.at_put(|_, _| {});
    assert_eq!(store.backups(VOLUME).unwrap(), [""; 0]);
}

#[test]
fn two_writers_at_once() {
    let volume = volume(14, 6);
    for put in 0..4 {
        for name in ["backup-1", "backup-2"] {
            let (objects, store) = fresh(None);
            let (count, other, source) = (Mutex::new(0), Arc::clone(&objects), volume.clone());
            objects.at_put(move |_, _| {
                let mut count = count.lock().unwrap();
                *count += 1;
                if *count == put + 1 {
                    create(&open(&other, None), name, &source.get("one")).unwrap();
                }
            });
            let made = create(&store, "backup-1", &volume.get("one"));
            objects.at_put(|_, _| {});
            let store = open(&objects, None);
            let there = store.backups(VOLUME).unwrap();
            match made {
                // The other one came first.
                Err(error) => assert_eq!((error.kind(), name), (ErrorKind::Exists, "backup-1")),
                Ok(_) if name == "backup-1" => panic!("the other one was complete: put {put}"),
                Ok(_) => assert_eq!(there, ["backup-1", "backup-2"]),
            }
            for backup in &there {
                check(&store, backup, volume.get("one").content());
            }
        }
    }
}

/// The only copy of a chunk is in a condemned pack: readers have it, no later run removes it, and the next backup writes
/// it anew.
#[test]
fn a_backup_that_relies_on_a_condemned_pack() {
    let volume = volume(15, 5);
    let content = volume.get("one").content();
    let (objects, store) = dead(&volume);
    let sweeper = Arc::clone(&objects);
    objects.at_put(move |path, _| {
        if path.contains("/manifests/") {
            // Right after the writer has looked.
            assert!(collect(&open(&sweeper, None)).unwrap().condemned > 0);
        }
    });
    let created = create(&store, "backup-2", &volume.get("one")).unwrap();
    objects.at_put(|_, _| {});
    assert_eq!(created.uploaded, 0, "it uses what is there");
    let before = packs(&objects);
    for round in 0..3 {
        if round == 1 {
            // A pack that is known by its footer stays condemned.
            objects.delete("/index/");
        }
        let store = open(&objects, None);
        check(&store, "backup-2", content);
        objects.age_by(LONG);
        assert_eq!(collect(&open(&objects, None)).unwrap().removed, 0);
    }
    assert_eq!(packs(&objects), before);
    let store = open(&objects, None);
    assert!(create(&store, "backup-3", &volume.get("one")).unwrap().uploaded > 0);
    objects.age_by(LONG);
    assert_eq!(collect(&store).unwrap().removed, before.len() as u64);
    for backup in ["backup-2", "backup-3"] {
        check(&open(&objects, None), backup, content);
    }
}

/// Found by review: what a pack holds is known by indexes alone, and a pack without one would be garbage.
#[test]
fn a_lost_index_makes_no_garbage() {
    let mut volume = volume(16, 5);
    volume.push("two", 0, &[5; BLOCK as usize]);
    let (objects, store) = fresh(None);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    create(&store, "backup-2", &volume.get("two")).unwrap();
    let before = packs(&objects);
    assert_eq!(objects.delete("/index/"), 2);
    // Readers find it.
    check(&open(&objects, None), "backup-2", volume.get("two").content());
    for _ in 0..3 {
        objects.age_by(LONG);
        let collected = collect(&open(&objects, None)).unwrap();
        assert_eq!((collected.removed, collected.condemned), (0, 0));
    }
    assert_eq!(packs(&objects), before);
    let indexes = || objects.paths().iter().filter(|path| path.contains("/index/")).count();
    assert_eq!(indexes(), 1, "a new one");
    check(&open(&objects, None), "backup-1", volume.get("one").content());
    // So does the next backup.
    objects.delete("/index/");
    create(&open(&objects, None), "backup-3", &volume.get("two")).unwrap();
    assert_eq!((packs(&objects), indexes()), (before.clone(), 1));
    // One that is damaged, or a chunk that is nowhere, stops it.
    objects.edit("/index/", |content| content[60] ^= 1);
    objects.age_by(LONG);
    let error = collect(&open(&objects, None)).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("/index/"), "{error}");
    objects.delete("/index/");
    remove(&open(&objects, None), "backup-1").unwrap();
    let lost = before.iter().find(|path| {
        let content = objects.content(path).unwrap();
        objects.set(path, None);
        let verified = verify(&open(&objects, None), "backup-2", true);
        let is_needed = !verified.is_ok_and(|verified| verified.bad.is_empty());
        objects.set(path, Some(content));
        is_needed
    });
    objects.set(lost.unwrap(), None);
    objects.age_by(LONG);
    let error = collect(&open(&objects, None)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(packs(&objects).len(), before.len() - 1);
}

/// A damaged manifest might need anything.
#[test]
fn a_damaged_manifest_stops_a_collection() {
    let mut volume = volume(17, 4);
    volume.push("two", 0, &[5; BLOCK as usize]);
    let (objects, store) = fresh(Some(&passphrase()));
    create(&store, "backup-1", &volume.get("one")).unwrap();
    objects.edit("/manifests/", |content| content[100] ^= 1);
    create(&open(&objects, Some(&passphrase())), "backup-2", &volume.get("two")).unwrap();
    remove(&store, "backup-2").unwrap();
    objects.age_by(LONG);
    let store = open(&objects, Some(&passphrase()));
    let error = collect(&store).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Corrupt && error.to_string().contains("/manifests/"),
        "{error}"
    );
    // It has a name by which it can be shown and deleted.
    let [volume] = &store.volumes().unwrap()[..] else { panic!("one volume") };
    let [backup] = &store.backups(volume).unwrap()[..] else { panic!("one backup") };
    assert!(volume.starts_with("damaged-") && backup.starts_with("damaged-"));
    let error = store.backup(volume, backup).unwrap_err();
    assert!(error.to_string().contains("/manifests/"), "{error}");
    let mut progress = |_, _| true;
    store.remove(volume, backup, &mut Work::new(&mut progress)).unwrap();
    assert!(collect(&store).unwrap().condemned > 0);
}

/// Damage in a pack is mended by a full backup.
#[test]
fn a_full_backup_mends() {
    let volume = volume(18, 6);
    let content = volume.get("one").content();
    let (objects, store) = fresh(None);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    objects.edit("/packs/", |content| content[60] ^= 1);
    let store = open(&objects, None);
    let error = restored(&store, "backup-1", content.len()).unwrap_err();
    assert!(error.to_string().contains("/packs/"), "{error}");
    let source = volume.get("one");
    let options = CreateOptions { full: true, ..options("backup-2", "one") };
    store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
    for backup in ["backup-1", "backup-2"] {
        check(&open(&objects, None), backup, content);
    }
}

/// What was found damaged counts as missing for the next backup, which reads only that again.
#[test]
fn the_next_backup_mends_what_was_found() {
    let mut volume = volume(19, 6);
    volume.push("two", BLOCK, &[6; BLOCK as usize]);
    let content = volume.get("one").content();
    let (objects, store) = fresh(None);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let bad = packs(&objects).into_iter().max_by_key(|path| objects.content(path).unwrap().len());
    let bad = bad.unwrap();
    objects.edit(&bad, |content| content[60] ^= 1);
    assert_eq!(store.mend().unwrap(), 0, "nobody has looked");
    let found = verify(&store, "backup-1", true).unwrap();
    assert!(found.bad.len() == 1 && found.bad[0].problem.contains(&bad), "{found:?}");
    assert_eq!((store.mend().unwrap(), store.mend().unwrap()), (1, 0));
    assert!(restored(&store, "backup-1", content.len()).is_err());
    // The other chunks of the pack are nowhere else, whatever says what is in it.
    objects.delete("/index/");
    objects.age_by(LONG);
    assert_eq!(collect(&open(&objects, None)).unwrap().removed, 0);
    assert_eq!(verify(&open(&objects, None), "backup-1", true).unwrap().bad.len(), 1);
    let created = create(&open(&objects, None), "backup-2", &volume.get("two")).unwrap();
    assert_eq!(created.base.as_deref(), Some("backup-1"));
    for _ in 0..2 {
        let store = open(&objects, None);
        check(&store, "backup-1", content);
        check(&store, "backup-2", volume.get("two").content());
        objects.age_by(LONG);
        collect(&store).unwrap();
    }
    assert_eq!(objects.content(&bad), None, "nobody needs it any more");
    // In the other layout.
    let error = crate::support::store(&Arc::new(Memory::default())).mend().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

/// Found by review: what is written anew for a damaged pack may be damaged in its turn, in another chunk, before the first
/// pack goes.
#[test]
fn damage_on_both_sides_of_a_mend() {
    let volume = volume(21, 9);
    let content = volume.get("one").content();
    let (objects, store) = fresh(None);
    let length = BLOCK as usize + 16;
    let chunk_pack = |but: &str| {
        let length = |path: &String| objects.content(path).unwrap().len();
        let found = packs(&objects).into_iter().filter(|path| path != but).max_by_key(length);
        found.unwrap()
    };
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let first = chunk_pack("");
    objects.edit(&first, |content| content[60] ^= 1);
    assert_eq!(verify(&store, "backup-1", true).unwrap().bad.len(), 1);
    assert_eq!(store.mend().unwrap(), 1);
    create(&open(&objects, None), "backup-2", &volume.get("one")).unwrap();
    let second = chunk_pack(&first);
    // In a chunk that the first pack still has.
    let is_other = (0..2).any(|piece| {
        objects.edit(&second, |content| content[60 + piece * length] ^= 1);
        let is_other = verify(&open(&objects, None), "backup-1", true).unwrap().bad.is_empty();
        if !is_other {
            objects.edit(&second, |content| content[60 + piece * length] ^= 1);
        }
        is_other
    });
    assert!(is_other);
    for _ in 0..2 {
        objects.age_by(LONG);
        assert_eq!(collect(&open(&objects, None)).unwrap().removed, 0);
        assert!(restored(&open(&objects, None), "backup-1", content.len()).unwrap() == content);
    }
    // It is said, though nothing is lost.
    let store = open(&objects, None);
    let found = verify(&store, "backup-1", true).unwrap();
    assert_eq!((found.bad, found.damaged_packs), (vec![], vec![second.clone()]));
    assert_eq!(store.mend().unwrap(), 1);
    create(&open(&objects, None), "backup-3", &volume.get("one")).unwrap();
    objects.age_by(LONG);
    assert_eq!(collect(&open(&objects, None)).unwrap().removed, 2);
    for backup in ["backup-1", "backup-2", "backup-3"] {
        check(&open(&objects, None), backup, content);
    }
}

/// Found by review: a backup does not rely on a list that cannot be read.
#[test]
fn a_damaged_list_is_written_again() {
    let volume = volume(22, 6);
    let content = volume.get("one").content();
    // Its own volume finds the damage when it looks for a base; another one knows nothing of it.
    for name in [VOLUME, "other"] {
        let (objects, store) = fresh(None);
        create(&store, "backup-1", &volume.get("one")).unwrap();
        let length = |path: &String| objects.content(path).unwrap().len();
        let lists = packs(&objects).into_iter().min_by_key(length).unwrap();
        objects.edit(&lists, |content| content[60] ^= 1);
        let (store, mut same) = (open(&objects, None), volume.clone());
        same.push("two", 0, &content[..1]);
        let source = same.get("two");
        let options = CreateOptions { volume: name.to_owned(), ..options("backup-2", "two") };
        store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
        // The first backup has the same list.
        check(&open(&objects, None), "backup-1", content);
        let disk = Disk::new(vec![0; content.len()]);
        let restoration = open(&objects, None).restore(name, "backup-2").map(|restoration| {
            restoration.run(&disk, Onto::Empty, &mut Work::new(&mut |_, _| true))
        });
        restoration.unwrap().unwrap();
        assert!(disk.content() == content);
    }
}

/// Found by review: a backup that completes while a collection runs is no damage.
#[test]
fn a_backup_inside_of_a_collection() {
    let mut volume = volume(23, 4);
    volume.push("two", 0, &[5; BLOCK as usize]);
    let (objects, store) = fresh(None);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    let (writer, source, count) = (Arc::clone(&objects), volume.clone(), Mutex::new(0));
    objects.at_walk(move |folder| {
        let mut count = count.lock().unwrap();
        if folder.ends_with("/manifests") && *count == 0 {
            *count += 1;
            create(&open(&writer, None), "backup-2", &source.get("two")).unwrap();
        }
    });
    assert_eq!(collect(&open(&objects, None)).unwrap().backups, 2);
    assert_eq!(store.backups(VOLUME).unwrap().len(), 2);
    check(&open(&objects, None), "backup-2", volume.get("two").content());
}

/// Found by review: indexes of packs whose indexes are all lost are no longer than readers take.
#[test]
fn many_packs_without_index_get_several() {
    let mut volume = volume(24, 1);
    let (objects, store) = fresh(None);
    for number in 0..17 {
        let name = format!("s{number}");
        volume.push(&name, 0, &[number; 100]);
        create(&store, &format!("backup-{number}"), &volume.get(&name)).unwrap();
    }
    assert_eq!(packs(&objects).len(), 34);
    let indexes = || objects.paths().iter().filter(|path| path.contains("/index/")).count();
    for is_writer in [true, false] {
        assert_eq!(objects.delete("/index/"), if is_writer { 17 } else { 2 });
        objects.age_by(LONG);
        let store = open(&objects, None);
        match is_writer {
            true => drop(create(&store, "backup-again", &volume.get("s16")).unwrap()),
            false => drop(collect(&store).unwrap()),
        }
        assert_eq!(indexes(), 2);
    }
    check(&open(&objects, None), "backup-3", volume.get("s3").content());
}

/// A pack of many chunks, of which a later backup needs few; and what a collection makes of it.
fn mostly_dead(secret: Option<&Secret>) -> (Arc<Memory>, BackupStore, Snapshots) {
    let mut volume = volume(25, 12);
    for chunk in 0..10 {
        volume.push(&format!("s{chunk}"), chunk * BLOCK, &[chunk as u8 + 1; BLOCK as usize]);
    }
    let (objects, store) = fresh(secret);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    create(&store, "backup-2", &volume.get("s9")).unwrap();
    remove(&store, "backup-1").unwrap();
    objects.age_by(LONG);
    (objects, store, volume)
}

/// The bytes of all packs.
fn stored(objects: &Memory) -> usize {
    packs(objects).iter().map(|path| objects.content(path).unwrap().len()).sum()
}

#[test]
fn packs_that_are_mostly_dead_are_rewritten() {
    for secret in ways() {
        let (objects, _, volume) = mostly_dead(secret.as_ref());
        let content = volume.get("s9").content();
        let before = stored(&objects);
        // One that knows what is there now, and reads all the time.
        let early = open(&objects, secret.as_ref());
        check(&early, "backup-2", content);
        let first = collect(&open(&objects, secret.as_ref())).unwrap();
        assert_eq!((first.rewritten, first.removed), (1, 0), "{first:?}");
        assert!(first.rewritten_bytes > BLOCK && stored(&objects) > before);
        check(&open(&objects, secret.as_ref()), "backup-2", content);
        // A new backup does not rely on the old pack.
        create(&open(&objects, secret.as_ref()), "backup-3", &volume.get("s9")).unwrap();
        objects.age_by(LONG);
        let second = collect(&open(&objects, secret.as_ref())).unwrap();
        assert_eq!((second.rewritten, second.rewritten_bytes), (0, 0), "{second:?}");
        assert!(second.removed >= 1 && stored(&objects) * 2 < before, "{second:?}");
        check(&early, "backup-2", content);
        // There it ends.
        objects.age_by(LONG);
        let third = collect(&open(&objects, secret.as_ref())).unwrap();
        assert_eq!((third.rewritten, third.condemned, third.removed), (0, 0, 0), "{third:?}");
        for backup in ["backup-2", "backup-3"] {
            check(&open(&objects, secret.as_ref()), backup, content);
        }
    }
}

/// A pack that was written lately lacks what a backup may be about to use.
#[test]
fn young_packs_are_not_rewritten() {
    let (objects, store, volume) = mostly_dead(None);
    for path in packs(&objects) {
        let content = objects.content(&path);
        objects.set(&path, content);
    }
    let collected = collect(&store).unwrap();
    assert_eq!((collected.rewritten, collected.condemned), (0, 0), "{collected:?}");
    check(&store, "backup-2", volume.get("s9").content());
}

/// Where nothing more can be written, what needs no rewriting is condemned all the same.
#[test]
fn what_cannot_be_rewritten_is_in_nobodys_way() {
    let mut seen = 0;
    for call in 0.. {
        let (objects, _, volume) = mostly_dead(None);
        let store = open(&objects, None);
        let before = objects.calls();
        objects.set_fault(Some((call, Fault::Fail)));
        let collected = collect(&store);
        objects.set_fault(None);
        if objects.calls() - before <= call {
            break;
        }
        check(&open(&objects, None), "backup-2", volume.get("s9").content());
        match collected {
            Err(error) if error.to_string().contains("rewriting packs") => {
                seen += 1;
                let is_condemned = |path: &String| path.contains("/condemned/");
                assert!(objects.paths().iter().any(is_condemned), "{call}: {error}");
            }
            _ => {}
        }
    }
    assert!(seen > 0);
}

fn indexes(objects: &Memory) -> usize {
    objects.paths().iter().filter(|path| path.contains("/index/")).count()
}

/// What was written in vain does not take the room that backups need.
#[test]
fn a_place_that_is_full_is_left_as_it_was() {
    let mut seen = 0;
    for more in (0..).step_by(100) {
        let (objects, _, volume) = mostly_dead(None);
        let (store, before) = (open(&objects, None), packs(&objects));
        let named = indexes(&objects);
        objects.set_room(Some(objects.bytes() + more));
        match collect(&store) {
            Ok(collected) => {
                assert_eq!(collected.rewritten, 1);
                break;
            }
            Err(error) => {
                seen += u32::from(error.to_string().contains("rewriting packs"));
                // What an index names is done.
                if indexes(&objects) == named {
                    assert_eq!(packs(&objects), before, "{more}: {error}");
                }
            }
        }
        objects.set_room(None);
        check(&open(&objects, None), "backup-2", volume.get("s9").content());
    }
    assert!(seen > 0);
}

/// Those of some packs of a plain repository that are condemned, and the others.
fn condemned(objects: &Memory, packs: &[String]) -> (Vec<String>, Vec<String>) {
    let named: Vec<Vec<u8>> = objects
        .paths()
        .iter()
        .filter(|path| path.contains("/condemned/"))
        .map(|path| objects.content(path).unwrap())
        .collect();
    let is_condemned = |path: &String| {
        let id: Vec<u8> = (0..16)
            .map(|at| &path[path.len() - 32 + 2 * at..][..2])
            .map(|digits| u8::from_str_radix(digits, 16).unwrap())
            .collect();
        named.iter().any(|object| object.windows(16).any(|part| part == id))
    };
    packs.iter().cloned().partition(is_condemned)
}

/// Of what is there twice, one is enough, if it can be read.
#[test]
fn what_is_there_twice_goes_once() {
    let volume = volume(26, 8);
    let content = volume.get("one").content();
    for damage in [false, true] {
        let (objects, store) = fresh(None);
        create(&store, "backup-1", &volume.get("one")).unwrap();
        let source = volume.get("one");
        let options = CreateOptions { full: true, ..options("backup-2", "one") };
        store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
        let before = packs(&objects);
        objects.age_by(LONG);
        let first = collect(&open(&objects, None)).unwrap();
        assert_eq!((first.rewritten, first.rewritten_bytes), (2, 0), "{first:?}");
        let (gone, stay) = condemned(&objects, &before);
        assert_eq!((gone.len(), stay.len()), (2, 2));
        if damage {
            // What stays is damaged meanwhile: nothing is removed that is there alone now.
            for path in &stay {
                objects.edit(path, |content| content[60] ^= 1);
            }
        }
        for _ in 0..2 {
            objects.age_by(LONG);
            collect(&open(&objects, None)).unwrap();
        }
        let left = packs(&objects);
        assert_eq!(
            gone.iter().filter(|path| left.contains(path)).count(),
            if damage { 2 } else { 0 }
        );
        for backup in ["backup-1", "backup-2"] {
            let store = open(&objects, None);
            assert!(restored(&store, backup, content.len()).unwrap() == content, "{damage}");
        }
    }
}

/// A full backup beside damage is not given up for what is damaged.
#[test]
fn the_copy_that_is_good_stays() {
    let volume = volume(28, 8);
    let content = volume.get("one").content();
    // Which of two equal packs is looked at first is left to chance.
    for _ in 0..12 {
        let (objects, store) = fresh(None);
        create(&store, "backup-1", &volume.get("one")).unwrap();
        let damaged = packs(&objects);
        let source = volume.get("one");
        let options = CreateOptions { full: true, ..options("backup-2", "one") };
        store.create(&source, options).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
        for path in &damaged {
            objects.edit(path, |content| content[60] ^= 1);
        }
        for round in 0..3 {
            let good: Vec<_> =
                packs(&objects).into_iter().filter(|path| !damaged.contains(path)).collect();
            assert_eq!(good.len(), 2, "{round}");
            objects.age_by(LONG);
            collect(&open(&objects, None)).unwrap();
            assert_eq!(condemned(&objects, &good).0, [""; 0], "{round}");
        }
        for backup in ["backup-1", "backup-2"] {
            let store = open(&objects, None);
            assert!(restored(&store, backup, content.len()).unwrap() == content);
        }
    }
}

/// What cannot be read keeps its pack, and what else is in it.
#[test]
fn a_damaged_pack_is_not_given_up() {
    let (objects, _, volume) = mostly_dead(None);
    let content = volume.get("s9").content();
    let length = |path: &String| objects.content(path).unwrap().len();
    let largest = packs(&objects).into_iter().max_by_key(length).unwrap();
    let whole = objects.content(&largest).unwrap();
    // Whatever of it is needed.
    for at in (60..whole.len() - 1000).step_by(BLOCK as usize) {
        objects.edit(&largest, |content| content[at] ^= 1);
    }
    let collected = collect(&open(&objects, None)).unwrap();
    assert_eq!(collected.rewritten, 0, "{collected:?}");
    objects.age_by(LONG);
    collect(&open(&objects, None)).unwrap();
    objects.set(&largest, Some(whole));
    check(&open(&objects, None), "backup-2", content);
}

/// Each backup leaves an index; many small ones become few.
#[test]
fn indexes_are_merged() {
    let mut volume = volume(27, 1);
    let (objects, store) = fresh(None);
    for number in 0..20 {
        let name = format!("s{number}");
        volume.push(&name, 0, &[number + 1; 100]);
        create(&store, &format!("backup-{number}"), &volume.get(&name)).unwrap();
    }
    let indexes = || objects.paths().iter().filter(|path| path.contains("/index/")).count();
    // Young ones may just be read by somebody.
    collect(&open(&objects, None)).unwrap();
    assert_eq!(indexes(), 20);
    // One that knows what the old ones said.
    let early = open(&objects, None);
    check(&early, "backup-0", volume.get("s0").content());
    objects.age_by(LONG);
    collect(&open(&objects, None)).unwrap();
    assert_eq!(indexes(), 2);
    objects.age_by(LONG);
    assert_eq!(collect(&open(&objects, None)).unwrap().condemned, 0);
    assert_eq!((indexes(), packs(&objects).len()), (2, 40));
    for store in [early, open(&objects, None)] {
        for number in 0..20 {
            let content = volume.get(&format!("s{number}")).content();
            check(&store, &format!("backup-{number}"), content);
        }
    }
    // The next backup knows what they name.
    let again = create(&open(&objects, None), "backup-again", &volume.get("s19")).unwrap();
    assert_eq!(again.uploaded, 0);
    // Somebody who had listed the old ones before they went finds the packs all the same.
    assert_eq!(objects.delete("/index/"), 2);
    check(&open(&objects, None), "backup-3", volume.get("s3").content());
}
