//! What an S3 server says.

use crate::names::plain;
use crate::objects::remote::Page;
use dbs_core::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

const WHAT: &str = "a list of objects";

/// An answer that is a page of a list, by the name of its element: anything else is none, an empty one least of all.
#[derive(Deserialize)]
enum List {
    ListBucketResult(Listed),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    is_truncated: bool,
    next_continuation_token: Option<String>,
    #[serde(default)]
    contents: Vec<Object>,
    #[serde(default)]
    common_prefixes: Vec<Prefix>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Object {
    key: String,
    size: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Prefix {
    prefix: String,
}

/// What went wrong.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Problem {
    pub code: String,
    pub message: String,
    pub region: Option<String>,
}

/// A page of a list.
///
/// # Errors
/// `Io`, also if it has a next page that it does not name.
pub fn page(text: &str) -> Result<Page> {
    let List::ListBucketResult(listed) = parse(text, WHAT)?;
    let next = listed.next_continuation_token.filter(|token| !token.is_empty());
    if listed.is_truncated && next.is_none() {
        let what = "it is not whole, and does not say where it goes on";
        return Err(Error::io(std::io::Error::other(what), format!("reading {WHAT}")));
    }
    let size = |object: &Object| object.size.as_ref().and_then(|size| size.trim().parse().ok());
    let keys = listed.contents.into_iter().map(|object| (size(&object), object.key));
    let keys = keys.map(|(size, key)| (key, size));
    let names = keys.chain(listed.common_prefixes.into_iter().map(|prefix| (prefix.prefix, None)));
    Ok(Page { names: names.collect(), next: next.filter(|_| listed.is_truncated) })
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
        let page = page(
            r#"<?xml version="1.0" encoding="UTF-8"?>
            <ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>
            <IsTruncated>true</IsTruncated><NextContinuationToken>a&amp;b=</NextContinuationToken>
            <Contents><Key>p/a&lt;b</Key><Size>3</Size></Contents><CommonPrefixes><Prefix>p/x/</Prefix></CommonPrefixes>
            <Contents><Key>p/c</Key></Contents></ListBucketResult>"#,
        )
        .unwrap();
        assert_eq!(page.next.as_deref(), Some("a&b="));
        let names = [("p/a<b", Some(3)), ("p/c", None), ("p/x/", None)];
        assert_eq!(page.names, names.map(|(name, size)| (name.to_owned(), size)));
        let text = "<Error><Code>NoSuchKey</Code><Message>no</Message></Error>";
        assert_eq!(error_text(text), "NoSuchKey: no");
        assert_eq!(error_text("oops\nmore"), "oops");
    }

    /// What a deletion takes for a list of all blocks.
    #[test]
    fn what_is_no_whole_list() {
        let list = |inner: &str| page(&format!("<ListBucketResult>{inner}</ListBucketResult>"));
        let one = "<Contents><Key>a</Key></Contents>";
        assert_eq!(list("<IsTruncated>false</IsTruncated>").unwrap().names, []);
        for inner in [
            one.to_owned(),
            format!("<IsTruncated>true</IsTruncated>{one}"),
            format!("<IsTruncated>true</IsTruncated><NextContinuationToken/>{one}"),
            format!("<IsTruncated/>{one}"),
        ] {
            assert!(list(&inner).is_err(), "{inner}");
        }
        for text in [
            "",
            "<ListBucketResult><Contents>",
            "<html><body>Sign in</body></html>",
            "<html><IsTruncated>false</IsTruncated></html>",
            "<Error><Code>InternalError</Code></Error>",
        ] {
            assert!(page(text).is_err(), "{text}");
        }
    }
}
