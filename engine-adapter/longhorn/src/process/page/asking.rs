//! What replicas say of themselves, asked beside whoever looks: one that hangs keeps no page waiting.

use crate::client::{PurgeStatus, RebuildStatus, ReplicaLink};
use dbs_core::Result;
use dbs_frontend::lock;
use longhorn_controller::rules::Mode;
use longhorn_controller::volume::Member;
use longhorn_wire::proto::ptypes;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// What was asked less long ago is not asked again.
const REST: Duration = Duration::from_millis(900);

/// What is known of replicas, by their addresses.
pub(super) struct Asking {
    volume: String,
    replicas: Mutex<BTreeMap<String, Asked>>,
}

#[derive(Default)]
struct Asked {
    /// The connection, which comes about with the first call.
    link: Option<ReplicaLink>,
    /// It has not answered yet.
    under_way: bool,
    known: Option<Known>,
}

/// What a replica has said.
#[derive(Clone)]
pub(super) struct Known {
    at: Instant,
    said: std::result::Result<ptypes::Replica, String>,
    rebuild: Option<Rebuild>,
    purge: Option<PurgeStatus>,
}

/// A rebuild, and since when it goes on.
#[derive(Clone)]
struct Rebuild {
    status: RebuildStatus,
    /// When it was seen first, and how far it was then.
    begun: (Instant, i32),
    /// Bytes of the replica that it is filled from, as far as that is known.
    total: u64,
}

impl Asking {
    pub fn new(volume: String) -> Self {
        Self { volume, replicas: Mutex::default() }
    }

    /// Asks those that take part in the volume, unless they were asked a moment ago, or have not answered yet.
    pub fn ask(self: &Arc<Self>, members: &[Member], runtime: &Handle) {
        let mut replicas = lock(&self.replicas);
        replicas.retain(|address, _| members.iter().any(|of| of.target.address == *address));
        // A plain file has nobody who answers.
        let answers =
            |of: &&Member| of.mode != Mode::Err && !of.target.address.starts_with("file:");
        for member in members.iter().filter(answers) {
            let asked = replicas.entry(member.target.address.clone()).or_default();
            let is_new = asked.known.as_ref().is_some_and(|known| known.at.elapsed() < REST);
            if asked.under_way || is_new {
                continue;
            }
            asked.under_way = true;
            let (me, member) = (Arc::clone(self), member.clone());
            runtime.spawn(async move {
                let known = me.hear(&member).await;
                me.note(&member.target.address, known);
            });
        }
    }

    /// What is known of those that take part in the volume: what others said last is no news.
    pub fn known(&self, members: &[Member]) -> BTreeMap<String, Known> {
        let replicas = lock(&self.replicas);
        let used = members.iter().filter(|member| member.mode != Mode::Err);
        let known = used.filter_map(|member| {
            let address = &member.target.address;
            Some((address.clone(), replicas.get(address)?.known.clone()?))
        });
        known.collect()
    }

    async fn hear(&self, member: &Member) -> Known {
        let address = &member.target.address;
        let said = match self.link(address) {
            Ok(link) => Ok((link.get().await, link)),
            Err(error) => Err(error),
        };
        let (said, link) = match said {
            Ok((Ok(said), link)) => (said, link),
            Ok((Err(error), _)) | Err(error) => {
                let said = Err(error.to_string());
                return Known { at: Instant::now(), said, rebuild: None, purge: None };
            }
        };
        // Its agent may be busy, and says later what it does.
        let status = match member.mode {
            Mode::Wo => link.rebuild_status().await.ok(),
            _ => None,
        };
        let purge = link.purge_status().await.ok();
        let rebuild = status.map(|status| self.rebuild(address, status));
        Known { at: Instant::now(), said: Ok(said), rebuild, purge }
    }

    fn link(&self, address: &str) -> Result<ReplicaLink> {
        if let Some(link) = lock(&self.replicas).get(address).and_then(|asked| asked.link.clone()) {
            return Ok(link);
        }
        let link = ReplicaLink::new(address, &self.volume, "")?;
        if let Some(asked) = lock(&self.replicas).get_mut(address) {
            asked.link = Some(link.clone());
        }
        Ok(link)
    }

