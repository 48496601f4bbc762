//! Our controller's data path over upstream's replicas, alone and beside ours.

use crate::support::{Address, Image, Kind, Lab, Load, MIB, Mix, Replica, check_each, eventually};
use crate::{each, replicas};
use dbs_frontend::Listen;
use longhorn_controller::frontend::{SocketFrontend, SocketOptions};
use longhorn_controller::path::{
    BackendAddress, Events, Mode, Path, PathKind, PathOptions, ReplicaId,
};
use std::sync::Arc;

const SIZE: usize = 16 * MIB;

struct Nobody;

impl Events for Nobody {
    fn faulted(&self, _: ReplicaId, _: &str) {}
}

/// A path over open replicas, and a socket to it.
fn path(lab: &Lab, replicas: &[&Replica]) -> (SocketFrontend, Arc<Path>, Address) {
    let options = PathOptions { reactors: 2, ..PathOptions::default() };
    let path = Path::new(options, SIZE as u64, Arc::new(Nobody)).unwrap();
    for (replica, id) in replicas.iter().zip(0..) {
        replica.rpc().open(SIZE as i64);
        let Address::Port(port) = replica.data() else { panic!("no port") };
        let backend = BackendAddress::Remote(Listen::Tcp("127.0.0.1".into(), port));
        path.add(id, &replica.url(), &backend, Mode::Rw).unwrap();
    }
    let socket = lab.path().join("longhorn-path.sock");
    let options = SocketOptions::at(Listen::Unix(socket.clone()));
    let frontend = SocketFrontend::start(&path, &options).unwrap();
    (frontend, path, Address::Socket(socket))
}

#[test]
fn our_path_over_upstreams_replicas() {
    let Some(lab) = Lab::new("our_path_over_upstreams_replicas") else { return };
    let mut replicas = replicas(&lab, "", SIZE, &[Kind::Stock, Kind::Stock, Kind::Stock]);
    let (frontend, path, address) = path(&lab, &each(&replicas));
    assert!(path.stats().replicas.iter().all(|replica| !replica.flushes));
    let load = Load::start(&address, Image::zero(SIZE), Mix { unmaps: 5, ..Mix::default() });
    load.go_on(1000);
    drop(path.pause(false));
    load.go_on(200);
    replicas[2].kill();
    eventually("the killed replica is ERR", || path.mode(2) == Some(Mode::Err));
    path.remove(2);
    load.go_on(500);
    let mut image = load.stop();
    assert_eq!((path.mode(0), path.mode(1)), (Some(Mode::Rw), Some(Mode::Rw)));
    check_each("behind our path", &mut image, &[&replicas[0], &replicas[1]]);
    assert_eq!(path.stats().errors, [0; PathKind::ALL.len()]);
    drop(frontend);
}

#[test]
fn our_path_over_replicas_of_both_kinds() {
    let Some(lab) = Lab::new("our_path_over_replicas_of_both_kinds") else { return };
    let replicas = replicas(&lab, "", SIZE, &[Kind::Stock, Kind::Ours]);
    let (frontend, path, address) = path(&lab, &each(&replicas));
    let load = Load::start(&address, Image::zero(SIZE), Mix::default());
    load.go_on(1000);
    let mut image = load.stop();
    check_each("behind our path", &mut image, &each(&replicas));
    let flushes: Vec<bool> = path.stats().replicas.iter().map(|r| r.flushes).collect();
    assert_eq!(flushes, replicas.iter().map(|r| r.kind() == Kind::Ours).collect::<Vec<_>>());
    drop(frontend);
}
