//! Several keys of one repository.

use super::*;

const FAULTS: [Fault; 4] = [Fault::Fail, Fault::Cut, Fault::CutAfter, Fault::Lost];

fn key_file(byte: u8) -> Secret {
    Secret::KeyFile([byte; 32].into())
}

/// The names of the keys, the one in use first.
fn names(store: &BackupStore) -> Vec<String> {
    let mut keys = store.keys().unwrap();
    keys.sort_by_key(|key| !key.used);
    assert!(keys[0].used && keys.iter().filter(|key| key.used).count() == 1);
    keys.into_iter().map(|key| key.id).collect()
}

#[test]
fn keys_are_added_and_removed() {
    let (objects, first) = fresh(Some(&passphrase()));
    let volume = volume(40, 3);
    create(&first, "backup-1", &volume.get("one")).unwrap();
    let added = first.add_key(&key_file(9)).unwrap();
    let old = names(&first)[0].clone();
    assert_eq!(names(&first), [&*old, &added]);
    let again = first.add_key(&key_file(9)).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Exists, "{again}");
    assert_eq!(first.add_key(&passphrase()).unwrap_err().kind(), ErrorKind::Exists);

    // Each opens the same.
    let second = open(&objects, Some(&key_file(9)));
    assert_eq!(names(&second), [&*added, &old]);
    let kinds: Vec<_> = second.keys().unwrap().iter().map(|key| (key.used, key.kind)).collect();
    assert!(kinds.contains(&(true, Some("key-file"))), "{kinds:?}");
    assert!(kinds.contains(&(false, Some("passphrase"))), "{kinds:?}");
    check(&second, "backup-1", volume.get("one").content());

    // Not the own one, and none that is not there.
    let own = second.remove_key(&added).unwrap_err();
    assert_eq!(own.kind(), ErrorKind::Invalid, "{own}");
    for name in ["x", "../config", &"0".repeat(32)] {
        assert_eq!(second.remove_key(name).unwrap_err().kind(), ErrorKind::NotFound, "{name}");
    }
    second.remove_key(&old).unwrap();
    assert_eq!(names(&second), [&*added]);
    let gone = try_open(&objects, Some(&passphrase())).map(drop).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Invalid, "{gone}");
    // Who is still there with the key that is gone does not remove the other one.
    let late = first.remove_key(&added).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Invalid, "{late}");
    check(&open(&objects, Some(&key_file(9))), "backup-1", volume.get("one").content());
    assert!(!objects.paths().iter().any(|path| path.contains("/clock/")));
}

#[test]
fn as_many_keys_as_are_tried() {
    let (objects, store) = fresh(Some(&key_file(100)));
    for byte in 1..16 {
        store.add_key(&key_file(byte)).unwrap();
    }
    let error = store.add_key(&key_file(16)).unwrap_err();
    assert!(error.to_string().contains("16 keys"), "{error}");
    for byte in 1..16 {
        open(&objects, Some(&key_file(byte)));
    }
    // One that is damaged is shown, keeps no other from being used, and can be removed.
    let used = &names(&store)[0];
    let path = format!("dbs-repository/keys/{}", names(&store)[1]);
    objects.set(&path, Some(b"{}".to_vec()));
    let keys = store.keys().unwrap();
    let damaged: Vec<_> = keys.iter().filter(|key| key.problem.is_some()).collect();
    assert_eq!((damaged.len(), damaged[0].kind), (1, None));
    store.remove_key(&damaged[0].id).unwrap();
    store.add_key(&key_file(16)).unwrap();
    assert_eq!(&names(&store)[0], used);
}

