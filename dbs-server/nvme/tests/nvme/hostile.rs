//! What no host sends.

use super::host::{Command, HOST, Options, Queue, Wire, crc32c, piece};
use super::{Place, SIZE, noise};
use std::io::Write;

const FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const DIGEST: u16 = 3;
const RANGE: u16 = 4;
const UNSUPPORTED: u16 = 6;

/// The target serves others, and nobody has the volume open.
fn is_unharmed(place: &Place) {
    let mut host = place.host(Options::default());
    host.queues[0].run(&Command::write(0, vec![1; 4096])).ok();
    host.queues[0].run(&Command::read(0, 4096)).ok();
}

#[test]
fn connections_that_do_not_begin_as_they_should_end_with_a_reason() {
    let place = Place::new();
    let edits: [(usize, &[u8], u16, u32); 7] = [
        (0, &[4], SEQUENCE, 0),
        (0, &[1], SEQUENCE, 0),
        (2, &[24], FIELD, 2),
        (4, &[127], FIELD, 4),
        (4, &[128, 0, 1], FIELD, 4),
        (8, &[1], UNSUPPORTED, 8),
        (10, &[32], FIELD, 10),
    ];
    for (at, bytes, error, field) in edits {
        let mut wire = Wire::plain(place.address(), Options::default());
        let mut init = wire.init();
        init[at..at + bytes.len()].copy_from_slice(bytes);
        wire.stream.write_all(&init).unwrap();
        assert_eq!(wire.expect_end(error), field, "{at}");
    }
    // Something else than connecting.
    let mut wire = Wire::new(place.address(), Options::default());
    wire.send(6, 4, &piece(1, 1, 0, 512), &[0; 512]);
    wire.expect_end(SEQUENCE);
    let mut queue = Queue::raw(Wire::new(place.address(), Options::default()), 0);
    assert_eq!(queue.run(&Command::identify(1, 0)).status, 0x0c);
    assert!(queue.wire.next().is_none());
    // Who goes away at each place.
    for bytes in [0, 1, 7, 8, 127] {
        let mut wire = Wire::plain(place.address(), Options::default());
        wire.stream.write_all(&wire.init()[..bytes]).unwrap();
    }
    is_unharmed(&place);
}

#[test]
fn pdus_that_cannot_be_end_the_controller_with_a_reason() {
    let place = Place::new();
    let wide = Options { header_digest: true, data_digest: true, ..Options::default() };
    let write = |wire: &Wire, length: usize| {
        let mut command = Command::write(0, vec![0; length]);
        command.entry[2] = 200;
        command.entry[32..36].copy_from_slice(&(length as u32).to_le_bytes());
        command.entry[39] = 1;
        wire.pdu(4, 0, &command.entry, &command.out)
    };
    // What is sent in place of a write of 4 KiB: an offset in it, and bytes there.
    let edits: [(Options, usize, &[u8], u16, u32); 15] = [
        (Options::default(), 0, &[0], SEQUENCE, 0),
        (Options::default(), 0, &[1], FIELD, 0),
        (Options::default(), 0, &[5], FIELD, 0),
        (Options::default(), 0, &[0xff], FIELD, 0),
        (Options::default(), 1, &[1], FIELD, 1),
        (Options::default(), 1, &[2], FIELD, 1),
        (wide, 1, &[2], FIELD, 1),
        (wide, 1, &[1], FIELD, 1),
        (Options::default(), 2, &[71], FIELD, 2),
        (Options::default(), 3, &[0], FIELD, 3),
        (Options::default(), 3, &[76], FIELD, 3),
        (Options::default(), 4, &[71, 0], FIELD, 4),
        (Options::default(), 4, &[0xff, 0xff, 0xff, 0xff], FIELD, 4),
        (wide, 4, &[78, 0], FIELD, 4),
        (wide, 20, &[1], DIGEST, 0),
    ];
    for (options, at, bytes, error, field) in edits {
        let mut host = place.host(options);
        let wire = &mut host.queues[0].wire;
        let mut pdu = write(wire, 4096);
        pdu[at..at + bytes.len()].copy_from_slice(bytes);
        // The target may have closed the connection before it has all of it.
        let _ = wire.stream.write_all(&pdu[..80]);
        let found = wire.expect_end(error);
        assert!(error == DIGEST || found == field, "{at} {bytes:?}: {found}");
        assert!(host.admin.wire.next().is_none(), "the controller ends");
    }
    let mut host = place.host(Options::default());
    let wire = &mut host.queues[0].wire;
    let pdu = write(wire, 16384 + 512);
    let _ = wire.stream.write_all(&pdu[..80]);
    assert_eq!(wire.expect_end(FIELD), 4, "more than fits into a capsule");
    // The host tells of an error of ours.
    let mut host = place.host(Options::default());
    host.queues[0].wire.send(2, 0, &[0; 16], &[]);
    assert!(host.queues[0].wire.next().is_none());
    assert!(place.content(0, 4096).iter().all(|byte| *byte == 0));
    is_unharmed(&place);
}

