use super::*;
use crate::replica::{ReplicaOptions, StoreSource};
use dbs_core::InitOptions;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;

const SIZE: u64 = 1 << 20;

struct Zeros;

impl Backing for Zeros {
    fn identity(&self) -> &str {
        KIND
    }

    fn name(&self) -> String {
        "zeros".to_owned()
    }

    fn size(&self) -> u64 {
        SIZE
    }

    fn read_at(&self, _offset: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.fill(0);
        Ok(())
    }
}

/// Files that never come over.
#[derive(Default)]
struct Files {
    /// Threads that have begun to bring them.
    begun: AtomicU32,
    panics: AtomicBool,
    /// Everything comes over while somebody asks.
    ends: OnceLock<Weak<Replica>>,
}

impl Taken for Files {
    fn file(&self) -> Arc<dyn Backing> {
        Arc::new(Zeros)
    }

    fn progress(&self) -> Progress {
        Progress { bytes: 0, total: SIZE, copied: 0 }
    }

    fn is_done(&self, _: &Store, _: &str) -> Result<bool> {
        Ok(false)
    }

    fn bring(&self, _: &Store, _: &str, told: &dyn Fn(Progress) -> Result<()>) -> Result<()> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics.swap(false, Ordering::SeqCst), "as a test wants it");
        loop {
            told(Progress::default())?;
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn show(&self, layers: &mut Vec<LayerInfo>, _: bool) {
        layers.push(LayerInfo { name: Some("of upstream's".to_owned()), ..layers[0].clone() });
        if let Some(replica) = self.ends.get().and_then(Weak::upgrade) {
            let taking = replica.taking().unwrap();
            replica.end_taking(&taking);
        }
    }

    fn remove(&self) -> Result<()> {
        Ok(())
    }
}

fn replica(dir: &Path, files: &Arc<Files>) -> (Arc<Replica>, Store) {
    let path = dir.join("store");
    let options = InitOptions { size: Some(32 << 20), ..InitOptions::default() };
    Store::init(&path, &options).unwrap();
    let store = Store::open(&path, &dbs_core::OpenOptions::default()).unwrap();
    let file = files.file();
    let attached = store.attach_backing(Arc::clone(&file));
    store.create_backed("v", SIZE, &file).unwrap();
    let taken = Some(Arc::clone(files) as Arc<dyn Taken>);
    let options = ReplicaOptions { taken, ..ReplicaOptions::new(dir, "v") };
    let replica = Replica::new(options, StoreSource::Own(store.clone())).unwrap();
    drop(attached);
    (replica, store)
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn has_ended(replica: &Replica) -> bool {
    let taking = replica.taking().unwrap();
    lock(&taking.run).as_ref().unwrap().ended.load(Ordering::SeqCst)
}

#[test]
fn one_thread_brings_them_and_another_if_that_has_panicked() {
    let place = tempfile::tempdir().unwrap();
    let files = Arc::new(Files::default());
    files.panics.store(true, Ordering::SeqCst);
    let (replica, store) = replica(place.path(), &files);
    until("it has panicked", || has_ended(&replica));
    assert_eq!(files.begun.load(Ordering::SeqCst), 1);
    replica.begin_taking(&store).unwrap();
    until("another has begun", || files.begun.load(Ordering::SeqCst) == 2);
    let first = lock(&replica.taking().unwrap().run).clone().unwrap();
    // Whoever takes the store asks for it.
    replica.begin_taking(&store).unwrap();
    let now = lock(&replica.taking().unwrap().run).clone().unwrap();
    assert!(Arc::ptr_eq(&first, &now) && !has_ended(&replica));
    replica.end_uses(Duration::from_secs(60));
    assert!(has_ended(&replica));
    store.close().unwrap();
}

#[test]
fn an_answer_is_of_the_store_alone_if_the_files_have_gone_meanwhile() {
    let place = tempfile::tempdir().unwrap();
    let files = Arc::new(Files::default());
    let (replica, store) = replica(place.path(), &files);
    assert_eq!(replica.layers(&store).unwrap().len(), 2);
    files.ends.set(Arc::downgrade(&replica)).unwrap();
    assert_eq!(replica.layers(&store).unwrap().len(), 1);
    replica.end_uses(Duration::from_secs(60));
    store.close().unwrap();
}
