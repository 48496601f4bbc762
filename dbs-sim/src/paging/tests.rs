//! Metadata blocks that are damaged, or read twice, while their bitmaps are away.

use super::*;
use crate::disk::Faults;
use dbs_core::store::Env;

impl Game {
    fn new(seed: u64) -> Result<Self, String> {
        Self::with(seed, None, false)
    }

    fn bytes(&self, block: u32, copy: u32) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK as usize];
        self.disk.read_at(self.address(block, copy), &mut bytes).unwrap();
        bytes
    }

    fn warnings(&self) -> Vec<String> {
        self.store.info().warnings
    }
}

/// Who needs what is damaged is told, and so is `dbs check`; nobody else is, and nothing is read as something else.
/// What changes there stays in the journal: commits go on, and nothing waits without end.
#[test]
fn damage_while_bitmaps_are_away_stops_nobody_else() {
    let mut game = Game::new(1).unwrap();
    (0..2).for_each(|copy| game.rot(0, copy));
    let (mut refused, mut right) = (0, 0);
    for place in 0..EXTENTS * PLACES {
        let mut buf = [0; BLOCK as usize];
        match game.volume.read_at(offset(place), &mut buf) {
            Ok(()) => {
                assert_eq!(buf[0], game.now.get(&place).copied().unwrap_or(0), "place {place}");
                right += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                refused += 1;
            }
        }
    }
    assert_eq!((refused, right), (PLACES_OF_BLOCK, EXTENTS * PLACES - PLACES_OF_BLOCK));
    let report = game.store.check().unwrap();
    assert_eq!(report.worst(), Some(Severity::Corrupt), "{report:?}");
    // Its block is to be written back, and cannot be.
    game.volume.discard(0, EXTENT).unwrap();
    game.settle().unwrap();
    game.write(EXTENTS * PLACES - 1).unwrap();
    game.settle().unwrap();
    let told = |game: &Game| {
        game.warnings().iter().filter(|text| text.starts_with("extent status 0: ")).count()
    };
    assert_eq!(told(&game), 1, "{:?}", game.warnings());
    // At last half of the journal's 64 blocks is full: that is said, with its cause.
    let (rounds, error) = game.fill_journal(10_000).unwrap_err();
    let full = error.to_string();
    assert!(rounds >= 10, "{rounds} rounds");
    assert!(full.contains("in the journal alone") && full.contains("extent status 0 "), "{full}");
    assert_eq!(told(&game), 1, "{:?}", game.warnings());
    drop(game.volume);
    assert!(game.store.close().is_err());
}

#[test]
fn a_store_whose_journal_a_damaged_block_holds_can_be_opened_again() {
    parked().unwrap();
}

/// What cannot be written back is no reason to write all else back, nor groups that say nothing, nor to read it again
/// with each commit. It is tried again after pauses, and then the journal gets room.
#[test]
fn commits_beside_a_block_that_cannot_be_read_cost_what_they_did() {
    let mut game = Game::new(8).unwrap();
    // With room, or each commit would write back for the sake of memory.
    game.store.set_metadata_memory(1 << 20);
    (0..2).for_each(|copy| game.rot(0, copy));
    game.volume.discard(0, EXTENT).unwrap();
    while game.store.settle().unwrap() {}
    // More than a quarter of its 64 blocks.
    let first = game.store.info().sequence;
    while game.store.info().sequence < first + 20 {
        game.fill_journal(1).unwrap();
    }
    let sequence = game.store.info().sequence;
    game.disk.arm(Faults::default());
    (0..8).for_each(|_| game.store.flush().unwrap());
    let counts = game.disk.counts();
    assert_eq!((counts.reads, counts.writes), (0, 0), "{counts:?}");
    assert_eq!(game.store.info().sequence, sequence);
    let buf = [1; BLOCK as usize];
    game.volume.write_at(offset(EXTENTS * PLACES - 1), &buf, true).unwrap();
    game.volume.discard(offset(EXTENTS * PLACES - 1), BLOCK).unwrap();
    game.store.flush().unwrap();
    let counts = game.disk.counts();
    assert!(counts.reads == 0 && counts.writes <= 3, "a block and a group each: {counts:?}");
    // After a pause, not each time.
    (0..100).for_each(|_| assert!(game.store.settle().is_ok()));
    let reads = game.disk.counts().reads;
    assert!(reads <= 4, "{reads} reads");
    (0..2).for_each(|copy| game.rot(0, copy));
    for _ in 0..20_000 {
        game.env.now_ns();
    }
    (0..8).for_each(|_| assert!(game.store.settle().is_ok()));
    game.disk.arm(Faults::default());
    drop(game.volume);
    game.store.close().unwrap();
    assert_eq!(game.disk.counts().reads, 0, "nothing was left to be brought");
    assert_eq!(open(&game.disk, &game.env).unwrap().check().unwrap().worst(), None);
}

