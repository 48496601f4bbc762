//! Reading ahead: one thread produces while the caller's consumes.

use dbs_core::Result;
use std::sync::mpsc::sync_channel;
use std::thread;

/// Items under way, hence buffers in memory.
const DEPTH: usize = 4;

/// Runs `produce` ahead of `consume`, in order, until it returns false. Items are reused: the
/// buffers in them are allocated once.
///
/// A producer that is blocked in a read when the consumer fails is waited for.
///
/// # Errors
/// The first error of either side; what was produced before an error of the producer is consumed.
pub(super) fn pipeline<T: Default + Send>(
    mut produce: impl FnMut(&mut T) -> Result<bool> + Send,
    mut consume: impl FnMut(&T) -> Result<()>,
) -> Result<()> {
    let (ready, consumed) = sync_channel::<Result<T>>(DEPTH);
    let (free, reused) = sync_channel::<T>(DEPTH);
    thread::scope(move |scope| {
        scope.spawn(move || {
            let mut fresh = std::iter::repeat_with(T::default).take(DEPTH);
            // An end of either channel means that the consumer has given up.
            while let Some(mut item) = fresh.next().or_else(|| reused.recv().ok()) {
                let sent = match produce(&mut item) {
                    Ok(true) => ready.send(Ok(item)),
                    Ok(false) => return,
                    Err(error) => {
                        let _ = ready.send(Err(error));
                        return;
                    }
                };
                if sent.is_err() {
                    return;
                }
            }
        });
        for item in consumed {
            let item = item?;
            consume(&item)?;
            // The producer may have reached its end.
            let _ = free.send(item);
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::{Error, ErrorKind};

    #[test]
    fn items_arrive_in_order_and_buffers_are_reused() {
        let mut next = 0;
        let mut seen = Vec::new();
        let mut buffers = std::collections::BTreeSet::new();
        pipeline(
            |item: &mut Vec<u64>| {
                item.clear();
                item.push(next);
                next += 1;
                Ok(next <= 1000)
            },
            |item| {
                seen.push(item[0]);
                buffers.insert(item.as_ptr() as usize);
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        assert!(buffers.len() <= DEPTH);
    }

    #[test]
    fn errors_of_both_sides_end_it() {
        let mut count = 0;
        let mut consumed = 0;
        let error = pipeline(
            |item: &mut u64| {
                count += 1;
                *item = count;
                if count < 10 { Ok(true) } else { Err(Error::corrupt("produce")) }
            },
            |_| {
                consumed += 1;
                Ok(())
            },
        )
        .unwrap_err();
        assert_eq!((error.kind(), consumed), (ErrorKind::Corrupt, 9));

        let error = pipeline(|_: &mut u64| Ok(true), |_| Err(Error::no_space("consume")));
        assert_eq!(error.unwrap_err().kind(), ErrorKind::NoSpace);
    }
}
