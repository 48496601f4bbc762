//! A store wherever it is: opened by this process, or served by another.

use crate::api::{self, Request};
use crate::control::{Watch, socket_path, store_uuid};
use crate::remote::{RemoteStore, replaced};
use crate::transfer::StoreAccess;
use dbs_core::{Error, ErrorKind, OpenOptions, Result, Store};
use serde_json::Value;
use std::path::Path;

/// An open or a served store: commands and data alike for both.
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
pub enum AnyStore {
    /// Nobody served it; it is open here.
    Idle(Store),
    /// A server owns it.
    Served(RemoteStore),
}

impl AnyStore {
    /// Opens the store at `path`, or connects to the server that holds it, whose control socket is
    /// in `runtime_dir`. `options` are for the store opened here: those of a served one are its
    /// server's.
    ///
    /// # Errors
    /// Those of [`Store::open`]; `Busy` if somebody who is no server holds it.
    pub fn open(path: &Path, options: &OpenOptions, runtime_dir: &Path) -> Result<Self> {
        let busy = match Store::open(path, options) {
            Err(error) if error.kind() == ErrorKind::Busy => error,
            opened => return opened.map(Self::Idle),
        };
        let server = store_uuid(path)
            .and_then(|uuid| RemoteStore::connect(&socket_path(runtime_dir, &uuid)));
        server.map(Self::Served).map_err(|why| match why.kind() {
            ErrorKind::NotFound => busy,
            _ => busy.context(why),
        })
    }

    /// Runs a command. `watch` is called with its progress; when it returns `false` the command
    /// stops at the next safe point. What the command leaves to be done behind it
    /// ([`Request::leaves_work`]) is for [`AnyStore::settle`].
    ///
    /// # Errors
    /// The command's; `Io` if the connection to the server fails: it may then have succeeded.
    pub fn call(&self, request: &Request, watch: &mut Watch<'_>) -> Result<Value> {
        match self {
            Self::Idle(store) => {
                api::execute(store, request, &mut |progress| watch(Some(progress)))
            }
            Self::Served(server) => server.call(request, watch),
        }
    }

    /// Does the background work that commands have left on a store that is open here; a server
    /// does that in its own time.
    ///
    /// # Errors
    /// Those of the store; `Interrupted` if `watch` stopped it. The commands themselves are done.
    pub fn settle(&self, watch: &mut Watch<'_>) -> Result<()> {
        let Self::Idle(_) = self else { return Ok(()) };
        self.call(&Request::VolumeTrim, watch).map(drop).map_err(|error| match error.kind() {
            ErrorKind::Interrupted => Error::new(
                ErrorKind::Interrupted,
                "the command itself is done; the rest of its space comes back the next time \
                 the store is written",
            ),
            _ => error.context("the command itself is done, but reclaiming its space failed"),
        })
    }

    /// Refuses to go on if a volume (`name`) or snapshot (`name@snapshot`) is another one than that with
    /// this identity: names are used again.
    ///
    /// # Errors
    /// `NotFound`, and those of the connection.
    pub fn check_same(&self, spec: &str, uuid: &str) -> Result<()> {
        let now = match self {
            Self::Idle(store) => {
                let seen = store.observe(spec)?;
                match seen.snapshot_info()? {
                    Some(snapshot) => snapshot.uuid,
                    None => seen.volume_info()?.uuid,
                }
            }
            Self::Served(server) => server.uuid(spec)?,
        };
        if now == uuid { Ok(()) } else { Err(replaced(spec)) }
    }

    /// Its volumes' data, and the commands that transfers need.
    #[must_use]
    pub fn access(&self) -> &(dyn StoreAccess + Sync) {
        match self {
            Self::Idle(store) => store,
            Self::Served(server) => server,
        }
    }

    /// Closes it; a server goes on.
    ///
    /// # Errors
    /// Those of [`Store::close`].
    pub fn close(self) -> Result<()> {
        match self {
            Self::Idle(store) => store.close(),
            Self::Served(_) => Ok(()),
        }
    }
}