/// A write that was asked for its data: its number, and the tag.
fn asked(queue: &mut Queue, length: usize) -> (u16, u16) {
    let id = queue.submit(&Command::write(0, vec![0; length]).asked_for());
    let pdu = queue.wire.next().unwrap();
    assert_eq!((pdu.kind, pdu.u16(8), pdu.u32(12), pdu.u32(16)), (9, id, 0, length as u32));
    (id, pdu.u16(10))
}

#[test]
fn data_that_was_not_asked_for_ends_the_controller() {
    let place = Place::new();
    // By how much tag and number are wrong, the offset, the length, the last, and the error.
    for (tag, id, offset, length, last, error, field) in [
        (1, 0, 0, 8192, true, FIELD, 10),
        (0, 1, 0, 8192, true, FIELD, 8),
        (0, 0, 512, 8192, true, RANGE, 12),
        (0, 0, 0, 8704, true, RANGE, 16),
        (0, 0, 0, 4096, true, FIELD, 1),
        (0, 0, 0, 8192, false, FIELD, 1),
    ] {
        let mut host = place.host(Options::default());
        let queue = &mut host.queues[0];
        let (number, known) = asked(queue, 8192);
        let rest = piece(number + id, known + tag, offset, length);
        queue.wire.send(6, u8::from(last) << 2, &rest, &vec![1; length]);
        assert_eq!(queue.wire.expect_end(error), field, "{tag} {id} {offset} {length} {last}");
    }
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    let (number, tag) = asked(queue, 8192);
    queue.wire.send(6, 4, &piece(number, tag, 0, 8192), &[1; 4096]);
    assert_eq!(queue.wire.expect_end(FIELD), 16, "another length than its PDU");
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    let (number, tag) = asked(queue, 8192);
    queue.wire.send(6, 4, &piece(number, tag, 0, 0), &[]);
    assert_eq!(queue.wire.expect_end(FIELD), 4, "none");
    // After it has come.
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    let (number, tag) = asked(queue, 8192);
    queue.wire.send(6, 4, &piece(number, tag, 0, 8192), &[0; 8192]);
    queue.wait(number).ok();
    queue.wire.send(6, 4, &piece(number, tag, 0, 8192), &[1; 8192]);
    assert_eq!(queue.wire.expect_end(FIELD), 10);
    assert!(place.content(0, 16384).iter().all(|byte| *byte == 0));
    is_unharmed(&place);
}

#[test]
fn a_write_of_which_a_part_came_is_not_done() {
    let place = Place::new();
    place.store.volume("v").unwrap().write_at(0, &[7; 65536], false).unwrap();
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    let (number, tag) = asked(queue, 65536);
    queue.wire.send(6, 0, &piece(number, tag, 0, 32768), &[1; 32768]);
    let part = queue.wire.pdu(6, 4, &piece(number, tag, 32768, 32768), &[1; 32768]);
    queue.wire.stream.write_all(&part[..20000]).unwrap();
    drop(host);
    // And one in a capsule.
    let mut host = place.host(Options::default());
    let mut command = Command::write(0, vec![1; 16384]);
    command.entry[32..36].copy_from_slice(&16384u32.to_le_bytes());
    command.entry[39] = 1;
    let wire = &mut host.queues[0].wire;
    let pdu = wire.pdu(4, 0, &command.entry, &command.out);
    wire.stream.write_all(&pdu[..pdu.len() - 1]).unwrap();
    drop(host);
    // Who comes next finds that nothing of it is under way.
    let mut host = place.host(Options::default());
    assert_eq!(host.queues[0].run(&Command::read(0, 65536)).ok().data, vec![7; 65536]);
}

#[test]
fn data_may_come_in_more_pieces_than_a_queue_may_have_under_way() {
    let place = Place::new();
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    let (number, tag) = asked(queue, 65536);
    let data = noise(3, 65536);
    let pieces: Vec<u8> = (0..65536)
        .step_by(16)
        .flat_map(|at| {
            let last = u8::from(at + 16 == data.len()) << 2;
            queue.wire.pdu(6, last, &piece(number, tag, at, 16), &data[at..at + 16])
        })
        .collect();
    // At once: some 1,600 of them are received together.
    queue.wire.stream.write_all(&pieces).unwrap();
    queue.wait(number).ok();
    assert!(place.content(0, 65536) == data);
}

