//! Every message and every error of the data connection, byte by byte, and clients that do not
//! keep to it.

use crate::support::{BLOCK, DRIVERS, MIB, Replica, Setup, eventually, pattern};
use longhorn_data::{Access, DataOptions, DataStats, Kind};
use longhorn_testing::{ClientError, DataClient};
use longhorn_wire::frame::{Damaged, Header, Hello, PAYLOAD_MAX_BYTES, Type};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn replicas() -> impl Iterator<Item = Replica> {
    DRIVERS.into_iter().filter_map(|driver| Setup::with_driver(driver).start())
}

fn done(header: Header, size: u32) -> Header {
    Header::new(Type::Response, header.sequence, header.offset, size)
}

#[test]
fn every_request_is_answered_as_longhorn_does() {
    for replica in replicas() {
        let mut raw = replica.raw();
        for (sequence, (offset, length)) in
            [(0, 4096), (8192, 512), (1, 3), (4095, 2), (MIB as i64 - 7, 70_000), (5, 0)]
                .into_iter()
                .enumerate()
        {
            let data = pattern(sequence as u64, length);
            let write = Header {
                // The server goes by the payload.
                size: 77,
                ..Header::with_payload(Type::Write, sequence as u32, offset, length as u32)
            };
            assert_eq!(raw.ask(write, &data), (done(write, length as u32), vec![]));
            let read = Header::new(Type::Read, u32::MAX - sequence as u32, offset, length as u32);
            let (reply, payload) = raw.ask(read, &[]);
            let expected = Header { length: length as u32, ..done(read, length as u32) };
            assert_eq!((reply, payload == data), (expected, true), "{offset}+{length}");
        }
        let ping = Header::new(Type::Ping, 9, 0, 0);
        assert_eq!(raw.ask(ping, &[]), (done(ping, 0), vec![]));
        let ping = Header { length: 100, ..ping };
        assert_eq!(raw.ask(ping, &[1; 100]), (done(ping, 0), vec![]), "whatever it carries");
        for (offset, length, freed) in
            [(0, 0, 0), (1, 8190, 0), (1, 8191, 4096), (4096, 4096, 4096), (0, 65536, 65536)]
        {
            let unmap = Header::new(Type::Unmap, 10, offset, length);
            assert_eq!(raw.ask(unmap, &[]), (done(unmap, freed), vec![]), "{offset}+{length}");
        }
        replica.finish();
    }
}

#[test]
fn ranges_outside_are_errors_and_the_connection_stays() {
    for replica in replicas() {
        let end = 16 * MIB as i64;
        let mut raw = replica.raw();
        for (offset, length) in [
            (end - 4096, 8192),
            (end, 1),
            (end, 4096),
            (end - 1, 2),
            (i64::MAX, u32::MAX),
            (end * 2, 512),
            (0, PAYLOAD_MAX_BYTES + 1),
            (-1, 1),
            (-4096, 4096),
            (i64::MIN, 0),
        ] {
            let read = Header::new(Type::Read, 3, offset, length);
            let text = raw.error(read, &[]);
            let expected = match (offset, length) {
                (0, _) => "at most 33554432 can be answered",
                (i64::MAX, _) => "can be answered",
                (offset, _) if offset < 0 => "negative",
                _ => "unexpected EOF",
            };
            assert!(text.contains(expected), "{offset}+{length}: {text}");
            let unmap = Header::new(Type::Unmap, 4, offset, length);
            if offset != 0 {
                let text = raw.error(unmap, &[]);
                assert!(text.contains("beyond the end") || offset < 0, "{text}");
            }
        }
        for (offset, length) in [(end - 4096, 8192), (end, 1), (end - 1, 2), (-1, 1), (end, 512)] {
            let write = Header::with_payload(Type::Write, 5, offset, length as u32);
            let text = raw.error(write, &vec![1; length]);
            let clear = if offset < 0 { "negative" } else { "beyond the end of the volume" };
            assert!(text.contains(clear), "{text}");
        }
        let write = Header::with_payload(Type::Write, 6, end - 3, 3);
        assert_eq!(raw.ask(write, b"end"), (done(write, 3), vec![]));
        let read = Header::new(Type::Read, 7, end - 3, 3);
        assert_eq!(raw.ask(read, &[]).1, b"end");
        assert_eq!(replica.events.revision.load(Ordering::SeqCst), 1, "failures are not counted");
        replica.finish();
    }
}

