//! What may be called how.

use crate::error::{Error, Result};
use crate::limits::NAME_MAX_BYTES;

/// Checks a volume or snapshot name.
///
/// # Errors
/// `Invalid` with the rule it breaks.
pub fn check(what: &str, name: &str) -> Result<()> {
    let rule = if name.is_empty() {
        "must not be empty"
    } else if name.len() > NAME_MAX_BYTES {
        "is longer than 255 bytes"
    } else if name.contains('@') {
        "must not contain `@`, which separates volume and snapshot"
    } else if name.chars().any(char::is_control) {
        "must not contain control characters"
    } else if name.trim() != name {
        "must not begin or end with a space"
    } else {
        return Ok(());
    };
    Err(Error::invalid(format!("{what} name {name:?} {rule}")))
}

/// Splits `volume` or `volume@snapshot`.
///
/// # Errors
/// `Invalid` if a part is empty.
pub fn split(spec: &str) -> Result<(&str, Option<&str>)> {
    match spec.split_once('@') {
        None if !spec.is_empty() => Ok((spec, None)),
        Some((volume, snapshot)) if !volume.is_empty() && !snapshot.is_empty() => {
            Ok((volume, Some(snapshot)))
        }
        _ => Err(Error::invalid(format!("{spec:?} is no `volume` or `volume@snapshot`"))),
    }
}
