//! Which volumes are exported, to whom, and to whom only for reading.

use super::export::Peer;
use std::str::FromStr;

/// Rules in the order of their importance: the first that fits the volume and the client counts. Without
/// any, everything is exported to everybody; with some, what none fits is exported to nobody.
#[derive(Debug, Clone, Default)]
pub struct ExportRules(pub Vec<ExportRule>);

/// Volumes by a pattern of their name, with their snapshots: `PATTERN[,ro][,from=CLIENT]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportRule {
    volumes: String,
    read_only: bool,
    /// Clients by a pattern of their address; everybody if absent.
    from: Option<String>,
}

/// What a client may do with a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing: it is not there.
    None,
    /// Read.
    Read,
    /// Read and write.
    Write,
}

impl ExportRules {
    /// What a client may do with a volume of this name. Commands of this machine's, which come over the
    /// control socket, may do anything.
    #[must_use]
    pub fn access(&self, volume: &str, peer: &Peer) -> Access {
        if self.0.is_empty() || peer.trusted {
            return Access::Write;
        }
        match self.0.iter().find(|rule| rule.fits(volume, peer)) {
            None => Access::None,
            Some(rule) if rule.read_only => Access::Read,
            Some(_) => Access::Write,
        }
    }
}

impl ExportRule {
    fn fits(&self, volume: &str, peer: &Peer) -> bool {
        let from = self.from.as_ref().is_none_or(|from| matches(from, &peer.address));
        from && matches(&self.volumes, volume)
    }
}

impl FromStr for ExportRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let volumes = parts.next().unwrap_or_default().to_owned();
        let mut rule = Self { volumes, read_only: false, from: None };
        for part in parts {
            match part.split_once('=') {
                None if part == "ro" => rule.read_only = true,
                Some(("from", from)) if !from.is_empty() => rule.from = Some(from.to_owned()),
                _ => {
                    return Err(format!(
                        "`{part}` is no part of an export rule; write PATTERN[,ro][,from=CLIENT]"
                    ));
                }
            }
        }
        if rule.volumes.is_empty() || rule.volumes.contains('@') {
            return Err(format!(
                "`{text}` names no volumes; write a name with * and ? for any characters (snapshots \
                 come with their volumes)"
            ));
        }
        Ok(rule)
    }
}

/// Whether a pattern fits all of a text: `*` stands for any characters, `?` for one.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut next) = (0, 0);
    // Where the last star was, and the first character behind what it stands for at the moment.
    let mut star: Option<(usize, usize)> = None;
    while next < text.len() {
        if pattern.get(at) == Some(&'*') {
            star = Some((at, next));
            at += 1;
        } else if pattern.get(at).is_some_and(|one| *one == '?' || *one == text[next]) {
            (at, next) = (at + 1, next + 1);
        } else if let Some((place, behind)) = star {
            // It stands for one more.
            (at, next) = (place + 1, behind + 1);
            star = Some((place, next));
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(|one| *one == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_all_of_a_text() {
        for (pattern, text, fits) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("vm-*", "vm-", true),
            ("vm-*", "vm-1", true),
            ("vm-?", "vm-12", false),
            ("*-*-x", "a-b-c-x", true),
            ("*ab", "aab", true),
            ("*ab", "aba", false),
            ("**?", "ä", true),
            ("tcp:10.0.*", "tcp:10.0.0.3:5123", true),
            ("tcp:10.0.*", "tcp:10.1.0.3:5123", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
        // As bad as it gets, and over at once.
        assert!(!matches(&"*a".repeat(100), &"a".repeat(99)));
    }

    #[test]
    fn the_first_rule_that_fits_counts() {
        let rules = ["vm-*,from=tcp:10.0.*", "vm-*,ro", "base,ro,from=unix:*"];
        let rules = ExportRules(rules.iter().map(|rule| rule.parse().unwrap()).collect());
        let at = |address: &str| Peer { address: address.to_owned(), ..Peer::default() };
        assert_eq!(rules.access("vm-1", &at("tcp:10.0.0.1:9")), Access::Write);
        assert_eq!(rules.access("vm-1", &at("tcp:10.1.0.1:9")), Access::Read);
        assert_eq!(rules.access("base", &at("tcp:10.0.0.1:9")), Access::None);
        assert_eq!(rules.access("base", &at("unix:/run/x")), Access::Read);
        assert_eq!(rules.access("other", &at("unix:/run/x")), Access::None);
        let command = Peer { trusted: true, ..at("unix:handed over") };
        assert_eq!(rules.access("other", &command), Access::Write);
        assert_eq!(ExportRules::default().access("other", &at("tcp:1.2.3.4:5")), Access::Write);
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in ["", ",ro", "a,rw", "a,from=", "a,from", "a@b", "a,,ro"] {
            assert!(text.parse::<ExportRule>().is_err(), "{text}");
        }
    }
}
