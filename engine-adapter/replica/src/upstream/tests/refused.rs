//! What is refused, and what stays as it is.

use super::*;

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