    /// How the rebuild of this one goes on.
    fn rebuild(&self, address: &str, status: RebuildStatus) -> Rebuild {
        let replicas = lock(&self.replicas);
        let known = |address: &str| replicas.get(address)?.known.as_ref();
        let from = status.from_replica_address_list.iter().flatten();
        let total = from.filter_map(|from| known(from)?.replica().map(allocated)).max();
        let before = known(address).and_then(|known| known.rebuild.as_ref());
        let same = before.filter(|before| before.begun.1 <= status.progress);
        let begun = same.map_or((Instant::now(), status.progress), |before| before.begun);
        Rebuild { status, begun, total: total.unwrap_or(0) }
    }

    fn note(&self, address: &str, known: Known) {
        // One that was removed meanwhile is not there.
        if let Some(asked) = lock(&self.replicas).get_mut(address) {
            asked.under_way = false;
            asked.known = Some(known);
        }
    }
}

impl Known {
    /// What it said of itself, if it answered.
    pub fn replica(&self) -> Option<&ptypes::Replica> {
        self.said.as_ref().ok()
    }

    /// What a page shows of it.
    pub fn document(&self) -> Map<String, Value> {
        let shown = match &self.said {
            Err(error) => json!({ "error": error }),
            Ok(said) => json!({
                "state": said.state,
                "rebuilding": said.rebuilding,
                "revision": (!said.revision_counter_disabled).then_some(said.revision_counter),
                "size": said.size.parse::<u64>().ok(),
                "allocated": allocated(said),
                "layers": said.chain.len(),
                "rebuild": self.rebuild.as_ref().map(Rebuild::document),
                "purge": self.purge.as_ref().filter(|purge| purge.is_purging),
            }),
        };
        let Value::Object(mut fields) = shown else { return Map::new() };
        let age = u64::try_from(self.at.elapsed().as_millis()).unwrap_or(u64::MAX);
        fields.insert("age_ms".to_owned(), age.into());
        fields
    }
}

impl Rebuild {
    fn document(&self) -> Value {
        let (then, from) = self.begun;
        let left = left(from, self.status.progress, then.elapsed());
        let rate = left.map(|(percent, _)| (percent / 100.0 * self.total as f64) as u64);
        json!({
            "state": self.status.state,
            "progress": self.status.progress,
            "error": self.status.error,
            "from": self.status.from_replica_address_list,
            "bytes_per_second": rate.filter(|rate| *rate > 0),
            "left_seconds": left.map(|(_, seconds)| seconds),
        })
    }
}

/// Percent in a second, and seconds that are left, when a rebuild came from one percentage to another in some time;
/// `None` before anything came. A replica may say any number.
fn left(from: i32, to: i32, over: Duration) -> Option<(f64, u64)> {
    let [from, to] = [from, to].map(f64::from);
    let seconds = over.as_secs_f64();
    let percent = (to - from) / seconds;
    let is_known = to > from && seconds > 0.0;
    is_known.then(|| (percent, ((100.0 - to).max(0.0) / percent).ceil() as u64))
}

/// Bytes that a replica's layers take, without what is below them.
fn allocated(replica: &ptypes::Replica) -> u64 {
    let own = replica.disks.iter().filter(|(name, _)| **name != replica.backing_file);
    own.filter_map(|(_, disk)| disk.size.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_comes_of_what_came_so_far() {
        assert_eq!(left(40, 40, Duration::from_secs(9)), None);
        assert_eq!(left(35, 40, Duration::ZERO), None);
        assert_eq!(left(20, 40, Duration::from_secs(10)), Some((2.0, 30)));
        assert_eq!(left(50, 100, Duration::from_secs(10)), Some((5.0, 0)));
    }

    /// Found by review: a replica that said nonsense ended the page's answer.
    #[test]
    fn a_replica_may_say_any_progress() {
        let second = Duration::from_secs(1);
        assert_eq!(left(i32::MIN, i32::MAX, second), Some((f64::from(u32::MAX), 0)));
        assert_eq!(left(i32::MAX, i32::MIN, second), None);
        assert!(left(i32::MIN, -1, second).is_some_and(|(_, seconds)| seconds == 1));
    }

    #[test]
    fn what_is_below_the_layers_takes_nothing_of_the_replica() {
        let disk = |size: &str| ptypes::DiskInfo { size: size.to_owned(), ..Default::default() };
        let disks = [("head", disk("4096")), ("below", disk("1")), ("odd", disk("x"))];
        let replica = ptypes::Replica {
            disks: disks.into_iter().map(|(name, disk)| (name.to_owned(), disk)).collect(),
            backing_file: "below".to_owned(),
            ..Default::default()
        };
        assert_eq!(allocated(&replica), 4096);
    }
}
