//! Images: a small store with bytes changed, whose checksums are made right again or not.

use crate::exercise::{assert_detected, survive};
use crate::hostile::Hostile;
use crate::input::Input;
use crate::sample::{contents, open};
use std::sync::Arc;

/// Bytes laid over a store; it is opened, checked, used, closed and opened again.
///
/// The input: flags (bit 0: the sample was killed, bit 1: checksums are mended, bit 2: opened for
/// reading first, bit 3: data has checksums), how many changes (one byte), the changes, and the rest
/// says how it is used.
pub fn image(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let hostile = Hostile::new(flags, &mut input);
    let disk = &hostile.disk;
    if hostile.is_comparable() {
        // Damage under checksums is detected or harmless.
        let copy = Arc::new(disk.fork());
        match open(&copy, None, 4, flags & 4 == 0) {
            Ok(store) => {
                hostile.assert_right(&store);
                if hostile.sums {
                    let report = store.scrub(true, &mut |_| true).expect("all can be read");
                    let whole = contents(&store).len() == hostile.sample.contents.len();
                    assert!(whole || report.damaged > 0, "not found by a scrub");
                }
            }
            Err(error) => assert_detected(&error, "open"),
        }
    }
    survive(disk, || None, &mut input);
}