#[test]
fn damaged_data_fails_its_command_alone() {
    let place = Place::new();
    let options = Options { header_digest: true, data_digest: true, ..Options::default() };
    let mut host = place.host(options);
    let queue = &mut host.queues[0];
    // In a capsule, whose number is one that comes next.
    let id = queue.submit(&Command::new(0, 1));
    queue.wait(id).ok();
    let mut command = Command::write(0, noise(1, 4096));
    command.entry[2..4].copy_from_slice(&(id + 1).to_le_bytes());
    command.entry[32..36].copy_from_slice(&4096u32.to_le_bytes());
    command.entry[39] = 1;
    let mut pdu = queue.wire.pdu(4, 0, &command.entry, &command.out);
    *pdu.last_mut().unwrap() ^= 1;
    queue.wire.stream.write_all(&pdu).unwrap();
    let answer = queue.wire.next().unwrap();
    assert_eq!((answer.kind, answer.u16(20), answer.u16(22)), (5, id + 1, 0x22 << 1));
    // Asked for, in two pieces of which one is damaged; the number after that.
    queue.submit(&Command::new(0, 1));
    queue.any().1.ok();
    let (number, tag) = asked(queue, 16384);
    let mut first = queue.wire.pdu(6, 0, &piece(number, tag, 0, 8192), &[1; 8192]);
    first[28 + 100] ^= 1;
    queue.wire.stream.write_all(&first).unwrap();
    queue.wire.send(6, 4, &piece(number, tag, 8192, 8192), &[1; 8192]);
    let done = queue.wait(number);
    assert_eq!((done.status, done.no_retry), (0x22, false));
    assert!(place.content(0, 16384).iter().all(|byte| *byte == 0));
    queue.run(&Command::write(0, vec![1; 4096])).ok();
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
}

#[test]
fn more_commands_than_a_queue_has_entries_end_the_controller() {
    let place = Place::new();
    let mut host = place.host(Options { entries: 4, ..Options::default() });
    let queue = &mut host.queues[0];
    for _ in 0..4 {
        asked(queue, 4096);
    }
    queue.submit(&Command::read(0, 4096));
    queue.wire.expect_end(SEQUENCE);
    is_unharmed(&place);
}

/// What a host may send is bounded by what it was asked for, and nobody waits for ever for their turn.
#[test]
fn data_is_asked_for_as_there_is_room() {
    let place = Place::new();
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    let mebibyte = 1 << 20;
    let data = noise(3, mebibyte);
    let mut commands = Vec::new();
    for index in 0..16 {
        let write = Command::write(index * mebibyte as u64 % SIZE, data.clone());
        commands.push(queue.submit(&write));
    }
    // Of reads and short writes all are answered meanwhile.
    let read = queue.submit(&Command::read(0, 4096));
    let mut tags = Vec::new();
    loop {
        let pdu = queue.wire.next().unwrap();
        match pdu.kind {
            9 => tags.push((pdu.u16(8), pdu.u16(10))),
            7 => assert_eq!(pdu.u16(8), read),
            _ => break assert_eq!(pdu.u16(20), read),
        }
    }
    assert_eq!(tags.iter().map(|(id, _)| *id).collect::<Vec<_>>(), commands[..8]);
    for index in 0..16 {
        let (id, tag) = tags[index];
        queue.wire.send(6, 4, &piece(id, tag, 0, mebibyte), &data);
        // Its answer, and the next that is asked for.
        for _ in 0..if index < 8 { 2 } else { 1 } {
            let pdu = queue.wire.next().unwrap();
            match pdu.kind {
                9 => tags.push((pdu.u16(8), pdu.u16(10))),
                _ => assert_eq!((pdu.kind, pdu.u16(20), pdu.u16(22)), (5, id, 0)),
            }
        }
    }
    for index in 0..16 {
        assert!(place.content(index * mebibyte as u64, mebibyte) == data);
    }
}

#[test]
fn a_queue_that_reads_much_waits_for_its_host() {
    let place = Place::new();
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    // Four times what may be under way.
    let reads: Vec<u16> = (0..127).map(|_| queue.submit(&Command::read(0, 1 << 20))).collect();
    for id in reads {
        queue.wait(id).ok();
    }
}

#[test]
fn noise_harms_nobody() {
    let place = Place::new();
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..300 {
        let mut wire = Wire::plain(place.address(), Options::default());
        let mut bytes = wire.init().to_vec();
        if round % 3 > 0 {
            let names = (HOST, place.subsystem("v"));
            let o = Options::default();
            let mut connect = Command::connect(names.0, &names.1, 0, 0xffff, o);
            connect.entry[32..36].copy_from_slice(&1024u32.to_le_bytes());
            connect.entry[39] = 1;
            bytes.extend(wire.pdu(4, 0, &connect.entry, &connect.out));
            let property = Command::property_set(0x14, 0x0046_0001);
            bytes.extend(wire.pdu(4, 0, &property.entry, &[]));
        }
        let from = if round % 3 == 2 { 128 + 1096 } else { 0 };
        for _ in 0..random.usize(0..4) {
            let at = random.usize(from..bytes.len());
            bytes[at] = random.u8(..);
        }
        bytes.extend((0..random.usize(0..200)).map(|_| random.u8(..)));
        let _ = wire.stream.write_all(&bytes);
        let _ = wire.stream.shutdown(std::net::Shutdown::Write);
        while wire_is_alive(&mut wire) {}
    }
    is_unharmed(&place);
}

fn wire_is_alive(wire: &mut Wire) -> bool {
    use std::io::Read;
    matches!(wire.stream.read(&mut [0; 4096]), Ok(count) if count > 0)
}
