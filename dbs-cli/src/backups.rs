//! Opening backup stores, with what the environment says.

use dbs_backup::url::Url;
use dbs_backup::{BackupStore, Secret};
use dbs_core::Result;

/// The value of an environment variable.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Opens the backup store that a URL names, whichever layout it has; credentials and keys come from the environment.
///
/// # Errors
/// As [`BackupStore::open`] and [`BackupStore::with_repository`].
pub fn open(url: &Url) -> Result<BackupStore> {
    let secret = secret()?;
    BackupStore::open(url, &variable)?.with_repository(secret.as_ref())
}

/// The key of an encrypted repository, from the environment.
///
/// # Errors
/// `Invalid` if it is none.
pub fn secret() -> Result<Option<Secret>> {
    Secret::from_variables("DBS_BACKUP", &|name| std::env::var_os(name))
}
