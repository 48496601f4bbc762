//! What a replica lets its connections do, and when writes are durable.

use crate::support::{DRIVERS, Events, MIB, Replica, Setup, eventually, pattern};
use dbs_core::{OpenOptions, Store, TailPlace};
use dbs_frontend::{Listen, Listener};
use longhorn_data::{Access, Active, DataOptions, DataServer, Durability, Gate, Target, Wake};
use longhorn_testing::{ClientError, DataClient};
use longhorn_wire::frame::{Header, Type};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

fn refused(text: &str) -> ClientError {
    ClientError::Replica(text.to_owned())
}

#[test]
fn a_closed_replica_answers_errors_and_its_connections_stay_until_it_is_open_again() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        for _ in 0..3 {
            let client = replica.client(2);
            client.write(0, &[1; 4096]).unwrap();
            assert!(replica.gate.set(Access::not_open("closed")));
            let gone = refused("replica no longer exist");
            assert_eq!(client.read(0, 4096), Err(gone.clone()));
            assert_eq!(client.write(0, &[2; 4096]), Err(gone.clone()));
            assert_eq!(client.write(0, &[]), Err(gone.clone()));
            assert_eq!(client.unmap(0, 4096), Err(gone));
            assert_eq!(client.ping(), Err(refused("ping failure: replica state closed")));
            // A controller connects before it opens.
            let next = replica.client(2);
            assert_eq!(next.ping(), Err(refused("ping failure: replica state closed")));
            assert!(replica.gate.set(Access::Open(replica.active.clone())));
            next.ping().unwrap();
            assert_eq!(next.read(0, 4096).unwrap(), [1; 4096]);
            assert!(matches!(client.read(0, 4096), Err(ClientError::Lost(_))));
        }
        replica.finish();
    }
}

/// The controller that wrote is gone, the next one has opened the replica: what the first one sent and
/// nobody has taken out of its socket yet would destroy what the second one writes.
#[test]
fn what_an_earlier_session_sent_is_not_carried_out() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let write = Header::with_payload(Type::Write, 1, 0, 4096);
        let bytes = [write.encode().as_slice(), &[3; 4096]].concat();
        // Before the close: nothing, half a header, half a payload.
        for half in [0, 13, 2000] {
            let mut old = replica.raw();
            old.ask(write, &[1; 4096]);
            old.stream.write_all(&bytes[..half]).unwrap();
            assert!(replica.gate.set(Access::not_open("closed")));
            let next = replica.client(2);
            next.ping().unwrap_err();
            assert!(replica.gate.set(Access::Open(replica.active.clone())));
            next.write(0, &[2; 4096]).unwrap();
            old.stream.write_all(&bytes[half..]).unwrap();
            assert!(old.is_closed(), "{half}");
            assert_eq!(next.read(0, 4096).unwrap(), [2; 4096], "{half}");
        }
        replica.finish();
    }
}

#[test]
fn pings_tell_the_truth() {
    let replica = Setup::default().start().unwrap();
    let client = replica.client(1);
    client.ping().unwrap();
    *replica.events.trouble.lock().unwrap() = Some("the store failed".to_owned());
    assert_eq!(client.ping(), Err(refused("the store failed")));
    *replica.events.trouble.lock().unwrap() = None;
    client.ping().unwrap();
    drop(client);
    replica.finish();
}

#[test]
fn the_first_change_is_told_before_it_is_acknowledged() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let client = replica.client(2);
        // By others, so that reactors could write there alone.
        replica.events.volume.write_at(0, &[9; 65536], false).unwrap();
        client.read(0, 4096).unwrap();
        client.ping().unwrap();
        client.write(17 * MIB, &[1; 4096]).unwrap_err();
        assert_eq!(replica.events.first_changes.load(Ordering::SeqCst), 0);
        *replica.events.delay.lock().unwrap() = Duration::from_millis(100);
        thread::scope(|scope| {
            for offset in [0, 8192, 12_289] {
                let (client, events) = (&client, &replica.events);
                scope.spawn(move || {
                    client.write(offset, &[1; 4096]).unwrap();
                    assert_eq!(events.first_changes.load(Ordering::SeqCst), 1);
                });
            }
        });
        assert_eq!(replica.events.revision.load(Ordering::SeqCst), 3);
        drop(client);
        replica.finish();
    }
}

