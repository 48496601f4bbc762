//! `--enable-backend file`: plain files as replicas of a controller.

use crate::controller::{TEXT_SIZE, check, client, modes, replica, run, write};
use crate::limits::Disk;
use crate::support::*;
use longhorn_testing::{ClientError, DataClient};
use longhorn_wire::frame::Type;
use longhorn_wire::proto::controller::controller_service_client::ControllerServiceClient;
use longhorn_wire::proto::controller::*;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// A controller with these options besides those that all have. It counts revisions, as files say they do.
fn controller(place: &Place, more: &[&str]) -> Process {
    let mut command = place.program();
    command.args(["controller", "vol", "--size", TEXT_SIZE, "--current-size", TEXT_SIZE]);
    command.args(["--listen", "127.0.0.1:0", "--replica-timeout-ms", "60000"]);
    command.arg("--socket-dir").arg(place.path()).args(more);
    Process::spawn(command)
}

/// One over these files, with a socket.
fn over(place: &Place, files: &[&str]) -> Process {
    let mut more = vec!["--frontend", "socket", "--enable-backend", "file"];
    more.extend(files.iter().flat_map(|address| ["--replica", address]));
    controller(place, &more).ready()
}

fn make(path: &Path) -> String {
    File::create(path).unwrap().set_len(SIZE).unwrap();
    format!("file://{}", path.display())
}

fn files<const N: usize>(place: &Place, names: [&str; N]) -> ([PathBuf; N], [String; N]) {
    let paths = names.map(|name| place.path().join(name));
    let addresses = paths.each_ref().map(|path| make(path));
    (paths, addresses)
}

/// The controller's own service.
struct Service {
    runtime: tokio::runtime::Runtime,
    client: ControllerServiceClient<Channel>,
}

impl Service {
    fn of(engine: &Process) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let channel = Channel::from_shared(format!("http://{}", engine.field("grpc"))).unwrap();
        let channel = runtime.block_on(async { channel.timeout(TIMEOUT).connect_lazy() });
        Self { runtime, client: ControllerServiceClient::new(channel) }
    }

    fn create(&self, address: &str) -> Result<ReplicaMode, Status> {
        let address = address.to_owned();
        let request = ControllerReplicaCreateRequest { address, ..Default::default() };
        let mut client = self.client.clone();
        let created = self.runtime.block_on(client.controller_replica_create(request))?;
        Ok(created.into_inner().mode())
    }

    fn update(&self, address: &str, mode: ReplicaMode) -> ReplicaMode {
        let address =
            Some(ReplicaAddress { address: address.to_owned(), instance_name: String::new() });
        let request = Request::new(ControllerReplica { address, mode: mode.into() });
        let mut client = self.client.clone();
        self.runtime.block_on(client.replica_update(request)).unwrap().into_inner().mode()
    }

    fn start(&self, addresses: &[String]) -> Result<i32, Status> {
        let size = SIZE.cast_signed();
        let replica_addresses = addresses.to_vec();
        let request = VolumeStartRequest { replica_addresses, size, current_size: size };
        let mut client = self.client.clone();
        let started = self.runtime.block_on(client.volume_start(request))?;
        Ok(started.into_inner().replica_count)
    }

    fn shutdown(&self) {
        let mut client = self.client.clone();
        self.runtime.block_on(client.volume_shutdown(())).unwrap();
    }
}

