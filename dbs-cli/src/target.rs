//! The store a command works on: opened by this process, or served by another.

use crate::context::Context;
use crate::old;
use crate::output;
use crate::progress::{Meter, Unit};
use dbs_client::any_store::AnyStore;
use dbs_control::api::{Progress, Request};
use dbs_core::store::TAKE_OVER_TIME;
use dbs_core::v1::Image;
use dbs_core::{ErrorKind, Result};
use dbs_transfer::{BlockAccess, StoreAccess};
use serde_json::Value;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for a store that somebody holds who is no server: another command, most likely, or a server that is
/// opening it.
const HELD_PATIENCE: Duration = Duration::from_secs(6);
const _: () = assert!(HELD_PATIENCE.as_secs() > TAKE_OVER_TIME.as_secs());
const HELD_POLL: Duration = Duration::from_millis(20);

/// Tries until it is not refused because somebody has the store, or `waits` says that waiting is of no use. `waits` is
/// called after the first time.
///
/// # Errors
/// Those of `attempt`.
pub fn while_held<T>(
    mut attempt: impl FnMut() -> Result<T>,
    waits: impl FnOnce() -> bool,
) -> Result<T> {
    let deadline = Instant::now() + HELD_PATIENCE;
    let mut waits = Some(waits);
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                if waits.take().is_some_and(|waits| !waits()) {
                    return Err(error);
                }
                thread::sleep(HELD_POLL);
            }
            ended => return ended,
        }
    }
}

/// An open or a served store.
pub enum Target {
    /// Of the present format.
    Live(AnyStore),
    /// An image of format 1.0.0, which is only read.
    Old(Box<Image>),
}

