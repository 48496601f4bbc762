//! Frontends of a controller that is a process, with the programs people use.

use crate::controller::*;
use crate::support::*;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// Whether a program is installed; says so if it is not.
fn have(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if !found {
        println!("SKIPPED a client of the frontend nbd: needs {program}");
    }
    found
}

/// Runs a program, for ten minutes at most, which must succeed; its output goes through a file.
fn client_of(place: &Place, program: &str, args: &[&str]) -> String {
    let path = place.path().join("output");
    let output = fs::File::create(&path).unwrap();
    let mut command = Command::new("timeout");
    command.args(["600", program]).args(args).stdin(Stdio::null());
    command.stdout(output.try_clone().unwrap()).stderr(output);
    let status = command.status().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert!(status.success(), "{program} {args:?}: {status}\n{text}");
    text
}

fn endpoint(engine: &Process) -> String {
    let info: serde_json::Value = serde_json::from_str(&run(engine, &["info"])).unwrap();
    assert_eq!(info["frontend"], "nbd");
    info["endpoint"].as_str().unwrap().to_owned()
}

fn image(path: &Path) {
    let mut random = fastrand::Rng::with_seed(5);
    let mut bytes = vec![0; SIZE as usize];
    random.fill(&mut bytes[..20 << 20]);
    fs::write(path, bytes).unwrap();
}

/// A newer controller that cannot serve must not have taken anything from the older one by then.
#[test]
fn a_taken_port_costs_an_older_controller_nothing() {
    let place = Place::new();
    let (_older, address) = replica(&place, "a");
    let mut engine = controller(&place, &[&address], &[]).ready();
    let data = client(&place);
    write(&data, 1);
    let newer = place.start("a", &["--disableRevCounter"]);
    let newer = format!("tcp://{}", newer.field("grpc"));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _taken = TcpListener::bind(taken).unwrap();
    let taken = taken.to_string();
    for option in ["--listen", "--metrics"] {
        let mut refused = controller(&place, &[&newer], &["--upgrade", option, &taken]);
        assert_eq!(refused.wait().code(), Some(1));
        assert!(refused.log().contains(&format!("cannot listen on {taken}")), "{}", refused.log());
        check(&client(&place), 1);
        write(&data, 1);
    }
    engine.stop();
}

/// Found by review: the older one's socket was gone, and no client came to it any more.
#[test]
fn an_upgrade_that_is_refused_leaves_the_older_ones_socket() {
    let place = Place::new();
    let (_older, address) = replica(&place, "a");
    let more = ["--nbd-listen", &format!("unix:{}", place.path().join("more.sock").display())];
    let _engine = controller_with(&place, "nbd", &[&address], &more).ready();
    let socket = place.path().join("longhorn/nbd-vol.sock");
    let greeting = || {
        let mut greeting = [0; 8];
        UnixStream::connect(&socket).unwrap().read_exact(&mut greeting).unwrap();
        greeting
    };
    assert_eq!(&greeting(), b"NBDMAGIC");
    let newer = place.start("a", &["--disableRevCounter"]);
    let newer = format!("tcp://{}", newer.field("grpc"));
    let with =
        |more: &[&str]| controller_with(&place, "nbd", &[&newer], &[&["--upgrade"], more].concat());
    let mut refused = with(&more);
    assert_eq!(refused.wait().code(), Some(1));
    assert!(refused.log().contains("another process listens on it"), "{}", refused.log());
    assert_eq!(&greeting(), b"NBDMAGIC");
    // With nothing in its way it has the place.
    let mut newer = with(&[]).ready();
    assert_eq!(&greeting(), b"NBDMAGIC");
    newer.stop();
    assert_eq!(fs::read_dir(socket.parent().unwrap()).unwrap().count(), 0);
}

