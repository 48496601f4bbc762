//! A long call that stands still between two of its steps, or about a read of the disk.

use crate::disk::at_next_read;
use crate::op::{Long, snapshot_name, volume_name};
use crate::standing::{Stand, Standing, State};
use dbs_core::{Error, ErrorKind, Store};
use std::rc::Rc;

/// The call.
pub struct Job {
    /// What it does.
    pub long: Long,
    /// The model's number of the volume that it has open; 0 for none.
    pub id: u32,
    call: Standing<Result<(), Error>>,
}

/// What has become of a call.
pub enum Went {
    /// It stands still.
    On(Job),
    /// It has ended.
    Ended(Result<(), Error>),
}

impl Job {
    /// Begins a call, up to its first step.
    #[must_use]
    pub fn begin(store: &Store, long: Long, id: u32) -> Went {
        let store = store.clone();
        let call = Standing::begin(move |stand| match long {
            Long::Flatten { vol } => {
                let mut stood = false;
                let mut step = |_, _| {
                    stood = true;
                    stand.still()
                };
                let flattened = flatten(&store, vol, &mut step);
                flattened.or_else(|error| if stood { not_rebuilt(error) } else { Err(error) })
            }
            Long::Compress { vol } => {
                let mut stood = false;
                let mut step = |_, _| {
                    stood = true;
                    stand.still()
                };
                let compressed = compress(&store, (vol, None), &mut step);
                // Meanwhile the store may fill up.
                compressed.or_else(|error| match error.kind() {
                    ErrorKind::NoSpace if stood => Ok(()),
                    _ => Err(error),
                })
            }
            Long::Vacuum => store.vacuum(&mut |_, _| stand.still()).map(drop).or_else(not_stopped),
            Long::Scrub => scrub(&store, stand),
            Long::Relearn => relearn(&store, stand),
        });
        Self::went(long, id, call)
    }

    /// Lets it do so many steps.
    #[must_use]
    pub fn go_on(self, steps: u8) -> Went {
        let Self { long, id, mut call } = self;
        for _ in 0..steps {
            match call.next(true) {
                State::Stands(stands) => call = stands,
                State::Ended(ended) => return Went::Ended(ended),
            }
        }
        Went::On(Self { long, id, call })
    }

    /// Stops it.
    ///
    /// # Errors
    /// Those of the call.
    pub fn stop(self) -> Result<(), Error> {
        self.call.end(false)
    }

    fn went(long: Long, id: u32, state: State<Result<(), Error>>) -> Went {
        match state {
            State::Stands(call) => Went::On(Self { long, id, call }),
            State::Ended(ended) => Went::Ended(ended),
        }
    }
}

/// Flattens a volume; it may be stopped.
pub(crate) fn flatten(
    store: &Store,
    vol: u8,
    step: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), Error> {
    match store.flatten(&volume_name(vol), step) {
        // A clone that rests on a file.
        Err(error)
            if error.kind() == ErrorKind::Unsupported
                && store.backing(&volume_name(vol))?.is_some() =>
        {
            Ok(())
        }
        flattened => flattened.or_else(not_stopped),
    }
}

/// Compresses a volume or snapshot; it may be stopped. Data that the disk cannot read is left as it is.
pub(crate) fn compress(
    store: &Store,
    (vol, snap): (u8, Option<u8>),
    step: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), Error> {
    let name = volume_name(vol);
    let spec = snap.map_or_else(|| name.clone(), |snap| format!("{name}@{}", snapshot_name(snap)));
    let compressed = store.compress(&spec, &mut |report| step(report.done, report.total));
    compressed.map(drop).or_else(not_stopped)
}

/// A rebuild of the volume began while a flatten of it stood still; it may have ended.
fn not_rebuilt(error: Error) -> Result<(), Error> {
    let text = error.to_string();
    let rebuilt = text.contains("is being rebuilt") || text.contains("was rebuilt meanwhile");
    if error.kind() == ErrorKind::Busy && rebuilt { Ok(()) } else { Err(error) }
}

/// Nothing is damaged that could be read.
fn scrub(store: &Store, stand: Stand) -> Result<(), Error> {
    let (data, stand) = (store.info().metadata, Rc::new(stand));
    let scrubbed = store.scrub(true, &mut |_| {
        let going = stand.still();
        stand_about_read(&stand, data);
        going
    });
    match scrubbed {
        Ok(report) if report.damaged > 0 => Err(Error::damaged(format!("{report:?}"))),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
        scrubbed => scrubbed.map(drop).or_else(not_stopped),
    }
}

fn relearn(store: &Store, stand: Stand) -> Result<(), Error> {
    let (data, stand) = (store.info().metadata, Rc::new(stand));
    loop {
        stand_about_read(&stand, data);
        if !store.relearn_checksums(1)? {
            return Ok(());
        }
    }
}

/// The calling thread stands still before its next read of data, which begins behind `data`, and after it.
pub(crate) fn stand_about_read(stand: &Rc<Stand>, data: u64) {
    let stand = Rc::clone(stand);
    at_next_read(data, move || {
        let _goes_on = stand.still();
    });
}

/// Being stopped by the progress function is what was asked for.
pub(crate) fn not_stopped(error: Error) -> Result<(), Error> {
    if error.kind() == ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}
