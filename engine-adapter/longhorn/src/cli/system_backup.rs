//! `longhorn system-backup`: Longhorn's backups of its own settings.

use super::backup_args::{SystemCommand, UploadArgs};
use super::client_args::Operands;
use super::output::{Failure, print_json};
use crate::client::open_store;
use dbs_backup::system::{SystemBackup, SystemConfig};
use dbs_backup::url::Url;
use dbs_core::{Error, Result};
use std::fs;

/// Does what the command line says.
///
/// # Errors
/// Why not, in upstream's words.
pub fn run(command: &SystemCommand) -> std::result::Result<(), Failure> {
    use SystemCommand as C;
    let (done, doing) = match command {
        C::Upload(args) => (upload(args), "Failed to run upload system-backup command"),
        C::Download(args) => (download(args), "Failed to run download system backup command"),
        C::GetConfig(args) => (config(args), "Failed to run get-config system backup command"),
        C::List(args) => (list(args), "Failed to run list system backup command"),
        C::Delete(args) => (delete(args), "Failed to run delete system backup command"),
    };
    done.map_err(|error| Failure::beside(doing, error))
}

fn upload(args: &UploadArgs) -> Result<()> {
    let [path, url] = args.operands.as_slice() else {
        return Err(Error::invalid("missing required parameters to upload system backup"));
    };
    let backup = SystemBackup::parse(url)?;
    for (value, name) in [
        (&args.git_commit, "git-commit"),
        (&args.manager_image, "manager-image"),
        (&args.engine_image, "engine-image"),
    ] {
        if value.is_empty() {
            return Err(Error::invalid(format!("missing required parameter --{name}")));
        }
    }
    let zip = fs::read(path).map_err(|e| Error::io(e, format!("reading `{path}`")))?;
    let facts = SystemConfig {
        longhorn_git_commit: args.git_commit.clone(),
        manager_image: args.manager_image.clone(),
        engine_image: args.engine_image.clone(),
        created_at: jiff::Timestamp::now().to_string(),
        ..SystemConfig::default()
    };
    open_store(&backup.store)?.upload_system(&backup, &zip, facts)
}

fn download(args: &Operands) -> Result<()> {
    let [url, path] = args.operands.as_slice() else {
        return Err(Error::invalid("missing required parameters to download system backup"));
    };
    let backup = SystemBackup::parse(url)?;
    let zip = open_store(&backup.store)?.download_system(&backup)?;
    fs::write(path, zip).map_err(|e| Error::io(e, format!("writing `{path}`")))
}

fn config(args: &Operands) -> Result<()> {
    let backup = one(args)?;
    print_json(&open_store(&backup.store)?.system(&backup)?)
}

fn list(args: &Operands) -> Result<()> {
    let url = args.operands.first();
    let url =
        url.ok_or_else(|| Error::invalid("missing required parameter for backup target URL"))?;
    print_json(&open_store(&Url::parse(url)?)?.systems()?)
}

fn delete(args: &Operands) -> Result<()> {
    let backup = one(args)?;
    open_store(&backup.store)?.remove_system(&backup)
}

fn one(args: &Operands) -> Result<SystemBackup> {
    let url = args.operands.first();
    let url =
        url.ok_or_else(|| Error::invalid("missing required parameter for system backup URL"))?;
    SystemBackup::parse(url)
}
