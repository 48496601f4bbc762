//! What a page may have done to the volume: what the commands of `longhorn snapshot` do.

use crate::client::{Listed, ReplicaLink, purge, remove_snapshot};
use dbs_core::{Error, ErrorKind, Result};
use dbs_web::{Leave, Order, Run};
use longhorn_controller::rules::Mode;
use longhorn_controller::volume::Controller;
use longhorn_wire::names::snapshot_disk;
use longhorn_wire::proto::controller::ReplicaMode;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// From one look to the next, whether somebody still waits.
const LOOK: Duration = Duration::from_millis(100);

/// A command, as pages send it.
#[derive(Debug, Deserialize)]
#[serde(tag = "method", content = "params", deny_unknown_fields)]
enum Command {
    #[serde(rename = "snapshot.create")]
    Create(Create),
    #[serde(rename = "snapshot.revert")]
    Revert(Named),
    #[serde(rename = "snapshot.remove")]
    Remove(Named),
    #[serde(rename = "snapshot.purge")]
    Purge {},
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    snapshot: String,
    #[serde(default)]
    freeze: bool,
}

/// A snapshot that exists: its name, and when it was taken, which tells it from another one of the name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    snapshot: String,
    created: Option<String>,
}

/// What a page asks to be done.
///
/// # Errors
/// Why that is no command.
pub(super) fn order(
    controller: &Arc<Controller>,
    runtime: &Handle,
    wire: Value,
) -> std::result::Result<Order, String> {
    let command = serde_json::from_value::<Command>(wire).map_err(|error| error.to_string())?;
    let leave = match &command {
        Command::Revert(named) | Command::Remove(named) if named.created.is_none() => {
            Leave::Lacks("time (created)")
        }
        _ => Leave::Change,
    };
    let volume = Volume { controller: Arc::clone(controller), runtime: runtime.clone() };
    let run: Run = Box::new(move |go_on| volume.run(command, go_on));
    Ok(Order { leave, run })
}

struct Volume {
    controller: Arc<Controller>,
    runtime: Handle,
}

impl Volume {
    /// What is done without a result is told as an empty one: a page takes nothing for an answer that was cut off.
    fn run(&self, command: Command, go_on: &mut dyn FnMut() -> bool) -> Result<Value> {
        match command {
            Command::Create(Create { snapshot, freeze }) => {
                let name = self.controller.snapshot(&snapshot, HashMap::new(), freeze)?;
                Ok(json!({ "name": name }))
            }
            Command::Revert(named) => {
                self.confirm(&named, go_on)?;
                self.controller.revert(&named.snapshot).map(|()| json!({}))
            }
            Command::Remove(named) => {
                self.confirm(&named, go_on)?;
                let (volume, replicas) = self.listed();
                let removed =
                    async move { remove_snapshot(&volume, &replicas, &named.snapshot).await };
                let text = "the removal goes on, but nobody waits for it any more";
                waited_for(&self.runtime, removed, go_on, text).map(|()| json!({}))
            }
            Command::Purge {} => {
                let (volume, replicas) = self.listed();
                let begun = async move { purge(&volume, &replicas, false).await };
                let text = "purges go on, but nobody waits for them any more";
                waited_for(&self.runtime, begun, go_on, text).map(|()| json!({}))
            }
        }
    }

    fn listed(&self) -> (String, Vec<Listed>) {
        let replicas = self.controller.replicas().into_iter().map(|member| Listed {
            address: member.target.address,
            mode: match member.mode {
                Mode::Wo => ReplicaMode::Wo,
                Mode::Rw => ReplicaMode::Rw,
                Mode::Err => ReplicaMode::Err,
            },
        });
        (self.controller.volume().name, replicas.collect())
    }

    /// Whether the snapshot of this name is still the one that was confirmed. A replica that hangs is asked only for as long
    /// as somebody waits: nothing has begun until then.
    fn confirm(
        &self,
        Named { snapshot, created }: &Named,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let (volume, replicas) = self.listed();
        let complete = replicas.iter().find(|replica| replica.mode == ReplicaMode::Rw);
        let complete = complete.ok_or_else(|| Error::busy("no replica is complete"))?;
        let address = complete.address.clone();
        let asked = async move { ReplicaLink::new(&address, &volume, "")?.get().await };
        let said = waited_for(&self.runtime, asked, go_on, "nobody waits for it any more")?;
        match said.disks.get(&snapshot_disk(snapshot)) {
            None => Err(Error::not_found(format!("there is no snapshot {snapshot}"))),
            Some(disk) if created.as_deref() == Some(disk.created.as_str()) => Ok(()),
            Some(disk) => Err(Error::not_found(format!(
                "another snapshot is called {snapshot} now: it was taken at {}",
                disk.created
            ))),
        }
    }
}

/// What comes of calls to replicas, if somebody waits until then. What has begun goes on without, as long as the
/// process does: half of it would be done otherwise. A replica that hangs holds neither a thread of the page nor
/// the end of the process.
fn waited_for<T: Send + 'static>(
    runtime: &Handle,
    calls: impl Future<Output = Result<T>> + Send + 'static,
    go_on: &mut dyn FnMut() -> bool,
    otherwise: &str,
) -> Result<T> {
    let given_up = || Error::new(ErrorKind::Interrupted, otherwise);
    let begun = runtime.spawn(calls);
    runtime.block_on(async {
        let nobody_waits = async {
            while go_on() {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            // It may have panicked.
            done = begun => done.unwrap_or_else(|_| Err(given_up())),
            () = nobody_waits => Err(given_up()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::sync::mpsc;
    use tokio::sync::oneshot;

    fn parse(method: &str, params: Value) -> std::result::Result<Command, String> {
        serde_json::from_value(json!({ "method": method, "params": params }))
            .map_err(|error| error.to_string())
    }

    /// Found by review: a removal that had begun at a replica which hangs held the end of the process.
    #[test]
    fn a_replica_that_hangs_is_not_waited_for_when_nobody_waits() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let of = runtime.handle();
        let given_up = waited_for(of, pending::<Result<()>>(), &mut || false, "goes on");
        assert_eq!(given_up.unwrap_err().to_string(), "goes on");
        let done = waited_for(of, async { Ok(7) }, &mut || true, "");
        assert_eq!(done.unwrap(), 7);
        runtime.shutdown_background();
    }

    #[test]
    fn what_has_begun_goes_on_without_who_asked() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (answer, answered) = oneshot::channel();
        let (tells, told) = mpsc::channel();
        let calls = async move {
            tells.send(answered.await).unwrap();
            Ok(())
        };
        waited_for(runtime.handle(), calls, &mut || false, "").unwrap_err();
        answer.send("the second replica").unwrap();
        assert_eq!(told.recv().unwrap(), Ok("the second replica"));
    }

    #[test]
    fn only_four_commands_are_known() {
        for (method, params) in [
            ("snapshot.create", json!({"snapshot": ""})),
            ("snapshot.create", json!({"snapshot": "s", "freeze": true})),
            ("snapshot.revert", json!({"snapshot": "s", "created": "c"})),
            ("snapshot.remove", json!({"snapshot": "s"})),
            ("snapshot.purge", json!({})),
        ] {
            parse(method, params).unwrap();
        }
        for (method, params) in [
            ("snapshot.create", json!({})),
            ("snapshot.remove", json!({"snapshot": "s", "force": true})),
            ("snapshot.purge", json!({"skip": true})),
            ("replica.remove", json!({"address": "a"})),
            ("frontend.shutdown", json!({})),
        ] {
            parse(method, params).unwrap_err();
        }
    }
}
