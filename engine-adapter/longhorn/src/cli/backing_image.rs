//! The commands for backups of backing images in a backup store.

use super::backup_args::BackupCommand;
use super::backup_store::url;
use super::client_args::Operands;
use super::output::print_json;
use crate::client::open_store;
use dbs_backup::Work;
use dbs_backup::config::Map;
use dbs_backup::url::Url;
use dbs_core::{Error, Result};
use serde::Serialize;

/// The option of a URL that names an image.
const OPTION: &str = "backingImage";

/// The backup of an image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct ImageInfo {
    name: String,
    #[serde(rename = "URL")]
    url: String,
    complete_at: String,
    size: String,
    checksum: String,
    labels: Option<Map>,
    #[serde(skip_serializing_if = "String::is_empty")]
    compression_method: String,
    secret: String,
    secret_namespace: String,
}

/// Does what the command line says.
pub fn run(command: &BackupCommand) -> Result<()> {
    use BackupCommand as C;
    match command {
        C::LsBackingImage(args) => {
            let url = url(&args.operands)?;
            print_json(&open_store(&url)?.images()?)
        }
        C::RmBackingImage(args) => {
            let (url, image) = image(args)?;
            let mut progress = |_, _| true;
            open_store(&url)?.remove_image(&image, &mut Work::new(&mut progress))
        }
        C::InspectBackingImage(args) => {
            let (url, image) = image(args)?;
            print_json(&inspect(&url, &image)?)
        }
        _ => Ok(()),
    }
}

fn inspect(url: &Url, image: &str) -> Result<ImageInfo> {
    let facts = open_store(url)?.complete_image(image)?;
    let sign = if url.options.is_empty() { '?' } else { '&' };
    Ok(ImageInfo {
        // The name needs no encoding.
        url: format!("{url}{sign}{OPTION}={}", facts.name),
        name: facts.name,
        complete_at: facts.complete_time,
        size: facts.size.to_string(),
        checksum: facts.checksum,
        labels: facts.labels,
        compression_method: facts.compression_method,
        secret: facts.secret,
        secret_namespace: facts.secret_namespace,
    })
}

/// The store and the image that a URL names.
fn image(args: &Operands) -> Result<(Url, String)> {
    let mut url = url(&args.operands)?;
    let image = url.option(OPTION).unwrap_or_default().to_owned();
    if !dbs_backup::names::is_valid(&image) {
        return Err(Error::invalid(format!("invalid backing image name parsed: {image}")));
    }
    url.options.retain(|(name, _)| name != OPTION);
    Ok((url, image))
}