#[test]
fn the_revision_counts_changes_whatever_their_size() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let client = replica.client(2);
        client.write(0, &[]).unwrap();
        client.write(0, &[1; 4096]).unwrap();
        client.write(1, &[1; 3]).unwrap();
        client.write(0, &pattern(1, 3 * MIB as usize)).unwrap();
        client.unmap(0, 0).unwrap();
        client.unmap(0, 100).unwrap();
        client.unmap(0, 65536).unwrap();
        client.read(0, 4096).unwrap();
        client.ping().unwrap();
        client.write(16 * MIB, &[1; 512]).unwrap_err();
        assert_eq!(replica.events.revision.load(Ordering::SeqCst), 7);
        drop(client);
        replica.finish();
    }
}

/// Once `set` has returned, nothing that was let through before still runs, and the store is not
/// in use.
#[test]
fn closing_waits_for_what_is_in_flight() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let client = replica.client(2);
        client.write(0, &[1; 4096]).unwrap();
        let held = replica.events.delay.lock().unwrap();
        let unmap = client.submit(Type::Unmap, 0, 4096, &[]).unwrap();
        eventually("it runs", || replica.events.unmapping.load(Ordering::SeqCst) == 1);
        assert!(!replica.gate.set_within(Access::not_open("closed"), Duration::from_millis(20)));
        assert_eq!(
            client.read(0, 1),
            Err(refused("replica no longer exist")),
            "others do not wait"
        );
        let gate = replica.gate.clone();
        let setting = thread::spawn(move || gate.set(Access::not_open("error")));
        thread::sleep(Duration::from_millis(50));
        assert!(!setting.is_finished());
        drop(held);
        assert!(setting.join().unwrap());
        assert_eq!(unmap.wait().unwrap().header.size, 4096, "it was answered well");
        drop(client);
        replica.finish();
    }
}

/// The store is closed and opened again while clients send whatever they can: no reply is wrong,
/// nothing that was acknowledged is lost.
#[test]
fn closed_and_opened_again_under_load() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let Replica { dir, path, store, events, active, gate, service, server } = replica;
        drop(active);
        let address = service.as_ref().unwrap().addresses()[1].clone();
        let (stop, acknowledged) = (AtomicU64::new(0), AtomicU64::new(0));
        let events = Mutex::new(Some((store, events)));
        let open = || {
            let store = Store::open(&path, &OpenOptions::default()).unwrap();
            let volume = store.volume("v").unwrap();
            let told = Arc::new(Events {
                store: store.clone(),
                volume: volume.clone(),
                first_changes: AtomicU64::new(0),
                commits: AtomicU64::new(0),
                revision: AtomicU64::new(0),
                delay: Mutex::default(),
                unmapping: AtomicU64::new(0),
                trouble: Mutex::default(),
                panics: Default::default(),
            });
            let target = Target::Volume { store: store.clone(), volume };
            assert!(gate.set(Access::Open(Arc::new(Active::new(target, told.clone())))));
            *events.lock().unwrap() = Some((store, told));
        };
        let close = || {
            assert!(gate.set(Access::not_open("closed")));
            let (store, told) = events.lock().unwrap().take().unwrap();
            assert!(Arc::into_inner(told).is_some(), "somebody still has it");
            store.close().unwrap();
        };
        thread::scope(|scope| {
            for mine in 0..3_u64 {
                let (address, stop, acknowledged) = (&address, &stop, &acknowledged);
                scope.spawn(move || {
                    let mut client = DataClient::connect(address, 2).unwrap();
                    let mut last = [0; 4];
                    let mut round = 0_u64;
                    while stop.load(Ordering::SeqCst) == 0 {
                        round += 1;
                        let place = (round % 4) as usize;
                        let offset = mine * MIB + place as u64 * 8192 + (round % 3) * 100;
                        let offset = if place == 0 { mine * MIB } else { offset };
                        match client.write(offset, &pattern(round, 4096)) {
                            Ok(()) => {
                                if place == 0 {
                                    last[0] = round;
                                }
                                acknowledged.fetch_add(1, Ordering::SeqCst);
                            }
                            // It is of an earlier session.
                            Err(ClientError::Lost(_)) => {
                                client = DataClient::connect(address, 2).unwrap();
                                continue;
                            }
                            Err(error) => assert_eq!(error, refused("replica no longer exist")),
                        }
                        if place == 0 && last[0] == round {
                            match client.read(offset, 4096) {
                                Ok(data) => assert!(data == pattern(round, 4096)),
                                Err(ClientError::Lost(_)) => {}
                                Err(error) => assert_eq!(error, refused("replica no longer exist")),
                            }
                        }
                    }
                });
            }
            for _ in 0..6 {
                let target = acknowledged.load(Ordering::SeqCst) + 30;
                eventually("writes go on", || acknowledged.load(Ordering::SeqCst) >= target);
                close();
                open();
            }
            stop.store(1, Ordering::SeqCst);
        });
        close();
        drop((service, server));
        assert!(Store::check_path(&path).unwrap().findings.is_empty());
        drop(dir);
    }
}