#[test]
fn files_hold_what_a_volume_holds() {
    let place = Place::new();
    let (paths, addresses) = files(&place, ["a", "b"]);
    let names = addresses.each_ref().map(String::as_str);
    let mut engine = over(&place, &names);
    let data = client(&place);
    write(&data, 1);
    check(&data, 1);
    // Parts of blocks, and nothing beyond the end.
    let mut first = block(0, 1);
    first[700..1700].fill(7);
    data.write(700, &[7; 1000]).unwrap();
    assert!(data.read(600, 1200).unwrap() == first[600..1800]);
    assert!(data.write(SIZE - 512, &[1; 1024]).is_err() && data.read(SIZE, 512).is_err());
    data.unmap(0, 4096).unwrap();
    data.flush().unwrap();
    // What no file can do is refused, and does no harm.
    let refused = refusal(&engine, &["snapshots", "create", "s"]);
    assert!(
        refused.contains(&format!("backend {} does not support snapshots", names[0])),
        "{refused}"
    );
    assert_eq!(modes(&engine), ["RW", "RW"]);
    let expanded = 2 * SIZE;
    run(&engine, &["expand", "--size", &expanded.to_string()]);
    let shown = format!("\"size\": {expanded}");
    eventually("it is larger", || run(&engine, &["info"]).contains(&shown));
    let last = expanded - BLOCK as u64;
    data.write(last, &block(9, 9)).unwrap();
    drop(data);
    engine.stop();
    for path in &paths {
        let file = File::open(path).unwrap();
        assert_eq!(file.metadata().unwrap().len(), expanded);
        let mut content = [0; BLOCK];
        for (number, version) in [(1, 1), (499, 1), (9, 9)] {
            let at = if number == 9 { last } else { number * BLOCK as u64 };
            file.read_exact_at(&mut content, at).unwrap();
            assert_eq!(version_of(&content, number), Some(version));
        }
    }
    // The volume is what the files are; killed, it lost nothing.
    let size = expanded.to_string();
    let sizes = ["--size", &size, "--current-size", &size];
    let more = [&sizes[..], &["--frontend", "socket", "--enable-backend", "file"]].concat();
    let more = [&more[..], &["--replica", names[0], "--replica", names[1]]].concat();
    let mut engine = controller(&place, &more).ready();
    let data = client(&place);
    write(&data, 2);
    engine.kill();
    let mut engine = controller(&place, &more).ready();
    check(&client(&place), 2);
    engine.stop();
}