/// A look through many layers whose bitmaps are away, each in a metadata block of its own, reads many at once.
#[test]
fn a_cold_read_of_a_deep_chain_takes_few_rounds() {
    const DEPTH: u64 = 100;
    let size = (DEPTH + 9) * 14 * EXTENT;
    let init = InitOptions {
        size: Some(size),
        extent_size: EXTENT,
        max_volumes: Some(8),
        checksums: false,
        ..InitOptions::default()
    };
    let (env, disk) = (Arc::new(SimEnv::new(1)), Arc::new(SimDisk::new(Medium::file(size), 1)));
    Store::init_on(&*disk, &init, &*env).unwrap();
    let tail = TailPlace::default();
    let store = open_with(&disk, &env, Some(&tail)).unwrap();
    store.create_volume("v", 14 * EXTENT).unwrap();
    let volume = store.volume("v").unwrap();
    for layer in 0..DEPTH {
        for (extent, block) in (0..14).flat_map(|extent| [(extent, 1), (extent, 3)]) {
            let at = extent * EXTENT + block * BLOCK;
            volume.write_at(at, &[layer as u8; BLOCK as usize], false).unwrap();
        }
        if layer == 0 {
            volume.write_at(7 * BLOCK, &[200; BLOCK as usize], false).unwrap();
        }
        store.create_snapshot("v", &layer.to_string(), &Default::default()).unwrap();
    }
    while store.settle().unwrap() {}
    store.set_metadata_memory(0);
    assert_eq!(store.info().lookups.bitmap_memory, 0);
    let reads = store.info().lookups.bitmap_reads;
    // The data comes in a batch of its own.
    let nth = 8;
    disk.after_read(nth, || {});
    let mut found = [0; BLOCK as usize];
    volume.read_at(7 * BLOCK, &mut found).unwrap();
    assert_eq!(found, [200; BLOCK as usize]);
    let brought = store.info().lookups.bitmap_reads - reads;
    assert!(brought >= DEPTH, "{brought} metadata blocks");
    assert!(disk.awaits_read(), "{nth} rounds or more");
}

