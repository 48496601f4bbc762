//! A replica that is being rebuilt beside complete ones.

use crate::data_support::pattern;
use crate::fake::{Do, Fake};
use crate::support::{Load, SIZE, Volume, address, content, options, refused, replicas};
use longhorn_controller::path::Mode;
use longhorn_wire::frame::Type;

#[test]
fn it_gets_whole_blocks_and_no_reads() {
    let volume = Volume::new(options(2));
    let replicas = replicas(1);
    let (complete, rebuilt) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &address(&replicas[0]), Mode::Rw);
    volume.add(2, &complete.address(), Mode::Rw);
    // What was there before, the new one does not have.
    let client = volume.client(4);
    for block in (0..SIZE).step_by(1 << 20) {
        client.write(block, &pattern(block, 1 << 20)).unwrap();
    }
    volume.add(3, &rebuilt.address(), Mode::Wo);
    let image = Load { unmaps: false, ..Load::default() }.during(&volume, |load| {
        load.some_more(800);
    });
    assert!(content(&replicas[0]) == image && complete.content() == image);
    let writes = rebuilt.seen(Type::Write);
    assert!(writes.len() > 100);
    for write in &writes {
        let range = (write.offset as u64, u64::from(write.size));
        assert!((range.0 | range.1).is_multiple_of(4096), "{write:?}");
    }
    assert_eq!(rebuilt.seen(Type::Read).len(), 0);
    assert!(volume.path.stats().widened > 100);
    // Each block that was written is complete.
    let copy = rebuilt.content();
    let mut blocks = 0;
    for write in &writes {
        for at in (write.offset as usize..).step_by(4096).take(write.size as usize / 4096) {
            assert!(copy[at..at + 4096] == image[at..at + 4096], "block at {at}");
            blocks += 1;
        }
    }
    assert!(blocks > 100);
}

#[test]
fn writes_into_the_same_block_do_not_lose_each_other() {
    let volume = Volume::new(options(2));
    let (complete, rebuilt) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &complete.address(), Mode::Rw);
    volume.add(2, &rebuilt.address(), Mode::Wo);
    let clients: Vec<_> = (0..4).map(|_| volume.client(2)).collect();
    for round in 0..40_u8 {
        let sent: Vec<_> = (0..32_u64)
            .map(|sector| {
                let client = &clients[sector as usize % 4];
                let data = [round ^ sector as u8; 512];
                client.submit(Type::Write, sector as i64 * 512, 512, &data).unwrap()
            })
            .collect();
        sent.into_iter().for_each(|pending| drop(pending.wait().unwrap()));
        let expected: Vec<u8> = (0..32_u8).flat_map(|sector| [round ^ sector; 512]).collect();
        assert!(clients[0].read(0, 16384).unwrap() == expected, "round {round}");
        assert!(complete.content()[..16384] == expected);
        assert!(rebuilt.content()[..16384] == expected);
    }
}

#[test]
fn unmaps_are_nothing_meanwhile_and_refused_while_it_grows() {
    let volume = Volume::new(options(1));
    let (complete, rebuilt) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &complete.address(), Mode::Rw);
    volume.add(2, &rebuilt.address(), Mode::Wo);
    let client = volume.client(1);
    client.write(0, &[1; 8192]).unwrap();
    assert_eq!(client.unmap(0, 8192), Ok(0));
    assert_eq!((complete.seen(Type::Unmap).len(), rebuilt.seen(Type::Unmap).len()), (0, 0));
    volume.path.set_mode(2, Mode::Rw);
    volume.path.set_expanding(true);
    assert!(refused(client.unmap(0, 8192)).contains("while expansion is in progress"));
    volume.path.set_expanding(false);
    assert_eq!(client.unmap(0, 8192), Ok(8192));
    assert_eq!((complete.seen(Type::Unmap).len(), rebuilt.seen(Type::Unmap).len()), (1, 1));
}

#[test]
fn it_may_fail_without_anybody_noticing() {
    let volume = Volume::new(options(2));
    let (complete, rebuilt) = (Fake::new(SIZE as usize), Fake::new(SIZE as usize));
    volume.add(1, &complete.address(), Mode::Rw);
    volume.add(2, &rebuilt.address(), Mode::Wo);
    let image = Load { unmaps: false, ..Load::default() }.during(&volume, |load| {
        rebuilt.behave(|_| Do::Close);
        volume.faulted(2);
        load.some_more(200);
    });
    assert!(complete.content() == image);
    assert_eq!(volume.mode(1), Mode::Rw);
}

#[test]
fn alone_it_serves_nobody() {
    let volume = Volume::new(options(1));
    let rebuilt = Fake::new(SIZE as usize);
    volume.add(1, &rebuilt.address(), Mode::Wo);
    let client = volume.client(1);
    assert_eq!(refused(client.read(0, 512)), "no backend available");
    assert_eq!(refused(client.write(0, &[1; 512])), "no backend available");
    volume.path.set_mode(1, Mode::Rw);
    client.write(0, &[1; 512]).unwrap();
    assert_eq!(client.read(0, 512).unwrap(), [1; 512]);
}
