//! Metadata out of a dump that somebody changed.

use crate::disk::Disk;
use crate::exercise::{assert_detected, survive};
use crate::input::Input;
use crate::repair::{carry_out, put_back, saved};
use crate::sample::{End, SIZE, Sample, contents, open};
use dbs_core::Store;
use serde_json::{Value, json};
use std::sync::Arc;

/// Changes that one input makes.
const CHANGES_MAX: usize = 8;
/// Bits of the flags: how the sample ended, whether it has checksums, whether the dump is the input.
const KILLED: u8 = 1;
const SUMS: u8 = 8;
const RAW: u8 = 16;

/// A dump with changes, or any bytes, as the metadata of the store it is of, or of what is left of one.
///
/// The input: flags (bit 0: the sample was killed, bits 1 and 2: what the dump is put onto, bit 3: data
/// has checksums, bit 4: the rest is the dump), how many changes (one byte), the changes, and the rest
/// says how it is used.
pub fn restore(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let end = if flags & KILLED == 0 { End::Closed } else { End::Killed };
    let sample = Sample::of(end, flags & SUMS != 0);
    let disk = Arc::new(match flags >> 1 & 3 {
        0 => sample.disk(),
        // Nothing but the data is left.
        1 => {
            let disk = sample.disk();
            disk.put(0, &vec![0; sample.metadata_bytes() as usize]);
            disk
        }
        2 => Disk::empty(SIZE as usize),
        _ => Disk::empty(SIZE as usize / 2),
    });
    let mut changed = true;
    let dump = if flags & RAW != 0 {
        input.bytes(usize::MAX).to_vec()
    } else {
        let mut dump: Value = serde_json::from_slice(&sample.dump).unwrap();
        dump.as_object_mut().unwrap().remove("crc32c");
        let count = usize::from(input.u8()).min(CHANGES_MAX);
        (0..count).for_each(|_| change(&mut dump, &mut input));
        changed = count > 0;
        serde_json::to_vec(&dump).unwrap()
    };
    let before = disk.fork();
    let plan = match Store::plan_restore_on(&*disk, &dump) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(disk.is_same(&before), "a plan changes the store");
            return assert_detected(&error, "plan");
        }
    };
    let saved = saved();
    carry_out(&disk, plan, &saved).expect("what is planned is done");
    if !changed && flags >> 1 & 3 < 2 {
        let store = open(&disk, None, 7, true).expect("a restored store opens");
        assert!(contents(&store) == sample.contents, "other content");
    }
    let used = Arc::new(disk.fork());
    assert!(survive(&used, || None, &mut input), "a restored store cannot be written");
    put_back(&disk, &saved, &before);
}

/// Changes one field, or leaves one out, or adds or drops an element.
fn change(dump: &mut Value, input: &mut Input<'_>) {
    let lists = ["regions", "volumes", "snapshots", "entries"];
    let object = match lists.get(usize::from(input.u8()) % (lists.len() + 1)) {
        None => dump,
        Some(list) => {
            let Some(list) = dump.get_mut(list).and_then(Value::as_array_mut) else { return };
            let at = input.below(list.len().max(1) as u64) as usize;
            match input.u8() % 8 {
                0 if !list.is_empty() => return drop(list.remove(at)),
                1 if !list.is_empty() => {
                    let again = list[at].clone();
                    return list.push(again);
                }
                _ => {}
            }
            match list.get_mut(at) {
                Some(element) => element,
                None => return,
            }
        }
    };
    let Some(fields) = object.as_object_mut() else { return };
    let at = input.below(fields.len().max(1) as u64) as usize;
    let Some(key) = fields.keys().nth(at).cloned() else { return };
    match value(input) {
        Some(value) => drop(fields.insert(key, value)),
        None => drop(fields.remove(&key)),
    }
}

fn value(input: &mut Input<'_>) -> Option<Value> {
    const EXTREMES: [u64; 8] =
        [u64::MAX, 1 << 63, 1 << 62, (1 << 61) + 1, 1 << 46, u32::MAX as u64, 1 << 30, 1 << 22];
    Some(match input.u8() % 10 {
        0..=2 => json!(input.u8()),
        3 => json!(input.u16()),
        4 => json!(u64::from(input.u16()) << 12),
        5 => json!(EXTREMES[usize::from(input.u8()) % EXTREMES.len()]),
        6 => json!(String::from_utf8_lossy(input.run())),
        7 => {
            let pairs = input.u8() % 8;
            json!((0..pairs).map(|_| [input.u8(), input.u8()]).collect::<Vec<_>>())
        }
        8 => json!(input.flag()),
        _ => return None,
    })
}
