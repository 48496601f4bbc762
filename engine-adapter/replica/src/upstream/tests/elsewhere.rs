//! Exports into another directory.

use super::*;

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
