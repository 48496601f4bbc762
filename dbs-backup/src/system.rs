//! Longhorn's backups of its own settings: a zip file and its facts, which the manager makes and reads.

use crate::config;
use crate::names::{self, BASE};
use crate::store::BackupStore;
use crate::url::Url;
use dbs_core::{Error, Result};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of a zip file: of the settings of a large cluster these are some MB.
const LIMIT: u64 = 1 << 30;
/// The folder with all of them.
const FOLDER: &str = "system-backups";

/// `system-backup.cfg`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct SystemConfig {
    /// Name.
    pub name: String,
    /// Version of Longhorn.
    pub longhorn_version: String,
    /// Its commit.
    pub longhorn_git_commit: String,
    /// The backup store.
    #[serde(rename = "BackupTargetURL")]
    pub backup_target_url: String,
    /// The manager's image.
    pub manager_image: String,
    /// The engine's image.
    pub engine_image: String,
    /// When it was made.
    pub created_at: String,
    /// SHA-256 of the zip file.
    pub checksum: String,
}

/// Which one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemBackup {
    /// The backup store that it is in.
    pub store: Url,
    /// Version of Longhorn.
    pub version: String,
    /// Name.
    pub name: String,
}

impl SystemBackup {
    /// Parses `STORE/backupstore/system-backups/VERSION/NAME`.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn parse(text: &str) -> Result<Self> {
        let mut store = Url::parse(text)?;
        let parts: Vec<&str> = store.path.split('/').collect();
        let [before @ .., base, folder, version, name] = parts.as_slice() else {
            return Err(Error::invalid(format!("invalid system backup URI: {}", store.path)));
        };
        if *folder != FOLDER {
            return Err(Error::invalid(format!(
                "invalid system backup URL subdirectory {folder}: {text}"
            )));
        }
        if *base != BASE {
            return Err(Error::invalid(format!(
                "invalid system backup URL backupstore directory {base}: {text}"
            )));
        }
        if [version, name].iter().any(|part| part.is_empty() || **part == ".") {
            return Err(Error::invalid(format!("invalid system backup URI: {}", store.path)));
        }
        let (version, name) = ((*version).to_owned(), (*name).to_owned());
        let mut path = before.join("/");
        // As upstream.
        if store.user.is_some() {
            path.push('/');
        }
        store.path = path;
        Ok(Self { store, version, name })
    }

    fn folder(&self) -> String {
        format!("{BASE}/{FOLDER}/{}/{}", self.version, self.name)
    }

    fn config(&self) -> String {
        format!("{}/system-backup.cfg", self.folder())
    }

    fn zip(&self) -> String {
        format!("{}/system-backup.zip", self.folder())
    }
}

impl BackupStore {
    /// Keeps a zip file. `facts` says the rest.
    ///
    /// # Errors
    /// `Exists`; those of the store.
    pub fn upload_system(
        &self,
        backup: &SystemBackup,
        zip: &[u8],
        facts: SystemConfig,
    ) -> Result<()> {
        self.begin();
        let path = backup.zip();
        if self.objects.stat(&path)?.is_some() {
            let text = format!("{path} already exists");
            return Err(Error::new(dbs_core::ErrorKind::Exists, text));
        }
        let facts = SystemConfig {
            name: backup.name.clone(),
            longhorn_version: backup.version.clone(),
            backup_target_url: backup.store.to_string(),
            checksum: checksum(zip),
            ..facts
        };
        self.objects.put(&path, zip)?;
        self.objects.put(&backup.config(), &config::encode(&facts)?)
    }

    /// The facts of one.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`.
    pub fn system(&self, backup: &SystemBackup) -> Result<SystemConfig> {
        let path = backup.config();
        config::parse(&path, &self.objects.get(&path, LIMIT)?)
    }

    /// The zip file of one, which is what its facts say.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`.
    pub fn download_system(&self, backup: &SystemBackup) -> Result<Vec<u8>> {
        self.begin();
        let facts = self.system(backup)?;
        let path = backup.zip();
        let zip = self.objects.get(&path, LIMIT)?;
        let got = checksum(&zip);
        if got != facts.checksum {
            let expect = names::plain(&facts.checksum);
            return Err(Error::corrupt(format!(
                "downloaded {path} checksum mismatched: got {got}: expect {expect}"
            )));
        }
        Ok(zip)
    }

    /// All of them: names, and where they are.
    ///
    /// # Errors
    /// Those of the store.
    pub fn systems(&self) -> Result<BTreeMap<String, String>> {
        let base = format!("{BASE}/{FOLDER}");
        let mut found = BTreeMap::new();
        for version in self.objects.list(&base)? {
            for name in self.objects.list(&format!("{base}/{version}"))? {
                let path = format!("{base}/{version}/{name}");
                found.insert(name, path);
            }
        }
        Ok(found)
    }

    /// Deletes one. One that is not there is no error.
    ///
    /// # Errors
    /// Those of the store.
    pub fn remove_system(&self, backup: &SystemBackup) -> Result<()> {
        self.begin();
        self.objects.remove_all(&backup.folder())
    }
}

fn checksum(bytes: &[u8]) -> String {
    names::hex(digest(&SHA256, bytes).as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_one() {
        let base = "backupstore/system-backups/v1.4.0/daily";
        let backup = SystemBackup::parse(&format!("s3://bucket@region/path/{base}")).unwrap();
        assert_eq!((&*backup.version, &*backup.name), ("v1.4.0", "daily"));
        assert_eq!(backup.store.to_string(), "s3://bucket@region/path/");
        assert_eq!(backup.zip(), format!("{base}/system-backup.zip"));
        let backup = SystemBackup::parse(&format!("nfs://host:/a/{base}")).unwrap();
        assert_eq!(backup.store.to_string(), "nfs://host:/a");
        for text in ["vfs:///a", "vfs:///a/x/system-backups/v/n", "vfs:///backupstore/x/v/n"] {
            assert!(SystemBackup::parse(text).is_err(), "{text}");
        }
        assert!(SystemBackup::parse("vfs:///a/backupstore/system-backups//n").is_err());
    }
}
