//! The commands for backups of a volume.

use super::args::Globals;
use super::backing_image;
use super::backup_args::{BackupCommand, CreateArgs, RestoreArgs, StatusArgs};
use super::backup_store;
use super::client::{block_on, connect};
use super::golang;
use super::output::{Failure, json, print, print_line};
use super::restore_to_file;
use crate::client::{ReplicaError, RestoreError, credential};
use dbs_backup::url::Url;
use dbs_core::{Error, Result};
use longhorn_wire::labels;
use longhorn_wire::proto::ptypes::BackupCreateRequest;
use serde::Serialize;

/// Does what the command line says.
///
/// # Errors
/// Why not, in upstream's words and where upstream's has them.
pub fn run(command: &BackupCommand, globals: &Globals) -> std::result::Result<(), Failure> {
    use BackupCommand as C;
    match command {
        C::Create(args) => block_on(create(args, globals))
            .map_err(|e| Failure::beside("Error running create backup command", e)),
        C::Status(args) => block_on(status(args, globals))
            .map_err(|e| Failure::behind("Error querying backup status", e)),
        C::Restore(args) => restore(args, globals),
        C::RestoreStatus(_) => block_on(restore_status(globals))
            .map_err(|e| Failure::beside("Error running restore backup command", e)),
        C::RestoreToFile(args) => restore_to_file::run(args)
            .map_err(|e| Failure::beside("Error running restore to file command", e)),
        C::LsBackingImage(_) | C::RmBackingImage(_) => {
            backing_image::run(command).map_err(Failure::printed)
        }
        C::InspectBackingImage(_) => backing_image::run(command)
            .map_err(|e| Failure::beside("Failed to run inspect-backing-image command", e)),
        other => backup_store::run(other).map_err(Failure::printed),
    }
}

async fn create(args: &CreateArgs, globals: &Globals) -> Result<()> {
    if args.dest.is_empty() {
        return Err(Error::invalid("missing required parameter --dest"));
    }
    let snapshot = args.snapshot.first().filter(|name| !name.is_empty());
    let snapshot = snapshot.ok_or_else(|| Error::invalid("missing required parameter snapshot"))?;
    labels::parse(&args.label)
        .map_err(|why| Error::invalid(format!("cannot parse backup labels: {why}")))?;
    let block_size = u64::try_from(args.backup_block_size).ok().filter(|size| *size > 0);
    let block_size = block_size.and_then(|size| size.checked_mul(1 << 20)).ok_or_else(|| {
        Error::invalid(format!("invalid backup block size: {}", args.backup_block_size))
    })?;
    let request = BackupCreateRequest {
        snapshot_file_name: snapshot.clone(),
        backup_target: args.dest.clone(),
        labels: args.label.clone(),
        credential: credential(&Url::parse(&args.dest)?),
        backing_image_name: args.backing_image_name.clone(),
        backing_image_checksum: args.backing_image_checksum.clone(),
        backup_name: args.backup_name.clone(),
        compression_method: args.compression_method.clone(),
        concurrent_limit: args.concurrent_limit,
        storage_class_name: args.storage_class_name.clone(),
        parameters: [("backup-block-size".to_owned(), block_size.to_string())].into(),
        ..BackupCreateRequest::default()
    };
    print_line(&connect(globals)?.backup_create(request).await?)
}

async fn status(args: &StatusArgs, globals: &Globals) -> Result<()> {
    let backup = args.backup.first().filter(|name| !name.is_empty());
    let backup = backup.ok_or_else(|| Error::invalid("missing required parameter backupID"))?;
    let instance = if args.replica.is_empty() { "" } else { &*args.replica_instance_name };
    print_line(&connect(globals)?.backup_status(backup, &args.replica, instance).await?)
}

async fn restore_status(globals: &Globals) -> Result<()> {
    print_line(&connect(globals)?.restore_status().await?)
}

/// What the standard output gets of errors on replicas.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct TaskError<'a> {
    replica_errors: &'a [ReplicaError],
}

fn restore(args: &RestoreArgs, globals: &Globals) -> std::result::Result<(), Failure> {
    const DOING: &str = "Error running restore backup command";
    let backup = args.backup.first().filter(|url| !url.is_empty());
    let restored = backup
        .ok_or_else(|| Error::invalid("missing required parameter backup"))
        .and_then(|backup| Url::parse(golang::unquoted(backup)))
        .and_then(|url| {
            block_on(async {
                let (credential, encrypted) =
                    (credential(&url), args.need_correct_encrypted_volume_size);
                let engine = connect(globals)?;
                Ok(engine.restore(&url, &credential, args.concurrent_limit, encrypted).await)
            })
        });
    let error = match restored.unwrap_or_else(|error| Err(RestoreError::Volume(error))) {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    // Callers read the standard output, and upstream writes it there too.
    match error {
        RestoreError::Volume(error) => {
            let _ = print(&error.to_string());
            Err(Failure::beside(DOING, error))
        }
        RestoreError::Replicas(errors) => {
            let _ = print(&json(&TaskError { replica_errors: &errors }).unwrap_or_default());
            let texts: Vec<_> =
                errors.iter().map(|e| format!("{}: {}", e.address, e.message)).collect();
            Err(Failure::beside(DOING, texts.join("; ")))
        }
    }
}