#[test]
fn what_is_unknown_is_skipped_without_a_reply() {
    for replica in replicas() {
        let mut raw = replica.raw();
        for number in [2, 3, 4, 5, 8, 9, 0x45, u32::MAX] {
            let strange = Header { sequence: 1, number, offset: 0, size: 4096, length: 70_000 };
            raw.send(strange, &vec![0xaa; 70_000]);
        }
        let ping = Header::new(Type::Ping, 2, 0, 0);
        assert_eq!(raw.ask(ping, &[]).0, done(ping, 0));
        // A read carries no payload; if it does, that is no next message.
        let read = Header { length: 26, ..Header::new(Type::Read, 3, 0, 512) };
        let (reply, payload) = raw.ask(read, &ping.encode());
        assert_eq!((reply.sequence, payload), (3, vec![0; 512]));
        drop(raw);
        replica.finish();
    }
}

#[test]
fn who_does_not_speak_the_protocol_is_disconnected_alone() {
    for replica in replicas() {
        let client = replica.client(2);
        client.write(0, b"still here").unwrap();
        let good = Header::with_payload(Type::Write, 1, 0, 4096).encode();
        let mut wrong_magic = good;
        wrong_magic[1] = 0x1c;
        let too_long =
            Header { length: PAYLOAD_MAX_BYTES + 1, ..Header::new(Type::Write, 1, 0, 0) };
        let giant = Header { length: u32::MAX, ..Header::new(Type::Read, 1, 0, 0) };
        for bytes in [
            wrong_magic.to_vec(),
            too_long.encode().to_vec(),
            giant.encode().to_vec(),
            b"GET / HTTP/1.1\r\nHost: replica\r\n\r\n".to_vec(),
            vec![0; 26],
            vec![0xff; 100_000],
        ] {
            let mut raw = replica.raw();
            // It may be closed before all is sent.
            let _ = raw.stream.write_all(&bytes);
            assert!(raw.is_closed());
        }
        // Half a message, and the end: no write.
        for bytes in [&good[..1], &good[..25], &good[..]] {
            let mut raw = replica.raw();
            raw.stream.write_all(bytes).unwrap();
            raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(raw.is_closed());
        }
        let mut raw = replica.raw();
        raw.stream.write_all(&[&good[..], &[1; 4095]].concat()).unwrap();
        drop(raw);
        assert_eq!(client.read(0, 10).unwrap(), b"still here");
        eventually("all are gone", || replica.gate.stats().connected == 2);
        drop(client);
        replica.finish();
    }
}

#[test]
fn garbage_never_harms() {
    for replica in replicas() {
        let client = replica.client(1);
        client.write(0, &[5; 4096]).unwrap();
        for seed in 0..40 {
            let mut raw = replica.raw();
            let mut bytes = pattern(seed, 3000);
            if seed % 2 == 0 {
                // The header is good as far as it goes: types, sizes and offsets of all kinds.
                bytes[..2].copy_from_slice(&[0x01, 0x1b]);
                bytes[6..10].copy_from_slice(&(seed as u32 / 2 % 10).to_le_bytes());
                bytes[22..26].copy_from_slice(&(seed as u32 * 60).to_le_bytes());
            }
            let _ = raw.stream.write_all(&bytes);
            if seed % 3 == 0 {
                let _ = raw.stream.shutdown(std::net::Shutdown::Write);
                raw.is_closed();
            }
        }
        client.ping().unwrap();
        eventually("all are gone", || replica.gate.stats().connected == 1);
        drop(client);
        replica.finish();
    }
}

