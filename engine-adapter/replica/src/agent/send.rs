//! Sending: a layer, a description, or a whole volume, as files to one of upstream's receivers.

use super::Agent;
use super::files::FileName;
use super::shelf::{disk_meta, no_disk};
use super::uses::Use;
use dbs_core::{Error, Result};
use dbs_service::log;
use longhorn_sync::image::{Bytes, GRAIN, LayerSource, Source};
use longhorn_sync::ssync::{self, SendOptions, Sent};
use longhorn_wire::names;
use longhorn_wire::proto::ptypes::{FileSendRequest, VolumeExportRequest};
use longhorn_wire::remote::bare_host;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// For one request where the caller names no time.
const TIMEOUT: Duration = Duration::from_secs(300);

/// What is to be sent, and how.
struct Parcel {
    source: Arc<dyn Source>,
    options: SendOptions,
}

impl Agent {
    /// Sends a file to a receiver.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` for the head, `Io` with what the receiver said.
    pub(super) async fn file_send(self: &Arc<Self>, request: FileSendRequest) -> Result<()> {
        let FileSendRequest { from_file_name, host, port, fast_sync, .. } = request;
        let timeout = seconds(request.file_sync_http_client_timeout);
        let (me, used) = (Arc::clone(self), self.uses.begin());
        let parcel = blocking(move || me.parcel(&from_file_name, fast_sync)).await?;
        deliver(parcel, &host, port, timeout, used).await
    }

    /// Sends what one reads through a snapshot to a receiver.
    ///
    /// # Errors
    /// `NotFound`, `Io` with what the receiver said.
    pub(super) async fn volume_export(
        self: &Arc<Self>,
        request: VolumeExportRequest,
    ) -> Result<()> {
        let VolumeExportRequest { snapshot_file_name: snapshot, host, port, .. } = request;
        let with_file = request.export_backing_image_if_exist;
        let timeout = seconds(request.file_sync_http_client_timeout);
        let (me, used) = (Arc::clone(self), self.uses.begin());
        let parcel = blocking(move || {
            let disk = names::snapshot_disk(&snapshot);
            if !me.replica.disks()?.contains_key(&disk) {
                return Err(no_disk(&disk));
            }
            let source = me.shelf.flattened(&snapshot, with_file)?;
            Ok(Parcel::new(snapshot, Arc::new(source)))
        });
        deliver(parcel.await?, &host, port, timeout, used).await
    }

    fn parcel(&self, name: &str, fast_sync: bool) -> Result<Parcel> {
        let disks = self.replica.disks()?;
        let find = |disk: &str| disks.get(disk).ok_or_else(|| no_disk(disk));
        match FileName::parse(name)? {
            FileName::Snapshot(disk) => {
                let snapshot = find(&disk)?.snapshot.as_deref();
                let volume = self.replica.volume_name();
                let source = LayerSource::to_send(&self.replica.store()?, volume, snapshot)?;
                let mut parcel = Parcel::new(disk, Arc::new(source));
                if fast_sync {
                    parcel.options.checksum = self.shelf.recorded_or_none(&parcel.options.name);
                    parcel.options.fast_sync = true;
                }
                Ok(parcel)
            }
            FileName::SnapshotMeta(disk) | FileName::HeadMeta(disk) => {
                let meta = disk_meta(&disk, find(&disk)?).to_bytes()?;
                let mut parcel = Parcel::new(name.to_owned(), Arc::new(Bytes::new(meta)));
                parcel.options.direct_io = false;
                Ok(parcel)
            }
            FileName::Head(disk) => {
                Err(Error::invalid(format!("{disk} is the head, which changes: it cannot be sent")))
            }
            FileName::Checksum(disk) => Err(Error::invalid(format!(
                "the checksum of {disk} is sent with it, and not by itself"
            ))),
        }
    }
}

impl Parcel {
    fn new(name: String, source: Arc<dyn Source>) -> Self {
        let mut options = SendOptions::new(name);
        options.direct_io = source.size().is_multiple_of(GRAIN);
        Self { source, options }
    }
}

/// Sends it. A caller that goes away ends it, in good order, and so does the end of its use of the store.
async fn deliver(
    parcel: Parcel,
    host: &str,
    port: i32,
    timeout: Duration,
    mut used: Use,
) -> Result<()> {
    let Parcel { source, mut options } = parcel;
    options.timeout = timeout;
    let name = options.name.clone();
    let host = bare_host(host).to_owned();
    let port = u16::try_from(port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| Error::invalid(format!("no port to send `{name}` to")))?;
    // Dropped together with this call.
    let (_caller, gone) = oneshot::channel::<()>();
    let to = format!("{host}:{port}");
    let sending = tokio::spawn(async move {
        let stop = async move {
            tokio::select! {
                // It never says anything.
                _ = gone => {}
                () = used.ended() => {}
            }
        };
        ssync::send(source, &host, port, options, stop).await
    });
    let Sent { skipped, existed, written, equal, .. } = sending.await.map_err(broken)??;
    log::info(
        "sent",
        &[
            ("file", &name),
            ("to", &to),
            ("skipped", &skipped),
            ("existed", &existed),
            ("written_bytes", &written),
            ("equal_bytes", &equal),
        ],
    );
    Ok(())
}

fn seconds(given: i32) -> Duration {
    match u64::try_from(given) {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
        _ => TIMEOUT,
    }
}

/// Does something where it may block.
///
/// # Errors
/// Of what is done.
pub(super) async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(act).await.map_err(broken)?
}

pub(super) fn broken(error: tokio::task::JoinError) -> Error {
    Error::new(dbs_core::ErrorKind::Io, format!("a task ended abnormally: {error}"))
}
