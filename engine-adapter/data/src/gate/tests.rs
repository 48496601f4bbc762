use super::*;
use std::sync::atomic::AtomicUsize;
use std::thread;

#[derive(Default)]
struct Events {
    changes: AtomicUsize,
    commits: AtomicUsize,
    fail: AtomicBool,
}

impl ActiveEvents for Events {
    fn first_change(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }
    fn unmap(&self, _: u64, _: u64) -> Result<u64, Error> {
        Ok(0)
    }
    fn commit(&self) -> Result<(), Error> {
        self.commits.fetch_add(1, Ordering::SeqCst);
        if self.fail.load(Ordering::SeqCst) { Err(Error::invalid("no")) } else { Ok(()) }
    }
    fn healthy(&self) -> Result<(), String> {
        Ok(())
    }
}

fn active(events: &Arc<Events>) -> Arc<Active> {
    let events: Arc<dyn ActiveEvents> = events.clone();
    Arc::new(Active::new(Target::Null { size: 1 << 20 }, events).with_commit_bytes(8192))
}

#[test]
fn set_waits_for_watchers_to_let_go() {
    let gate = Gate::new(Access::Open(active(&Arc::default())));
    let told = Arc::new(AtomicUsize::new(0));
    let count = told.clone();
    let watch = gate.watch(Arc::new(move || {
        count.fetch_add(1, Ordering::SeqCst);
    }));
    let View { generation: before, access: held, .. } = watch.look();
    assert!(matches!(held, Access::Open(_)));
    assert!(!gate.set_within(Access::not_open("closed"), Duration::from_millis(5)), "held");
    assert_eq!(told.load(Ordering::SeqCst), 1);
    assert!(!gate.is_settled());
    let View { generation, access, .. } = watch.look();
    assert!(generation > before && matches!(access, Access::Refused { .. }));

    let setter = gate.clone();
    let setting = thread::spawn(move || setter.set(Access::not_open("error")));
    while told.load(Ordering::SeqCst) < 2 {
        thread::yield_now();
    }
    watch.release(Some(generation));
    assert!(!setting.is_finished(), "what came with the former change is still held");
    watch.release(None);
    assert!(setting.join().unwrap());
    assert!(gate.is_settled());
}

#[test]
fn a_session_ends_with_a_close_and_not_with_an_open() {
    let gate = Gate::new(Access::not_open("closed"));
    let open = || Access::Open(active(&Arc::default()));
    let mut sessions = vec![gate.session()];
    for access in [
        open(),
        open(),
        Access::not_open("closed"),
        Access::not_open("error"),
        open(),
        Access::not_open("closed"),
    ] {
        assert!(gate.set(access));
        sessions.push(gate.session());
    }
    assert_eq!(sessions, [0, 0, 0, 1, 1, 1, 2]);
}

#[test]
fn who_is_gone_holds_nothing() {
    let gate = Gate::new(Access::not_open("closed"));
    let watch = gate.watch(Arc::new(|| {}));
    drop(watch);
    assert!(gate.set(Access::not_open("error")));
}

#[test]
fn the_first_change_is_told_once_and_commits_when_due() {
    let events = Arc::<Events>::default();
    let active = active(&events);
    assert!(!active.is_changed());
    (0..3).for_each(|_| active.change());
    assert!(active.is_changed());
    assert_eq!(events.changes.load(Ordering::SeqCst), 1);

    assert!(!active.is_due() && !active.wrote(8192), "not yet");
    assert!(active.wrote(1));
    assert!(!active.wrote(1 << 20) && !active.is_due(), "one at a time");
    events.fail.store(true, Ordering::SeqCst);
    active.commit_in_background().unwrap_err();
    assert!(active.is_due(), "a failed one is due again");
    events.fail.store(false, Ordering::SeqCst);
    active.commit_in_background().unwrap();
    assert!(!active.is_due());
    assert_eq!(events.commits.load(Ordering::SeqCst), 2);
}
