//! A server and those of its clients who wait for a backup store that does not answer.

use crate::support::Place;
use dbs_control::api::Request;
use dbs_core::{Backing, OpenOptions, Store};
use dbs_nbd::{Client, ClientOptions, ExportRules, Failure, Listen};
use dbs_server::serve::{ServeOptions, Serving};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const SIZE: u64 = 1 << 20;

/// A file that says nothing until it is told to.
#[derive(Default)]
struct Mute {
    /// Reads that wait, the most there were at once, and whether they are answered.
    state: Mutex<(usize, usize, bool)>,
    changed: Condvar,
}

impl Mute {
    fn speak(&self) {
        self.state.lock().unwrap().2 = true;
        self.changed.notify_all();
    }
}

impl Backing for Mute {
    fn identity(&self) -> &str {
        "mute"
    }

    fn name(&self) -> String {
        "mute".to_owned()
    }

    fn size(&self) -> u64 {
        SIZE
    }

    fn read_at(&self, _offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        state.1 = state.1.max(state.0);
        let mut state = self.changed.wait_while(state, |(.., speaks)| !*speaks).unwrap();
        state.0 -= 1;
        buf.fill(7);
        Ok(())
    }

    fn is_far(&self) -> bool {
        true
    }
}

/// A server with four workers of a store with volume `near`, and `far`, which rests on the file.
fn serve(place: &Place, file: &Arc<Mute>) -> Serving {
    let far: Arc<dyn Backing> = file.clone();
    let store = Store::open(&place.store(), &OpenOptions::default()).unwrap();
    store.create_volume("near", SIZE).unwrap();
    store.create_backed("far", SIZE, &far).unwrap();
    store.close().unwrap();
    let options = ServeOptions {
        store: place.store(),
        open: OpenOptions { backing: vec![far], ..OpenOptions::default() },
        nbd: vec![Listen::Unix(place.path("nbd"))],
        inherited: Vec::new(),
        exports: ExportRules::default(),
        vhost_user: None,
        nvme: Default::default(),
        tls: None,
        reactors: Some(1),
        spin: Duration::ZERO,
        workers: 4,
        runtime_dir: place.path("run"),
        control: None,
        access: dbs_control::Access::default(),
        commit_interval: Duration::from_secs(1),
    };
    Serving::start(&options).unwrap()
}

fn connect(socket: &Path, volume: &str) -> Client<UnixStream> {
    Client::connect_unix(socket, volume, &ClientOptions::default()).unwrap()
}

/// However many connections wait for a file that does not answer: others find a worker.
#[test]
fn who_waits_for_a_silent_file_leaves_workers_to_others() {
    let (place, file) = (Place::with_store(), Arc::new(Mute::default()));
    let serving = serve(&place, &file);
    let socket = place.path("nbd");
    let waiting: Vec<_> = (0..6)
        .map(|block| {
            let mut client = connect(&socket, "far");
            thread::spawn(move || {
                let mut found = vec![0; 4096];
                client.read_at(block * 4096, &mut found).map(|()| found)
            })
        })
        .collect();
    let in_flight = || {
        let top = serving.execute(&Request::Top).unwrap();
        let of = |client: &serde_json::Value| client["load"]["in_flight"].as_u64().unwrap_or(0);
        top["clients"].as_array().unwrap().iter().map(of).sum::<u64>()
    };
    let late = Instant::now() + Duration::from_secs(60);
    while in_flight() < 6 {
        assert!(Instant::now() < late, "the server does not say what waits");
        thread::sleep(Duration::from_millis(5));
    }
    // A part of a block is nothing that a reactor does alone.
    let (answered, answer) = channel();
    let mut client = connect(&socket, "near");
    thread::spawn(move || answered.send(client.write_at(512, &[3; 512], false)));
    answer.recv_timeout(Duration::from_secs(60)).expect("no worker is left").unwrap();
    assert_eq!(file.state.lock().unwrap().1, 2, "half of the workers");
    file.speak();
    for client in waiting {
        assert!(client.join().unwrap().unwrap() == vec![7; 4096]);
    }
    serving.stop().unwrap();
}

/// Clients see the end of the server, and no error of a store that is closed, whoever asks it something meanwhile.
#[test]
fn a_server_that_somebody_asks_ends_its_connections() {
    let (place, file) = (Place::with_store(), Arc::new(Mute::default()));
    let serving = serve(&place, &file);
    let mut client = connect(&place.path("nbd"), "near");
    client.read_at(0, &mut [0; 4096]).unwrap();
    let asked = serving.asked();
    serving.stop().unwrap();
    let error = client.read_at(0, &mut [0; 4096]).unwrap_err();
    let refused = error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>());
    assert!(refused.is_none(), "{error}");
    drop(asked);
}
