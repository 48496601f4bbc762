//! Receiving: layers and descriptions, as files from one of upstream's senders.

use super::Agent;
use super::files::FileName;
use super::incoming::{IncomingSink, MetaSink};
use super::peer::client::Traffic;
use super::ports::Port;
use super::send::{blocking, broken};
use super::uses::Use;
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_sync::image::Sink;
use longhorn_sync::ssync::{self, ReceiveOptions, Received};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A receiver at work.
pub struct Receiver {
    /// Where it listens.
    pub port: u16,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<()>>,
}

impl Receiver {
    /// Waits until all has come in.
    ///
    /// # Errors
    /// `Interrupted` if the sender did not come; of the store.
    async fn done(self) -> Result<()> {
        // Not dropped before: that would stop it.
        let Self { stop: _stop, task, .. } = self;
        task.await.map_err(broken)?
    }

    /// Ends it, and waits until nothing is written any more.
    async fn stop(self) {
        // It may have ended by itself.
        let _ = self.stop.send(());
        let _ = self.task.await;
    }

    /// Waits until all has come in, if the sender says that it has sent it; else nobody may write
    /// there any more on return.
    ///
    /// # Errors
    /// Of the sender, and as [`Receiver::done`].
    pub async fn end(self, sent: Result<()>) -> Result<()> {
        match sent {
            Ok(()) => self.done().await,
            Err(error) => {
                self.stop().await;
                Err(error)
            }
        }
    }

    /// Lets it go on alone, until its sender has finished or has not been heard of for long.
    pub fn detach(self, name: String) {
        let Self { stop, task, .. } = self;
        tokio::spawn(async move {
            let _stop = stop;
            if let Err(error) = task.await.map_err(broken).and_then(|outcome| outcome) {
                log::warn("receive", &[("file", &name), ("error", &error)]);
            }
        });
    }
}

/// What is being received.
enum What {
    Layer(Arc<IncomingSink>),
    Meta(Arc<MetaSink>),
}

impl Agent {
    /// Begins to receive a file, on a port of its own. `passed` counts the bytes of data.
    ///
    /// # Errors
    /// `Invalid` for what cannot be received, `Busy` without a port; of the store.
    pub(super) async fn receiver(
        self: &Arc<Self>,
        name: &str,
        traffic: Arc<Traffic>,
        passed: Arc<AtomicU64>,
    ) -> Result<Receiver> {
        let (me, name) = (Arc::clone(self), name.to_owned());
        let used = self.uses.begin();
        let (port, what) = blocking(move || {
            let what = me.place(&name, traffic)?;
            Ok((me.ports.take()?, what))
        })
        .await?;
        let number = port.number();
        let (stop, stopped) = oneshot::channel();
        let options = ReceiveOptions {
            progress: Arc::new(move |bytes| {
                passed.fetch_add(bytes, Ordering::Relaxed);
            }),
            ..ReceiveOptions::default()
        };
        let me = Arc::clone(self);
        let task =
            tokio::spawn(async move { me.receive(port, what, options, stopped, used).await });
        Ok(Receiver { port: number, stop, task })
    }

    /// Where what is received under this name goes.
    fn place(&self, name: &str, traffic: Arc<Traffic>) -> Result<What> {
        match FileName::parse(name)? {
            FileName::Snapshot(disk) => {
                let (replica, shelf) = (Arc::clone(&self.replica), Arc::clone(&self.shelf));
                Ok(What::Layer(Arc::new(IncomingSink::new(replica, shelf, &disk, traffic)?)))
            }
            FileName::SnapshotMeta(disk) | FileName::HeadMeta(disk) => {
                Ok(What::Meta(Arc::new(MetaSink::new(Arc::clone(&self.replica), disk))))
            }
            FileName::Head(_) | FileName::Checksum(_) => {
                Err(Error::invalid(format!("{name} cannot be received")))
            }
        }
    }

    async fn receive(
        self: Arc<Self>,
        port: Port,
        what: What,
        options: ReceiveOptions,
        stopped: oneshot::Receiver<()>,
        used: Use,
    ) -> Result<()> {
        let listener = port.listener()?;
        let sink: Arc<dyn Sink> = match &what {
            What::Layer(sink) => Arc::clone(sink) as _,
            What::Meta(sink) => Arc::clone(sink) as _,
        };
        // Until nothing is written any more, it is a use.
        let mut ends = used.clone();
        let stop = async {
            tokio::select! {
                // Also when the other end is gone.
                _ = stopped => {}
                () = ends.ended() => {}
            }
        };
        let outcome = ssync::receive(listener, sink, options, stop).await;
        drop(port);
        let interrupted = |text: &str| Err(Error::new(ErrorKind::Interrupted, text));
        match (outcome?, what) {
            (Received::Closed { .. }, What::Layer(_)) => Ok(()),
            (Received::Closed { .. }, What::Meta(sink)) if sink.is_taken() => Ok(()),
            (Received::Closed { .. }, What::Meta(_)) => {
                interrupted("the sender went away without sending anything")
            }
            (Received::Idle, _) => interrupted("the sender was not heard of for too long"),
            (Received::Stopped, _) => interrupted("receiving was stopped"),
        }
    }
}
