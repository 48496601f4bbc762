//! Hosts that prove who they are, and those that cannot.

use super::chap::*;
use super::host::{Command, DISCOVERY, HOST, Host, Options, Queue};
use super::{Place, agreements, noise, options};
use dbs_frontend::Listen;
use dbs_nvme::{Keys, NvmeOptions, NvmeTcp};
use dbs_reactor::Driver;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:66666666-2222-3333-4444-555555555555";
const REQUIRED: u16 = 0x191;

fn secret() -> Secret {
    Secret::new(1, 32, 1)
}

fn place() -> Place {
    Place::keyed(&format!("{HOST} {}\n{OTHER} {}\n", secret().text(), Secret::new(0, 48, 9).text()))
}

/// A connection that the target wants a proof on.
fn begin(place: &Place, options: Options, names: (&str, &str), queue: (u16, u16)) -> (Queue, u16) {
    let command = Command::connect(names.0, names.1, queue.0, queue.1, options);
    let mut this = Queue::raw(super::host::Wire::new(place.address(), options), queue.0);
    let result = this.run(&command).ok().result;
    assert_eq!(result >> 16, 2, "it is to prove who it is");
    (this, result as u16)
}

fn admin(place: &Place) -> Queue {
    begin(place, Options::default(), (HOST, &place.subsystem("v")), (0, 0xffff)).0
}

/// A host with one I/O queue.
fn connect(place: &Place, options: Options, prover: &Prover<'_>) -> Result<Host, u8> {
    let names = (prover.host, prover.subsystem);
    let (mut admin, controller) = begin(place, options, names, (0, 0xffff));
    prover.prove(&mut admin)?;
    admin.run(&Command::property_set(0x14, 0x0046_0001)).ok();
    assert_eq!(admin.run(&Command::property_get(0x1c, false)).ok().result, 1, "ready");
    let (mut queue, its) = begin(place, options, names, (1, controller));
    assert_eq!(its, controller);
    prover.prove(&mut queue)?;
    Ok(Host { admin, queues: vec![queue], controller })
}

fn uses(host: &mut Host, seed: u64) {
    let data = noise(seed, 8192);
    host.queues[0].run(&Command::write(4096, data.clone())).ok();
    assert!(host.queues[0].run(&Command::read(4096, 8192)).ok().data == data);
}

#[test]
fn a_host_with_a_key_connects_on_each_queue() {
    for (kind, length) in [(0, 32), (0, 64), (1, 32), (2, 48), (3, 64)] {
        let (secret, proof) = (Secret::new(kind, length, 3), Secret::new(0, 48, 4));
        let place = Place::keyed(&format!("{HOST} {} {}\n", secret.text(), proof.text()));
        let v = place.subsystem("v");
        for (options, seed) in agreements().into_iter().zip(0..) {
            let controller = (seed % 3 > 0).then_some(&proof);
            // What suits the key is chosen, and else what there is.
            let hashes: &[u8] = if seed % 2 == 0 { &[1, 2, 3] } else { &[0x7f, 2] };
            let prover = Prover { controller, hashes, ..Prover::new(HOST, &v, &secret) };
            uses(&mut connect(&place, options, &prover).unwrap(), seed);
        }
        // Which subsystems there are is told to hosts with a key, too.
        let (mut admin, _) = begin(&place, Options::default(), (HOST, DISCOVERY), (0, 0xffff));
        Prover::new(HOST, DISCOVERY, &secret).prove(&mut admin).unwrap();
        admin.run(&Command::property_set(0x14, 0x0046_0001)).ok();
        let log = admin.run(&Command::log(0x70, 0, 2048)).ok().data;
        assert_eq!((log[8], &log[1024 + 256..][..v.len()]), (1, v.as_bytes()));
    }
}

