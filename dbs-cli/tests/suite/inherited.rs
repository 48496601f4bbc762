//! Sockets that whoever starts `dbs serve` has opened for it: systemd's socket activation.

use crate::support::{Place, run};
use dbs_nbd::{Client, ClientOptions};
use std::fs::File;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

/// `dbs --json serve` of the store, with what systemd would pass as its first socket.
fn passed(place: &Place, socket: impl Into<OwnedFd>, process: &str) -> Command {
    let mut command = Command::new("sh");
    let script =
        format!("exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID={process} exec \"$0\" \"$@\"");
    command
        .args(["-c", &script, env!("CARGO_BIN_EXE_dbs"), "--json", "serve"])
        .env_clear()
        .env("DBS_RUNTIME_DIR", place.path("run"))
        .env("DBS_STORE", place.store())
        .current_dir(place.dir.path())
        .stdin(Stdio::from(socket.into()));
    command
}

fn read(path: &Path) -> [u8; 4] {
    let mut client = Client::connect_unix(path, "v", &ClientOptions::default()).unwrap();
    let mut found = [0; 512];
    client.read_at(0, &mut found).unwrap();
    found[..4].try_into().unwrap()
}

#[test]
fn clients_come_in_through_a_socket_that_was_passed() {
    let place = Place::with_store();
    place.json("volume create v 8MiB");
    let path = place.path("passed.sock");
    let listener = UnixListener::bind(&path).unwrap();
    for round in 1..=2 {
        // Before there is a server: it waits.
        let early = std::thread::spawn({
            let path = path.clone();
            move || read(&path)
        });
        let socket = listener.try_clone().unwrap();
        let mut command = passed(&place, socket, "$$");
        let server = place.served(command.args(["--nbd", "unix:own.sock"]));
        let address = format!("unix:{}", path.display());
        assert_eq!(server.ready["nbd"], serde_json::json!([address, "unix:own.sock"]));
        assert_eq!(early.join().unwrap(), if round == 1 { [0; 4] } else { [7; 4] });
        let own = place.path("own.sock");
        let mut client = Client::connect_unix(&own, "v", &ClientOptions::default()).unwrap();
        client.write_at(0, &[7; 4096], true).unwrap();
        drop(client);
        assert_eq!(read(&path), [7; 4]);
        let (code, log) = server.stop();
        assert_eq!(code, Some(0), "{log}");
        // It is there for the next server, whose own it is not to remove.
        assert!(path.exists() && !own.exists());
    }
}

#[test]
fn what_was_passed_to_another_process_is_not_taken() {
    let place = Place::with_store();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = place.served(&mut passed(&place, listener, "1"));
    assert_eq!(server.ready["nbd"], serde_json::json!([]));
    assert_eq!(server.stop().0, Some(0));
}

#[test]
fn what_was_passed_and_is_no_socket_that_listens_is_refused() {
    let place = Place::with_store();
    let connected = UnixListener::bind(place.path("a.sock")).unwrap();
    let connected = std::os::unix::net::UnixStream::connect(
        connected.local_addr().unwrap().as_pathname().unwrap(),
    );
    let wrong: [OwnedFd; 2] = [File::open("/dev/null").unwrap().into(), connected.unwrap().into()];
    for socket in wrong {
        let refused = run(&mut passed(&place, socket, "$$")).exits(1, "no socket");
        assert!(refused.stderr.contains("file descriptor 3"), "{}", refused.stderr);
        assert!(refused.stderr.contains("no stream socket that listens"), "{}", refused.stderr);
    }
}

#[test]
fn nbd_clients_start_a_server_for_themselves() {
    let place = Place::with_store();
    place.json("volume create v 8MiB");
    let mut command = Command::new("nbdinfo");
    command.args(["--size", "--", "[", env!("CARGO_BIN_EXE_dbs"), "--quiet", "serve", "]"]);
    command.env("DBS_STORE", place.store()).env("DBS_RUNTIME_DIR", place.path("run"));
    match command.stdin(Stdio::null()).output() {
        Err(_) => println!("SKIPPED: nbdinfo is not here"),
        Ok(output) => {
            assert_eq!(String::from_utf8_lossy(&output.stdout), "8388608\n", "{output:?}")
        }
    }
    place.dbs("check").ok("closed in good order");
}
