//! What a host asks for.

use super::host::{Command, DATASET, DISCOVERY, FLUSH, GET, Host, Options, SET};
use super::{Place, SIZE, agreements, noise};
use dbs_core::SnapshotOptions;
use dbs_reactor::Driver;
use std::collections::HashMap;

fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(data[at..at + 2].try_into().unwrap())
}

fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(data[at..at + 4].try_into().unwrap())
}

fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(data[at..at + 8].try_into().unwrap())
}

#[test]
fn each_kind_of_command_is_carried_out_however_pdus_look() {
    for options in agreements() {
        let place = Place::new();
        let mut host = place.host(options);
        let queue = &mut host.queues[0];
        // Asked for, and as long as can be in a capsule.
        for (at, length) in [(8192, 1 << 20), (2 << 20, 16384), (3 << 20, 4096), (4 << 20, 512)] {
            let data = noise(at, length);
            queue.run(&Command::write(at, data.clone())).ok();
            assert!(place.content(at, length) == data, "{options:?} {at}");
            let read = queue.run(&Command::read(at, length as u64)).ok().data;
            assert!(read == data, "{options:?} {at}");
        }
        // Parts of blocks, and what nobody wrote.
        queue.run(&Command::write(8192 + 512, vec![7; 512])).ok();
        let read = queue.run(&Command::read(4096, 8192)).ok().data;
        assert_eq!((&read[..4096], &read[4608..5120]), (&[0; 4096][..], &[7; 512][..]));
        queue.run(&Command::write(4096, vec![3; 4096]).durable()).ok();
        assert_eq!(place.content(4096, 4096), vec![3; 4096]);
        queue.run(&Command::new(FLUSH, 1)).ok();
        queue.run(&Command::new(FLUSH, u32::MAX)).ok();
        // Zeros with their space and without it.
        let data = noise(1, 64 << 10);
        for frees in [false, true] {
            queue.run(&Command::write(1 << 20, data.clone())).ok();
            queue.run(&Command::zeroes((1 << 20) + 4096, 8192, frees)).ok();
            let mut expected = data.clone();
            expected[4096..12288].fill(0);
            assert!(place.content(1 << 20, data.len()) == expected, "{frees}");
        }
        // Ranges, in a capsule and asked for; a hint does nothing.
        let ranges = [((1 << 20), 4096), ((1 << 20) + 16384, 8192), (0, 0)];
        for transfer in [false, true] {
            queue.run(&Command::write(1 << 20, data.clone())).ok();
            let mut command = Command::deallocate(&ranges);
            if transfer {
                // As Linux does: as long as can be, with nonsense behind.
                command.out.resize(4096, 0xff);
                command.transfer = true;
            }
            let hint = command.clone().dword(11, 2);
            queue.run(&hint).ok();
            assert!(place.content(1 << 20, data.len()) == data);
            queue.run(&command).ok();
            let mut expected = data.clone();
            expected[..4096].fill(0);
            expected[16384..24576].fill(0);
            assert!(place.content(1 << 20, data.len()) == expected, "{transfer}");
        }
        let client = &place.nvme.clients()[0];
        assert_eq!((client.counted.reads, client.counted.writes), (5, 12));
        assert_eq!(client.counted.read_bytes, (1 << 20) + 16384 + 4096 + 512 + 8192);
    }
}

#[test]
fn pdus_may_come_in_any_pieces() {
    use std::io::Write;
    let place = Place::new();
    let options = Options { header_digest: true, data_digest: true, ..Options::default() };
    let mut host = place.host(options);
    let queue = &mut host.queues[0];
    // A write of 512 bytes, and a read of it, which the host knows of.
    let data = noise(5, 512);
    let mut write = Command::write(4096, data.clone());
    (write.entry[2], write.entry[3], write.entry[39]) = (0, 0x70, 0x01);
    write.entry[32..36].copy_from_slice(&512u32.to_le_bytes());
    let bytes = queue.wire.pdu(4, 0, &write.entry, &write.out);
    for piece in [1, 7, 8, 9, 75, 76, 77, 100] {
        for bytes in bytes.chunks(piece) {
            queue.wire.stream.write_all(bytes).unwrap();
        }
        let answer = queue.wire.next().unwrap();
        assert_eq!((answer.kind, answer.u16(20), answer.u16(22)), (5, 0x7000, 0), "{piece}");
    }
    assert!(queue.run(&Command::read(4096, 512)).ok().data == data);
}