/// A store that cannot write all back is not closed as one that has: what the journal keeps is redone.
#[test]
fn what_cannot_be_read_for_a_while_is_in_the_journal() {
    for is_back in [false, true] {
        let mut game = Game::new(2).unwrap();
        game.rot(0, 0);
        let place = game.address(0, 1);
        let eio = || Faults { read_eio_in: Some(place..place + BLOCK), ..Faults::default() };
        game.disk.arm(eio());
        let error = game.volume.read_at(0, &mut [0; BLOCK as usize]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        game.volume.discard(0, EXTENT).unwrap();
        (0..PLACES).for_each(|place| game.holds(place, 0));
        game.write(EXTENTS * PLACES - 1).unwrap();
        game.settle().unwrap();
        game.disk.arm(if is_back { Faults::default() } else { eio() });
        let Game { disk, env, store, volume, now, .. } = game;
        drop(volume);
        match store.close() {
            Ok(()) => assert!(is_back),
            Err(error) => assert!(error.to_string().contains("extent status 0 "), "{error}"),
        }
        disk.arm(Faults::default());
        let store = open(&disk, &env).unwrap();
        let volume = store.volume("v").unwrap();
        for place in 0..EXTENTS * PLACES {
            let mut buf = [0; BLOCK as usize];
            volume.read_at(offset(place), &mut buf).unwrap();
            assert_eq!(buf[0], now.get(&place).copied().unwrap_or(0), "place {place}, {is_back}");
        }
        while store.settle().unwrap() {}
        assert_eq!(store.check().unwrap().worst(), None);
    }
}

/// Where all that is away was freed, nothing has to be read to write the block back.
#[test]
fn a_damaged_block_that_nothing_is_left_of_is_written_again() {
    for is_parked in [false, true] {
        let game = Game::new(3).unwrap();
        (0..2).for_each(|copy| game.rot(0, copy));
        if is_parked {
            game.volume.discard(0, EXTENT).unwrap();
            while game.store.settle().unwrap() {}
        }
        assert_eq!(game.warnings().len(), usize::from(is_parked), "{:?}", game.warnings());
        game.volume.discard(0, 14 * EXTENT).unwrap();
        while game.store.settle().unwrap() {}
        if !is_parked {
            assert_eq!(game.store.check().unwrap().worst(), None);
        }
        let Game { disk, env, store, volume, .. } = game;
        drop(volume);
        store.close().unwrap();
        assert_eq!(open(&disk, &env).unwrap().check().unwrap().worst(), None);
    }
}

/// The copy that is not good is told of, and written again: before the good one is, which a torn write
/// would destroy.
#[test]
fn a_copy_that_is_not_good_is_written_first() {
    for copy in 0..2 {
        let game = Game::new(4).unwrap();
        game.rot(0, copy);
        let mut found = [0; BLOCK as usize];
        game.volume.read_at(0, &mut found).unwrap();
        assert_eq!(found[0], game.now[&0]);
        let [warning] = &game.warnings()[..] else { panic!("{:?}", game.warnings()) };
        assert!(warning.contains(&format!("extent status 0: copy {copy} ")), "{warning}");
        // Then it changes, and one copy is on its way to the device.
        game.store.set_metadata_memory(1 << 20);
        game.volume.discard(0, BLOCK).unwrap();
        let _more = game.store.settle().unwrap();
        let (good, bad) = (game.address(0, 1 - copy), game.address(0, copy));
        let bytes = |disk: &SimDisk, at| {
            let mut bytes = vec![0; BLOCK as usize];
            disk.read_at(at, &mut bytes).unwrap();
            bytes
        };
        let lost = game.disk.crash_image(&mut fastrand::Rng::with_seed(1), CrashMode::Lost);
        assert!(bytes(&lost, good) == bytes(&game.disk, good), "the good copy stays");
        assert!(bytes(&lost, bad) != bytes(&game.disk, bad), "the other one is on its way");
        for seed in 0..8 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let image = Arc::new(game.disk.crash_image(&mut rng, CrashMode::Torn));
            game.env.reboot();
            let store = open(&image, &game.env).unwrap();
            store.volume("v").unwrap().read_at(offset(1), &mut found).unwrap();
            assert_eq!(found[0], game.now[&1]);
        }
        while game.store.settle().unwrap() {}
        let report = game.store.check().unwrap();
        assert_eq!((report.worst(), report.findings.len()), (None, 0), "{report:?}");
    }
}

