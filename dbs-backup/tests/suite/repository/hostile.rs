//! Objects that somebody has altered: a reader gives right bytes, or an error that names the object.

use super::*;

/// A repository with two backups, and what it takes to read all of one of them.
fn repository(secret: Option<&Secret>) -> (Arc<Memory>, Snapshots) {
    let (objects, store) = fresh(secret);
    let mut volume = volume(20, 3);
    volume.push("two", 0, b"changed");
    create(&store, "backup-1", &volume.get("one")).unwrap();
    create(&store, "backup-2", &volume.get("two")).unwrap();
    (objects, volume)
}

/// Reads everything as a new process; what is wrong.
fn read_all(
    objects: &Arc<Memory>,
    secret: Option<&Secret>,
    volume: &Snapshots,
) -> std::result::Result<(), String> {
    let store = try_open(objects, secret).map_err(|error| error.to_string())?;
    assert!(store.is_repository());
    for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
        let content = volume.get(snapshot).content();
        let read = restored(&store, backup, content.len()).map_err(|error| error.to_string())?;
        assert!(read == content, "{backup} has wrong bytes");
        let verified = verify(&store, backup, true).map_err(|error| error.to_string())?;
        if let Some(bad) = verified.bad.first() {
            return Err(bad.problem.clone());
        }
    }
    Ok(())
}

/// What an alteration of this object may lead to.
fn check(
    objects: &Arc<Memory>,
    secret: Option<&Secret>,
    volume: &Snapshots,
    path: &str,
    what: &str,
) {
    match read_all(objects, secret, volume) {
        // What an index says is in the packs, too; what is not read by this backup changes nothing.
        Ok(()) => {
            let is_spare =
                path.contains("/index/") || path.contains("/packs/") || path.contains("/keys/");
            assert!(is_spare, "{path} {what}: nobody has noticed");
        }
        Err(error) if path.ends_with("config") || path.contains("/keys/") => drop(error),
        Err(error) => {
            assert!(error.contains(path) || error.contains("backup-"), "{path} {what}: {error}")
        }
    }
}

/// As `check`, where the object is read in any case.
fn check_noticed(
    objects: &Arc<Memory>,
    secret: Option<&Secret>,
    volume: &Snapshots,
    path: &str,
    at: usize,
) {
    let error = read_all(objects, secret, volume).expect_err("nobody has noticed");
    assert!(error.contains(path), "{path} byte {at}: {error}");
}

#[test]
fn altered_and_truncated_objects() {
    for secret in [None, Some(Secret::KeyFile([3; 32].into()))] {
        let (objects, volume) = repository(secret.as_ref());
        read_all(&objects, secret.as_ref(), &volume).unwrap();
        for path in objects.paths() {
            let content = objects.content(&path).unwrap();
            let step = (content.len() / 40).max(1);
            for at in (0..content.len()).step_by(step).chain([0, 8, 10, content.len() - 1]) {
                let mut altered = content.clone();
                altered[at] ^= 4;
                objects.set(&path, Some(altered));
                check(&objects, secret.as_ref(), &volume, &path, &format!("byte {at}"));
                objects.set(&path, Some(content[..at].to_vec()));
                check(&objects, secret.as_ref(), &volume, &path, &format!("length {at}"));
            }
            objects.set(&path, Some([&content[..], b"x"].concat()));
            check(&objects, secret.as_ref(), &volume, &path, "longer");
            objects.set(&path, Some(content));
        }
    }
}

/// Each byte of blobs and manifests matters.
#[test]
fn every_byte_of_blobs_and_manifests() {
    for secret in [None, Some(Secret::KeyFile([3; 32].into()))] {
        let (objects, volume) = repository(secret.as_ref());
        for path in objects.paths() {
            let content = objects.content(&path).unwrap();
            let range = match &path {
                path if path.contains("/manifests/") => 0..content.len(),
                // The header of a pack and what is behind its blobs are read only if its index is lost.
                path if path.contains("/packs/") => 48..content.len() - 16 - 64,
                _ => continue,
            };
            let step = if path.contains("/packs/") { 211 } else { 7 };
            for at in range.step_by(step) {
                let is_footer = path.contains("/packs/") && at > content.len() - 16 - 16 - 48 * 4;
                if is_footer {
                    continue;
                }
                let mut altered = content.clone();
                altered[at] ^= 1;
                objects.set(&path, Some(altered));
                check_noticed(&objects, secret.as_ref(), &volume, &path, at);
            }
            objects.set(&path, Some(content));
        }
    }
}