#[test]
fn what_cannot_be_is_refused_and_the_queue_goes_on() {
    let place = Place::new();
    let mut host = place.host(Options::default());
    let queue = &mut host.queues[0];
    let (field, namespace, sgl, range) = (0x02, 0x0b, 0x0f, 0x80);
    let edit = |command: Command, at: usize, byte: u8| {
        let mut command = command;
        command.entry[at] = byte;
        command
    };
    let read = Command::read(0, 4096);
    for (command, status) in [
        (Command::read(SIZE, 4096), range),
        (Command::read(SIZE - 512, 1024), range),
        (Command::read(u64::MAX / 512 * 512, 512), range),
        (read.clone().dword(11, u32::MAX), range),
        (Command::write(SIZE, vec![0; 512]), range),
        (Command::write(SIZE, vec![0; 512]).asked_for(), range),
        (Command::zeroes(SIZE - 4096, 8192, true), range),
        (Command::deallocate(&[(0, 4096), (SIZE - 4096, 8192)]), range),
        (Command::deallocate(&[(u64::MAX / 512 * 512, 512)]), range),
        (read.clone().dword(1, 0), namespace),
        (read.clone().dword(1, 2), namespace),
        (read.clone().dword(1, u32::MAX), namespace),
        (edit(read.clone(), 1, 0x41), field),
        (edit(read.clone(), 1, 0x00), field),
        (Command { takes: 8192, ..read.clone() }, sgl),
        (Command { takes: 0, ..read.clone() }, sgl),
        (Command::write(0, vec![0; 4096]).dword(12, 0), sgl),
        (Command::write(0, vec![0; 4096]).dword(12, 8), sgl),
        (Command::read(0, 2 << 20), field),
        (Command::new(0x05, 1), 0x01),
        (Command::new(0x7f, 1), 0x01),
        (Command { out: vec![0; 512], ..Command::new(FLUSH, 1) }, field),
        (Command { out: vec![0; 16], ..Command::new(DATASET, 1).dword(10, 1) }, sgl),
        (Command { out: vec![0; 4112], ..Command::new(DATASET, 1) }, sgl),
    ] {
        let done = queue.run(&command);
        assert_eq!((done.status, done.no_retry), (status, true), "{command:?}");
    }
    // Nothing of it was done.
    assert!(place.content(0, 4096).iter().all(|byte| *byte == 0));
    queue.run(&read).ok();
}

#[test]
fn the_controller_and_the_namespace_say_what_linux_wants_to_know() {
    let place = Place::new();
    let mut host = Host::admin(place.address(), Options::default(), &place.subsystem("v")).unwrap();
    let admin = &mut host.admin;
    let capabilities = admin.run(&Command::property_get(0, true)).ok().result;
    assert_eq!((capabilities & 0xffff, capabilities >> 37 & 1), (127, 1), "entries, NVM");
    assert_eq!((capabilities >> 48 & 15, capabilities >> 24 & 255), (0, 30), "pages, timeout");
    assert_eq!(admin.run(&Command::property_get(8, false)).ok().result, 0x0001_0400);
    assert_eq!(admin.run(&Command::property_get(8, true)).status, 2);
    let data = admin.run(&Command::identify(1, 0)).ok().data;
    assert_eq!(u16_at(&data, 78), host.controller);
    assert_eq!(u32_at(&data, 80), 0x0001_0400);
    assert_eq!(data[77], 8, "1 MiB");
    assert_eq!((data[111], data[512], data[513]), (1, 0x66, 0x44));
    assert!(u16_at(&data, 320) > 0 && u16_at(&data, 514) > 0, "keep alive, commands");
    assert_eq!((u32_at(&data, 516), u16_at(&data, 520)), (1, 12));
    assert_eq!((data[525] & 1, u32_at(&data, 536)), (1, 1 | 1 << 20));
    assert_eq!((u32_at(&data, 1792), u32_at(&data, 1796)), ((64 + 16384) / 16, 1));
    assert_eq!((u16_at(&data, 1800), data[1802], data[1803]), (0, 0, 1));
    let subsystem = place.subsystem("v");
    assert_eq!(&data[768..768 + subsystem.len()], subsystem.as_bytes());
    assert_eq!(data[768 + subsystem.len()], 0);
    let data = admin.run(&Command::identify(0, 1)).ok().data;
    assert_eq!((u64_at(&data, 0), u64_at(&data, 8), data[99]), (SIZE / 512, SIZE / 512, 0));
    assert_eq!((data[25], data[26], data[130]), (0, 0, 9));
    // What is below the file of the store is not known.
    assert_eq!((data[24], data[33], u16_at(&data, 36), u16_at(&data, 64)), (0x10, 9, 0, 7));
    let data = admin.run(&Command::identify(2, 0)).ok().data;
    assert_eq!((u32_at(&data, 0), u32_at(&data, 4)), (1, 0));
    assert_eq!(u32_at(&admin.run(&Command::identify(2, 1)).ok().data, 0), 0);
    let data = admin.run(&Command::identify(3, 1)).ok().data;
    let uuid: String = data[4..20].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!((data[0], data[1], data[20], data[21]), (3, 16, 0, 0));
    assert_eq!(uuid, place.store.volume_info("v").unwrap().uuid.replace('-', ""));
    let data = admin.run(&Command::identify(6, 0)).ok().data;
    assert_eq!((data[1], u32_at(&data, 4)), (13, (1 << 30) / 512));
    for (kind, namespace, status) in
        [(0, 2, 0x0b), (3, 0, 0x0b), (5, 1, 2), (8, 1, 2), (0x1c, 0, 2)]
    {
        assert_eq!(admin.run(&Command::identify(kind, namespace)).status, status, "{kind}");
    }
    let short = Command { takes: 512, ..Command::identify(1, 0) };
    assert_eq!(admin.run(&short).status, 0x0f);
}

