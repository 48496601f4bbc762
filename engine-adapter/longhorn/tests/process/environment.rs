//! Options from environment variables: whoever starts these processes in a cluster passes fixed arguments.

use crate::controller::{client, command_of, free_ports, replica};
use crate::support::*;
use std::process::{Command, Output};

const REPLICA: [(&str, &str); 13] = [
    ("DBS_REPLICA_DURABILITY", "power"),
    ("DBS_COMMIT_INTERVAL", "250ms"),
    ("DBS_COMMIT_BYTES", "8mb"),
    ("DBS_REPLICA_METRICS", "127.0.0.1:0"),
    ("DBS_REPLICA_REACTORS", "2"),
    ("DBS_WORKERS", "3"),
    ("DBS_SPIN", "0"),
    ("DBS_EXTENT_SIZE", "2mb"),
    ("DBS_CHECKSUMS", "false"),
    ("DBS_CHECKSUM_CACHE", "1mb"),
    ("DBS_TAKE_OVER", "100mb"),
    // Their values are the test's own.
    ("DBS_TAIL", ""),
    ("DBS_REPLICA_STORE", ""),
];
const CONTROLLER: [(&str, &str); 11] = [
    ("DBS_CONTROLLER_REACTORS", "2"),
    ("DBS_REPLICA_CONNECTIONS", "3"),
    ("DBS_QUEUE_DEPTH", "16"),
    ("DBS_FLUSH_TIMEOUT", "30"),
    ("DBS_PREFER_LOCAL", "true"),
    ("DBS_CONTROLLER_METRICS", "127.0.0.1:0"),
    ("DBS_BLOCK_DEVICE", "iscsi"),
    ("DBS_DURABILITY", "power"),
    ("DBS_FRONTEND_QUEUES", "1"),
    ("DBS_FRONTEND_DEPTH", "32"),
    ("DBS_DEVICE_DIR", "/nonexistent"),
];

fn replica_command(place: &Place) -> Command {
    let mut command = place.program();
    command.args(crate::REPLICA).arg(place.replica("r"));
    command.args(["--size", "64mb", "--listen", &format!("127.0.0.1:{}", free_ports())]);
    command
}

fn has(line: &str, variable: &str, value: &str) -> bool {
    line.split(' ').any(|pair| pair == format!("{variable}={value}"))
}

#[test]
fn a_replica_s_options_come_from_its_environment() {
    let place = Place::new();
    let mut command = replica_command(&place);
    let tail = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    command.envs(REPLICA).env("DBS_TAIL", tail.path());
    // What is given as an argument holds.
    command.args(["--commit-interval", "2s"]);
    let mut replica = Process::spawn(command).ready();
    let line = replica.wait_for("event=environment");
    for (variable, value) in REPLICA {
        let expected = !value.is_empty() && variable != "DBS_COMMIT_INTERVAL";
        assert_eq!(has(&line, variable, value), expected, "{variable}: {line}");
    }
    assert!(has(&line, "DBS_TAIL", &tail.path().display().to_string()), "{line}");
    assert!(replica.metric("dbs_replica_size_bytes") > 0.0);
    replica.stop();
}

#[test]
fn a_controller_s_options_come_from_its_environment() {
    let place = Place::new();
    let (_r, address) = replica(&place, "r");
    let mut command = command_of(&place, "socket", &[&address], &[]);
    command.envs(CONTROLLER).env("DBS_SOCKET_DIR", "/nonexistent");
    let mut engine = Process::spawn(command).ready();
    let line = engine.wait_for("event=environment");
    for (variable, value) in CONTROLLER {
        assert!(has(&line, variable, value), "{variable}: {line}");
    }
    assert!(!line.contains("DBS_SOCKET_DIR"), "an argument says where: {line}");
    assert!(engine.metric("dbs_volume_size_bytes") > 0.0);
    let data = client(&place);
    data.write(0, &block(0, 1)).unwrap();
    engine.stop();
}

/// A template may leave variables empty.
#[test]
fn an_empty_variable_says_nothing() {
    let place = Place::new();
    let mut command = replica_command(&place);
    command.envs(REPLICA.map(|(variable, _)| (variable, "")));
    let mut r = Process::spawn(command).ready();
    assert!(!r.log().contains("event=environment"), "{}", r.log());
    let address = format!("tcp://{}", r.field("grpc"));
    let mut command = command_of(&place, "socket", &[&address], &["--disableRevCounter=false"]);
    command.envs(CONTROLLER.map(|(variable, _)| (variable, "")));
    let mut engine = Process::spawn(command).ready();
    assert!(!engine.log().contains("event=environment"), "{}", engine.log());
    engine.stop();
    r.stop();
}

#[test]
fn a_wrong_value_names_its_variable() {
    let run = |args: &[&str], variable: &str| -> Output {
        let mut command = Command::new(crate::PROGRAM);
        command.args(args).env(variable, "wr=ong").output().unwrap()
    };
    let replica: &[&str] = &["--volume-name", "vol", "replica", "/nonexistent/r"];
    let controller: &[&str] = &["controller", "vol", "--frontend", "socket"];
    let any = ["DBS_TAIL", "DBS_REPLICA_STORE", "DBS_DEVICE_DIR"];
    for (args, variables) in [(replica, &REPLICA[..]), (controller, &CONTROLLER)] {
        for (variable, _) in variables.iter().filter(|(variable, _)| !any.contains(variable)) {
            let ended = run(args, variable);
            let text = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(ended.status.code(), Some(1), "{variable}: {text}");
            let named = format!("(environment variable {variable})'");
            assert!(text.contains(&named) && text.contains("wr=ong"), "{variable}: {text}");
        }
    }
    // The same wrong value as an argument is the argument's.
    let mut command = Command::new(crate::PROGRAM);
    command.args(controller).args(["--queue-depth", "0"]).env("DBS_QUEUE_DEPTH", "5");
    let text = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(text.contains("'--queue-depth <N>'"), "{text}");
}
