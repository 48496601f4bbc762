//! Labels as upstream's command line takes them: keys are those of Kubernetes, values anything.

use std::collections::HashMap;

const NAME_MAX: usize = 63;
const PREFIX_MAX: usize = 253;

/// Reads `key=value` each.
///
/// # Errors
/// What is wrong with the first that is no label.
pub fn parse(labels: &[String]) -> Result<HashMap<String, String>, String> {
    labels.iter().map(|label| one(label)).collect()
}

fn one(label: &str) -> Result<(String, String), String> {
    let Some((key, value)) = label.split_once('=') else {
        return Err(format!("invalid label not in <key>=<value> format {label}"));
    };
    check_key(key).map_err(|why| format!("invalid key {key} for label: {why}"))?;
    if value.is_empty() {
        return Err(format!("invalid empty value for label with key {key}"));
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// `[PREFIX/]NAME`.
fn check_key(key: &str) -> Result<(), String> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if let Some(prefix) = prefix {
        check_prefix(prefix)?;
    }
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() {
        return Err("name part must be non-empty".to_owned());
    }
    if name.len() > NAME_MAX {
        return Err(format!("name part must be no more than {NAME_MAX} characters"));
    }
    if !ends(name.chars().next()) || !ends(name.chars().last()) || !name.chars().all(inner) {
        let text = "name part takes letters, digits, '-', '_' and '.', and begins and ends with a \
                    letter or digit";
        return Err(text.to_owned());
    }
    Ok(())
}

/// A DNS name in lower case.
fn check_prefix(prefix: &str) -> Result<(), String> {
    if prefix.is_empty() {
        return Err("prefix part must be non-empty".to_owned());
    }
    if prefix.len() > PREFIX_MAX {
        return Err(format!("prefix part must be no more than {PREFIX_MAX} characters"));
    }
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let part = |part: &str| {
        part.starts_with(plain)
            && part.ends_with(plain)
            && part.chars().all(|c| plain(c) || c == '-')
    };
    if prefix.split('.').all(part) {
        Ok(())
    } else {
        Err("prefix part is no DNS name in lower case, such as example.com".to_owned())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_kubernetes_keys_and_any_value() {
        let labels = ["a=b", "example.com/x.y_z-1=c=d ", "A=<"].map(str::to_owned);
        let parsed = parse(&labels).unwrap();
        assert_eq!(parsed["a"], "b");
        assert_eq!(parsed["example.com/x.y_z-1"], "c=d ");
        assert_eq!(parsed["A"], "<");
        for wrong in
            ["a", "a=", "=b", "-a=b", "a_=b", "a b=c", "/a=b", "A/b=c", "a./b=c", "a/b/c=d"]
        {
            let text = parse(&[wrong.to_owned()]).unwrap_err();
            assert!(text.starts_with("invalid "), "{wrong}: {text}");
        }
        assert!(parse(&[format!("{}=v", "n".repeat(63))]).is_ok());
        assert!(parse(&[format!("{}=v", "n".repeat(64))]).is_err());
    }
}