/// Found by review: a second controller, which was refused, took the list along by which the next one takes a block
/// device over; that removed the device instead.
#[test]
fn a_controller_that_is_refused_removes_no_list_of_another() {
    let place = Place::new();
    let (replica, address) = replica(&place, "a");
    let list = place.path().join("longhorn/ublk-vol.replicas");
    fs::create_dir_all(list.parent().unwrap()).unwrap();
    fs::write(&list, "{}").unwrap();
    let other = replica.open();
    let mut refused = controller_with(&place, "nbd", &[&address], &[]);
    assert_eq!(refused.wait().code(), Some(61), "{}", refused.log());
    assert!(list.exists());
    replica.rpc().close().unwrap();
    drop(other);
    let mut engine = controller_with(&place, "nbd", &[&address], &[]).ready();
    assert!(!list.exists(), "nobody tells that device what is written now");
    engine.stop();
}

#[test]
fn nbd_clients_find_a_volume_over_three_replicas() {
    let place = Place::new();
    let mut replicas: Vec<_> = ["a", "b", "c"].map(|name| replica(&place, name)).into();
    let addresses: Vec<&str> = replicas.iter().map(|(_, address)| address.as_str()).collect();
    let more = ["--reactors", "2", "--nbd-listen", "tcp:0"];
    let mut engine = controller_with(&place, "nbd", &addresses, &more).ready();
    let uri = endpoint(&engine);
    let listening = engine.wait_for("nbd=tcp:127.0.0.1:");
    let port = listening.rsplit(':').next().unwrap().trim().to_owned();
    let tcp = format!("nbd://127.0.0.1:{port}/vol");
    if have("nbdinfo") {
        assert_eq!(client_of(&place, "nbdinfo", &["--size", &uri]).trim(), TEXT_SIZE);
        let text = client_of(&place, "nbdinfo", &["--json", &tcp]);
        let info: serde_json::Value = serde_json::from_str(&text).unwrap();
        let export = &info["exports"][0];
        for can in ["can_multi_conn", "can_trim", "can_zero", "can_fua", "can_flush"] {
            assert_eq!(export[can], true, "{can}");
        }
    }
    let file = place.path().join("image");
    image(&file);
    let file = file.to_str().unwrap();
    if have("nbdcopy") {
        client_of(&place, "nbdcopy", &["--flush", "--connections=4", file, &uri]);
        replicas[1].0.kill();
        if have("qemu-img") {
            client_of(&place, "qemu-img", &["compare", "-f", "raw", "-F", "raw", file, &uri]);
        }
        let back = place.path().join("back");
        client_of(&place, "nbdcopy", &[&tcp, back.to_str().unwrap()]);
        assert!(fs::read(back).unwrap() == fs::read(file).unwrap());
    }
    if have("fio") && client_of(&place, "fio", &["--enghelp"]).contains("nbd") {
        let uri = format!("--uri={uri}");
        let load = ["--name=x", "--ioengine=nbd", &uri, "--rw=randwrite", "--bsrange=512-64k"];
        let check = ["--size=8m", "--iodepth=32", "--verify=crc32c", "--verify_fatal=1"];
        // Nothing is left where the test runs.
        let check = [&check[..], &["--verify_state_save=0"]].concat();
        client_of(&place, "fio", &[&load[..], &check[..]].concat());
    }
    run(&engine, &["frontend", "shutdown"]);
    assert_eq!(endpoint(&engine), "");
    run(&engine, &["frontend", "start", "nbd"]);
    assert_eq!(endpoint(&engine), uri);
    engine.stop();
    assert!(!place.path().join("longhorn/nbd-vol.sock").exists());
}

#[test]
fn frontends_that_cannot_be_had_name_the_way_out() {
    let place = Place::new();
    let text = |frontend: &str| {
        let mut engine = controller_with(&place, frontend, &[], &["--null-backend"]);
        assert_eq!(engine.wait().code(), Some(1));
        engine.log()
    };
    assert!(text("rest").contains("socket"));
    if Path::new("/dev/ublk-control").exists() {
        println!("SKIPPED what is said without the driver: this kernel has ublk");
        return;
    }
    let device = text("ublk");
    assert!(device.contains("modprobe ublk_drv"), "{device}");
    assert!(!place.path().join("longhorn/ublk-vol.json").exists());
}