#[test]
fn dbs_knows_its_own_kind_and_flushes() {
    for replica in replicas() {
        let client = replica.client(2);
        let hello = client.hello().unwrap().unwrap();
        assert_eq!(hello, Hello::of_server(None));
        client.write(4096, &[1; 4096]).unwrap();
        let before = replica.events.commits.load(Ordering::SeqCst);
        client.flush().unwrap();
        assert!(replica.events.commits.load(Ordering::SeqCst) > before);
        // It is about connections: also where the replica is closed. A flush is not.
        assert!(replica.gate.set(Access::not_open("closed")));
        assert!(client.hello().unwrap().is_some());
        let refused = ClientError::Replica("replica no longer exist".to_owned());
        assert_eq!(client.flush(), Err(refused));
        drop(client);
        replica.finish();
    }
}

/// Who has not said that it knows of damage gets an error like any other, on each connection for itself.
#[test]
fn damage_has_a_place_for_who_knows_of_it() {
    for driver in DRIVERS {
        let setup = Setup { checksums: true, ..Setup::with_driver(driver) };
        let Some(replica) = setup.start() else { continue };
        let data = pattern(1, 16384);
        let (mut knows, mut other) = (replica.raw(), replica.raw());
        let hello = Hello::of_client().encode();
        knows.ask(Header::with_payload(Type::Ping, 1, 0, hello.len() as u32), &hello);
        knows.ask(Header::with_payload(Type::Write, 2, 0, 16384), &data);
        replica.damage(8192);
        let read = Header::new(Type::Read, 3, 512, 16384 - 512);
        let write = Header::with_payload(Type::Write, 4, 8704, 512);
        for (request, payload) in [(read, &[][..]), (write, &[1; 512])] {
            assert!(other.error(request, payload).contains("byte 8192 of `v` is damaged"));
            let (reply, payload) = knows.ask(request, payload);
            assert_eq!((reply.kind(), reply.offset), (Some(Type::Damaged), request.offset));
            let damaged = Damaged::decode(&payload).unwrap();
            assert_eq!((damaged.offset, damaged.in_snapshot), (8192, false));
            assert!(damaged.text.contains("byte 8192 of `v` is damaged"), "{}", damaged.text);
        }
        // What it held is taken, nothing else, and only whole blocks.
        let mut heal = |offset: i64, data: &[u8]| {
            knows.ask(Header::with_payload(Type::Heal, 5, offset, data.len() as u32), data).0
        };
        assert_eq!(heal(8192, &data[..4096]).kind(), Some(Type::Error));
        assert_eq!(heal(8192, &data[8192..8704]).kind(), Some(Type::Error));
        assert_eq!(heal(16 * MIB as i64, &data[..4096]).kind(), Some(Type::Error));
        let revision = replica.events.revision.load(Ordering::SeqCst);
        for healed in [4096, 0] {
            let reply = heal(4096, &data[4096..]);
            assert_eq!((reply.kind(), reply.size), (Some(Type::Response), healed));
        }
        assert_eq!(replica.events.revision.load(Ordering::SeqCst), revision);
        let (_, read) = other.ask(Header::new(Type::Read, 6, 0, 16384), &[]);
        assert!(read == data);
        drop((knows, other));
        replica.finish();
    }
}

/// It is carried out in several steps: damage where it ends must be told before the first one.
#[test]
fn a_long_write_that_meets_damage_changes_nothing() {
    let setup = Setup { checksums: true, extent_size: 64 << 10, ..Setup::default() };
    let replica = setup.start().unwrap();
    let (client, length) = (replica.client(1), 12 * MIB);
    let data = pattern(1, (16 * MIB) as usize);
    client.write(0, &data).unwrap();
    let last = (length + 512) / 4096 * 4096;
    replica.damage(last);
    let refused = client.write(512, &vec![7; length as usize]).unwrap_err();
    assert!(refused.to_string().contains("is damaged"), "{refused}");
    assert!(client.read(0, last as u32).unwrap() == data[..last as usize]);
    drop(client);
    replica.finish();
}