/// Each object in the place of each other one.
#[test]
fn swapped_objects() {
    for secret in [None, Some(passphrase())] {
        let (objects, volume) = repository(secret.as_ref());
        let paths = objects.paths();
        for path in &paths {
            let content = objects.content(path);
            for other in paths.iter().filter(|other| *other != path) {
                objects.set(path, objects.content(other));
                check(&objects, secret.as_ref(), &volume, path, &format!("is {other}"));
            }
            objects.set(path, content);
        }
        // A whole object of a repository with the same secret.
        let (others, _) = repository(secret.as_ref());
        for path in &paths {
            let content = objects.content(path);
            let folder = path.split('/').nth(1).unwrap();
            let other = others.paths().into_iter().find(|other| other.contains(folder)).unwrap();
            objects.set(path, others.content(&other));
            check(&objects, secret.as_ref(), &volume, path, "is of another repository");
            objects.set(path, content);
        }
        // Under another name, as the backup of another volume and by another name.
        let manifest = paths.iter().find(|path| path.contains("/manifests/")).unwrap();
        let digit = if manifest[25..].starts_with('0') { "1" } else { "0" };
        let renamed = [&manifest[..25], digit, &manifest[26..]].concat();
        objects.set(&renamed, objects.content(manifest));
        let store = open(&objects, secret.as_ref());
        assert!(store.volumes().unwrap().iter().any(|volume| volume.starts_with("damaged-")));
    }
}

#[test]
fn objects_that_are_gone() {
    let (objects, volume) = repository(None);
    for path in objects.paths() {
        let content = objects.content(&path);
        objects.set(&path, None);
        let outcome = read_all(&objects, None, &volume);
        assert_eq!(outcome.is_ok(), path.contains("/index/"), "{path}: {outcome:?}");
        if path.ends_with("/config") {
            // Neither in another layout, nor as a new repository.
            let opened = try_open(&objects, None).map(drop).unwrap_err();
            let made = store(&objects).init(&InitOptions::default()).unwrap_err();
            for error in [opened, made] {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                assert!(error.to_string().contains("config"), "{error}");
            }
        }
        objects.set(&path, content);
    }
}

#[test]
fn a_wrong_key_opens_nothing() {
    let secrets = [
        Secret::Passphrase("one".to_owned().into()),
        Secret::Passphrase("two".to_owned().into()),
        Secret::KeyFile([1; 32].into()),
        Secret::KeyFile([2; 32].into()),
    ];
    for secret in &secrets {
        let (objects, volume) = repository(Some(secret));
        for other in secrets.iter().filter(|other| *other != secret) {
            let error = try_open(&objects, Some(other)).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
        let error = try_open(&objects, None).map(drop).unwrap_err();
        assert!(error.to_string().contains("DBS_BACKUP_PASSPHRASE"), "{error}");
        read_all(&objects, Some(secret), &volume).unwrap();
    }
    // Whoever gives a key wants nothing written in the clear: neither here, nor where a repository was.
    let (objects, _) = repository(None);
    for place in [objects, Arc::new(Memory::default())] {
        let error = try_open(&place, Some(&secrets[0])).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    // All copies of the key are gone.
    let (objects, _) = repository(Some(&secrets[0]));
    objects.delete("/keys/");
    let error = try_open(&objects, Some(&secrets[0])).map(drop).unwrap_err();
    assert!(error.to_string().contains("gone"), "{error}");
}

/// Who does not know what is going to be removed relies on nothing.
#[test]
fn a_damaged_condemnation_stops_writers() {
    let (objects, mut volume) = repository(None);
    remove(&open(&objects, None), "backup-1").unwrap();
    remove(&open(&objects, None), "backup-2").unwrap();
    objects.age_by(LONG);
    assert!(collect(&open(&objects, None)).unwrap().condemned > 0);
    assert_eq!(objects.edit("/condemned/", |content| content[60] ^= 1), 1);
    volume.push("three", 0, b"more");
    let created = create(&open(&objects, None), "backup-3", &volume.get("three")).map(drop);
    objects.age_by(LONG);
    let collected = collect(&open(&objects, None)).map(drop);
    for error in [created.unwrap_err(), collected.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("/condemned/"), "{error}");
    }
    assert_eq!(open(&objects, None).backups(VOLUME).unwrap(), [""; 0]);
}
