//! Objects with something before or after each call, for tests.

use super::{Allowed, Found, Objects, Stat};
use dbs_core::Result;
use std::sync::Arc;

/// Something before or after a call.
pub(crate) type Hook<T> = Box<dyn Fn(&str) -> T + Send + Sync>;

/// Objects with hooks.
pub(crate) struct Hooked {
    pub inner: Arc<dyn Objects>,
    /// Before each writing.
    pub put: Hook<Result<()>>,
    /// After each reading.
    pub get: Hook<()>,
    /// Before each reading of a part.
    pub range: Hook<()>,
    /// Each try of a removal, after it was allowed: true says that it was lost, and there is another. And before a folder
    /// is removed.
    pub remove: Hook<bool>,
}

impl Hooked {
    /// With hooks that do nothing.
    pub fn on(inner: Arc<dyn Objects>) -> Self {
        let (put, get, remove) =
            (Box::new(|_: &str| Ok(())), Box::new(|_: &str| ()), Box::new(|_: &str| false));
        Self { inner, put, get, range: Box::new(|_| ()), remove }
    }
}

impl Objects for Hooked {
    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        (self.put)(path)?;
        self.inner.put(path, content)
    }

    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let content = self.inner.get(path, limit);
        (self.get)(path);
        content
    }

    fn get_range(&self, path: &str, start: u64, most: u64) -> Result<Vec<u8>> {
        (self.range)(path);
        self.inner.get_range(path, start, most)
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        self.inner.stat(path)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        self.inner.list(folder)
    }

    fn walk(&self, folder: &str, found: Found<'_>) -> Result<()> {
        self.inner.walk(folder, found)
    }

    fn remove_if(&self, path: &str, allowed: Allowed<'_>) -> Result<()> {
        loop {
            allowed()?;
            if !(self.remove)(path) {
                return self.inner.remove(path);
            }
        }
    }

    fn remove_all(&self, folder: &str) -> Result<()> {
        (self.remove)(folder);
        self.inner.remove_all(folder)
    }

    fn remove_empty(&self, folder: &str) -> Result<()> {
        (self.remove)(folder);
        self.inner.remove_empty(folder)
    }

    fn settle(&self) -> Result<()> {
        self.inner.settle()
    }
}
