//! Making a repository: sections 1 and 2 of `docs/repository.md`.

use super::Id;
use super::format::{self, CHUNK_SIZE, Config};
use super::keys::{self, Key, Keys, Kind, Secret, Wrapped};
use crate::names::{TEMPORARY, hex};
use crate::objects::Objects;
use dbs_core::{Error, ErrorKind, Result};
use std::cell::Cell;
use std::sync::Arc;

/// How a repository is made.
#[derive(Debug, Clone, Default)]
pub struct InitOptions {
    /// What to encrypt it with.
    pub secret: Option<Secret>,
    /// Bytes of a chunk, for tests; by default 1 MiB.
    pub chunk_size: Option<u64>,
    /// A passphrase is stretched little: for tests.
    pub cheap: bool,
}

/// Makes a repository.
///
/// # Errors
/// `Exists` if there are backups already; those of the store.
pub(crate) fn init(objects: &Arc<dyn Objects>, options: &InitOptions) -> Result<()> {
    if objects.stat(&format::path("config"))?.is_some() {
        return Err(Error::new(ErrorKind::Exists, "there is a repository already"));
    }
    check_bare(objects)?;
    if !objects.list(&crate::names::volumes())?.is_empty() {
        return Err(Error::new(
            ErrorKind::Exists,
            "there are backups in Longhorn's layout already: choose another place",
        ));
    }
    let (key, id): (Key, Id) = (keys::random()?, Id::new()?);
    let keys = Keys::new(key, id, options.secret.is_some());
    if let Some(secret) = &options.secret {
        let wrapped = format::encode(&Wrapped::new(&key, id, secret, options.cheap)?)?;
        objects.put(&format::path(&format!("keys/{}", hex(&Id::new()?.0))), &wrapped)?;
    }
    let plain = options.secret.is_none().then_some(&key);
    let config = Config::new(id, options.chunk_size.unwrap_or(CHUNK_SIZE), plain);
    let config = config.encode(&keys)?;
    Config::parse(&config)?;
    // The config makes it a repository, and so comes last: unless somebody else is about to.
    alone(objects, &keys, |_| {
        if objects.stat(&format::path("config"))?.is_some() {
            return Err(Error::new(ErrorKind::Exists, "there is a repository already"));
        }
        objects.put(&format::path("config"), &config)
    })
}

/// What one who is alone knows of it.
#[derive(Default)]
pub(super) struct Claim {
    /// A request had no answer: it may be carried out late.
    is_late: Cell<bool>,
}

impl Claim {
    /// Notes what has become of a request that must not be carried out when somebody else is alone.
    pub fn sent<T>(&self, answer: Result<T>) -> Result<T> {
        let is_late = answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Io);
        self.is_late.set(self.is_late.get() || is_late);
        answer
    }
}

/// Does what only one may do at a time: of two who begin at once, one at least sees the other's claim, and does nothing.
pub(super) fn alone<T>(
    objects: &Arc<dyn Objects>,
    keys: &Keys,
    what: impl FnOnce(&Claim) -> Result<T>,
) -> Result<T> {
    let (folder, id) = (format::path("clock"), Id::new()?);
    let (name, claim) = (hex(&id.0), Claim::default());
    let path = format!("{folder}/{name}");
    if let Err(error) = objects.put(&path, &keys.object(Kind::Clock, id).header) {
        // It may be there all the same.
        let _ = objects.remove(&path);
        return Err(error);
    }
    let done = objects.list(&folder).and_then(|all| match all.iter().find(|other| **other != name) {
        None => what(&claim),
        Some(other) => Err(Error::busy(format!(
            "another `dbs backup` command that must be alone runs there. Try again; if one was cut off, remove {folder}/{other} a day later, or have `dbs backup prune` do so"
        ))),
    });
    if claim.is_late.get() {
        // The claim stays until the request cannot come any more: it is tidied a day later.
        return done.map_err(|error| {
            error.context(format!("it may be done late, so {path} stays for a day"))
        });
    }
    // One that stays is tidied, too: what was done is done.
    let _ = objects.remove(&path);
    done
}

/// Whether nothing of a repository is to be seen where its `config` may not be read: nothing is there, or none of it may be
/// listed either.
pub(super) fn is_hidden(objects: &Arc<dyn Objects>) -> bool {
    match objects.list(format::BASE) {
        Ok(names) => names.is_empty(),
        Err(error) => error.kind() == ErrorKind::Invalid,
    }
}

/// Refuses a place where there is more of a repository than an `init` that was cut off leaves: it is one whose `config` is
/// lost. Whoever goes on in another layout, or makes a new repository, hides its backups, and may write in the clear.
pub(super) fn check_bare(objects: &Arc<dyn Objects>) -> Result<()> {
    let mut names = objects.list(format::BASE)?.into_iter();
    let is_other =
        |name: &String| !["keys", "clock"].contains(&&**name) && !name.contains(TEMPORARY);
    match names.find(is_other) {
        None => Ok(()),
        Some(name) => Err(Error::corrupt(format!(
            "{path} is gone, and {base}/{name} is there: put your copy of {path} back",
            path = format::path("config"),
            base = format::BASE
        ))),
    }
}
