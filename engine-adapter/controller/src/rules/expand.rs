//! What follows from an expansion that was asked of all replicas.
//!
//! One success of a complete replica is success: those that failed are left behind, even if they are as
//! they were. If all of those failed, who is as it was stays, at the old size; one that is being rebuilt
//! and has grown does not.

use super::mode::Mode;
use super::sabotage::{Bug, is};
use longhorn_wire::control::expansion::{ExpandCode, ExpandError};

/// Sizes are multiples of this.
const STEP: u64 = 4096;

/// What follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether the volume has the new size.
    pub expanded: bool,
    /// Replicas to become `ERR`, by their place in what was given.
    pub faulted: Vec<usize>,
    /// To be remembered as the last error, if there was one.
    pub error: Option<String>,
}

/// What follows from what each replica, named by its address, said, in this mode.
#[must_use]
pub fn decide(results: &[(&str, Mode, Result<(), ExpandError>)]) -> Decision {
    let failures: Vec<_> = results
        .iter()
        .filter_map(|(address, _, result)| Some((*address, result.as_ref().err()?)))
        .collect();
    let expanded = results.iter().any(|(_, mode, result)| *mode == Mode::Rw && result.is_ok());
    let stays = |result: &Result<(), ExpandError>| match result {
        Ok(()) => expanded,
        Err(failure) => !expanded && failure.code == ExpandCode::FunctionFailedRollbackSucceeded,
    };
    let faulted = results
        .iter()
        .enumerate()
        .filter(|(_, (_, _, result))| !stays(result) && !is(Bug::KeepUnexpanded))
        .map(|(index, _)| index)
        .collect();
    let texts: Vec<_> =
        failures.iter().map(|(address, failure)| format!("{address}: {failure}")).collect();
    let error = (!texts.is_empty() || !expanded).then(|| {
        let what = match expanded {
            true => "the expansion succeeded, but some replica expansion failed",
            false => "the expansion failed since all replica expansion failed",
        };
        format!("{what}: {}", texts.join("; "))
    });
    Decision { expanded, faulted, error }
}

/// Whether an expansion is to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// It is.
    Expand,
    /// The volume has this size. Users of its frontend may not see it: that step may have failed before.
    Show,
    /// The volume has this size, and no users.
    Nothing,
}

/// Whether an expansion of a volume from `present` to `size` bytes is to be started; `up` if its frontend
/// is.
///
/// # Errors
/// Why not, in upstream's words.
pub fn begin(expanding: bool, up: bool, present: u64, size: u64) -> Result<Begin, String> {
    if expanding {
        return Err("controller expansion is in progress".to_owned());
    }
    if !size.is_multiple_of(STEP) {
        return Err(format!(
            "requested expansion size {size} not multiple of volume sector size {STEP}"
        ));
    }
    match size.cmp(&present) {
        std::cmp::Ordering::Less => {
            Err(format!("controller cannot be expanded to a smaller size {size}"))
        }
        std::cmp::Ordering::Equal if up => Ok(Begin::Show),
        std::cmp::Ordering::Equal => Ok(Begin::Nothing),
        std::cmp::Ordering::Greater => Ok(Begin::Expand),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(code: ExpandCode) -> Result<(), ExpandError> {
        Err(ExpandError::new(code, "no"))
    }

    #[test]
    fn one_success_leaves_the_others_behind() {
        use Mode::{Rw, Wo};
        let undone = || failed(ExpandCode::FunctionFailedRollbackSucceeded);
        let broken = || failed(ExpandCode::FunctionFailedRollbackFailed);
        for (results, expanded, faulted) in [
            (vec![("a", Rw, Ok(())), ("b", Rw, Ok(()))], true, vec![]),
            (vec![("a", Rw, Ok(())), ("b", Rw, undone())], true, vec![1]),
            (vec![("a", Rw, broken()), ("b", Rw, Ok(()))], true, vec![0]),
            (vec![("a", Rw, undone()), ("b", Rw, undone())], false, vec![]),
            (vec![("a", Rw, undone()), ("b", Rw, broken())], false, vec![1]),
            (
                vec![("a", Rw, failed(ExpandCode::ResultUnknown)), ("b", Rw, broken())],
                false,
                vec![0, 1],
            ),
            (vec![("a", Rw, Ok(())), ("b", Wo, undone())], true, vec![1]),
            (vec![("a", Rw, undone()), ("b", Wo, undone())], false, vec![]),
            // It has a size that no complete one has.
            (vec![("a", Rw, undone()), ("b", Wo, Ok(()))], false, vec![1]),
        ] {
            let decision = decide(&results);
            assert_eq!((decision.expanded, decision.faulted), (expanded, faulted), "{results:?}");
            let all = results.iter().all(|(_, _, result)| result.is_ok());
            assert_eq!(decision.error.is_none(), all);
        }
        let text = decide(&[("a", Rw, Ok(())), ("tcp://b:1", Rw, undone())]).error.unwrap();
        assert_eq!(
            text,
            "the expansion succeeded, but some replica expansion failed: tcp://b:1: error: \
             code = FunctionFailedRollbackSucceeded, message = no"
        );
        assert!(!decide(&[]).expanded);
    }

    #[test]
    fn sizes_grow_in_whole_blocks() {
        assert_eq!(begin(false, false, 4096, 8192), Ok(Begin::Expand));
        assert_eq!(begin(false, true, 4096, 8192), Ok(Begin::Expand));
        assert_eq!(begin(false, true, 4096, 4096), Ok(Begin::Show));
        assert_eq!(begin(false, false, 4096, 4096), Ok(Begin::Nothing));
        assert!(begin(true, false, 4096, 8192).unwrap_err().contains("in progress"));
        let text = begin(false, true, 8192, 4096).unwrap_err();
        assert_eq!(text, "controller cannot be expanded to a smaller size 4096");
        let text = begin(false, true, 8192, 50_331_649).unwrap_err();
        assert_eq!(
            text,
            "requested expansion size 50331649 not multiple of volume sector size 4096"
        );
    }
}