impl Target {
    /// Opens the store that `context` names, or connects to the server that holds it.
    ///
    /// # Errors
    /// Those of [`dbs_core::Store::open`]; `Busy` if somebody who is no server holds it.
    pub fn open(context: &Context, writes: bool) -> Result<Self> {
        let path = context.store()?;
        let options = context.open_options(!writes);
        let open = || AnyStore::open(path, &options, &context.runtime_dir());
        let opened = while_held(open, || true);
        match opened {
            Ok(store) => {
                if let AnyStore::Idle(store, _) = &store {
                    store.info().warnings.iter().for_each(|text| output::warn(text));
                    context.attach_backups(store);
                }
                Ok(Self::Live(store))
            }
            Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Corrupt) => {
                Image::open(path, None).map(|image| Self::Old(Box::new(image))).map_err(|_| error)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether a server has the store open.
    pub fn is_served(&self) -> bool {
        matches!(self, Self::Live(AnyStore::Served(_)))
    }

    /// Runs a request. On an open store this also does the background work the request leaves.
    ///
    /// # Errors
    /// The request's.
    pub fn call(&self, context: &Context, request: &Request) -> Result<Value> {
        let label = label(request);
        let mut meter = context.meter(label, unit(request));
        if is_long(request) {
            context.stop.on_signals()?;
        }
        match self {
            Self::Live(store) => {
                let value = store.call(request, &mut |progress| watch(&mut meter, progress))?;
                drop(meter);
                if request.leaves_work() {
                    self.settle(context)?;
                }
                Ok(value)
            }
            Self::Old(image) => old::execute(image, request),
        }
    }

    /// As [`Target::call`], for a short request that cleans up behind a command: what has stopped that one does
    /// not stop this. The background work that it leaves is then done the next time.
    ///
    /// # Errors
    /// As [`Target::call`].
    pub fn clean_up(&self, context: &Context, request: &Request) -> Result<()> {
        let Self::Live(store) = self else { return Err(old::unsupported()) };
        store.call(request, &mut |_| true)?;
        if context.stop.asked() {
            return Ok(());
        }
        match self.settle(context) {
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            settled => settled,
        }
    }

    /// Does the background work that a command has left on an open store; a server does that in
    /// its own time.
    ///
    /// # Errors
    /// Those of the store; `Interrupted`, with the command itself done.
    pub fn settle(&self, context: &Context) -> Result<()> {
        let Self::Live(store @ AnyStore::Idle(..)) = self else { return Ok(()) };
        context.stop.on_signals()?;
        let mut meter = context.meter(label(&Request::VolumeTrim), Unit::Steps);
        store.settle(&mut |progress| watch(&mut meter, progress))
    }

    /// The store for transfers.
    ///
    /// # Errors
    /// `Unsupported` for an old image.
    pub fn access(&self) -> Result<&(dyn StoreAccess + Sync)> {
        match self {
            Self::Live(store) => Ok(store.access()),
            Self::Old(_) => Err(old::unsupported()),
        }
    }

    /// As [`AnyStore::check_same`].
    ///
    /// # Errors
    /// As there; `Unsupported` for an old image.
    pub fn check_same(&self, spec: &str, uuid: &str) -> Result<()> {
        match self {
            Self::Live(store) => store.check_same(spec, uuid),
            Self::Old(_) => Err(old::unsupported()),
        }
    }

    /// Opens a volume or snapshot for reading or writing its data.
    ///
    /// # Errors
    /// `NotFound`, and those of the store or the connection.
    pub fn open_spec(&self, spec: &str) -> Result<Box<dyn BlockAccess + '_>> {
        match self {
            Self::Old(image) => Ok(Box::new(image.open_spec(spec)?)),
            other => Ok(other.access()?.open(spec)?),
        }
    }

    /// Closes it.
    ///
    /// # Errors
    /// Those of [`dbs_core::Store::close`].
    pub fn close(self) -> Result<()> {
        match self {
            Self::Live(store) => store.close(),
            Self::Old(_) => Ok(()),
        }
    }
}

impl Context {
    /// Opens the store, or its server, runs `body` and closes it again. An error of closing is
    /// one of the command: what it did may not be durable.
    ///
    /// # Errors
    /// Those of opening and closing, and of `body`.
    pub fn with<T>(&self, writes: bool, body: impl FnOnce(&Target) -> Result<T>) -> Result<T> {
        let target = Target::open(self, writes)?;
        let result = body(&target);
        let closed = target.close().map_err(|e| e.context("closing the store"));
        match (result, closed) {
            (Ok(result), closed) => closed.map(|()| result),
            (Err(error), _) => Err(error),
        }
    }

    /// Runs one request.
    ///
    /// # Errors
    /// As [`Context::with`].
    pub fn call(&self, request: &Request) -> Result<Value> {
        self.with(request.writes(), |target| target.call(self, request))
    }
}

/// Passes what a server tells on to a progress line.
pub fn watch(meter: &mut Meter, progress: Option<Progress>) -> bool {
    match progress {
        Some(progress) => meter.update(progress.done, progress.total),
        None => meter.goes_on(),
    }
}

/// Whether it takes long, and can be stopped in good order.
fn is_long(request: &Request) -> bool {
    use Request as R;
    matches!(
        request,
        R::Vacuum { .. }
            | R::Scrub { .. }
            | R::VolumeFlatten { .. }
            | R::VolumeTrim
            | R::VolumeRelease { .. }
            | R::VolumeCompress { .. }
            | R::Work { .. }
    )
}

fn label(request: &Request) -> &'static str {
    match request {
        Request::Vacuum { .. } => "compacting",
        Request::VolumeFlatten { .. } => "flattening",
        Request::Scrub { .. } => "scrubbing",
        Request::VolumeTrim => "reclaiming space",
        Request::VolumeRelease { .. } => "looking for zeros",
        Request::VolumeCompress { .. } => "compressing",
        _ => "working",
    }
}

/// What its progress counts.
fn unit(request: &Request) -> Unit {
    match request {
        Request::Scrub { .. } | Request::VolumeRelease { .. } => Unit::Bytes,
        _ => Unit::Steps,
    }
}