/// What a command says that fails.
fn refusal(engine: &Process, args: &[&str]) -> String {
    let url = format!("http://{}", engine.field("grpc"));
    let mut command = std::process::Command::new(crate::PROGRAM);
    let output = command.args(["--url", &url, "--volume-name", "vol"]).args(args).output().unwrap();
    assert!(!output.status.success(), "{args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// As upstream's tests of its controller do it.
#[test]
fn files_come_and_go_as_upstreams_do() {
    let place = Place::new();
    let (_, addresses) = files(&place, ["a", "b"]);
    let [a, b] = addresses.each_ref().map(String::as_str);
    let backends = ["--enable-backend", "tcp", "--enable-backend", "file"];
    let mut engine = controller(&place, &backends).ready();
    let service = Service::of(&engine);
    for _ in 0..3 {
        assert_eq!(service.create(a).unwrap(), ReplicaMode::Wo);
    }
    assert_eq!(modes(&engine), ["WO"]);
    let second = service.create(b).unwrap_err();
    assert!(second.message().contains("can only have one WO replica at a time"), "{second}");
    assert_eq!(service.update(a, ReplicaMode::Rw), ReplicaMode::Rw);
    assert_eq!(service.create(b).unwrap(), ReplicaMode::Wo);
    for address in [a, a, b] {
        run(&engine, &["rm-replica", address]);
    }
    assert!(modes(&engine).is_empty());
    assert_eq!(service.start(&addresses).unwrap(), 2);
    assert_eq!(modes(&engine), ["RW", "RW"]);
    let (_server, tcp) = replica(&place, "tcp");
    assert_eq!(service.create(&tcp).unwrap(), ReplicaMode::Wo, "a server beside files");
    drop(service);
    engine.stop();
}

#[test]
fn without_the_flag_no_file_is_touched() {
    let place = Place::new();
    let (paths, [address]) = files(&place, ["a"]);
    let text = format!("failed to find factory for {address}");
    let missing = place.path().join("missing");
    let mut engine = controller(&place, &["--replica", &address]);
    assert_eq!(engine.wait().code(), Some(61));
    assert!(engine.log().contains(&text), "{}", engine.log());
    assert!(engine.log().contains("--enable-backend file"), "{}", engine.log());
    let mut engine = controller(&place, &[]).ready();
    let service = Service::of(&engine);
    for path in [&paths[0], &missing] {
        let refused = service.create(&format!("file://{}", path.display())).unwrap_err();
        assert!(refused.message().contains("failed to find factory for"), "{refused}");
    }
    let other = service.create("nvme://x").unwrap_err();
    assert!(other.message().contains("failed to find factory for nvme://x"), "{other}");
    // Its connection would be waited for.
    drop(service);
    engine.stop();
    assert!(!missing.exists() && fs::read(&paths[0]).unwrap() == vec![0; SIZE as usize]);
    // Nor servers, where only files were asked for.
    let mut engine = controller(&place, &["--enable-backend", "file"]).ready();
    let refused = Service::of(&engine).create("tcp://127.0.0.1:1").unwrap_err();
    assert!(refused.message().contains("without `--enable-backend tcp`"), "{refused}");
    engine.stop();
    let mut engine = controller(&place, &["--enable-backend", "nbd"]);
    assert!(!engine.wait().success() && engine.log().contains("Unsupported backend: nbd"));
}

#[test]
fn what_is_no_plain_file_is_refused() {
    let place = Place::new();
    let (paths, [good]) = files(&place, ["good"]);
    let at = |name: &str| place.path().join(name);
    fs::create_dir(at("directory")).unwrap();
    mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", at("device")).unwrap();
    symlink(at("loop"), at("loop")).unwrap();
    symlink(at("nowhere"), at("dangling")).unwrap();
    symlink(&paths[0], at("link")).unwrap();
    let long = "x".repeat(300);
    let mut engine = controller(&place, &["--enable-backend", "file"]).ready();
    let service = Service::of(&engine);
    let address = |name: &str| format!("file://{}", at(name).display());
    for (name, text) in [
        ("directory", "is a directory"),
        ("pipe", "is no regular file"),
        ("device", "is a device"),
        ("dangling", "there is no file"),
        ("missing", "truncate -s"),
        ("loop", "opening"),
        (long.as_str(), "opening"),
        ("nul\0", "opening"),
        ("good/", "opening"),
    ] {
        let refused = service.create(&address(name)).unwrap_err();
        assert!(refused.message().contains(text), "{name}: {refused}");
        assert_ne!(refused.code(), Code::Internal, "{refused}");
    }
    assert!(service.create("file://").is_err() && !at("nowhere").exists());
    // A link to a file is that file, which is one replica, of one controller.
    assert_eq!(service.create(&address("link")).unwrap(), ReplicaMode::Wo);
    service.update(&address("link"), ReplicaMode::Rw);
    let twice = |service: &Service| {
        let refused = service.create(&good).unwrap_err();
        assert!(refused.message().contains("is in use"), "{refused}");
    };
    twice(&service);
    let mut other = controller(&place, &["--enable-backend", "file"]).ready();
    twice(&Service::of(&other));
    run(&engine, &["rm-replica", &address("link")]);
    assert_eq!(Service::of(&other).create(&good).unwrap(), ReplicaMode::Wo);
    drop(service);
    other.stop();
    engine.stop();
}

/// With `--upgrade` the older controller may have the file a little longer. Nobody else may, and no other file.
#[test]
fn a_takeover_shares_a_file_with_the_older_controller_alone() {
    let place = Place::new();
    let (paths, [a, b]) = files(&place, ["a", "b"]);
    let link = place.path().join("link");
    symlink(&paths[0], &link).unwrap();
    let link = format!("file://{}", link.display());
    let mut old = over(&place, &[&a]);
    let upgrade = ["--upgrade", "--frontend", "socket", "--enable-backend", "file"];
    let twice = [&upgrade[..], &["--replica", &a, "--replica", &link]].concat();
    let mut new = controller(&place, &twice).ready();
    // One file is not two replicas.
    let is_one = |modes: &[String]| modes.iter().filter(|mode| *mode == "RW").count() == 1;
    assert!(is_one(&modes(&new)), "{:?}", modes(&new));
    new.wait_for("is in use by another replica of this process");
    // A file that is added later is taken over from nobody.
    let mut other = controller(&place, &["--enable-backend", "file"]).ready();
    let others = Service::of(&other);
    assert_eq!(others.create(&b).unwrap(), ReplicaMode::Wo);
    let service = Service::of(&new);
    let refused = service.create(&b).unwrap_err();
    assert!(refused.message().contains("is in use by another backend"), "{refused}");
    let data = client(&place);
    write(&data, 1);
    old.kill();
    // The lock is the newer one's with the next I/O.
    write(&data, 2);
    check(&data, 2);
    run(&other, &["rm-replica", &b]);
    let refused = others.create(&a).unwrap_err();
    assert!(refused.message().contains("is in use by another backend"), "{refused}");
    drop((data, service, others));
    other.stop();
    new.stop();
}

/// A volume that is shut down and started again has no older controller any more.
#[test]
fn only_the_first_start_of_a_takeover_shares_a_file() {
    let place = Place::new();
    let (_, [a, b]) = files(&place, ["a", "b"]);
    let mut old = controller(&place, &["--enable-backend", "file"]).ready();
    let olds = Service::of(&old);
    assert_eq!(olds.create(&a).unwrap(), ReplicaMode::Wo);
    let mut new = controller(&place, &["--upgrade", "--enable-backend", "file"]).ready();
    let service = Service::of(&new);
    assert_eq!(
        service.start(std::slice::from_ref(&a)).unwrap(),
        1,
        "the start without replicas was none"
    );
    service.shutdown();
    service.start(&[a]).unwrap_err();
    new.wait_for("is in use by another backend");
    assert_eq!(service.start(&[b]).unwrap(), 1);
    drop((service, olds));
    new.stop();
    old.stop();
}

/// Reads go to one or the other.
#[test]
fn a_file_and_a_server_agree_on_what_was_discarded() {
    let place = Place::new();
    let (_, [file]) = files(&place, ["a"]);
    let (_server, tcp) = replica(&place, "r");
    let backends = ["--enable-backend", "tcp", "--enable-backend", "file"];
    let mut engine = controller(&place, &backends).ready();
    let service = Service::of(&engine);
    for address in [&file, &tcp] {
        service.create(address).unwrap();
        assert_eq!(service.update(address, ReplicaMode::Rw), ReplicaMode::Rw);
    }
    drop(service);
    run(&engine, &["frontend", "start", "socket"]);
    let data = client(&place);
    write(&data, 1);
    let length = 8 * BLOCK as u32;
    data.unmap(0, length).unwrap();
    for _ in 0..8 {
        assert!(data.read(0, length).unwrap().iter().all(|byte| *byte == 0));
    }
    let behind = data.read(length.into(), BLOCK as u32).unwrap();
    assert_eq!(version_of(&behind, 8), Some(1));
    engine.stop();
}

#[test]
fn a_file_that_goes_wrong_is_given_up() {
    let place = Place::new();
    let (paths, addresses) = files(&place, ["cut", "gone", "good"]);
    let mut engine = over(&place, &addresses.each_ref().map(String::as_str));
    let data = client(&place);
    write(&data, 1);
    File::options().write(true).open(&paths[0]).unwrap().set_len(4096).unwrap();
    // It is not made as long again by a write behind its end, with zeros in between.
    write(&data, 2);
    check(&data, 2);
    eventually("the one that was cut off shows", || modes(&engine)[0] == "ERR");
    assert_eq!(fs::metadata(&paths[0]).unwrap().len(), 4096);
    fs::remove_file(&paths[1]).unwrap();
    eventually("the one that is gone shows", || modes(&engine) == ["ERR", "ERR", "RW"]);
    check(&data, 2);
    write(&data, 3);
    check(&data, 3);
    let log = engine.log();
    assert!(log.contains("was cut off") && log.contains("was removed or replaced"), "{log}");
    drop(data);
    engine.stop();
    let Some(_disk) = Disk::mount(&place.path().join("small"), "1m") else {
        eprintln!("SKIPPED a file on a full disk: a tmpfs cannot be mounted (not root)");
        return;
    };
    let full = make(&place.path().join("small/full"));
    let mut engine = over(&place, &[&full]);
    let data = client(&place);
    match until_full(&data) {
        ClientError::Unexpected(reply) => assert_eq!(reply.kind(), Some(Type::NoSpace)),
        other => panic!("{other}"),
    }
    assert_eq!(modes(&engine), ["RW"], "the last one can be read");
    data.read(0, 4096).unwrap();
    engine.stop();
    let mut engine = over(&place, &[&full, &addresses[2]]);
    let data = client(&place);
    for number in 0..1024 {
        data.write(number * BLOCK as u64, &block(number, 4)).unwrap();
    }
    eventually("the full one shows", || modes(&engine) == ["ERR", "RW"]);
    for number in 0..1024 {
        let content = data.read(number * BLOCK as u64, BLOCK as u32).unwrap();
        assert_eq!(version_of(&content, number), Some(4), "block {number}");
    }
    engine.stop();
}

/// Writes until that fails; how.
fn until_full(data: &DataClient) -> ClientError {
    let write = |number: u64| data.write(number * BLOCK as u64, &block(number, 1));
    (0..SIZE / BLOCK as u64).find_map(|number| write(number).err()).unwrap()
}
