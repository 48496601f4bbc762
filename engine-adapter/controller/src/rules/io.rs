//! Which requests of a frontend are answered without asking a replica.

use super::mode::Modes;
use super::sabotage::{Bug, is};

/// How a request fails when no replica is complete.
pub const NO_BACKEND: &str = "no backend available";

/// What a frontend asks for, as error texts call it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Data.
    Read,
    /// A change of it.
    Write,
    /// A discard.
    Unmap,
}

/// Whether a request is within the volume.
///
/// # Errors
/// Upstream's text, which says `EOF`.
pub fn check_range(kind: Kind, offset: i64, length: u64, size: u64) -> Result<u64, String> {
    let start = u64::try_from(offset).ok();
    match start.and_then(|start| Some((start, start.checked_add(length)?))) {
        Some((start, end)) if end <= size => Ok(start),
        _ => {
            let what = match kind {
                Kind::Read => "Read",
                Kind::Write => "Write",
                Kind::Unmap => "unmap",
            };
            Err(format!(
                "EOF: {what} of {length} bytes at offset {offset} is beyond volume size {size}"
            ))
        }
    }
}

/// What becomes of a discard within the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unmap {
    /// It goes to all replicas, as a write does.
    Send,
    /// It is answered with 0 bytes freed: a rebuilt replica would not know later that something was
    /// discarded, and it is no error to free nothing.
    Skip,
    /// It fails, and may be repeated soon.
    Refuse(String),
}

/// What becomes of a discard within the volume.
#[must_use]
pub fn unmap(modes: Modes, expanding: bool, offset: u64, length: u64) -> Unmap {
    if modes.is_rebuilding() && !is(Bug::UnmapWhileRebuilding) {
        Unmap::Skip
    } else if expanding {
        Unmap::Refuse(format!(
            "cannot unmap {length} bytes at offset {offset} while expansion is in progress"
        ))
    } else {
        Unmap::Send
    }
}

#[cfg(test)]
mod tests {
    use super::super::mode::{Slot, Slots};
    use super::*;

    #[test]
    fn requests_beyond_the_end_fail_with_upstreams_text() {
        assert_eq!(check_range(Kind::Read, 4096, 4096, 8192), Ok(4096));
        assert_eq!(check_range(Kind::Write, 8192, 0, 8192), Ok(8192));
        let text = check_range(Kind::Read, 8192, 4096, 8192).unwrap_err();
        assert_eq!(text, "EOF: Read of 4096 bytes at offset 8192 is beyond volume size 8192");
        let text = check_range(Kind::Unmap, -1, 4096, 8192).unwrap_err();
        assert_eq!(text, "EOF: unmap of 4096 bytes at offset -1 is beyond volume size 8192");
        assert!(check_range(Kind::Write, i64::MAX, u64::MAX, 8192).is_err());
    }

    #[test]
    fn a_discard_waits_for_no_rebuild_and_no_expansion() {
        let one = |index| Slots::of(Slot::new(index).unwrap());
        let complete = Modes { rw: one(0), wo: Slots::EMPTY };
        let rebuilding = Modes { rw: one(0), wo: one(1) };
        assert_eq!(unmap(complete, false, 0, 1), Unmap::Send);
        assert_eq!(unmap(rebuilding, false, 0, 1), Unmap::Skip);
        assert_eq!(unmap(rebuilding, true, 0, 1), Unmap::Skip);
        assert!(matches!(unmap(complete, true, 0, 1), Unmap::Refuse(_)));
    }
}
