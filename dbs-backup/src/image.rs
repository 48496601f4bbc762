//! Backups of backing images, as Longhorn's manager makes them: looked at and deleted here, neither made nor restored.
//!
//! All images share one pool of blocks, and one lock.

use crate::config;
use crate::lock::Kind;
use crate::names::{self, BASE, BlockName};
use crate::pool::Work;
use crate::store::BackupStore;
use dbs_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The pseudo volume whose locks are those of all images.
const LOCK: &str = "BACKINGIMAGE";
/// Bytes of an image's facts: as many as those of a volume.
const LIMIT: u64 = config::BACKUP_LIMIT;

/// `backing-image.cfg`, as far as somebody reads it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ImageConfig {
    /// Name.
    pub name: String,
    /// Bytes.
    #[serde(with = "config::number_in_text")]
    pub size: u64,
    /// SHA-512 of the image.
    pub checksum: String,
    /// Labels.
    pub labels: Option<config::Map>,
    /// How its blocks are compressed.
    pub compression_method: String,
    /// When it was complete; empty while it is not.
    pub complete_time: String,
    /// The secret that the image is encrypted with.
    pub secret: String,
    /// Where that is.
    pub secret_namespace: String,
    /// What it holds.
    #[serde(deserialize_with = "config::or_default")]
    blocks: Vec<ImageBlock>,
}

/// The last block of an image may be a short one, and blocks may be anywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ImageBlock {
    #[serde(rename = "BlockChecksum", with = "config::block_name")]
    name: BlockName,
}

fn images() -> String {
    format!("{BASE}/backing-images/backing-images")
}

fn blocks() -> String {
    format!("{BASE}/backing-images/blocks")
}

fn config_of(image: &str) -> String {
    format!("{}/{image}/backing-image.cfg", images())
}

impl BackupStore {
    /// The names of the images, sorted.
    ///
    /// # Errors
    /// Those of the store.
    pub fn images(&self) -> Result<Vec<String>> {
        let mut found = self.objects.list(&images())?;
        found.retain(|name| names::is_valid(name));
        found.sort();
        Ok(found)
    }

    /// The facts of an image's backup.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`.
    pub fn image(&self, image: &str) -> Result<ImageConfig> {
        names::check("backing image", image)?;
        let path = config_of(image);
        config::parse(&path, &self.objects.get(&path, LIMIT)?)
    }

    /// Deletes the backup of an image, complete or not, and the blocks to which no other image refers. One that is not
    /// there is no error.
    ///
    /// # Errors
    /// `Busy` if somebody makes or restores a backup of an image; those of the store.
    pub fn remove_image(&self, image: &str, work: &mut Work<'_>) -> Result<()> {
        self.begin();
        names::check("backing image", image)?;
        let lock = self.lock(LOCK, Kind::Deletion)?;
        let (folder, mut facts) = (format!("{}/{image}", images()), Vec::new());
        self.walk(&folder, work, &mut |path, _| facts.push(path.to_owned()))?;
        self.remove_facts(&folder, facts, &lock, work)?;
        self.objects.remove_empty(&folder)?;
        let others = self.images()?;
        let Some(referenced) = self.referenced(&others)? else { return Ok(()) };
        let mut garbage = Vec::new();
        self.walk(&blocks(), work, &mut |path, _| {
            if names::block_of(path).is_some_and(|name| !referenced.contains(&name)) {
                garbage.push(path.to_owned());
            }
        })?;
        // Whoever took the lock for one out of date has begun a backup by now.
        let is_new = || Ok(self.images()?.iter().any(|name| others.binary_search(name).is_err()));
        if is_new()? {
            return Ok(());
        }
        self.sweep(&blocks(), garbage, &lock, work, &is_new)
    }

    /// The blocks of these images; nothing if that is not known of all of them.
    fn referenced(&self, images: &[String]) -> Result<Option<HashSet<BlockName>>> {
        let mut referenced = HashSet::new();
        for image in images {
            match self.image(image) {
                Ok(facts) if facts.complete_time.is_empty() => return Ok(None),
                Ok(facts) => referenced.extend(facts.blocks.iter().map(|block| block.name)),
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(referenced))
    }

    /// The facts of an image's backup that is complete.
    ///
    /// # Errors
    /// As [`BackupStore::image`]; `Busy` if it is not.
    pub fn complete_image(&self, image: &str) -> Result<ImageConfig> {
        let facts = self.image(image)?;
        if facts.complete_time.is_empty() {
            let text = format!("backup backing image {image} is still in progress");
            return Err(Error::busy(text));
        }
        Ok(facts)
    }
}
