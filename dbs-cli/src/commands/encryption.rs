//! Commands on encrypted volumes.

use crate::context::Context;
use crate::secret;
use clap::Args;
use dbs_control::api::{Given, Request};
use dbs_core::{Error, Result};
use std::path::PathBuf;

/// Unlock an encrypted volume of a store that is served.
///
/// It stays unlocked until `dbs volume lock`, or until the server ends. Without a server there is nothing to
/// unlock: set DBS_VOLUME_PASSPHRASE, DBS_VOLUME_PASSPHRASE_FILE (a file whose first line is the passphrase)
/// or DBS_VOLUME_KEY_FILE for the command that reads or writes the volume, `dbs serve` among others.
#[derive(Debug, Args)]
pub struct Unlock {
    /// Volume
    name: String,
    /// File of 32 random bytes that unlocks it. Without it, DBS_VOLUME_PASSPHRASE and the like, or who sits
    /// at the terminal
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

impl Unlock {
    pub fn run(self, context: &Context) -> Result<()> {
        let Self { name: volume, key_file } = self;
        let value = context.with(false, |target| {
            if !target.is_served() {
                return Err(Error::invalid(
                    "no server has the store open: a volume is unlocked for as long as its store is. Set \
                     DBS_VOLUME_PASSPHRASE, DBS_VOLUME_PASSPHRASE_FILE or DBS_VOLUME_KEY_FILE for the command that \
                     reads or writes it",
                ));
            }
            let secret = Given(secret::present(key_file.as_deref(), &volume)?);
            target.call(context, &Request::VolumeUnlock { volume: volume.clone(), secret })
        })?;
        context.done(&value, &format!("volume {volume} is unlocked"))
    }
}

/// Lock an encrypted volume of a store that is served.
///
/// The server forgets its key. Nobody may have the volume or a snapshot of it open: `dbs clients` lists who
/// has. Clones of it have locks of their own; one that is made while it is locked is locked, too.
#[derive(Debug, Args)]
pub struct Lock {
    /// Volume
    name: String,
}

impl Lock {
    pub fn run(self, context: &Context) -> Result<()> {
        let message = format!("volume {} is locked", self.name);
        context.done(&context.call(&Request::VolumeLock { volume: self.name })?, &message)
    }
}

/// Give an encrypted volume another passphrase or key file.
///
/// No data is written, and clones keep their secrets. The present secret comes from --key-file,
/// DBS_VOLUME_PASSPHRASE and the like, or the terminal; the new one from --new-key-file,
/// DBS_VOLUME_NEW_PASSPHRASE, DBS_VOLUME_NEW_PASSPHRASE_FILE, DBS_VOLUME_NEW_KEY_FILE, or the terminal.
/// Whoever has an old copy of the store, or a dump, opens that with the old secret as before. So are copies in
/// other stores, also if `dbs receive` goes on with them: change the secret there, too.
#[derive(Debug, Args)]
pub struct Rekey {
    /// Volume
    name: String,
    /// File of 32 random bytes that unlocks it now
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// File of 32 random bytes that is to unlock it from now on
    #[arg(long, value_name = "FILE")]
    new_key_file: Option<PathBuf>,
}

impl Rekey {
    pub fn run(self, context: &Context) -> Result<()> {
        let Self { name: volume, key_file, new_key_file } = self;
        let message = format!("volume {volume} has another secret now");
        let secret = Given(secret::present(key_file.as_deref(), &volume)?);
        let new = Given(secret::new(new_key_file.as_deref(), &volume)?);
        let value = context.call(&Request::VolumeRekey { volume, secret, new })?;
        context.done(&value, &message)
    }
}