#[test]
fn who_has_no_key_or_another_is_refused_and_disturbs_nobody() {
    let place = place();
    let (v, secret) = (place.subsystem("v"), secret());
    let prover = Prover::new(HOST, &v, &secret);
    let mut good = connect(&place, Options::default(), &prover).unwrap();
    let unknown = Queue::connect(place.address(), Options::default(), ("nqn.x", &v), (0, 0xffff));
    let unknown = unknown.err().unwrap();
    assert_eq!((unknown.status, unknown.no_retry), (0x184, true));
    for wrong in [Secret::new(1, 32, 2), Secret::new(0, 32, 1), Secret::new(3, 64, 1)] {
        let prover = Prover { secret: &wrong, ..prover.clone() };
        assert_eq!(connect(&place, Options::default(), &prover).err(), Some(FAILED), "{wrong:?}");
        // On a queue of one that is there.
        let its = (2, good.controller);
        let (mut queue, _) = begin(&place, Options::default(), (HOST, &v), its);
        assert_eq!(prover.prove(&mut queue), Err(FAILED));
        // With the key of another host, in whose name nothing was connected.
        let other = Prover { host: OTHER, ..prover };
        let (mut queue, _) = begin(&place, Options::default(), (HOST, &v), its);
        assert_eq!(other.prove(&mut queue), Err(FAILED));
    }
    // A host with a key of its own gets no queue of another's controller.
    let own = Secret::new(0, 48, 9);
    let other = Prover { host: OTHER, secret: &own, ..prover };
    let (mut queue, _) = begin(&place, Options::default(), (OTHER, &v), (2, good.controller));
    send(&mut queue, &other.negotiate()).ok();
    let challenge = other.fetch(&mut queue).unwrap();
    let refused = send(&mut queue, &other.reply(&challenge));
    assert_eq!((refused.status, queue.wire.next().is_none()), (0x184, true));
    uses(&mut good, 1);
    assert_eq!(place.nvme.clients().len(), 1);
    // Nobody waits for a volume, or keeps it, without a proof.
    drop(good);
    while !place.store.holders().is_empty() {
        std::thread::yield_now();
    }
    let waiting = admin(&place);
    assert!(place.store.holders().is_empty() && place.nvme.clients().is_empty());
    connect(&place, Options::default(), &Prover::new(HOST, &v, &secret)).unwrap();
    drop(waiting);
}

/// A challenge is never the same, and an answer to one is none to another.
#[test]
fn an_answer_that_was_heard_is_of_no_use() {
    let place = place();
    let (v, secret) = (place.subsystem("v"), secret());
    let prover = Prover::new(HOST, &v, &secret);
    let mut first = admin(&place);
    send(&mut first, &prover.negotiate()).ok();
    let heard = prover.reply(&prover.fetch(&mut first).unwrap());
    send(&mut first, &heard).ok();
    prover.fetch(&mut first).unwrap();
    first.run(&Command::property_get(0x1c, false)).ok();
    drop(first);
    for queue in [0, 1] {
        let mut again = admin(&place);
        for _ in 0..queue {
            again = admin(&place);
        }
        send(&mut again, &prover.negotiate()).ok();
        prover.fetch(&mut again).unwrap();
        send(&mut again, &heard).ok();
        assert_eq!(prover.fetch(&mut again), Err(FAILED));
    }
}

#[test]
fn nothing_else_is_done_before_a_proof() {
    let place = place();
    let (v, secret) = (place.subsystem("v"), secret());
    let prover = Prover::new(HOST, &v, &secret);
    let good = connect(&place, Options::default(), &prover).unwrap();
    let admin_commands = [
        Command::property_get(0x1c, false),
        Command::property_set(0x14, 0x0046_0001),
        Command::identify(1, 0),
        Command::connect(HOST, &v, 0, 0xffff, Options::default()),
    ];
    let io = [Command::read(0, 4096), Command::write(0, vec![1; 4096]), Command::new(0, 1)];
    let admin_commands = admin_commands.iter().map(|command| (0, 0xffff, command));
    let io = io.iter().map(|command| (2, good.controller, command));
    for (number, controller, command) in admin_commands.chain(io) {
        for step in 0..3 {
            let at = (number, controller);
            let (mut queue, _) = begin(&place, Options::default(), (HOST, &v), at);
            if step > 0 {
                send(&mut queue, &prover.negotiate()).ok();
            }
            if step > 1 {
                prover.fetch(&mut queue).unwrap();
            }
            let done = queue.run(command);
            assert_eq!((done.status, done.no_retry), (REQUIRED, true), "{step} {command:?}");
            assert!(queue.wire.next().is_none());
        }
    }
    assert!(place.content(0, 4096).iter().all(|byte| *byte == 0));
}