#[test]
fn a_bug_in_the_replica_costs_one_reply() {
    let replica = Setup::default().start().unwrap();
    let client = replica.client(1);
    replica.events.panics.store(true, Ordering::SeqCst);
    let error = client.unmap(0, 4096).unwrap_err();
    assert_eq!(error, ClientError::Replica("internal error of the replica".to_owned()));
    replica.events.panics.store(false, Ordering::SeqCst);
    assert_eq!(client.unmap(0, 4096), Ok(4096));
    drop(client);
    replica.finish();
}

#[test]
fn the_server_says_that_it_closes() {
    for mut replica in replicas() {
        let mut raw = replica.raw();
        let write = Header::with_payload(Type::Write, 1, 0, 4096);
        assert_eq!(raw.ask(write, &[1; 4096]).0, done(write, 4096));
        replica.service = None;
        let (last, payload) = raw.receive();
        assert_eq!((last, payload), (Header::new(Type::Close, 0, 0, 0), vec![]));
        assert!(raw.is_closed());
        drop(raw);
        replica.finish();
    }
}

#[test]
fn both_families_are_served_and_everything_is_counted() {
    for replica in replicas() {
        let tcp = replica.client(2);
        let unix = DataClient::connect(replica.unix(), 1).unwrap();
        tcp.write(0, &[1; 8192]).unwrap();
        assert_eq!(unix.read(4096, 4096).unwrap(), [1; 4096]);
        unix.ping().unwrap();
        unix.unmap(0, 4096).unwrap();
        unix.read(16 * MIB, 1).unwrap_err();
        let stats = replica.gate.stats();
        let of = |counts: &[u64; 5], kind| DataStats::of(counts, kind);
        assert_eq!(Kind::ALL.map(|kind| of(&stats.requests, kind)), [2, 1, 1, 1, 0]);
        assert_eq!(Kind::ALL.map(|kind| of(&stats.errors, kind)), [1, 0, 0, 0, 0]);
        assert_eq!(Kind::ALL.map(|kind| of(&stats.bytes, kind)), [4096, 8192, 4096, 0, 0]);
        assert_eq!((stats.connected, stats.connections, stats.in_flight), (3, 3, 0));
        assert_eq!(stats.latency.iter().sum::<u64>(), 5);
        drop((tcp, unix));
        eventually("they are gone", || replica.gate.stats().connected == 0);
        let (gate, requests) = (replica.gate.clone(), stats.requests);
        replica.finish();
        assert_eq!(gate.stats().requests, requests, "what was counted stays");
    }
}

#[test]
fn without_storage_the_protocol_alone_is_served() {
    for driver in DRIVERS {
        let Some(replica) = (Setup { driver, null: true, ..Setup::default() }).start() else {
            continue;
        };
        let client = replica.client(1);
        client.write(0, &[7; 8192]).unwrap();
        assert_eq!(client.read(0, 8192).unwrap(), [0; 8192], "nobody else's bytes");
        assert_eq!(client.read(3, 5).unwrap(), [0; 5]);
        let eof = ClientError::Replica("unexpected EOF".to_owned());
        assert_eq!(client.read(16 * MIB - BLOCK, 8192), Err(eof));
        client.write(16 * MIB, &[1; 4096]).unwrap_err();
        assert_eq!(replica.events.revision.load(Ordering::SeqCst), 1);
        drop(client);
        replica.finish();
    }
}

#[test]
fn a_connection_too_many_is_closed() {
    let options = DataOptions { max_connections: 2, reactors: 1, ..DataOptions::default() };
    let replica = Setup { options, ..Setup::default() }.start().unwrap();
    let client = replica.client(2);
    client.ping().unwrap();
    client.ping().unwrap();
    assert!(replica.raw().is_closed());
    client.ping().unwrap();
    drop(client);
    eventually("there is room again", || {
        let again = DataClient::connect(replica.tcp(), 1).unwrap();
        again.with_timeout(Duration::from_secs(5)).ping().is_ok()
    });
    replica.finish();
}
