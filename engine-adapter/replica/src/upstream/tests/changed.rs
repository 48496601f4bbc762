//! What somebody has changed where an import or export was cut off.

use super::*;

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