/// If the device has lost the writes of both copies, what it held before is not taken for what was written.
#[test]
fn two_copies_that_are_older_are_refused() {
    let mut game = Game::new(10).unwrap();
    let old = [0, 1].map(|copy| game.bytes(0, copy));
    game.volume.discard(0, BLOCK).unwrap();
    game.settle().unwrap();
    for (copy, bytes) in (0..).zip(&old) {
        assert!(game.bytes(0, copy) != *bytes);
        game.disk.write_at(game.address(0, copy), bytes).unwrap();
    }
    let error = game.volume.read_at(offset(PLACES), &mut [0; BLOCK as usize]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    game.read(EXTENTS * PLACES - 1).unwrap();
}

/// Where the device cannot read one copy, that is told, and written again with the next change: a device may refuse
/// to write there, too, which stops the store.
#[test]
fn a_copy_that_cannot_be_read_is_written_when_something_changes() {
    let mut game = Game::new(4).unwrap();
    let bad = game.address(0, 0);
    game.disk.arm(Faults { read_eio_in: Some(bad..bad + BLOCK), ..Faults::default() });
    game.volume.read_at(0, &mut [0; BLOCK as usize]).unwrap();
    let [warning] = &game.warnings()[..] else { panic!("{:?}", game.warnings()) };
    assert!(warning.contains("cannot read copy 0"), "{warning}");
    game.settle().unwrap();
    assert_eq!(game.disk.counts().writes, 0);
    let before = game.bytes(0, 1);
    game.volume.discard(0, BLOCK).unwrap();
    game.settle().unwrap();
    assert!(game.bytes(0, 1) != before);
    game.disk.arm(Faults::default());
    assert!(game.bytes(0, 0) != before);
    let report = game.store.check().unwrap();
    assert_eq!((report.worst(), report.findings.len()), (None, 0), "{report:?}");
}

/// While a block is read for one reader, another one brings it, it is changed, written back, and could go again.
#[test]
fn a_block_is_read_for_two_while_it_is_written_back() {
    let game = Game::new(5).unwrap();
    let (store, volume) = (game.store, game.volume);
    let other = volume.clone();
    let store = Arc::new(store);
    let beside = Arc::clone(&store);
    game.disk.after_read(1, move || {
        let mut found = [0; BLOCK as usize];
        other.read_at(0, &mut found).unwrap();
        other.write_at(BLOCK, &[9; BLOCK as usize], false).unwrap();
        other.discard(0, BLOCK).unwrap();
        while beside.settle().unwrap() {}
        beside.set_metadata_memory(0);
    });
    let mut found = [0; 2 * BLOCK as usize];
    volume.read_at(0, &mut found).unwrap();
    assert!(!game.disk.awaits_read());
    assert_eq!((found[0], found[BLOCK as usize]), (0, 9));
    drop(volume);
    assert_eq!(store.check().unwrap().worst(), None);
    assert_eq!(store.info().lookups.bitmap_memory, 0);
}

/// Of two deleted snapshots one needs a block for its merge that is damaged: the other one is merged.
#[test]
fn a_merge_that_cannot_be_is_put_off() {
    let mut game = Game::new(6).unwrap();
    for name in ["a", "b"] {
        game.store.create_snapshot("v", name, &Default::default()).unwrap();
        // Of "a" and of "b" each has something in both; what "b" gets from above is in the second block.
        game.write(EXTENTS * PLACES - 1).unwrap();
    }
    game.settle().unwrap();
    (0..2).for_each(|copy| game.rot(0, copy));
    // "a" has what lies in the damaged block, and "b" has not.
    for name in ["a", "b"] {
        game.store.delete_snapshot("v", name).unwrap();
    }
    let report = game.store.work(1000).unwrap();
    assert_eq!(report.remaining, 0, "{report:?}");
    let put_off = |text: &&String| text.contains("a deleted snapshot is not merged for that");
    assert_eq!(game.warnings().iter().filter(put_off).count(), 1, "{:?}", game.warnings());
    assert_eq!(game.store.work(1000).unwrap().done, 0);
    let counted = |game: &Game| {
        let info = game.store.info();
        (info.snapshots_deleting, info.snapshots_put_off)
    };
    assert_eq!(counted(&game), (1, 1));
    game.write(EXTENTS * PLACES - 1).unwrap();
    game.store.flush().unwrap();
    // Nor is it tried again and again.
    (0..3).for_each(|_| assert!(game.store.settle().is_ok()));
    assert_eq!(counted(&game), (1, 1));
}

/// What was put off is merged once what it needs can be read, whether somebody reads it or a pause is over.
#[test]
fn a_merge_that_was_put_off_comes_back() {
    for by_reader in [true, false] {
        let mut game = Game::new(6).unwrap();
        game.store.create_snapshot("v", "a", &Default::default()).unwrap();
        (0..PLACES).for_each(|place| game.write(place).unwrap());
        game.settle().unwrap();
        (0..2).for_each(|copy| game.rot(0, copy));
        game.store.delete_snapshot("v", "a").unwrap();
        let _report = game.store.work(1000).unwrap();
        assert_eq!(game.store.info().snapshots_put_off, 1);
        let refused = game.store.work(1000).unwrap();
        assert_eq!(refused.done, 0);
        (0..2).for_each(|copy| game.rot(0, copy));
        if by_reader {
            game.volume.read_at(offset(PLACES), &mut [0; BLOCK as usize]).unwrap();
        } else {
            let _more = game.store.settle().unwrap();
            for _ in 0..2000 {
                game.env.now_ns();
            }
            let _more = game.store.settle().unwrap();
        }
        assert_eq!(game.store.info().snapshots_put_off, 0, "{by_reader}");
        while game.store.work(1000).unwrap().done > 0 {}
        assert_eq!(game.store.info().snapshots_deleting, 0);
        (0..EXTENTS * PLACES).for_each(|place| game.read(place).unwrap());
        assert_eq!(game.store.check().unwrap().worst(), None);
    }
}

/// A layer over a snapshot whose merge is put off says why it does not change, and a trim passes over what is damaged.
#[test]
fn who_needs_what_is_put_off_is_told_why() {
    let Game { store, volume, disk, geometry, .. } = Game::new(9).unwrap();
    drop(volume);
    store.set_rebuilding("v", true).unwrap();
    for name in ["a", "b"] {
        store.create_snapshot("v", name, &Default::default()).unwrap();
        let volume = store.volume("v").unwrap();
        for place in 0..PLACES {
            volume.write_at(offset(place), &[1; BLOCK as usize], false).unwrap();
        }
    }
    while store.settle().unwrap() {}
    store.set_metadata_memory(0);
    for copy in 0..2 {
        disk.flip_bit(geometry.block_address(RegionKind::Extents, 0, copy) + 777, 3);
    }
    store.delete_snapshot("v", "a").unwrap();
    let _report = store.work(1000).unwrap();
    assert_eq!(store.info().snapshots_put_off, 1);
    let layer = store.layer("v", Some("b")).unwrap();
    let error = layer.clear(0, BLOCK).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

/// A trim passes over what nobody knows the blocks of, and goes on behind it.
#[test]
fn a_trim_goes_on_after_a_metadata_block_that_is_damaged() {
    let game = Game::new(9).unwrap();
    (0..2).for_each(|copy| game.rot(0, copy));
    let report = game.volume.trim(true, &mut |_| true).unwrap();
    let held = |extents: u64| extents * 2 * BLOCK;
    assert_eq!((report.unreadable, report.checked), (held(14), held(EXTENTS - 14)), "{report:?}");
    assert_eq!(report.done, report.total);
}

/// Volume extents of which neighbours are in different metadata blocks.
struct Scattered {
    disk: Arc<SimDisk>,
    store: Store,
    volume: Volume,
}

impl Scattered {
    /// Metadata blocks, and extents of each.
    const BLOCKS: u64 = 60;
    const ITEMS: u64 = 14;
    const EXTENTS: u64 = Self::BLOCKS * Self::ITEMS;

    /// If it `is_above`, over a snapshot of zeros, over one that holds something.
    fn new(is_above: bool) -> Self {
        let size = (Self::EXTENTS + 50) * EXTENT;
        let init = InitOptions {
            size: Some(size),
            extent_size: EXTENT,
            max_volumes: Some(8),
            checksums: false,
            ..InitOptions::default()
        };
        let (env, disk) = (Arc::new(SimEnv::new(1)), Arc::new(SimDisk::new(Medium::file(size), 1)));
        Store::init_on(&*disk, &init, &*env).unwrap();
        let tail = TailPlace::default();
        let store = open_with(&disk, &env, Some(&tail)).unwrap();
        store.create_volume("v", Self::EXTENTS * EXTENT).unwrap();
        let volume = store.volume("v").unwrap();
        if is_above {
            volume.write_at(0, &[1; BLOCK as usize], false).unwrap();
            store.create_snapshot("v", "below", &Default::default()).unwrap();
            volume.discard(0, Self::EXTENTS * EXTENT).unwrap();
            store.create_snapshot("v", "zeros", &Default::default()).unwrap();
        }
        let scattered = Self { disk, store, volume };
        for extent in (0..Self::EXTENTS).map(Self::nth_taken) {
            for block in [1, 3] {
                scattered.write(extent, block);
            }
        }
        scattered.settle();
        scattered
    }

    /// The volume extent that takes the n-th extent.
    fn nth_taken(n: u64) -> u64 {
        n % Self::ITEMS * Self::BLOCKS + n / Self::ITEMS
    }

    fn write(&self, extent: u64, block: u64) {
        let at = extent * EXTENT + block * BLOCK;
        self.volume.write_at(at, &[block as u8; BLOCK as usize], false).unwrap();
    }

    fn settle(&self) {
        while self.store.settle().unwrap() {}
        self.store.set_metadata_memory(0);
        assert_eq!(self.store.info().lookups.bitmap_memory, 0);
    }

    /// Whether a call reads in fewer rounds than so many, of all metadata blocks.
    fn takes_fewer_rounds(&self, rounds: u64, call: impl FnOnce()) -> bool {
        let reads = self.store.info().lookups.bitmap_reads;
        self.disk.after_read(rounds, || {});
        call();
        assert!(self.store.info().lookups.bitmap_reads >= reads + Self::BLOCKS);
        self.disk.awaits_read()
    }
}

/// Who goes through the extents of a layer, each with its bitmap in another metadata block, reads many at once.
#[test]
fn a_walk_over_scattered_extents_takes_few_rounds() {
    let scattered = Scattered::new(false);
    let Scattered { store, volume, .. } = &scattered;
    let size = Scattered::EXTENTS * EXTENT;
    assert!(scattered.takes_fewer_rounds(3, || {
        let map = volume.map(0, size, usize::MAX).unwrap();
        assert_eq!(map.len() as u64, Scattered::EXTENTS * 4 + 1);
    }));
    scattered.settle();
    assert!(scattered.takes_fewer_rounds(3, || {
        let usage = store.usage("v", None).unwrap();
        assert_eq!(usage.referenced, Scattered::EXTENTS * 2 * BLOCK);
    }));
    scattered.settle();
    assert!(scattered.takes_fewer_rounds(3, || {
        store.diff("v", None, None, 0, size).unwrap();
    }));
    scattered.settle();
    let observer = store.observe("v").unwrap();
    assert!(scattered.takes_fewer_rounds(6, || {
        assert_eq!(observer.data_bytes().unwrap(), Scattered::EXTENTS * 2 * BLOCK);
    }));
}

/// A step of a merge handles 64 extents, and reads what it needs of them at once, or nearly so.
#[test]
fn a_merge_over_scattered_extents_takes_few_rounds() {
    for is_above in [false, true] {
        let scattered = Scattered::new(is_above);
        let Scattered { store, volume, .. } = &scattered;
        if !is_above {
            store.create_snapshot("v", "zeros", &Default::default()).unwrap();
        }
        store.delete_snapshot("v", "zeros").unwrap();
        scattered.settle();
        let steps = Scattered::EXTENTS.div_ceil(64);
        assert!(scattered.takes_fewer_rounds(4 * steps, || {
            while store.work(1000).unwrap().remaining > 0 {}
        }));
        assert_eq!(store.info().snapshots_deleting, 0);
        let mut found = [0; 4 * BLOCK as usize];
        for extent in 0..Scattered::EXTENTS {
            volume.read_at(extent * EXTENT, &mut found).unwrap();
            for (block, bytes) in (0..).zip(found.chunks_exact(BLOCK as usize)) {
                assert_eq!(bytes[0], if [1, 3].contains(&block) { block } else { 0 });
            }
        }
        assert_eq!(store.check().unwrap().worst(), None);
    }
}

/// Metadata blocks that are to be written back are read together.
#[test]
fn what_is_written_back_is_read_together() {
    let scattered = Scattered::new(false);
    scattered.volume.discard(0, Scattered::BLOCKS * EXTENT).unwrap();
    assert!(scattered.takes_fewer_rounds(3, || while scattered.store.settle().unwrap() {}));
}

/// What a write will change stays in memory also if there was no bound when it was planned.
#[test]
fn a_bound_that_comes_amid_a_write_spares_its_bitmaps() {
    let Game { disk, env, store, volume, now, .. } = Game::new(11).unwrap();
    drop(volume);
    store.close().unwrap();
    let store = Store::open_within(Arc::clone(&disk) as _, None, env, false, None).unwrap();
    let volume = store.volume("v").unwrap();
    let mut requests = [(); 2].map(|()| Request::new());
    let place = |number: usize| offset(number as u64 * PLACES + 2);
    for (number, request) in requests.iter_mut().enumerate() {
        let started = volume.start_write(place(number), BLOCK, request).unwrap();
        assert_eq!(started, Start::Io);
        disk.write_at(request.segments()[0].device, &[9; BLOCK as usize]).unwrap();
        // The second one is planned with it.
        store.set_metadata_memory(0);
        assert!(store.info().lookups.bitmap_memory > 0);
    }
    for request in &mut requests {
        let _commits = request.finish_write(Ok(())).unwrap();
    }
    while store.settle().unwrap() {}
    store.set_metadata_memory(0);
    assert_eq!(store.info().lookups.bitmap_memory, 0);
    let mut found = [0; BLOCK as usize];
    for number in 0..2 {
        volume.read_at(place(number), &mut found).unwrap();
        assert_eq!(found, [9; BLOCK as usize]);
        volume.read_at(offset(number as u64 * PLACES), &mut found).unwrap();
        assert_eq!(found[0], now[&(number as u64 * PLACES)]);
    }
    drop((requests, volume));
    assert_eq!(store.check().unwrap().worst(), None);
}

/// Who may not write reads the copy that is good, and has nothing to mend: what was read can leave again.
#[test]
fn a_reader_without_memory_for_bitmaps_changes_nothing() {
    let Game { disk, env, store, volume, now, geometry, .. } = Game::new(12).unwrap();
    drop(volume);
    store.close().unwrap();
    let storage: Arc<dyn Storage> = Arc::clone(&disk) as _;
    let store = Store::open_within(storage, None, env, true, Some(0)).unwrap();
    for (block, copy) in [(0, 0), (1, 1)] {
        disk.flip_bit(geometry.block_address(RegionKind::Extents, block, copy) + 777, 3);
    }
    let written = disk.mark();
    let volume = store.volume("v").unwrap();
    for place in 0..EXTENTS * PLACES {
        let mut buf = [0; BLOCK as usize];
        volume.read_at(offset(place), &mut buf).unwrap();
        assert_eq!(buf[0], now.get(&place).copied().unwrap_or(0), "place {place}");
    }
    let size = EXTENTS * EXTENT;
    let data = |map: Vec<dbs_core::info::MapRange>| {
        map.iter().filter(|range| range.state == dbs_core::info::RangeState::Data).count()
    };
    assert_eq!(data(volume.map(0, size, usize::MAX).unwrap()), now.len());
    assert_eq!(store.usage("v", None).unwrap().referenced, now.len() as u64 * BLOCK);
    assert!(!store.settle().unwrap());
    store.set_metadata_memory(0);
    let lookups = store.info().lookups;
    assert!(lookups.bitmap_reads > 0 && lookups.bitmap_memory == 0, "{lookups:?}");
    drop((volume, store));
    assert_eq!(disk.mark(), written);
}