struct Waking {
    calls: AtomicU64,
    takes: Duration,
    fails: AtomicU64,
    opens: Mutex<Option<(Arc<Gate>, Arc<Active>)>>,
}

impl Wake for Waking {
    fn wake(&self) -> Result<(), String> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        thread::sleep(self.takes);
        if self.fails.load(Ordering::SeqCst) > 0 {
            self.fails.fetch_sub(1, Ordering::SeqCst);
            return Err("the old process does not let go".to_owned());
        }
        if let Some((gate, active)) = self.opens.lock().unwrap().take() {
            assert!(gate.set(Access::Open(active)));
        }
        Ok(())
    }
}

#[test]
fn a_dormant_replica_wakes_once_and_answers_what_waited() {
    for driver in DRIVERS {
        let Some(replica) = Setup::with_driver(driver).start() else { continue };
        let opens = Mutex::new(Some((replica.gate.clone(), replica.active.clone())));
        let (calls, fails) = (AtomicU64::new(0), AtomicU64::new(1));
        let wake = Arc::new(Waking { calls, fails, takes: Duration::from_millis(100), opens });
        assert!(replica.gate.set(Access::Dormant(wake.clone())));
        let client = replica.client(4);
        client.ping().unwrap();
        assert_eq!(wake.calls.load(Ordering::SeqCst), 0, "a ping does not wake");
        assert_eq!(client.read(0, 1), Err(refused("the old process does not let go")));
        assert_eq!(wake.calls.load(Ordering::SeqCst), 1);
        let writes: Vec<_> = (0..40_u8)
            .map(|n| client.submit(Type::Write, i64::from(n) * 5000, 0, &[n; 5000]).unwrap())
            .collect();
        client.ping().unwrap();
        writes.into_iter().for_each(|write| assert_eq!(write.wait().unwrap().header.size, 5000));
        assert_eq!(wake.calls.load(Ordering::SeqCst), 2, "for all of them");
        assert_eq!(client.read(35_000, 5000).unwrap(), [7; 5000]);
        drop((client, wake));
        replica.finish();
    }
}

/// Wakes once another replica's request has ended, as a hand-over inside one process does.
struct AfterAnother {
    other: DataClient,
    opens: (Arc<Gate>, Arc<Active>),
}

impl Wake for AfterAnother {
    fn wake(&self) -> Result<(), String> {
        let unmap = self.other.submit(Type::Unmap, 0, 4096, &[]).map_err(|e| e.to_string())?;
        let (ended, end) = mpsc::channel();
        thread::spawn(move || ended.send(unmap.wait().is_ok()));
        let ended = end.recv_timeout(Duration::from_secs(60));
        ended.map_err(|_| "the other's request does not end".to_owned())?;
        let (gate, active) = self.opens.clone();
        assert!(gate.set(Access::Open(active)));
        Ok(())
    }
}

/// Replicas that wake wait for requests of their predecessors, which need workers: the same ones.
#[test]
fn who_wakes_takes_no_worker_from_the_requests_it_waits_for() {
    for driver in DRIVERS {
        let options = DataOptions { workers: 1, ..Setup::default().options };
        let Some(replica) = (Setup { options, ..Setup::with_driver(driver) }).start() else {
            continue;
        };
        let path = replica.dir.path().join("newer.sock");
        let gate = Gate::new(Access::not_open("closed"));
        let listener = Listener::bind(&Listen::Unix(path)).unwrap();
        let newer = replica.server.serve(gate.clone(), vec![listener]).unwrap();
        let opens = (gate.clone(), replica.active.clone());
        gate.set(Access::Dormant(Arc::new(AfterAnother { other: replica.client(1), opens })));
        let client = DataClient::connect(&newer.addresses()[0], 1).unwrap();
        client.write(0, &[1; 4096]).unwrap();
        drop(client);
        newer.stop();
        assert!(gate.set(Access::not_open("closed")));
        drop(gate);
        replica.finish();
    }
}