#[test]
fn features_and_logs() {
    let place = Place::new();
    let mut host = Host::admin(place.address(), Options::default(), &place.subsystem("v")).unwrap();
    let admin = &mut host.admin;
    let set = |feature: u32, value: u32| Command::new(SET, 0).dword(10, feature).dword(11, value);
    let get = |feature: u32| Command::new(GET, 0).dword(10, feature);
    // Of each of 2 reactors at most 2.
    assert_eq!(admin.run(&set(7, 200 | 2 << 16)).ok().result, 3 | 2 << 16);
    assert_eq!(admin.run(&set(7, 0xffff)).status, 2);
    assert_eq!(admin.run(&get(7)).ok().result, 3 | 3 << 16);
    admin.run(&set(0x0b, 0x100)).ok();
    assert_eq!(admin.run(&get(0x0b)).ok().result, 0x100);
    admin.run(&set(0x0f, 4500)).ok();
    assert_eq!(admin.run(&get(0x0f)).ok().result, 5000);
    assert_eq!(admin.run(&get(6)).ok().result, 1);
    admin.run(&set(6, 1)).ok();
    assert_eq!(admin.run(&set(6, 0)).status, 0x10e);
    assert_eq!((admin.run(&set(1, 0)).status, admin.run(&get(1)).status), (2, 2));
    for (log, length) in [(1, 64), (2, 512), (3, 512), (4, 4096), (5, 4096)] {
        assert_eq!(admin.run(&Command::log(log, 0, length)).ok().data.len(), length as usize);
    }
    let effects = admin.run(&Command::log(5, 0, 4096)).ok().data;
    assert_eq!((u32_at(&effects, 1024 + 4), u32_at(&effects, 1024 + 8)), (3, 1), "write, read");
    assert_eq!(admin.run(&Command::log(5, 1024, 64)).ok().data, effects[1024..1088]);
    assert_eq!(admin.run(&Command::log(5, 8192, 64)).status, 2);
    assert_eq!(admin.run(&Command::log(0x70, 0, 64)).status, 0x109);
    assert_eq!(admin.run(&Command::log(2, 0, 2 << 20)).status, 2);
    admin.run(&Command::new(0x18, 0)).ok();
    assert_eq!(admin.run(&Command::new(8, 0).dword(10, 1)).ok().result, 1, "not aborted");
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x0d, 0x80, 0xff] {
        assert_eq!(admin.run(&Command::new(opcode, 0)).status, 1, "{opcode:#x}");
    }
}

