//! Who has a volume: replicas that are served or about to be, commands, the look after removed directories.

use super::super::guard;
use super::super::protocol::STEP_TIMEOUT;
use super::{ENDING_PAUSE, Hosting, State};
use dbs_control::api::Request;
use dbs_core::{Error, Result};
use std::thread;
use std::time::Instant;

impl State {
    fn serves(&self, volume: &str) -> bool {
        self.starting.contains(volume) || self.replicas.iter().any(|hosted| hosted.volume == volume)
    }
}

/// No command and no other replica comes to this volume. Others are not held up by that, nor by a command on another
/// volume, which may run for hours.
pub(super) struct Starting<'a> {
    hosting: &'a Hosting,
    volume: String,
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.hosting.state().starting.remove(&self.volume);
    }
}

/// A command runs on these volumes: none of them becomes a replica's meanwhile.
pub(super) struct Commanded<'a> {
    hosting: &'a Hosting,
    volumes: Vec<&'a str>,
}

impl Drop for Commanded<'_> {
    fn drop(&mut self) {
        let mut state = self.hosting.state();
        for volume in &self.volumes {
            if let Some(index) = state.commanded.iter().position(|other| other == volume) {
                state.commanded.swap_remove(index);
            }
        }
    }
}

impl Hosting {
    pub(super) fn serves(&self, volume: &str) -> bool {
        self.state().serves(volume)
    }

    /// The volume for its replica alone, unless a command runs on it or another replica of it is about to be served.
    fn hold(&self, volume: &str) -> Option<Starting<'_>> {
        let mut state = self.state();
        let is_commanded = state.commanded.iter().any(|other| other == volume);
        let is_free = !is_commanded && state.starting.insert(volume.to_owned());
        is_free.then(|| Starting { hosting: self, volume: volume.to_owned() })
    }

    /// The volume for being deleted, unless somebody has it.
    pub(super) fn hold_unserved(&self, volume: &str) -> Option<Starting<'_>> {
        let held = self.hold(volume)?;
        let replicas = self.replicas();
        (!replicas.iter().any(|hosted| hosted.volume == volume)).then_some(held)
    }

    /// Begins to serve a replica of a volume: from now on no command and no other replica comes to the volume.
    pub(super) fn begin(&self, volume: &str) -> Result<Starting<'_>> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            if let Some(held) = self.hold(volume) {
                return Ok(held);
            }
            if Instant::now() >= deadline {
                let text = format!(
                    "a command has been changing `{volume}` for long, or another replica of it has been starting"
                );
                return Err(Error::busy(text));
            }
            thread::sleep(ENDING_PAUSE);
        }
    }

    /// Lets a command run on its volumes, unless it changes one that is being served.
    pub(super) fn begin_command<'a>(&'a self, request: &'a Request) -> Result<Commanded<'a>> {
        let changed = guard::changed(request).into_iter();
        let volumes: Vec<_> = changed.chain(guard::made(request)).collect();
        let mut state = self.state();
        guard::check(request, &|volume| state.serves(volume))?;
        state.commanded.extend(volumes.iter().map(|volume| (*volume).to_owned()));
        Ok(Commanded { hosting: self, volumes })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dbs_core::{ErrorKind, InitOptions, OpenOptions, Store, TailPlace};
    use dbs_server::serve::Extension;
    use longhorn_data::DataOptions;
    use serde_json::Value;
    use std::time::Duration;

    /// Found by review: a long command kept all replicas from starting, and they all commands from running.
    #[test]
    fn a_command_holds_up_its_own_volumes_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.dbs");
        Store::init(&path, &InitOptions { size: Some(64 << 20), ..Default::default() }).unwrap();
        let options = OpenOptions { tail: TailPlace::None, ..Default::default() };
        let store = Store::open(&path, &options).unwrap();
        let hosting = Hosting::start(store, DataOptions::default(), Duration::from_secs(600));
        let hosting = hosting.unwrap();
        let flatten = |volume: &str| Request::VolumeFlatten { volume: volume.to_owned() };
        let run = |request: &Request, what: &mut dyn FnMut()| {
            hosting.command(request, &mut || {
                what();
                Ok(Value::Null)
            })
        };
        let rename = Request::VolumeRename { volume: "v".to_owned(), new: "new".to_owned() };
        run(&rename, &mut || {
            run(&flatten("v"), &mut || {}).unwrap();
            assert!(hosting.hold("v").is_none() && hosting.hold("new").is_none());
            let starting = hosting.begin("r").unwrap();
            let refused = run(&flatten("r"), &mut || unreachable!()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy);
            assert!(hosting.hold("r").is_none() && hosting.hold_unserved("r").is_none());
            run(&flatten("w"), &mut || {}).unwrap();
            drop(starting);
            run(&flatten("r"), &mut || {}).unwrap();
        })
        .unwrap();
        assert!(hosting.state().commanded.is_empty());
        assert!(["v", "new", "r"].iter().all(|volume| hosting.hold(volume).is_some()));
        hosting.stop();
    }
}
