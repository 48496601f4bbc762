//! Who uses a served store: whom `dbs clients` shows, what is refused while somebody does, and who is
//! shown what.

use crate::nvme_host::{Command, EVENT, Host, Options as HostOptions, SET};
use crate::support::{Place, Served};
use dbs_guest::{Guest, Options, Request};
use dbs_nbd::{Client, ClientOptions};
use serde_json::Value;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A served store with two volumes, one with a snapshot.
fn serve(place: &Place, args: &str) -> Served {
    place.init();
    place.json("volume create v 8MiB");
    place.json("volume create other 8MiB");
    place.json("snapshot create v@s");
    place.serve(&format!("--nbd unix:{} {args}", place.path("nbd").display()))
}

fn connect(place: &Place, export: &str) -> std::io::Result<Client<UnixStream>> {
    Client::connect_unix(&place.path("nbd"), export, &ClientOptions::default())
}

fn clients(place: &Place) -> Vec<Value> {
    place.json("clients --interval 0").as_array().unwrap().clone()
}

fn none_left(place: &Place) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !clients(place).is_empty() {
        assert!(Instant::now() < deadline, "clients do not go");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A command is refused as the volume is in use; the error names who and since when.
fn refused(place: &Place, args: &str, who: &str) {
    let run = place.dbs(args).exits(11, args);
    assert!(run.stderr.contains(&format!("{who} ")), "{args}: {}", run.stderr);
    assert!(run.stderr.contains(" since 20"), "{args}: {}", run.stderr);
    assert!(run.stderr.contains("dbs clients kick "), "{args}: {}", run.stderr);
}

#[test]
fn what_a_client_has_open_is_not_rolled_back_shrunk_or_deleted() {
    let place = Place::new();
    let _served = serve(&place, "");
    let who = format!("NBD client unix:{}", place.path("nbd").display());
    let mut client = connect(&place, "v").unwrap();
    client.write_at(0, &[7; 4096], true).unwrap();
    refused(&place, "snapshot rollback v@s --yes", &who);
    refused(&place, "volume resize v 4MiB --yes", &who);
    refused(&place, "volume delete v --yes", &who);
    let mut found = [0; 4096];
    client.read_at(0, &mut found).unwrap();
    assert_eq!(found, [7; 4096]);
    // What takes nothing from it goes on.
    place.json("volume resize v 16MiB");
    place.json("snapshot create v@t");
}

#[test]
fn virtual_machines_are_shown_refuse_others_and_are_kicked() {
    let place = Place::new();
    let served = serve(&place, "--vhost-user vm --export v --export other,ro");
    assert_eq!(served.ready["vhost_user"], "vm");
    let socket = place.path("vm/v.sock");
    let mut guest = Guest::connect(&socket, &Options::default()).unwrap();
    let written = guest.queues[0].run(&Request::write(0, vec![7; 8192])).unwrap();
    assert_eq!(written.0, 0);
    let who = "virtual machine at vm/v.sock";
    refused(&place, "snapshot rollback v@s --yes", who);
    refused(&place, "volume delete v --yes", who);
    // Nobody writes beside it.
    let mut beside = connect(&place, "v").unwrap();
    assert!(beside.write_at(0, &[8; 4096], false).is_err());
    drop(beside);
    let one = clients(&place).into_iter().find(|client| client["kind"] == "vhost_user").unwrap();
    assert_eq!((&one["volume"], &one["read_only"]), (&"v".into(), &false.into()));
    assert_eq!(one["requests"]["written_bytes"], 8192);
    // A resize is told to the guest before the command is done, and sockets are there when a command is.
    place.json("volume resize v 16MiB");
    assert_eq!(guest.change(Duration::from_secs(60)).unwrap(), 2);
    assert_eq!(guest.size().unwrap(), 16 << 20);
    place.json("snapshot create v@t");
    assert!(place.path("vm/v@t.sock").exists());
    place.json("--yes snapshot delete v@t");
    assert!(!place.path("vm/v@t.sock").exists());
    // The rules of exports hold.
    let mut other = Guest::connect(&place.path("vm/other.sock"), &Options::default()).unwrap();
    assert_eq!(other.queues[0].run(&Request::write(0, vec![1; 512])).unwrap().0, 1);
    place.json("volume create hidden 4MiB");
    assert!(!place.path("vm/hidden.sock").exists());
    place.json(&format!("clients kick {}", one["id"]));
    place.json("--yes snapshot rollback v@s");
    drop((guest, other));
    none_left(&place);
    let refused = place.dbs("serve --vhost-user vm --user nobody");
    assert!(refused.stderr.contains("cannot be used with"), "{}", refused.stderr);
}

/// Where hosts of NVMe connect, and the name of the subsystem of a volume or snapshot.
fn nvme(served: &Served) -> SocketAddr {
    let address = served.ready["nvme"][0].as_str().unwrap();
    address.strip_prefix("tcp:").unwrap().parse().unwrap()
}

fn subsystem(place: &Place, what: &str) -> String {
    let uuid = place.json(what)["uuid"].as_str().unwrap().to_owned();
    format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")
}

#[test]
fn hosts_of_nvme_are_shown_refuse_others_go_on_after_a_kill_and_are_kicked() {
    let place = Place::new();
    let mut served = serve(&place, "--nvme tcp:0 --export v --export other,ro,from=tcp:127.*");
    let (address, v) = (nvme(&served), subsystem(&place, "volume show v"));
    let options = HostOptions::default();
    let mut host = Host::with(address, options, &v, 2);
    host.queues[0].run(&Command::write(0, vec![7; 8192])).ok();
    let who =
        "NVMe host nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555 at tcp:127";
    let run = place.dbs("snapshot rollback v@s --yes").exits(11, "rollback");
    assert!(run.stderr.contains(who) && run.stderr.contains("clients kick"), "{}", run.stderr);
    place.dbs("volume delete v --yes").exits(11, "delete");
    // Nobody writes beside it.
    let mut beside = connect(&place, "v").unwrap();
    assert!(beside.write_at(0, &[8; 4096], false).is_err());
    drop(beside);
    let one = clients(&place).into_iter().find(|client| client["kind"] == "nvme_tcp").unwrap();
    assert_eq!((&one["volume"], &one["read_only"]), (&"v".into(), &false.into()));
    assert_eq!(one["requests"]["written_bytes"], 8192);
    // A resize is told to the host before the command is done.
    let event = host.admin.submit(&Command::new(EVENT, 0));
    host.admin.run(&Command::new(SET, 0).dword(10, 0x0b).dword(11, 1 << 8)).ok();
    place.json("volume resize v 16MiB");
    host.admin.wait(event).ok();
    host.queues[1].run(&Command::write(12 << 20, vec![9; 4096])).ok();
    // The rules of exports hold, and a snapshot is there when its command is done.
    let other = subsystem(&place, "volume show other");
    let mut reader = Host::with(address, options, &other, 1);
    assert_eq!(reader.queues[0].run(&Command::write(0, vec![1; 512])).status, 0x20);
    place.json("snapshot create v@t");
    let snapshot = subsystem(&place, "snapshot show v@t");
    let mut frozen = Host::with(address, options, &snapshot, 1);
    assert_eq!(frozen.queues[0].run(&Command::read(4096, 512)).ok().data, [7; 512]);
    place.json("volume create hidden 4MiB");
    let hidden = subsystem(&place, "volume show hidden");
    assert_eq!(Host::admin(address, options, &hidden).err().unwrap().status, 0x182);
    drop((reader, frozen));
    // Who is killed has acknowledged nothing that the next server does not know.
    served.kill();
    assert!(host.queues[0].wire.next().is_none());
    let served = place.serve("--nvme tcp:0");
    let mut host = Host::with(nvme(&served), options, &v, 2);
    assert_eq!(host.queues[0].run(&Command::read(4096, 4096)).ok().data, [7; 4096]);
    assert_eq!(host.queues[1].run(&Command::read(12 << 20, 4096)).ok().data, [9; 4096]);
    let one = clients(&place).into_iter().find(|client| client["kind"] == "nvme_tcp").unwrap();
    place.json(&format!("clients kick {}", one["id"]));
    place.json("--yes snapshot rollback v@s");
    assert!(host.admin.wire.next().is_none());
    none_left(&place);
}

#[test]
fn nvme_listens_on_loopback_alone() {
    let place = Place::new();
    place.init();
    let refused = place.dbs("serve --nvme tcp:0.0.0.0:4420").exits(2, "all addresses");
    for word in ["tcp:0.0.0.0:4420", "authentication", "tcp:4420", "ssh -L"] {
        assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
}

#[test]
fn clients_are_shown_and_kicked() {
    let place = Place::new();
    let _served = serve(&place, "");
    assert!(clients(&place).is_empty());
    let mut writer = connect(&place, "v").unwrap();
    let reader = connect(&place, "v@s").unwrap();
    writer.write_at(0, &[7; 8192], false).unwrap();
    writer.read_at(0, &mut [0; 4096]).unwrap();
    writer.flush().unwrap();
    let found = clients(&place);
    assert_eq!(found.len(), 2, "{found:?}");
    let of = |snapshot: Value| found.iter().find(|one| one["snapshot"] == snapshot).unwrap();
    let (one, two) = (of(Value::Null), of("s".into()));
    assert_eq!((&one["kind"], &one["volume"]), (&"nbd".into(), &"v".into()));
    assert_eq!((&one["read_only"], &two["read_only"]), (&false.into(), &true.into()));
    let requests = &one["requests"];
    assert_eq!((&requests["reads"], &requests["read_bytes"]), (&1.into(), &4096.into()));
    assert_eq!((&requests["writes"], &requests["written_bytes"]), (&1.into(), &8192.into()));
    assert_eq!(requests["others"], 1);
    assert!(one["who"].as_str().unwrap().contains(&format!("process {}", std::process::id())));
    assert!(one["since_ns"].as_u64().unwrap() > 1_600_000_000_000_000_000);
    assert!(one["rates"].is_null());
    let measured = place.json("clients --interval 50ms");
    assert!(measured[0]["rates"]["iops"].is_number());
    let table = place.dbs("clients --interval 0").ok("clients").text();
    assert!(table.starts_with("ID ") && table.contains("v@s") && table.contains("8.0 KiB"));
    // A volume is called what it is called now.
    place.json("volume rename v w");
    assert!(clients(&place).iter().all(|one| one["volume"] == "w"));

    let id = one["id"].as_u64().unwrap();
    assert_eq!(place.json(&format!("clients kick {id}"))["id"], id);
    assert!(writer.flush().is_err());
    // It is gone when the command is over.
    place.json("snapshot rollback w@s --yes");
    assert_eq!(clients(&place).len(), 1);
    place.dbs(&format!("clients kick {id}")).exits(10, "it is gone");
    drop(reader);
    none_left(&place);
}

#[test]
fn nobody_uses_an_idle_store() {
    let place = Place::with_store();
    assert!(clients(&place).is_empty());
    place.dbs("clients kick 1").exits(10, "there is none");
}

#[test]
fn rules_say_what_is_exported_and_to_whom() {
    let place = Place::new();
    let _served = serve(&place, "--export v,ro,from=unix:* --export oth*,from=tcp:*");
    assert!(connect(&place, "v").unwrap().read_only());
    assert!(connect(&place, "v@s").unwrap().read_only());
    // It is the only one there is.
    assert!(connect(&place, "").unwrap().read_only());
    let hidden = connect(&place, "other").unwrap_err().to_string();
    let absent = connect(&place, "absent").unwrap_err().to_string();
    assert_eq!(hidden.replace("other", "absent"), absent);
    let list = Client::list(UnixStream::connect(place.path("nbd")).unwrap()).unwrap();
    let names: Vec<_> = list.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["v", "v@s"]);
    // Commands have their way.
    place.pipe("volume import new -", &[7; 8192]).ok("import");
    assert_eq!(place.pipe("volume export new -", &[]).ok("export").stdout, [7; 8192]);
    place.dbs("serve --export v,rw").exits(2, "no such rule");
}
