//! The wrapped keys of a repository: section 3 of `docs/repository.md`.

use super::format::{self, CONFIG_LIMIT};
use super::keys::{Key, Secret, Wrapped};
use super::{Id, Repository, init};
use crate::names::hex;
use crate::objects::Objects;
use dbs_core::{Error, ErrorKind, Result};
use jiff::Timestamp;
use serde::Serialize;
use std::sync::Arc;

/// Wrapped keys that are tried.
const KEYS_MAX: usize = 16;

/// One of the keys that open a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyInfo {
    /// What names it.
    pub id: String,
    /// `passphrase` or `key-file`; none if it cannot be read.
    pub kind: Option<&'static str>,
    /// When it was added, RFC 3339.
    pub added: String,
    /// It is the one that was given.
    pub used: bool,
    /// Why it cannot be read.
    pub problem: Option<String>,
}

impl Repository {
    /// The keys that open it, in the order of their names.
    ///
    /// # Errors
    /// `Invalid` if nothing is encrypted; those of the store.
    pub fn list_keys(&self) -> Result<Vec<KeyInfo>> {
        let own = self.opened_by()?;
        let mut all = Vec::new();
        for id in ids(&self.objects)? {
            let Some(stat) = self.objects.stat(&path(id))? else { continue };
            let added = Timestamp::try_from(stat.modified).unwrap_or_default();
            let (kind, problem) = match read(&self.objects, id) {
                Ok(wrapped) => (Some(wrapped.kind()), None),
                Err(error) if error.kind() == ErrorKind::Corrupt => (None, Some(error.to_string())),
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let (id, used) = (hex(&id.0), own == id);
            let added = added.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            all.push(KeyInfo { id, kind, added, used, problem });
        }
        Ok(all)
    }

    /// Adds a key that opens it, and returns its name.
    ///
    /// # Errors
    /// `Invalid` if nothing is encrypted, or if there are too many; `Exists` if this one opens it already; `Busy` if
    /// somebody else changes the keys; those of the store.
    pub fn add_key(&self, secret: &Secret) -> Result<String> {
        self.opened_by()?;
        init::alone(&self.objects, &self.keys, |_| {
            let there = ids(&self.objects)?;
            // More would not all be tried.
            if there.len() >= KEYS_MAX {
                let text = format!("the repository has {KEYS_MAX} keys: remove one first");
                return Err(Error::invalid(text));
            }
            for id in there {
                // One that cannot be read opens nothing.
                let opens = read(&self.objects, id).and_then(|key| self.keys.are_in(&key, secret));
                if opens.unwrap_or(false) {
                    return Err(Error::new(
                        ErrorKind::Exists,
                        format!("that is the key {} of the repository already", hex(&id.0)),
                    ));
                }
            }
            let (id, wrapped) = (Id::new()?, self.keys.wrap(secret)?);
            self.objects.put(&path(id), &format::encode(&wrapped)?)?;
            Ok(hex(&id.0))
        })
    }

    /// Removes a key. Whoever does so has given another one: so there is one that opens the repository.
    ///
    /// # Errors
    /// `Invalid` if nothing is encrypted, or if it is the one that was given, or that one is gone; `Corrupt` if that one is
    /// damaged; `NotFound`; `Busy` if somebody else changes the keys; those of the store.
    pub fn remove_key(&self, name: &str) -> Result<()> {
        let own = self.opened_by()?;
        let none = || Error::not_found(format!("the repository has no key {name}"));
        let id = Id::parse(name).ok_or_else(none)?;
        if id == own {
            return Err(Error::invalid(format!(
                "{name} is the key that was given: to remove it, give another one that opens the repository"
            )));
        }
        init::alone(&self.objects, &self.keys, |claim| {
            // Somebody else may have removed it before we were alone.
            self.check_own()?;
            let path = path(id);
            let content = match self.objects.get(&path, CONFIG_LIMIT) {
                Ok(content) => Some(content),
                Err(error) if error.kind() == ErrorKind::NotFound => return Err(none()),
                // It is no key, whatever it is.
                Err(error) if error.kind() == ErrorKind::Corrupt => None,
                Err(error) => return Err(error),
            };
            let removed = claim.sent(self.objects.remove(&path));
            // Whoever was held up meanwhile was perhaps not alone any more: of two who remove the key of each other, the one
            // that comes last sees here that it took the last one.
            if let Err(error) = self.check_own() {
                if let Some(content) = content {
                    self.objects.put(&path, &content)?;
                }
                return Err(error.context(format!("the key {name} is kept")));
            }
            removed?;
            self.objects.settle()
        })
    }

    /// Refuses to go on if the key that opened the repository is not there as it was: it may be the last one.
    fn check_own(&self) -> Result<()> {
        let Some((own, was)) = &self.opened_by else { return Ok(()) };
        let path = path(*own);
        match read(&self.objects, *own) {
            Ok(wrapped) if wrapped == *was => Ok(()),
            Ok(_) => Err(format::damaged(&path, "it is not what opened the repository")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(Error::invalid("the key that was given has been removed meanwhile"))
            }
            Err(error) => Err(error),
        }
    }

    fn opened_by(&self) -> Result<Id> {
        self.opened_by.as_ref().map(|(id, _)| *id).ok_or_else(|| {
            Error::invalid("the repository is not encrypted: it has no keys that could be changed")
        })
    }
}

/// The repository key, by the first wrapped key that this secret opens; and the name of that one, and what it is.
///
/// # Errors
/// `Invalid` if none does; `Corrupt`, `Unsupported` and others of those that cannot be tried.
pub(super) fn unwrap_key(
    objects: &Arc<dyn Objects>,
    repository: Id,
    secret: &Secret,
) -> Result<(Key, (Id, Wrapped))> {
    let ids = ids(objects)?;
    let mut problem = None;
    for id in ids.iter().take(KEYS_MAX) {
        let tried = read(objects, *id).and_then(|wrapped| match wrapped.is_for(secret) {
            true => Ok(wrapped.unwrap_key(repository, secret)?.map(|key| (key, (*id, wrapped)))),
            false => Ok(None),
        });
        match tried {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => {}
            // One that is damaged must not keep the others from being tried.
            Err(error) => problem = Some(error),
        }
    }
    Err(problem.unwrap_or_else(|| {
        let what = match (ids.is_empty(), secret) {
            (true, _) => {
                "the keys of the repository are gone: put your copy of `dbs-repository/keys` back"
            }
            (false, Secret::Passphrase(_)) => "the passphrase is not that of the repository",
            (false, Secret::KeyFile(_)) => "the key file is not that of the repository",
        };
        Error::invalid(what)
    }))
}

/// The names of all wrapped keys, in their order.
fn ids(objects: &Arc<dyn Objects>) -> Result<Vec<Id>> {
    let names = objects.list(&format::path("keys"))?;
    let mut ids: Vec<_> = names.iter().filter_map(|name| Id::parse(name)).collect();
    ids.sort();
    Ok(ids)
}

fn read(objects: &Arc<dyn Objects>, id: Id) -> Result<Wrapped> {
    let path = path(id);
    let bytes = objects.get(&path, CONFIG_LIMIT)?;
    serde_json::from_slice(&bytes).map_err(|e| format::damaged(&path, &e.to_string()))
}

fn path(id: Id) -> String {
    format::path(&format!("keys/{}", hex(&id.0)))
}
