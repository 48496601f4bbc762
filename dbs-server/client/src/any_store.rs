//! A store wherever it is: opened by this process, or served by another.

use crate::remote::{RemoteStore, replaced};
use dbs_control::api::{self, Request};
use dbs_control::{Watch, is_trusted, listening, socket_path, store_key, store_place};
use dbs_core::{Error, ErrorKind, OpenOptions, Result, Store, Volume};
use dbs_transfer::StoreAccess;
use dbs_ublk::{check_unwritten, hold_waiting};
use nix::unistd::Uid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// An open or a served store: commands and data alike for both.
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
pub enum AnyStore {
    /// Nobody served it; it is open here. Devices that wait for the next server hold their volumes, as far as
    /// the store is written.
    Idle(Store, BTreeMap<u32, Volume>),
    /// A server owns it.
    Served(RemoteStore),
}

impl AnyStore {
    /// Opens the store at `path`, or connects to the server that holds it, whose control socket is
    /// in `runtime_dir` or in another's. `options` are for the store opened here: those of a served one
    /// are its server's.
    ///
    /// # Errors
    /// Those of [`Store::open`]; `Busy` if somebody who is no server holds it.
    pub fn open(path: &Path, options: &OpenOptions, runtime_dir: &Path) -> Result<Self> {
        let refused = match Store::open(path, options) {
            Err(error) if error.kind() == ErrorKind::Busy || is_denied(&error) => error,
            opened => {
                let store = opened?;
                let held = match options.read_only {
                    true => BTreeMap::new(),
                    false => hold_waiting(&store, runtime_dir),
                };
                return Ok(Self::Idle(store, held));
            }
        };
        match find_server(path, runtime_dir) {
            Ok(server) => Ok(Self::Served(server)),
            Err(why) if why.kind() != ErrorKind::NotFound => {
                Err(Error::new(refused.kind(), format!("{refused}; {why}")))
            }
            Err(why) if refused.kind() == ErrorKind::Busy => {
                Err(Error::busy(format!("{refused} ({why})")))
            }
            Err(_) => Err(refused),
        }
    }

    /// Runs a command. `watch` is called with its progress; when it returns `false` the command
    /// stops at the next safe point. What the command leaves to be done behind it
    /// ([`Request::leaves_work`]) is for [`AnyStore::settle`].
    ///
    /// # Errors
    /// The command's; `Io` if the connection to the server fails: it may then have succeeded.
    pub fn call(&self, request: &Request, watch: &mut Watch<'_>) -> Result<Value> {
        match self {
            Self::Idle(store, _) => {
                api::execute(store, request, &mut |progress| watch(Some(progress)))
            }
            Self::Served(server) => match server.call(request, watch) {
                Err(error) if knows_names_alone(&error) => self.call_by_name(request, error, watch),
                answer => answer,
            },
        }
    }

    /// Runs a command that the server has refused with `error`, which knows no request that says which volume it means: as
    /// clients did when there was none. The name may be another volume's between the two requests.
    fn call_by_name(
        &self,
        request: &Request,
        error: Error,
        watch: &mut Watch<'_>,
    ) -> Result<Value> {
        let (Self::Served(server), Some((plain, spec, uuid))) = (self, request.by_name()) else {
            let why =
                "the server of the store is older than this program: restart it with this version";
            return Err(Error::unsupported(format!("{why}: {error}")));
        };
        self.check_same(&spec, &uuid)?;
        server.call(&plain, watch)
    }

    /// Does the background work that commands have left on a store that is open here; a server
    /// does that in its own time.
    ///
    /// # Errors
    /// Those of the store; `Interrupted` if `watch` stopped it. The commands themselves are done.
    pub fn settle(&self, watch: &mut Watch<'_>) -> Result<()> {
        let Self::Idle(..) = self else { return Ok(()) };
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
            Self::Idle(store, _) => {
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

    /// Refuses to write a volume that a device has to itself which waits for a server; a server does that by
    /// itself.
    ///
    /// # Errors
    /// `ReadOnly`.
    pub fn check_unwritten(&self, volume: &str) -> Result<()> {
        match self {
            Self::Idle(store, held) if !held.is_empty() => check_unwritten(store, volume),
            _ => Ok(()),
        }
    }

    /// Its volumes' data, and the commands that transfers need.
    #[must_use]
    pub fn access(&self) -> &(dyn StoreAccess + Sync) {
        match self {
            Self::Idle(store, _) => store,
            Self::Served(server) => server,
        }
    }

    /// Closes it; a server goes on.
    ///
    /// # Errors
    /// Those of [`Store::close`].
    pub fn close(self) -> Result<()> {
        match self {
            Self::Idle(store, _) => store.close(),
            Self::Served(_) => Ok(()),
        }
    }
}

/// Connects to the server of the store at `path`: on its socket in `runtime_dir`, or on one of that name
/// that a server of another user, or with another runtime directory, listens on.
///
/// # Errors
/// `NotFound` if none does, and what keeps this user from one that does.
pub fn find_server(path: &Path, runtime_dir: &Path) -> Result<RemoteStore> {
    // Who may not read the store may still be allowed to ask its server.
    let known = match store_key(path) {
        Err(error) if is_denied(&error) => None,
        key => Some(key?),
    };
    let Ok(place) = store_place(path) else {
        return Err(Error::not_found("the store cannot be read, so its server cannot be found"));
    };
    let socket = socket_path(runtime_dir, known.as_deref().unwrap_or(&place));
    // Elsewhere it is found below, as one that anybody could have put there.
    if let Some(key) = known.as_ref().filter(|_| is_trusted(runtime_dir)) {
        match RemoteStore::connect(&socket, key) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            found => return found,
        }
    }
    let owner = std::fs::metadata(path).map(|metadata| metadata.uid());
    let owner = owner.map_err(|e| Error::io(e, format!("looking at {}", path.display())))?;
    let users = vec![Uid::from_raw(0), Uid::effective(), Uid::from_raw(owner)];
    let wanted = |key: &str| match &known {
        Some(known) => key == known,
        None => key.strip_suffix(&place).is_some_and(|uuid| uuid.len() == UUID_AND_DASH),
    };
    let mut why = Error::not_found(format!("no server listens on {}", socket.display()));
    for (socket, key) in listening(wanted) {
        match RemoteStore::connect_found(&socket, &key, users.clone()) {
            Ok(server) => return Ok(server),
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// Whether a server has refused a parameter that came with a later version. All refuse what they do not know.
fn knows_names_alone(error: &Error) -> bool {
    error.kind() == ErrorKind::Invalid && error.to_string().contains("no request: unknown field")
}

/// What a key has in front of the place.
const UUID_AND_DASH: usize = 37;

fn is_denied(error: &Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|e| e.kind() == io::ErrorKind::PermissionDenied)
}