/// What is sent instead of a message, and how that ends.
#[test]
fn messages_out_of_order_end_the_connection() {
    let place = place();
    let (v, secret) = (place.subsystem("v"), secret());
    let prover = Prover::new(HOST, &v, &secret);
    let negotiate = prover.negotiate();
    let edit = |at: usize, byte: u8| {
        let mut message = prover.negotiate();
        message[at] = byte;
        message
    };
    // The first.
    for (message, why) in [
        (edit(1, 2), MESSAGE),
        (edit(1, 4), MESSAGE),
        (edit(1, 0xf0), MESSAGE),
        (edit(1, 0xf1), MESSAGE),
        (edit(0, 1), MESSAGE),
        (edit(0, 2), MESSAGE),
        (negotiate[..7].to_vec(), PAYLOAD),
        (negotiate[..8].to_vec(), PAYLOAD),
        (negotiate[..71].to_vec(), PAYLOAD),
        (vec![0; 8192], PROTOCOL),
        (edit(6, 1), CONCATENATION),
        (edit(7, 0), PROTOCOL),
        (edit(7, 2), PAYLOAD),
        (edit(7, 255), PAYLOAD),
        (edit(8, 2), PROTOCOL),
        (edit(10, 31), PAYLOAD),
        (edit(10, 255), PAYLOAD),
        (edit(11, 31), PAYLOAD),
        (edit(10, 0), HASH),
        (edit(11, 0), GROUP),
        (Prover { hashes: &[0, 4], ..prover.clone() }.negotiate(), HASH),
        (Prover { groups: &[1, 5], ..prover.clone() }.negotiate(), GROUP),
    ] {
        let mut queue = admin(&place);
        send(&mut queue, &message).ok();
        let failure = receive(&mut queue, 4096).ok().data;
        assert_eq!((&failure[..2], failure[7]), (&[0, 0xf1][..], why), "{message:?}");
        assert!(queue.wire.next().is_none());
    }
    // The second.
    let edits: [(usize, &[u8], u8); 10] = [
        (0, &[0, 0], MESSAGE),
        (0, &[1, 4], MESSAGE),
        (4, &[0, 0], PAYLOAD),
        (6, &[31], PAYLOAD),
        (6, &[255], PAYLOAD),
        (6, &[0], PAYLOAD),
        (8, &[2], PAYLOAD),
        (8, &[1], PAYLOAD),
        (10, &[1, 0], PAYLOAD),
        (10, &[255, 255], PAYLOAD),
    ];
    for (at, bytes, why) in edits {
        let mut queue = admin(&place);
        send(&mut queue, &negotiate).ok();
        let mut reply = prover.reply(&prover.fetch(&mut queue).unwrap());
        reply[at..at + bytes.len()].copy_from_slice(bytes);
        send(&mut queue, &reply).ok();
        let failure = receive(&mut queue, 4096).ok().data;
        assert_eq!((&failure[..2], failure[7]), (&[0, 0xf1][..], why), "{at} {bytes:?}");
    }
    for length in [8, 15, 16, 47] {
        let mut queue = admin(&place);
        send(&mut queue, &negotiate).ok();
        let reply = prover.reply(&prover.fetch(&mut queue).unwrap());
        send(&mut queue, &reply[..length]).ok();
        assert_eq!(prover.fetch(&mut queue), Err(PAYLOAD), "{length}");
    }
    // A host that cannot take the challenge, and one that takes another turn.
    let mut queue = admin(&place);
    send(&mut queue, &negotiate).ok();
    prover.fetch(&mut queue).unwrap();
    let mut failure = edit(1, 0xf0);
    failure.truncate(16);
    send(&mut queue, &failure).ok();
    assert!(queue.wire.next().is_none());
    let mut queue = admin(&place);
    send(&mut queue, &negotiate).ok();
    send(&mut queue, &negotiate).ok();
    assert_eq!(prover.fetch(&mut queue), Err(MESSAGE));
    // What there is nothing to fetch of.
    let mut queue = admin(&place);
    assert_eq!(receive(&mut queue, 4096).status, 0x0c);
    assert!(queue.wire.next().is_none());
    connect(&place, Options::default(), &prover).unwrap();
}