#[test]
fn where_there_are_no_keys() {
    let (_, plain) = fresh(None);
    let longhorn = store(&Arc::new(Memory::default()));
    for store in [plain, longhorn] {
        assert_eq!(store.keys().unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(store.add_key(&key_file(1)).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(store.remove_key(&"0".repeat(32)).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

/// Two who each remove the key of the other: one of them sees that it is not alone, or that its own key is gone.
#[test]
fn two_at_once_leave_a_key() {
    let (objects, first) = fresh(Some(&key_file(1)));
    let other = first.add_key(&key_file(2)).unwrap();
    let claim = format!("dbs-repository/clock/{}", "7".repeat(32));
    objects.set(&claim, Some(Vec::new()));
    let error = first.remove_key(&other).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains(&claim), "{error}");
    assert_eq!(first.add_key(&key_file(3)).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(first.keys().unwrap().len(), 2);
    // What a command that was killed has left is out of the way a day later.
    objects.age_by(LONG);
    collect(&first).unwrap();
    first.remove_key(&other).unwrap();
}

/// Who was asleep between its looks and its removal, while its claim was tidied, does not take the last key.
#[test]
fn two_who_remove_each_other_leave_a_key() {
    let (objects, first) = fresh(Some(&key_file(1)));
    let volume = volume(43, 2);
    create(&first, "backup-1", &volume.get("one")).unwrap();
    let other = first.add_key(&key_file(2)).unwrap();
    let own = names(&first)[0].clone();
    let (awake, path) = (Arc::clone(&objects), format!("dbs-repository/keys/{other}"));
    objects.at_remove(move |removed| {
        if removed == path {
            assert_eq!(awake.delete("/clock/"), 1);
            open(&awake, Some(&key_file(2))).remove_key(&own).unwrap();
        }
    });
    let error = first.remove_key(&other).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("is kept"), "{error}");
    objects.at_remove(|_| {});
    assert!(try_open(&objects, Some(&key_file(1))).is_err());
    check(&open(&objects, Some(&key_file(2))), "backup-1", volume.get("one").content());
}

/// A removal whose answer is lost may be carried out later: until then nobody removes the other key.
#[test]
fn a_removal_that_comes_late_leaves_a_key() {
    let (objects, first) = fresh(Some(&key_file(1)));
    let other = first.add_key(&key_file(2)).unwrap();
    let own = names(&first)[0].clone();
    let (failing, path) = (Arc::clone(&objects), format!("dbs-repository/keys/{other}"));
    let late = path.clone();
    objects.at_remove(move |removed| {
        if removed == path {
            failing.set_fault(Some((0, Fault::Fail)));
        }
    });
    let error = first.remove_key(&other).unwrap_err();
    assert!(error.kind() == ErrorKind::Io && error.to_string().contains("/clock/"), "{error}");
    objects.at_remove(|_| {});
    objects.set_fault(None);
    let second = open(&objects, Some(&key_file(2)));
    assert_eq!(second.remove_key(&own).unwrap_err().kind(), ErrorKind::Busy);
    objects.set(&late, None);
    // The claim goes as all old ones do.
    objects.age_by(LONG);
    let first = open(&objects, Some(&key_file(1)));
    collect(&first).unwrap();
    first.add_key(&key_file(3)).unwrap();
}

/// The own key may have been damaged since it opened the repository.
#[test]
fn no_key_is_removed_by_one_that_is_damaged() {
    let (objects, first) = fresh(Some(&key_file(1)));
    let other = first.add_key(&key_file(2)).unwrap();
    let own = format!("dbs-repository/keys/{}", names(&first)[0]);
    let whole = objects.content(&own).unwrap();
    let mut rotten = whole.clone();
    let digit = rotten.iter().rposition(u8::is_ascii_digit).unwrap();
    rotten[digit] = if rotten[digit] == b'0' { b'1' } else { b'0' };
    for content in [Vec::new(), rotten] {
        objects.set(&own, Some(content));
        let error = first.remove_key(&other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        open(&objects, Some(&key_file(2)));
    }
    objects.set(&own, Some(whole));
    first.remove_key(&other).unwrap();
}

#[test]
fn a_change_of_keys_that_is_cut_off() {
    let volume = volume(41, 2);
    for fault in FAULTS {
        for (adds, call) in
            [true, false].into_iter().flat_map(|adds| (0..8).map(move |c| (adds, c)))
        {
            let case = format!("{fault:?} {adds} {call}");
            let (objects, store) = fresh(Some(&key_file(1)));
            create(&store, "backup-1", &volume.get("one")).unwrap();
            let other = store.add_key(&key_file(2)).unwrap();
            objects.set_fault(Some((call, fault)));
            let _ = match adds {
                true => store.add_key(&key_file(3)).map(drop),
                false => store.remove_key(&other),
            };
            objects.set_fault(None);
            // The key that was given opens it whatever happened, and the change can be made again.
            let store = open(&objects, Some(&key_file(1)));
            check(&store, "backup-1", volume.get("one").content());
            objects.age_by(LONG);
            collect(&store).expect(&case);
            match adds {
                true => match store.add_key(&key_file(3)) {
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Exists, "{case}: {error}"),
                    Ok(_) => drop(open(&objects, Some(&key_file(3)))),
                },
                false => match store.remove_key(&other) {
                    Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{case}: {error}"),
                    Ok(()) => assert!(try_open(&objects, Some(&key_file(2))).is_err(), "{case}"),
                },
            }
            open(&objects, Some(&key_file(if adds { 3 } else { 1 })));
        }
    }
}

/// Names of one letter, which Longhorn's layout does not have.
#[test]
fn names_of_one_letter() {
    let (_, store) = fresh(None);
    let volume = volume(42, 2);
    let source = volume.get("one");
    let options = |volume: &str, backup: &str| CreateOptions {
        volume: volume.to_owned(),
        ..options(backup, "one")
    };
    let run = |store: &BackupStore, options| {
        store.create(&source, options)?.run(&mut Work::new(&mut |_, _| true))
    };
    let created = run(&store, options("v", "b")).unwrap();
    let url = dbs_backup::url::Url::parse(&created.url).unwrap();
    assert_eq!(url.need_backup().unwrap(), ("v", "b"));
    let disk = Disk::new(vec![0; source.content().len()]);
    let restoration = store.restore("v", "b").unwrap();
    restoration.run(&disk, Onto::Empty, &mut Work::new(&mut |_, _| true)).unwrap();
    assert!(disk.content() == source.content());
    assert_eq!(
        (store.volumes().unwrap(), store.backups("v").unwrap()),
        (vec!["v".into()], vec!["b".into()])
    );
    assert!(store.remove("v", "b", &mut Work::new(&mut |_, _| true)).unwrap().found);
    let longhorn = crate::support::store(&Arc::new(Memory::default()));
    for (volume, backup) in [("v", "backup-1"), ("vol", "b")] {
        let refused = run(&longhorn, options(volume, backup)).unwrap_err();
        assert!(refused.to_string().contains("2 or more letters"), "{refused}");
    }
    assert_eq!(longhorn.volume("v").unwrap_err().kind(), ErrorKind::Invalid);
    assert!(run(&store, options(".", "b")).is_err() && run(&store, options("v", "")).is_err());
}