#[test]
fn who_says_awake_and_is_not_is_an_error() {
    let replica = Setup::default().start().unwrap();
    let wake = Waking {
        calls: AtomicU64::new(0),
        takes: Duration::ZERO,
        fails: AtomicU64::new(0),
        opens: Mutex::default(),
    };
    assert!(replica.gate.set(Access::Dormant(Arc::new(wake))));
    let client = replica.client(1);
    assert_eq!(client.read(0, 1), Err(refused("the replica is still not open")));
    drop(client);
    replica.finish();
}

/// What a copy of the store's file shows of the first block: what a loss of power would have left,
/// if the medium had kept all it was given. The tail, which only a kill leaves, is not looked at.
fn after_power_loss(path: &Path) -> Vec<u8> {
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).unwrap();
    let options = OpenOptions { tail: TailPlace::None, ..OpenOptions::default() };
    let store = Store::open(&copy, &options).unwrap();
    let mut block = vec![0; 4096];
    store.volume("v").unwrap().read_at(0, &mut block).unwrap();
    store.close().unwrap();
    std::fs::remove_file(copy).unwrap();
    block
}

#[test]
fn what_is_acknowledged_is_as_durable_as_was_asked_for() {
    for driver in DRIVERS {
        for durability in [Durability::Power, Durability::Interval] {
            let commit_interval = Duration::from_secs(3600);
            let options = DataOptions { commit_interval, ..Setup::default().options };
            // Small, as it is copied often.
            let (store_size, volume_size) = (32 * MIB, 4 * MIB);
            let setup = Setup {
                durability,
                options,
                store_size,
                volume_size,
                ..Setup::with_driver(driver)
            };
            let Some(replica) = setup.start() else { continue };
            let client = replica.client(2);
            // Through a worker, which gives the extent its place, then by the reactor alone.
            for (offset, length) in [(MIB, 4096), (8193, 3000), (0, 4096)] {
                client.write(offset, &vec![7; length]).unwrap();
            }
            let commits = replica.events.commits.load(Ordering::SeqCst);
            let power = durability == Durability::Power;
            if power || replica.store.info().tail {
                assert_eq!(commits, if power { 3 } else { 0 }, "{durability:?}");
            }
            if power || replica.store.info().tail {
                let expected = if power { 7 } else { 0 };
                assert_eq!(after_power_loss(&replica.path), [expected; 4096], "{durability:?}");
            }
            if !power {
                client.flush().unwrap();
                assert_eq!(after_power_loss(&replica.path), [7; 4096]);
            }
            client.unmap(0, 4096).unwrap();
            let expected = if power || !replica.store.info().tail { 0 } else { 7 };
            assert_eq!(after_power_loss(&replica.path), [expected; 4096], "{durability:?}");
            drop(client);
            replica.finish();
        }
    }
}

/// Commits are shared by those that wait for one.
#[test]
fn power_durability_batches_commits() {
    let setup = Setup { durability: Durability::Power, ..Setup::default() };
    let replica = setup.start().unwrap();
    let client = replica.client(2);
    client.write(0, &[1; 4096]).unwrap();
    let before = replica.events.commits.load(Ordering::SeqCst);
    // No commit ends before all have come.
    let held = replica.events.delay.lock().unwrap();
    let writes: Vec<_> = (0..512_i64)
        .map(|n| client.submit(Type::Write, n * 4096, 4096, &[2; 4096]).unwrap())
        .collect();
    eventually("all are there", || replica.gate.stats().in_flight == 512);
    drop(held);
    writes.into_iter().for_each(|write| drop(write.wait().unwrap()));
    let commits = replica.events.commits.load(Ordering::SeqCst) - before;
    assert!((1..100).contains(&commits), "{commits} commits for 512 writes");
    drop(client);
    replica.finish();
}

