//! The backup store that a request means, with the credentials that came with it.

use dbs_backup::BackupStore;
use dbs_backup::url::Url;
use dbs_core::{Error, Result};
use std::collections::HashMap;

/// A request's credentials, by the names of upstream's environment variables.
pub type Credential = HashMap<String, String>;

/// Names that go together: both or neither, and what upstream says if only the second, or only the first, is there.
const PAIRS: [(&str, &str, &str, &str, &str); 2] = [
    (
        "s3",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "s3 credential access key not found",
        "s3 credential secret access key not found",
    ),
    (
        "azblob",
        "AZBLOB_ACCOUNT_NAME",
        "AZBLOB_ACCOUNT_KEY",
        "azure Blob Storage credential account name not found",
        "azure Blob Storage credential account key not found",
    ),
];

/// Opens the backup store of a URL. What the credential does not name is taken from the environment of this process: so
/// do roles and web identities work, and targets without a secret.
///
/// # Errors
/// `Invalid` for one half of a key; those of opening it.
pub fn open(url: &Url, credential: &Credential) -> Result<BackupStore> {
    let given = |name: &str| credential.get(name).map_or("", String::as_str);
    for (scheme, first, second, no_first, no_second) in PAIRS {
        if url.scheme == scheme && given(first).is_empty() != given(second).is_empty() {
            let text = if given(first).is_empty() { no_first } else { no_second };
            return Err(Error::invalid(text));
        }
    }
    BackupStore::open(url, &|name| variable(name, credential))
}

fn variable(name: &str, credential: &Credential) -> Option<String> {
    // A name without a value says that there is none, except for keys: upstream keeps those that it has.
    let is_key = PAIRS.iter().any(|(_, first, second, ..)| [*first, *second].contains(&name));
    let value = match credential.get(name) {
        Some(value) if !value.is_empty() || !is_key => Some(value.clone()),
        _ => std::env::var(name).ok(),
    };
    value.filter(|value| !value.is_empty())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_in_pairs() {
        let url = Url::parse("s3://bucket@us-east-1/").unwrap();
        for (name, text) in [
            ("AWS_ACCESS_KEY_ID", "s3 credential secret access key not found"),
            ("AWS_SECRET_ACCESS_KEY", "s3 credential access key not found"),
        ] {
            let credential = Credential::from([(name.to_owned(), "x".to_owned())]);
            let error = open(&url, &credential).err().unwrap();
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn a_request_comes_before_the_environment() {
        let home = std::env::var("HOME").ok();
        assert_eq!(variable("HOME", &Credential::new()), home);
        let credential = Credential::from([("HOME".to_owned(), String::new())]);
        assert_eq!(variable("HOME", &credential), None);
        let credential = Credential::from([("HOME".to_owned(), "/x".to_owned())]);
        assert_eq!(variable("HOME", &credential).as_deref(), Some("/x"));
    }
}
