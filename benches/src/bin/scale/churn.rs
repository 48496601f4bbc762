//! A store filled to the brim, emptied and filled again: it must neither grow nor lose anything.

use dbs_benches::content::{BLOCK, Content};
use dbs_benches::machine::allocated;
use dbs_benches::report::{Table, mib, time};
use dbs_benches::{Bench, Outcome, drain, open, timed};
use dbs_core::{ErrorKind, Store};

/// Rounds, each as large as the store.
const ROUNDS: u64 = 10;
/// Blocks of a volume that lives through all of them.
const KEPT_BLOCKS: u64 = 1024;

/// Takes the measurement.
///
/// # Errors
/// Those of the store, content that is not what was written, or growth.
pub fn measure(bench: &Bench) -> Outcome<Table> {
    let size: u64 = bench.pick(1 << 30, 48 << 20);
    let path = bench.init("churn.dbs", size)?;
    let title = format!("A store of {} MiB filled, emptied, filled again", size >> 20);
    let columns = ["round", "written until full", "time", "file when full", "file when empty"];
    let mut table = Table::new(&title, &columns);
    let store = open(&path)?;
    store.create_volume("kept", KEPT_BLOCKS * BLOCK as u64)?;
    let mut kept = Content::new(1, KEPT_BLOCKS);
    kept.write_all(&store.volume("kept")?)?;

    let mut first = None;
    for round in 1..=ROUNDS {
        let name = format!("round{round}");
        store.create_volume(&name, size)?;
        let mut content = Content::new(1 + round, size / BLOCK as u64);
        let ((), took) = timed(|| fill(&store, &name, &mut content))?;
        let full = allocated(&path)?;
        content.verify(&store.volume(&name)?)?;
        kept.verify(&store.volume("kept")?)?;
        empty(&store, &name, round)?;
        drain(&store)?;
        store.flush()?;
        let empty = allocated(&path)?;
        let written = content.written() * BLOCK as u64;
        table.row(&[&round, &mib(written), &time(took), &mib(full), &mib(empty)]);

        let (written_first, full_first, empty_first) = *first.get_or_insert((written, full, empty));
        // Metadata blocks are first used at some time or other.
        let slack = size / 256;
        if written != written_first || full > full_first + slack || empty > empty_first + slack {
            return Err(format!("round {round} differs:\n{}", table.finish()).into());
        }
    }
    kept.verify(&store.volume("kept")?)?;
    store.close()?;
    Ok(table)
}

/// Writes until the store is full.
fn fill(store: &Store, name: &str, content: &mut Content) -> Outcome<()> {
    let volume = store.volume(name)?;
    match content.write_all(&volume) {
        Err(error) if error.kind() == ErrorKind::NoSpace => Ok(volume.flush()?),
        Err(error) => Err(error.into()),
        Ok(()) => Err("a volume as large as the store found room in it".into()),
    }
}

/// Empties the store in one of three ways; the volume is gone afterwards.
fn empty(store: &Store, name: &str, round: u64) -> Outcome<()> {
    match round % 3 {
        0 => store.volume(name)?.discard(0, store.volume_info(name)?.size)?,
        1 => {}
        _ => {
            store.create_snapshot(name, "s", &Default::default())?;
            store.delete_snapshot(name, "s")?;
        }
    }
    Ok(store.delete_volume(name)?)
}