#[test]
fn discovery_shows_volumes_and_snapshots_that_the_host_may_see() {
    let place = Place::new();
    place.store.create_volume("hidden", SIZE).unwrap();
    place.store.create_volume("w", SIZE).unwrap();
    place.store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    place.nvme.follow();
    let mut host = Host::admin(place.address(), Options::default(), DISCOVERY).unwrap();
    let data = host.admin.run(&Command::identify(1, 0)).ok().data;
    assert_eq!((data[111], &data[768..768 + DISCOVERY.len()]), (2, DISCOVERY.as_bytes()));
    let log = host.admin.run(&Command::log(0x70, 0, 5 * 1024)).ok().data;
    assert_eq!((u64_at(&log, 8), u16_at(&log, 16)), (3, 0));
    let mut expected = ["v", "w", "v@s"].map(|volume| place.subsystem(volume));
    expected.sort();
    let text = |bytes: &[u8]| {
        String::from_utf8(bytes.to_vec()).unwrap().trim_end_matches(['\0', ' ']).to_owned()
    };
    for (record, subsystem) in log[1024..4096].chunks(1024).zip(&expected) {
        assert_eq!(record[..3], [3, 1, 2], "TCP, IPv4, NVM");
        assert_eq!(u16_at(record, 6), 0xffff);
        assert_eq!(text(&record[32..64]), place.address().port().to_string());
        assert_eq!(&text(&record[256..512]), subsystem);
        assert_eq!(text(&record[512..768]), "127.0.0.1");
    }
    assert!(log[4096..].iter().all(|byte| *byte == 0));
    // In parts that fit no record.
    let part = host.admin.run(&Command::log(0x70, 1280, 1500)).ok().data;
    assert_eq!(part, log[1280..2780]);
    assert!(host.admin.run(&Command::log(0x70, !3, 64)).ok().data.iter().all(|b| *b == 0));
    assert_eq!(host.admin.run(&Command::identify(0, 1)).status, 2);
    // It shows no disk, and cannot have I/O queues.
    assert!(place.nvme.clients().is_empty());
    let names = (super::host::HOST, DISCOVERY);
    let queue = super::host::Queue::connect(
        place.address(),
        Options::default(),
        names,
        (1, host.controller),
    );
    assert_eq!(queue.err().unwrap().status, 0x182);
}

#[test]
fn many_commands_at_once_are_answered_each_once_and_with_its_own_data() {
    for (driver, options) in [Driver::Auto, Driver::Epoll]
        .into_iter()
        .flat_map(|d| agreements().into_iter().map(move |o| (d, o)))
    {
        let place = Place::with(driver);
        let mut host = Host::with(place.address(), options, &place.subsystem("v"), 2);
        let part = SIZE / 2;
        std::thread::scope(|scope| {
            for (index, queue) in host.queues.iter_mut().enumerate() {
                scope.spawn(move || random_load(queue, part * index as u64, part, 500));
            }
        });
    }
}

/// Writes and reads of random ranges of a part, which a command under way has to itself.
fn random_load(queue: &mut super::host::Queue, start: u64, part: u64, commands: usize) {
    let mut random = fastrand::Rng::with_seed(start);
    let mut model = vec![0u8; part as usize];
    let mut running: HashMap<u16, (std::ops::Range<usize>, Option<Vec<u8>>)> = HashMap::new();
    let (mut begun, mut ended) = (0, 0);
    while ended < commands {
        while begun < commands && running.len() < 100 {
            let length = 512 * random.usize(1..=96);
            let at = 512 * random.usize(0..=(part as usize - length) / 512);
            let range = at..at + length;
            if running.values().any(|(r, _)| r.start < range.end && range.start < r.end) {
                continue;
            }
            let offset = start + at as u64;
            let (id, data) = if random.bool() {
                let data: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
                (queue.submit(&Command::write(offset, data.clone())), Some(data))
            } else {
                (queue.submit(&Command::read(offset, length as u64)), None)
            };
            running.insert(id, (range, data));
            begun += 1;
        }
        let (id, done) = queue.any();
        let (range, written) = running.remove(&id).expect("answered once");
        let read = done.ok().data;
        match written {
            Some(data) => model[range].copy_from_slice(&data),
            None => assert!(read == model[range], "what was read is not what was written"),
        }
        ended += 1;
    }
}

#[test]
fn snapshots_and_volumes_that_may_only_be_read_are_not_written() {
    let place = Place::new();
    place.store.create_volume("read", SIZE).unwrap();
    place.store.volume("v").unwrap().write_at(0, &[5; 4096], false).unwrap();
    place.store.create_snapshot("v", "s", &SnapshotOptions::default()).unwrap();
    place.nvme.follow();
    for (spec, byte) in [("v@s", 5), ("read", 0)] {
        let subsystem = place.subsystem(spec);
        let mut host = Host::with(place.address(), Options::default(), &subsystem, 1);
        assert_eq!(host.admin.run(&Command::identify(0, 1)).ok().data[99], 1);
        let queue = &mut host.queues[0];
        assert_eq!(queue.run(&Command::read(0, 4096)).ok().data, vec![byte; 4096]);
        for command in [
            Command::write(0, vec![1; 4096]),
            Command::write(0, vec![1; 65536]),
            Command::zeroes(0, 4096, true),
            Command::deallocate(&[(0, 4096)]),
        ] {
            assert_eq!(queue.run(&command).status, 0x20, "{command:?}");
        }
        queue.run(&Command::new(FLUSH, 1)).ok();
        assert_eq!(queue.run(&Command::read(0, 4096)).ok().data, vec![byte; 4096]);
    }
}