#[test]
fn commands_of_authentication_that_cannot_be_are_refused() {
    let place = place();
    let (v, secret) = (place.subsystem("v"), secret());
    let prover = Prover::new(HOST, &v, &secret);
    let edit = |command: Command, at: usize, byte: u8| {
        let mut command = command;
        command.entry[at] = byte;
        command
    };
    let good = || sending(&prover.negotiate());
    let (field, length, kind) = (0x02, 0x0f, 0x11);
    for (command, status) in [
        (edit(good(), 41, 0), field),
        (edit(good(), 42, 2), field),
        (edit(good(), 43, 0), field),
        (edit(good(), 44, 71), field),
        (edit(good(), 46, 1), field),
        (edit(good(), 1, 0), field),
        (sending(&[]), field),
        (good().asked_for(), field),
        (receiving(0), field),
        (receiving(76), field),
        (receiving(8196), field),
        (edit(receiving(4096), 47, 0xff), field),
        (edit(receiving(4096), 45, 0x08), length),
    ] {
        let mut queue = admin(&place);
        assert_eq!(queue.run(&command).status, status, "{command:?}");
        assert!(queue.wire.next().is_none());
    }
    // Where the data is to go is not said.
    let mut queue = admin(&place);
    let mut command = receiving(4096);
    command.entry[32..36].copy_from_slice(&4096u32.to_le_bytes());
    (command.entry[2], command.entry[39]) = (1, 1);
    queue.wire.send(4, 0, &command.entry, &[]);
    assert_eq!(queue.wire.next().unwrap().u16(22) >> 1 & 0x7ff, kind);
    connect(&place, Options::default(), &prover).unwrap();
}

#[test]
fn the_controller_proves_who_it_is_to_who_asks_and_has_a_key_for_it() {
    let (secret, proof) = (secret(), Secret::new(2, 48, 7));
    let other = Secret::new(0, 64, 8);
    let lines = format!("{HOST} {} {}\n{OTHER} {}\n", secret.text(), proof.text(), other.text());
    let place = Place::keyed(&lines);
    let v = place.subsystem("v");
    let prover = Prover { controller: Some(&proof), ..Prover::new(HOST, &v, &secret) };
    // Another key than the controller has: the host ends it, and nothing is left.
    for controller in [&other, &secret] {
        let prover = Prover { controller: Some(controller), ..prover.clone() };
        assert_eq!(connect(&place, Options::default(), &prover).err(), Some(0));
        while !place.store.holders().is_empty() {
            std::thread::yield_now();
        }
    }
    // No key.
    let without = Prover { host: OTHER, secret: &other, ..prover.clone() };
    assert_eq!(connect(&place, Options::default(), &without).err(), Some(FAILED));
    // The target's own challenge: its answer would be one to it.
    let mut queue = admin(&place);
    send(&mut queue, &prover.negotiate()).ok();
    let challenge = prover.fetch(&mut queue).unwrap();
    let mut reply = prover.reply(&challenge);
    reply[48..80].copy_from_slice(&challenge[16..48]);
    send(&mut queue, &reply).ok();
    assert_eq!(prover.fetch(&mut queue), Err(FAILED));
    // A challenge for TLS, which has no sequence.
    let mut queue = admin(&place);
    send(&mut queue, &prover.negotiate()).ok();
    let mut reply = prover.reply(&prover.fetch(&mut queue).unwrap());
    reply[12..16].fill(0);
    send(&mut queue, &reply).ok();
    assert_eq!(prover.fetch(&mut queue), Err(PAYLOAD));
    let mut host = connect(&place, Options::default(), &prover).unwrap();
    uses(&mut host, 3);
}

