//! Texts without what differs between two volumes.

use serde_json::Value;

/// Pairs of a text and what stands for it.
#[derive(Default, Clone)]
pub struct Names(Vec<(String, String)>);

impl Names {
    pub fn add(&mut self, text: &str, plain: &str) {
        self.0.push((text.to_owned(), plain.to_owned()));
        // None is the beginning of another that comes first.
        self.0.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
    }

    pub fn plain(&self, text: &str) -> String {
        let named = |text: String, (from, to): &(String, String)| text.replace(from, to);
        without_times_and_ids(&self.0.iter().fold(text.to_owned(), named))
    }

    /// A value with all its keys and texts so, and lists in order.
    pub fn plain_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.plain(text)),
            Value::Array(items) => {
                let mut items: Vec<_> = items.iter().map(|item| self.plain_value(item)).collect();
                items.sort_by_key(ToString::to_string);
                Value::Array(items)
            }
            Value::Object(pairs) => {
                let pairs = pairs.iter();
                pairs.map(|(key, value)| (self.plain(key), self.plain_value(value))).collect()
            }
            other => other.clone(),
        }
    }
}

fn without_times_and_ids(text: &str) -> String {
    const PATTERNS: [(&str, &str); 2] =
        [("0000-00-00T00:00:00", "TIME"), ("xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", "ID")];
    let matches = |text: &str, pattern: &str| {
        text.len() >= pattern.len()
            && text.bytes().zip(pattern.bytes()).all(|(byte, wanted)| match wanted {
                b'0' => byte.is_ascii_digit(),
                b'x' => byte.is_ascii_hexdigit(),
                other => byte == other,
            })
    };
    let (mut plain, mut rest) = (String::new(), text);
    while let Some(first) = rest.chars().next() {
        match PATTERNS.iter().find(|(pattern, _)| matches(rest, pattern)) {
            Some((pattern, name)) => {
                plain += name;
                rest = &rest[pattern.len()..];
                if *name == "TIME" {
                    // Of a second, upstream prints as many digits as there are.
                    rest = rest.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
                }
            }
            None => {
                plain.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    plain
}
