//! Connections of shims, of which there may be thousands: none has a thread.

use dbs_core::{Error, Result};
use std::os::unix::net::UnixStream;
use tokio::io::Interest;
use tokio::runtime::Handle;

/// Calls `ended`, where it may block, once the peer sends anything or ends the connection.
///
/// # Errors
/// `Io` if the connection cannot be watched.
pub fn when_over(
    runtime: &Handle,
    stream: UnixStream,
    ended: impl FnOnce(&UnixStream) + Send + 'static,
) -> Result<()> {
    let failed = |e| Error::io(e, "watching a shim's connection");
    let watched = stream.try_clone().map_err(failed)?;
    watched.set_nonblocking(true).map_err(failed)?;
    let watched = {
        let _context = runtime.enter();
        tokio::net::UnixStream::from_std(watched).map_err(failed)?
    };
    runtime.spawn(async move {
        // An error is an end, too.
        let _over = watched.ready(Interest::READABLE).await;
        drop(watched);
        let done = tokio::task::spawn_blocking(move || {
            // The duplicate shares this with the stream.
            let _broken = stream.set_nonblocking(false);
            ended(&stream);
        });
        // A panic there has been reported.
        let _panicked = done.await;
    });
    Ok(())
}
