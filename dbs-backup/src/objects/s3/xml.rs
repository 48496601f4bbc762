//! What an S3 server says.

use crate::names::plain;
use dbs_core::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// One page of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Page {
    pub is_truncated: bool,
    pub next_continuation_token: Option<String>,
    pub contents: Vec<Object>,
    pub common_prefixes: Vec<Prefix>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Object {
    pub key: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Prefix {
    pub prefix: String,
}

/// What went wrong.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Problem {
    pub code: String,
    pub message: String,
    pub region: Option<String>,
}

/// Parses an answer.
///
/// # Errors
/// `Io`: the next answer may be whole.
pub fn parse<T: DeserializeOwned>(text: &str, what: &str) -> Result<T> {
    quick_xml::de::from_str(text)
        .map_err(|e| Error::io(std::io::Error::other(e.to_string()), format!("reading {what}")))
}

/// An error as one line.
pub fn error_text(text: &str) -> String {
    match quick_xml::de::from_str::<Problem>(text) {
        Ok(Problem { code, message, .. }) if !code.is_empty() => {
            plain(&format!("{code}: {message}"))
        }
        _ => plain(text.lines().next().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let page: Page = parse(
            r#"<?xml version="1.0" encoding="UTF-8"?>
            <ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>
            <IsTruncated>true</IsTruncated><NextContinuationToken>a&amp;b=</NextContinuationToken>
            <Contents><Key>p/a&lt;b</Key><Size>3</Size></Contents><CommonPrefixes><Prefix>p/x/</Prefix></CommonPrefixes>
            <Contents><Key>p/c</Key></Contents></ListBucketResult>"#,
            "a list",
        )
        .unwrap();
        assert!(page.is_truncated);
        assert_eq!(page.next_continuation_token.as_deref(), Some("a&b="));
        assert_eq!(page.contents.iter().map(|o| &*o.key).collect::<Vec<_>>(), ["p/a<b", "p/c"]);
        assert_eq!(page.common_prefixes[0].prefix, "p/x/");
        assert!(parse::<Page>("<ListBucketResult><Contents>", "a list").is_err());
        assert!(parse::<Page>("", "a list").is_err());
        let text = "<Error><Code>NoSuchKey</Code><Message>no</Message></Error>";
        assert_eq!(error_text(text), "NoSuchKey: no");
        assert_eq!(error_text("oops\nmore"), "oops");
    }
}
