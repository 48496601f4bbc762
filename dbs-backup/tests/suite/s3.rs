//! S3: against a server of our own that behaves badly, and against a real one if there is one.
//!
//! `S3_URL=s3://BUCKET@REGION/PATH` with `AWS_ENDPOINTS`, `AWS_ACCESS_KEY_ID` and so on names the real one.

use crate::s3_server::{Manner, Server};
use crate::support::*;
use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Onto, Work};
use dbs_core::ErrorKind;
use std::sync::atomic::Ordering;
use std::thread;

fn open(endpoint: &str, url: &str) -> dbs_core::Result<BackupStore> {
    let variable = |name: &str| match name {
        "AWS_ENDPOINTS" => Some(endpoint.to_owned()),
        "AWS_ACCESS_KEY_ID" => Some("key".to_owned()),
        "AWS_SECRET_ACCESS_KEY" => Some("secret".to_owned()),
        _ => None,
    };
    BackupStore::open(&Url::parse(url)?, &variable).map(BackupStore::without_waiting)
}

/// All operations.
fn all_operations(store: &BackupStore, name: &str) {
    let mut volume = volume(20, 6);
    volume.push("two", 0, b"two");
    create(store, "backup-1", &volume.get("one")).expect(name);
    let created = create(store, "backup-2", &volume.get("two")).expect(name);
    assert_eq!(created.base.as_deref(), Some("backup-1"));
    for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
        let content = volume.get(snapshot).content();
        let disk = Disk::new(vec![0; content.len()]);
        restore(store, backup, &disk, Onto::Empty).expect(name);
        assert!(disk.content() == content, "{name}");
        let mut progress = |_, _| true;
        let found = store.verify(VOLUME, backup, true, &mut Work::new(&mut progress)).expect(name);
        assert_eq!(found.bad, [], "{name}");
    }
    assert_eq!(store.volumes().expect(name), [VOLUME]);
    assert_eq!(store.backups(VOLUME).expect(name), ["backup-1", "backup-2"]);
    assert_eq!(store.backup(VOLUME, "absent").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(remove(store, "backup-1").expect(name).blocks, 1);
    remove_volume(store, VOLUME).expect(name);
    assert!(store.volumes().expect(name).is_empty());
}

#[test]
fn a_server_that_behaves_badly() {
    use Manner as M;
    let manners = [M::Well, M::Busy, M::Hangup, M::Truncated, M::Elsewhere, M::Ahead, M::Strange];
    thread::scope(|scope| {
        for manner in manners {
            scope.spawn(move || {
                let (server, endpoint) = Server::start(manner);
                let store = open(&endpoint, "s3://bucket@region/some/path/").unwrap();
                all_operations(&store, &format!("{manner:?}"));
                assert!(server.objects.lock().unwrap().is_empty(), "{manner:?}");
                let connections = server.connections.load(Ordering::SeqCst);
                let requests = server.requests.load(Ordering::SeqCst);
                assert!(
                    manner != M::Well || connections * 4 < requests,
                    "{connections} connections for {requests} requests: they are not kept"
                );
                let log = server.log.lock().unwrap();
                let block = "/bucket/some/path/backupstore/volumes/5e/23/vol-1/blocks/";
                assert!(log.iter().any(|line| line.starts_with(&format!("PUT {block}"))));
            });
        }
    });
}

/// A list of backups reads the starts of their facts; one that is empty, as after a power loss, is damaged and no more.
#[test]
fn the_starts_of_facts_are_listed() {
    let (server, endpoint) = Server::start(Manner::Well);
    let store = open(&endpoint, "s3://bucket@region/").unwrap();
    let mut volume = volume(22, 400);
    create(&store, "backup-1", &volume.get("one")).unwrap();
    volume.push("two", 0, b"two");
    let source = volume.get("two");
    let mut labelled = options("backup-2", "two");
    labelled.labels.insert("dbs-volume-size".to_owned(), source.content().len().to_string());
    store.create(&source, labelled).unwrap().run(&mut Work::new(&mut |_, _| true)).unwrap();
    let key = |name: &str| format!("backupstore/volumes/5e/23/vol-1/backups/backup_{name}.cfg");
    server.objects.lock().unwrap().insert(key("backup-3"), Vec::new());
    assert!(server.objects.lock().unwrap()[&key("backup-2")].len() > 17 << 10);
    server.log.lock().unwrap().clear();
    let found = dbs_backup::catalog::Catalog::new(store).backups(VOLUME).unwrap();
    let sizes: Vec<_> = found.complete.iter().map(|listed| listed.size).collect();
    assert_eq!(sizes.len(), 2);
    assert!(sizes.contains(&(source.content().len() as u64)), "{sizes:?}");
    assert!(found.problems[0].to_string().contains("backup-3"), "{:?}", found.problems);
    let log = server.log.lock().unwrap();
    let asked = |name| log.iter().filter(|line| line.ends_with(&key(name))).count();
    // Without a label for the size of the volume, the whole facts are read.
    assert_eq!([asked("backup-1"), asked("backup-2"), asked("backup-3")], [2, 1, 1], "{log:?}");
}