#[test]
fn commits_come_by_time_and_by_bytes_and_not_for_nothing() {
    for driver in DRIVERS {
        let hour = Duration::from_secs(3600);
        let by_bytes = DataOptions { commit_interval: hour, ..Setup::default().options };
        let commit_bytes = MIB;
        let setup = Setup { options: by_bytes, commit_bytes, ..Setup::with_driver(driver) };
        let Some(replica) = setup.start() else { continue };
        let client = replica.client(1);
        client.write(0, &pattern(1, MIB as usize)).unwrap();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(replica.events.commits.load(Ordering::SeqCst), 0);
        client.write(MIB, &[1; 4096]).unwrap();
        eventually("a commit", || replica.events.commits.load(Ordering::SeqCst) == 1);
        drop(client);
        replica.finish();

        let commit_interval = Duration::from_millis(20);
        let by_time = DataOptions { commit_interval, ..Setup::default().options };
        let replica = Setup { options: by_time, ..Setup::with_driver(driver) }.start().unwrap();
        let client = replica.client(1);
        for round in 1..4 {
            // Overwrites, too, which leave no record to commit.
            client.write(0, &[round; 4096]).unwrap();
            let wanted = u64::from(round);
            eventually("a commit", || replica.events.commits.load(Ordering::SeqCst) >= wanted);
        }
        thread::sleep(Duration::from_millis(50));
        let commits = replica.events.commits.load(Ordering::SeqCst);
        client.read(0, 4096).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert_eq!(replica.events.commits.load(Ordering::SeqCst), commits, "for nothing");
        drop(client);
        replica.finish();
    }
}

/// What is written while a commit runs is committed by the next one, though that became due, and
/// was put off, while the first still ran.
#[test]
fn a_write_during_a_commit_is_committed_too() {
    for driver in DRIVERS {
        let commit_interval = Duration::from_millis(20);
        let options = DataOptions { commit_interval, ..Setup::default().options };
        let Some(replica) = (Setup { options, ..Setup::with_driver(driver) }).start() else {
            continue;
        };
        let client = replica.client(1);
        client.write(0, &[1; 4096]).unwrap();
        eventually("a commit", || replica.events.commits.load(Ordering::SeqCst) >= 1);
        *replica.events.delay.lock().unwrap() = Duration::from_millis(400);
        let before = replica.events.commits.load(Ordering::SeqCst);
        client.write(0, &[2; 4096]).unwrap();
        eventually("a commit", || replica.events.commits.load(Ordering::SeqCst) > before);
        // It takes many intervals.
        client.write(0, &[3; 4096]).unwrap();
        eventually("another", || replica.events.commits.load(Ordering::SeqCst) > before + 1);
        *replica.events.delay.lock().unwrap() = Duration::ZERO;
        drop(client);
        replica.finish();
    }
}

/// One server, many replicas: what one does is not seen by the others, and one ends alone.
#[test]
fn one_server_has_many_replicas() {
    let server = DataServer::start(DataOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let services: Vec<_> = (0..50)
        .map(|number| {
            let gate = Gate::new(Access::not_open(&format!("state-{number}")));
            let path = dir.path().join(format!("{number}.sock"));
            let listener = match number % 2 {
                0 => Listener::bind(&Listen::Unix(path)).unwrap(),
                _ => Listener::from_unix(UnixListener::bind(path).unwrap()).unwrap(),
            };
            server.serve(gate, vec![listener]).unwrap()
        })
        .collect();
    let clients: Vec<_> = services
        .iter()
        .map(|service| DataClient::connect(&service.addresses()[0], 2).unwrap())
        .collect();
    for (number, client) in clients.iter().enumerate() {
        let text = format!("ping failure: replica state state-{number}");
        assert_eq!(client.ping(), Err(refused(&text)));
    }
    let mut services = services;
    let gone = services.remove(7);
    let address = gone.addresses()[0].clone();
    gone.stop();
    assert!(matches!(clients[7].ping(), Err(ClientError::Lost(_))));
    assert!(DataClient::connect(&address, 1).is_err());
    assert!(matches!(clients[8].ping(), Err(ClientError::Replica(_))));
    drop(services);
    drop(server);
    assert!(matches!(clients[8].ping(), Err(ClientError::Lost(_))));
}

/// What is in flight when the service ends is answered.
#[test]
fn a_service_that_ends_answers_what_it_took() {
    for driver in DRIVERS {
        let Some(mut replica) = Setup::with_driver(driver).start() else { continue };
        let mut raw = replica.raw();
        let write = Header::with_payload(Type::Write, 1, 0, 4096);
        raw.ask(write, &[1; 4096]);
        *replica.events.delay.lock().unwrap() = Duration::from_millis(100);
        raw.send(Header::new(Type::Unmap, 2, 0, 4096), &[]);
        eventually("it runs", || replica.events.unmapping.load(Ordering::SeqCst) == 1);
        replica.service = None;
        let (reply, _) = raw.receive();
        assert_eq!((reply.sequence, reply.size), (2, 4096));
        assert_eq!(raw.receive().0.kind(), Some(Type::Close));
        assert!(raw.is_closed());
        replica.finish();
    }
}