/// A connection is authenticated once; Linux takes a refusal of more for nothing but that.
#[test]
fn a_queue_that_is_connected_is_not_authenticated_again() {
    let place = place();
    let (v, secret) = (place.subsystem("v"), secret());
    let prover = Prover::new(HOST, &v, &secret);
    let mut host = connect(&place, Options::default(), &prover).unwrap();
    let Host { admin, queues, .. } = &mut host;
    for queue in [admin, &mut queues[0]] {
        let refused = [send(queue, &prover.negotiate()), receive(queue, 4096)];
        assert!(refused.iter().all(|done| done.status != 0), "{refused:?}");
    }
    uses(&mut host, 1);
    assert_eq!(host.admin.run(&Command::identify(1, 0)).ok().data.len(), 4096);
}

#[test]
fn other_machines_are_listened_for_only_with_keys_and_if_that_is_said() {
    let place = Place::new();
    let file = place.dir.path().join("keys");
    fs::write(&file, format!("{HOST} {}\n", secret().text())).unwrap();
    for mode in [0o640, 0o604, 0o620, 0o602] {
        fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        let error = Keys::load(&file).unwrap_err().to_string();
        assert!(error.contains("nobody else"), "{error}");
    }
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let keys = Arc::new(Keys::load(&file).unwrap());
    // Of no machine: what may be listened on cannot be either.
    let other: Listen = "tcp:192.0.2.1:0".parse().unwrap();
    for (keys, insecure_data, said) in [
        (None, false, "--nvme-keys"),
        (None, true, "--nvme-keys"),
        (Some(&keys), false, "--nvme-insecure-data"),
        (Some(&keys), true, "starting the NVMe/TCP server"),
    ] {
        let nvme = NvmeOptions { listen: vec![other.clone()], keys: keys.cloned(), insecure_data };
        let started = NvmeTcp::start(place.store.clone(), &nvme, options(Driver::Auto));
        let error = started.err().unwrap().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// Found by review: a host of another machine was told to connect to 0.0.0.0, which is itself. An address of both families
/// stands for another one as well, and no other machine reaches it.
#[test]
fn discovery_names_the_address_that_the_host_has_come_to() {
    let mut place = Place::new();
    let keys = Keys::parse(&format!("{HOST} {}\n", secret().text())).unwrap();
    let listen = vec!["tcp:[::ffff:127.0.0.1]:0".parse().unwrap()];
    let nvme = NvmeOptions { listen, keys: Some(Arc::new(keys)), insecure_data: true };
    place.nvme = NvmeTcp::start(place.store.clone(), &nvme, options(Driver::Auto)).unwrap();
    let names = (HOST, DISCOVERY);
    let (mut admin, _) = begin(&place, Options::default(), names, (0, 0xffff));
    Prover::new(HOST, DISCOVERY, &secret()).prove(&mut admin).unwrap();
    admin.run(&Command::property_set(0x14, 0x0046_0001)).ok();
    let log = admin.run(&Command::log(0x70, 0, 2048)).ok().data;
    assert_eq!((log[1025], &log[1024 + 512..][..10]), (1, &b"127.0.0.1 "[..]), "IPv4");
}
