//! What the nodes of a backup store's tree are, and what is remembered of them.

use crate::node::{self, ROOT};
use dbs_backup::catalog::Listed;
use dbs_backup::names::BlockName;
use dbs_backup::read::OpenBackup;
use fuser::FileType;
use std::sync::{Arc, Mutex, Weak};

/// What a node is.
#[derive(Debug, Clone)]
pub enum Kind {
    /// `/`
    Root,
    /// `/store.json`
    StoreJson,
    /// `/errors.log`
    Errors,
    /// `/volumes`
    Volumes,
    /// `/volumes/NAME`
    Volume(Arc<str>),
    /// `/volumes/NAME/latest`
    Latest(Arc<str>),
    /// `/volumes/NAME/TIME_BACKUP.raw`
    Backup(Arc<Listed>),
}

/// What is remembered of a backup.
#[derive(Default)]
pub struct Seen(pub Mutex<Remembered>);

/// What it was when somebody opened it.
#[derive(Default)]
pub struct Remembered {
    /// As long as somebody has it open.
    pub open: Weak<OpenBackup>,
    /// Of the content that the kernel may have cached.
    pub digest: Option<u64>,
}

impl node::Kind for Kind {
    type Seen = Seen;

    fn root() -> Self {
        Self::Root
    }

    fn number(&self) -> u64 {
        let (kind, thing) = match self {
            Self::Root => return ROOT,
            Self::StoreJson => return ROOT + 1,
            Self::Volumes => return ROOT + 2,
            Self::Errors => return ROOT + 3,
            Self::Volume(volume) => (0, volume.to_string()),
            Self::Latest(volume) => (1, volume.to_string()),
            Self::Backup(listed) => (2, format!("{}/{}", listed.volume, listed.stem())),
        };
        let digits = BlockName::of(thing.as_bytes()).to_string();
        let thing = digits.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        node::number(thing.unwrap_or_default(), kind)
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Volume(one), Self::Volume(other)) | (Self::Latest(one), Self::Latest(other)) => {
                one == other
            }
            (Self::Backup(one), Self::Backup(other)) => one.is_same(other),
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    fn file_type(&self) -> FileType {
        match self {
            Self::Root | Self::Volumes | Self::Volume(_) => FileType::Directory,
            Self::Latest(_) => FileType::Symlink,
            _ => FileType::RegularFile,
        }
    }
}
