//! What may be called how.

use crate::error::{Error, Result};
use crate::limits::NAME_MAX_BYTES;
use unicode_normalization::{UnicodeNormalization, is_nfc};

/// Checks a new name of a volume or snapshot: two that look the same are the same.
///
/// # Errors
/// `Invalid` with the rule it breaks.
pub fn check(what: &str, name: &str) -> Result<()> {
    check_stored(what, name)?;
    let wrong = |rule: String| Err(Error::invalid(format!("{what} name {name:?} {rule}")));
    if let Some(hidden) = name.chars().find(|c| is_hidden(*c)) {
        return wrong(format!("must not contain U+{:04X}, which is not seen", u32::from(hidden)));
    }
    if !is_nfc(name) {
        let composed: String = name.nfc().collect();
        return wrong(format!(
            "is not in Unicode's normalization form C (NFC); write it as {composed}"
        ));
    }
    Ok(())
}

/// Whether a character shows nothing of itself, or changes how its neighbours are shown: controls,
/// separators of lines, what turns the direction of text, joins or has no width.
#[must_use]
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{34f}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{17b4}'..='\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

/// Checks a name that is there: stores have had names that [`check`] refuses, and stay usable.
///
/// # Errors
/// `Invalid` with the rule it breaks.
pub fn check_stored(what: &str, name: &str) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_names_are_seen_and_have_one_form() {
        for name in ["größe", "étoile", "名前", "اسم", "a-b_c.d 1", "Ω", "कि"] {
            check("volume", name).unwrap_or_else(|error| panic!("{error}"));
        }
        for (name, text) in [
            ("a\u{202e}b", "U+202E, which is not seen"),
            ("a\u{200b}", "U+200B"),
            ("\u{feff}a", "U+FEFF"),
            ("a\u{2028}b", "U+2028"),
            ("e\u{301}", "write it as \u{e9}"),
            ("\u{212b}", "(NFC)"),
        ] {
            check_stored("volume", name).unwrap_or_else(|error| panic!("{error}"));
            let error = check("volume", name).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Invalid);
            assert!(error.to_string().contains(text), "{error}");
        }
        for name in ["", "a@b", "a\n", " a"] {
            assert!(check_stored("volume", name).is_err() && check("volume", name).is_err());
        }
    }
}
