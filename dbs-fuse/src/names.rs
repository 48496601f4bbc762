//! Names of volumes and snapshots as names of files, and back. A name has one file name, and a file
//! name at most one name.

use std::ffi::OsStr;

/// The file name of a name. What a file name cannot have, or should not, is `%` and two hexadecimal
/// digits for each byte: `/`, `%`, control characters, and the whole of `.` and `..`.
#[must_use]
pub fn escape(name: &str) -> String {
    let dots = matches!(name, "." | "..");
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        if c == '/' || c == '%' || c.is_control() || dots {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                out.push_str(&format!("%{byte:02X}"));
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// The name of a file name; none if [`escape`] makes no such file name.
#[must_use]
pub fn unescape(file_name: &OsStr) -> Option<String> {
    let text = file_name.to_str()?;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        if *first == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = after.get(2..)?;
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    let name = String::from_utf8(bytes).ok()?;
    // One file name for a name: not `%41` for `A`, not `%2f` for `%2F`.
    (escape(&name) == text).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        let names = [
            ("plain", "plain"),
            ("a/b", "a%2Fb"),
            ("100%", "100%25"),
            ("%2F", "%252F"),
            (".", "%2E"),
            ("..", "%2E%2E"),
            ("...", "..."),
            (".raw", ".raw"),
            ("größe 1", "größe 1"),
            ("a\nb\u{7f}\u{85}", "a%0Ab%7F%C2%85"),
        ];
        for (name, file) in names {
            assert_eq!(escape(name), file);
            assert_eq!(unescape(OsStr::new(file)).as_deref(), Some(name));
        }
        for file in ["%", "%4", "%41", "%2f", "%+1", "a%", "%FF", "a/b", ".", "\n", "%2E%2E%2E"] {
            assert_eq!(unescape(OsStr::new(file)), None, "{file}");
        }
    }
}