/// Whoever waits for a list that is long, or does not end, can stop it.
#[test]
fn a_list_is_stopped() {
    let (_server, endpoint) = Server::start(Manner::Endless);
    let store = open(&endpoint, "s3://bucket@region/").unwrap();
    let volume = volume(21, 2);
    let source = volume.get("one");
    let creation = store.create(&source, options("backup-1", "one")).unwrap();
    let error = creation.run(&mut Work::new(&mut |_, _| false)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    assert!(store.backups(VOLUME).unwrap().is_empty(), "what was begun is removed all the same");
}

#[test]
fn what_cannot_be_opened() {
    let (_server, endpoint) = Server::start(Manner::Well);
    for (url, kind) in [
        ("s3://bucket", ErrorKind::Invalid),
        ("s3:///path", ErrorKind::Invalid),
        ("s3://other@region/", ErrorKind::NotFound),
    ] {
        let error = open(&endpoint, url).map(drop).unwrap_err();
        assert_eq!(error.kind(), kind, "{url}: {error}");
    }
    assert!(open("ftp://x", "s3://bucket@region/").is_err());
    assert!(open("http://x/path", "s3://bucket@region/").is_err());
    let half = |name: &str| (name == "AWS_ACCESS_KEY_ID").then(|| "key".to_owned());
    let url = Url::parse("s3://bucket@region/").unwrap();
    let error = BackupStore::open(&url, &half).map(drop).unwrap_err();
    assert!(error.to_string().contains("s3 credential secret access key not found"));
}

/// All operations of a repository, which reads from the middle of objects.
fn all_in_a_repository(store: BackupStore, name: &str) {
    use dbs_backup::{InitOptions, Secret};
    let secret = Secret::KeyFile([5; 32].into());
    let options =
        InitOptions { secret: Some(secret.clone()), chunk_size: Some(BLOCK), cheap: true };
    store.init(&options).expect(name);
    let store = store.with_repository(Some(&secret)).expect(name);
    let mut volume = volume(24, 40);
    volume.push("two", 3 * BLOCK, b"two");
    create(&store, "backup-1", &volume.get("one")).expect(name);
    create(&store, "backup-2", &volume.get("two")).expect(name);
    for (backup, snapshot) in [("backup-1", "one"), ("backup-2", "two")] {
        let content = volume.get(snapshot).content();
        let disk = Disk::new(vec![0; content.len()]);
        restore(&store, backup, &disk, Onto::Empty).expect(name);
        assert!(disk.content() == content, "{name}");
        let found = store.verify(VOLUME, backup, true, &mut Work::new(&mut |_, _| true));
        assert_eq!(found.expect(name).bad, [], "{name}");
    }
    remove_volume(&store, VOLUME).expect(name);
    let collected = store.collect(&mut Work::new(&mut |_, _| true)).expect(name).unwrap();
    assert_eq!((collected.backups, collected.removed), (0, 0), "{name}");
}

#[test]
fn a_repository_on_a_server() {
    for manner in [Manner::Well, Manner::Truncated] {
        let (_server, endpoint) = Server::start(manner);
        let store = open(&endpoint, "s3://bucket@region/some/path/").unwrap();
        all_in_a_repository(store, &format!("{manner:?}"));
    }
}

/// Rights that end at Longhorn's layout: it is used as before there were repositories, unless one can be seen, or a key is
/// given.
#[test]
fn rights_for_one_layout_alone() {
    for manner in [Manner::Tight, Manner::Tighter] {
        let (server, endpoint) = Server::start(manner);
        let again = || open(&endpoint, "s3://bucket@region/").unwrap();
        let store = again().with_repository(None).unwrap();
        assert!(!store.is_repository());
        all_operations(&store, "rights for one layout");
        let key = dbs_backup::Secret::KeyFile([5; 32].into());
        assert!(again().with_repository(Some(&key)).is_err(), "nothing is written in the clear");
        server.objects.lock().unwrap().insert("dbs-repository/config".to_owned(), vec![1]);
        let opened = again().with_repository(None);
        assert_eq!(opened.is_err(), manner == Manner::Tight);
    }
}

/// A refusal that passes makes no other layout of a repository.
#[test]
fn rights_that_come_late() {
    let (server, endpoint) = Server::start(Manner::Well);
    let store = open(&endpoint, "s3://bucket@region/").unwrap();
    store.init(&dbs_backup::InitOptions::default()).unwrap();
    let mut seen = 0;
    for refused in 0..6 {
        server.refused.store(0, Ordering::SeqCst);
        let store = open(&endpoint, "s3://bucket@region/").unwrap();
        server.refused.store(refused, Ordering::SeqCst);
        match store.with_repository(None) {
            Ok(store) => assert!(store.is_repository(), "{refused}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Invalid, "{refused}: {error}");
                seen += 1;
            }
        }
    }
    assert!(seen > 0);
}

#[test]
fn a_real_server() {
    let Ok(url) = std::env::var("S3_URL") else {
        println!("SKIPPED: no S3_URL");
        return;
    };
    let url = Url::parse(&url).unwrap();
    let variable = |name: &str| std::env::var(name).ok();
    all_operations(&BackupStore::open(&url, &variable).unwrap().without_waiting(), "a real server");
    let repository = Url {
        path: format!("{}/{}", url.path, dbs_backup::names::random("repository").unwrap()),
        ..url.clone()
    };
    all_in_a_repository(BackupStore::open(&repository, &variable).unwrap(), "a real server");
    let wrong = |name: &str| match name {
        "AWS_SECRET_ACCESS_KEY" => Some("wrong".to_owned()),
        other => std::env::var(other).ok(),
    };
    match BackupStore::open(&url, &wrong) {
        Ok(_) => println!("this server does not look at signatures"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{error}"),
    }
}
