//! How many snapshots a volume may have, and how much they may hold.

/// Most layers of a replica, whatever the volume's own limit is.
pub const TOTAL_MAX: u32 = 250;

/// What one replica says of its snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Snapshots that count for the volume's limit.
    pub count: u32,
    /// All layers.
    pub total: u32,
    /// Bytes that the snapshots hold.
    pub size: u64,
    /// Bytes that the head holds.
    pub head: u64,
}

/// The volume's own limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most snapshots.
    pub count: u32,
    /// Most bytes of all snapshots together; 0 for any.
    pub size: u64,
}

/// The most that any replica says of each; `None` if none says anything.
#[must_use]
pub fn usage(all: impl IntoIterator<Item = Usage>) -> Option<Usage> {
    all.into_iter().reduce(|a, b| Usage {
        count: a.count.max(b.count),
        total: a.total.max(b.total),
        size: a.size.max(b.size),
        head: a.head.max(b.head),
    })
}

/// Whether one more snapshot may be taken.
///
/// # Errors
/// Why not, in upstream's words.
pub fn check(usage: Option<Usage>, limits: Limits) -> Result<(), String> {
    let Some(usage) = usage else {
        return Err("cannot get an valid result for snapshot usage".to_owned());
    };
    if usage.count >= limits.count {
        return Err(format!(
            "snapshot count usage {} is equal or larger than snapshotMaxCount {}",
            usage.count, limits.count
        ));
    }
    if usage.total >= TOTAL_MAX {
        return Err(format!("snapshot count total is already too big: {}", usage.total));
    }
    let (size, used) = (i128::from(limits.size), i128::from(usage.size));
    if limits.size > 0 && i128::from(usage.head) > size - used {
        let left = size - used;
        let head = usage.head;
        return Err(format!("snapshot free space {left} is not enough for head file {head}"));
    }
    Ok(())
}

/// Whether this may become the most snapshots.
///
/// # Errors
/// There are more already.
pub fn check_count(count: u32, usage: Option<Usage>) -> Result<(), String> {
    match usage {
        None => check(None, Limits { count, size: 0 }),
        Some(Usage { count: used, .. }) if count < used => Err(format!(
            "cannot set snapshotMaxCount={count} smaller than current snapshot count usage={used}, \
             please purge snapshots first"
        )),
        Some(_) => Ok(()),
    }
}

/// Whether this may become the most bytes of all snapshots; 0 takes the limit away.
///
/// # Errors
/// They hold more already.
pub fn check_size(size: u64, usage: Option<Usage>) -> Result<(), String> {
    match usage {
        None => check(None, Limits { count: 0, size }),
        Some(Usage { size: used, .. }) if size > 0 && size < used => Err(format!(
            "cannot set snapshotMaxSize={size} smaller than current snapshot size usage={used}, \
             please purge snapshots first"
        )),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_counts_and_the_fullest_replica_decides() {
        let limits = Limits { count: 10, size: 1000 };
        let base = Usage { count: 9, total: 249, size: 600, head: 400 };
        assert_eq!(check(Some(base), limits), Ok(()));
        for (worse, text) in [
            (Usage { count: 10, ..base }, "snapshot count usage 10 is equal or larger than"),
            (Usage { total: 250, ..base }, "snapshot count total is already too big: 250"),
            (
                Usage { head: 401, ..base },
                "snapshot free space 400 is not enough for head file 401",
            ),
            (
                Usage { size: 1001, ..base },
                "snapshot free space -1 is not enough for head file 400",
            ),
        ] {
            let error = check(usage([base, worse]), limits).unwrap_err();
            assert!(error.starts_with(text), "{error}");
            assert!(check(usage([worse, base]), limits).is_err());
        }
        let any = Limits { count: 250, size: 0 };
        assert_eq!(check(Some(Usage { head: u64::MAX, ..base }), any), Ok(()));
        assert!(check(usage([]), any).unwrap_err().contains("valid result"));
    }

    #[test]
    fn a_limit_is_not_set_below_what_there_is() {
        let usage = Some(Usage { count: 3, total: 5, size: 100, head: 0 });
        assert!(check_count(2, usage).unwrap_err().contains("please purge"));
        assert_eq!(check_count(3, usage), Ok(()));
        assert!(check_size(99, usage).is_err());
        assert_eq!(check_size(100, usage), Ok(()));
        assert_eq!(check_size(0, usage), Ok(()));
        assert!(check_count(3, None).is_err() && check_size(3, None).is_err());
    }
}
