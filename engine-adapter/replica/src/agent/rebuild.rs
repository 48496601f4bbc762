//! Rebuild: becoming a copy of other replicas of the volume, layer by layer.
//!
//! What is here of a layer, an older version of it or what came in before an interruption, is
//! compared and changed; only what is not here at all is copied wholly. Sources of our kind are asked
//! for what differs ([`super::peer`]), upstream's to send their files to receivers here.

use super::Agent;
use super::clone::source_with;
use super::files::FileName;
use super::incoming::IncomingSink;
use super::jobs::{Job, Kind};
use super::peer::client::{Remote, Traffic, Transfer};
use super::peer::layer::LayerMut;
use super::queue::{Item, Progress, Queue};
use super::send::{blocking, broken};
use super::shelf::StoreLayer;
use super::uses::Use;
use crate::replica::meta::{DiskMeta, VolumeMeta};
use dbs_core::io::buffer::AlignedBuf;
use dbs_core::{Error, ErrorKind, Result};
use dbs_service::log;
use longhorn_sync::image::{Checksum, GRAIN, Record, Sink, Source, SparseFile};
use longhorn_wire::proto::dbs::{LayerInfo, LayersRequest};
use longhorn_wire::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use longhorn_wire::proto::ptypes::{FileLocalSync, FileSendRequest, FilesSyncRequest};
use longhorn_wire::remote::{self, Address};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// How often the progress is told.
const TICK: Duration = Duration::from_millis(200);
/// Failures in a row after which a source is left alone, if there are others.
const FAILURES: u32 = 3;
/// Read and compared at once from a local file.
const STEP: u64 = 1 << 20;

/// What a rebuild is given.
struct Order {
    agent: Arc<Agent>,
    queue: Queue,
    traffic: Arc<Traffic>,
    skipped: AtomicU64,
    fast: bool,
    /// There is one source.
    alone: bool,
    to_host: String,
    http_timeout: i32,
    call_timeout: Duration,
}

impl Agent {
    /// Fetches files from other replicas, to the end; a caller that goes away does not stop it.
    ///
    /// # Errors
    /// `Busy` while it is purging or rebuilding; what is wrong with the last file tried.
    pub(super) async fn files_sync(self: &Arc<Self>, request: FilesSyncRequest) -> Result<()> {
        let mut from: BTreeSet<_> = request.from_address_map.keys().cloned().collect();
        if from.is_empty() && !request.from_address.is_empty() {
            from.insert(request.from_address.clone());
        }
        let job = self.jobs.begin(Kind::Rebuild, from.iter().cloned().collect(), "")?;
        let me = Arc::clone(self);
        let task = tokio::spawn(async move {
            let outcome = me.sync(request, from, &job).await;
            if let Err(error) = &outcome {
                let volume = me.replica.volume_name();
                log::error("rebuild", &[("volume", &volume), ("error", error)]);
            }
            job.end(&outcome);
            outcome
        });
        task.await.map_err(broken)?
    }

    async fn sync(
        self: &Arc<Self>,
        request: FilesSyncRequest,
        from: BTreeSet<String>,
        job: &Job,
    ) -> Result<()> {
        let begun = Instant::now();
        let files = request.sync_file_info_list;
        let items: Vec<_> = files
            .iter()
            .map(|file| {
                let weight = u64::try_from(file.actual_size).unwrap_or(0);
                Item::new(&file.from_file_name, &file.to_file_name, weight)
            })
            .collect();
        if items.is_empty() || from.is_empty() {
            return Err(Error::invalid("no files or remote replicas for sync"));
        }
        let addresses = from.iter().map(|from| Address::parse(from));
        let addresses = addresses.collect::<Result<Vec<_>>>()?;
        let order = Arc::new(Order {
            agent: Arc::clone(self),
            queue: Queue::new(items.clone(), addresses.clone(), self.rest),
            traffic: Arc::default(),
            skipped: AtomicU64::new(0),
            fast: request.fast_sync,
            alone: addresses.len() == 1,
            to_host: remote::bare_host(&request.to_host).to_owned(),
            http_timeout: request.file_sync_http_client_timeout,
            call_timeout: match u64::try_from(request.grpc_timeout_seconds) {
                Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
                _ => remote::LONG_CALL,
            },
        });
        let mut fill = self.replica.incoming().begin_fill();
        let mut local = false;
        if let Some(paths) = request.local_sync {
            match order.copy_locally(paths, items.clone()).await {
                Ok(()) => local = true,
                Err(error) => {
                    // What came of it comes again.
                    fill = self.replica.incoming().begin_fill();
                    let volume = self.replica.volume_name();
                    let fields: [(&str, &dyn std::fmt::Display); 2] =
                        [("volume", &volume), ("why", &error)];
                    log::info("rebuild-not-local", &fields);
                }
            }
        }
        let outcome = if local { Ok(()) } else { order.copy(addresses, &items, job).await };
        if outcome.is_ok() {
            self.replica.incoming().end_fill(&fill);
        }
        order.report(begun, local, files.len());
        outcome
    }
}

impl Order {
    /// Fetches all files from all sources at once.
    async fn copy(self: &Arc<Self>, from: Vec<Address>, items: &[Item], job: &Job) -> Result<()> {
        let mut workers = JoinSet::new();
        for address in from {
            let me = Arc::clone(self);
            workers.spawn(async move {
                let outcome = me.work(&address).await;
                me.queue.leave(&address);
                outcome
            });
        }
        let total: u64 = items.iter().map(|item| item.weight).sum();
        let mut lost = None;
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                ended = workers.join_next() => match ended {
                    None => break,
                    Some(ended) => lost = ended.map_err(broken).and_then(|ended| ended).err().or(lost),
                },
                _ = tick.tick() => job.progress(items.iter().map(Item::done).sum(), total),
            }
        }
        // Trouble with a source does not matter where others have done the work.
        self.queue.outcome().map_err(|error| match lost {
            Some(lost) => error.context(lost),
            None => error,
        })
    }

    /// Fetches files from one source, as long as there are some.
    async fn work(self: &Arc<Self>, from: &Address) -> Result<()> {
        let volume = &self.agent.volume;
        let agent = from.agent()?;
        let mut attempt = 0;
        let peer = loop {
            attempt += 1;
            match Remote::meet(&agent, volume, self.agent.short_rest()).await {
                Ok(peer) => break peer,
                Err(error) if attempt >= FAILURES || error.kind() != ErrorKind::Io => {
                    let text = format!("replica {from} is no source for a rebuild");
                    return Err(error.context(text));
                }
                Err(error) => {
                    log::warn("source-not-reached", &[("from", from), ("error", &error)]);
                    tokio::time::sleep(self.agent.rest).await;
                }
            }
        };
        if peer.is_none() {
            // Of two replicas of ours each layer says which file it rests on.
            let has_file = !self.agent.replica.backing_identity()?.is_empty();
            source_with(from, volume, has_file).await?;
        }
        let mut failures = 0;
        while let Some(item) = self.queue.next(from).await {
            let outcome = match (&peer, FileName::parse(&item.from)) {
                (Some(peer), Ok(FileName::Snapshot(_) | FileName::SnapshotMeta(_))) => {
                    self.fetch(peer, &item).await
                }
                _ => self.have_sent_whole(&agent, &item).await,
            };
            failures = match &outcome {
                Ok(()) => 0,
                // It answers, and may have the other files.
                Err(error) if error.kind() == ErrorKind::Damaged => failures,
                Err(_) => failures + 1,
            };
            self.queue.ended(item, from, outcome);
            if failures >= FAILURES && self.queue.has_several_sources() {
                let text = format!("replica {from} failed {failures} times in a row");
                return Err(Error::new(ErrorKind::Io, text));
            }
        }
        Ok(())
    }

    /// Has a file sent by an agent of upstream's kind; an image with its description, as its content may be another
    /// one at another source.
    async fn have_sent_whole(&self, agent: &Address, item: &Item) -> Result<()> {
        self.have_sent(agent, item).await?;
        let Ok(FileName::Snapshot(disk)) = FileName::parse(&item.to) else { return Ok(()) };
        if !self.alone {
            let meta = |name: &str| format!("{}.meta", name.trim());
            self.have_sent(agent, &Item::new(&meta(&item.from), &meta(&item.to), 0)).await?;
        }
        self.agent.replica.incoming().came_in(&disk, None)
    }

    /// Has a file sent by an agent of upstream's kind to a receiver here.
    async fn have_sent(&self, agent: &Address, item: &Item) -> Result<()> {
        let Progress { whole, passed } = item.progress.clone();
        whole.store(item.weight, Ordering::Relaxed);
        let traffic = Arc::clone(&self.traffic);
        let receiver = self.agent.receiver(&item.to, traffic, passed).await?;
        let request = FileSendRequest {
            from_file_name: item.from.clone(),
            host: self.to_host.clone(),
            port: receiver.port.into(),
            fast_sync: self.fast,
            file_sync_http_client_timeout: self.http_timeout,
        };
        let calls = remote::calls(agent, &self.agent.volume)?;
        let request = remote::within(self.call_timeout, request);
        let mut client = SyncAgentServiceClient::new(calls);
        let what = format!("having {} send {}", agent, item.from);
        let sent = client.file_send(request).await.map(drop);
        receiver.end(sent.map_err(|status| remote::failed(&status, &what))).await
    }

    /// Fetches what differs from a replica of our kind.
    async fn fetch(self: &Arc<Self>, peer: &Remote, item: &Item) -> Result<()> {
        let (from, is_meta) = match FileName::parse(&item.from)? {
            FileName::SnapshotMeta(disk) => (disk, true),
            FileName::Snapshot(disk) => (disk, false),
            _ => return Err(Error::invalid(format!("{} is no layer", item.from))),
        };
        let to = match FileName::parse(&item.to)? {
            FileName::SnapshotMeta(disk) if is_meta => disk,
            FileName::Snapshot(disk) if !is_meta => disk,
            _ => return Err(Error::invalid(format!("{} cannot become {}", item.from, item.to))),
        };
        let checksums = self.fast && !is_meta;
        let request = LayersRequest { disks: vec![from], checksums, flattened: false };
        let Some(info) = peer.layers(request).await?.pop() else {
            return Err(Error::invalid("the other replica described nothing"));
        };
        self.agent.replica.check_same_below(&info.file)?;
        if is_meta {
            let meta = DiskMeta::parse(&to, &info.meta)?;
            let replica = Arc::clone(&self.agent.replica);
            return blocking(move || replica.incoming().put_meta(&to, meta)).await;
        }
        item.progress.whole.store(info.size, Ordering::Relaxed);
        let (me, described, disk) = (Arc::clone(self), info.clone(), to.clone());
        let used = self.agent.uses.begin();
        let Some((target, existed)) = blocking(move || me.open(&disk, &described)).await? else {
            self.skipped.fetch_add(1, Ordering::Relaxed);
            item.progress.passed.store(info.size, Ordering::Relaxed);
            log::info("layer-equal", &[("disk", &to), ("checksum", &info.checksum)]);
            let me = Arc::clone(self);
            return blocking(move || me.came_in(&to, &info)).await;
        };
        let traffic = Arc::<Traffic>::default();
        let passed = Arc::clone(&item.progress.passed);
        let transfer = Transfer {
            info: info.clone(),
            flattened: false,
            target,
            traffic: Arc::clone(&traffic),
            passed,
            used,
        };
        let outcome = peer.fetch(transfer).await;
        self.traffic.add(&traffic);
        outcome?;
        log::info(
            "layer-fetched",
            &[
                ("disk", &to),
                ("existed", &existed),
                ("bytes", &info.data_bytes),
                ("compared_bytes", &traffic.compared.load(Ordering::Relaxed)),
                ("received_bytes", &traffic.received.load(Ordering::Relaxed)),
            ],
        );
        let me = Arc::clone(self);
        blocking(move || me.close(&to, &info)).await
    }

    /// Opens a layer for what differs, and says whether there was something; `None` if it is known
    /// to be equal.
    fn open(&self, disk: &str, info: &LayerInfo) -> Result<Option<(Arc<dyn LayerMut>, bool)>> {
        let Agent { replica, shelf, .. } = &*self.agent;
        let existing = replica.incoming().existing(disk)?;
        if existing == Some(info.size) && self.is_equal(disk, info).unwrap_or(false) {
            return Ok(None);
        }
        let layer = StoreLayer(replica.incoming().begin(disk, info.size)?);
        // It may come in, so from here on the checksum does not hold.
        Record::remove(&shelf.image(disk))?;
        Ok(Some((Arc::new(layer), existing.is_some())))
    }

    /// Whether checksum and map are the same. A layer that cannot be looked at is not.
    fn is_equal(&self, disk: &str, info: &LayerInfo) -> Result<bool> {
        if !self.fast || info.checksum.is_empty() {
            return Ok(false);
        }
        let shelf = &self.agent.shelf;
        let Some(ours) = shelf.recorded(disk)? else { return Ok(false) };
        let same = ours.method == info.checksum_method && ours.value == info.checksum;
        let snapshot = longhorn_wire::names::snapshot_name(disk).unwrap_or_default();
        Ok(same && shelf.map_digest(snapshot)?[..] == info.map_digest[..])
    }

    /// A layer has come in.
    fn close(&self, disk: &str, info: &LayerInfo) -> Result<()> {
        let Agent { replica, shelf, .. } = &*self.agent;
        replica.incoming().flush()?;
        self.came_in(disk, info)?;
        if info.checksum.is_empty() {
            return Ok(());
        }
        let (method, value) = (info.checksum_method.clone(), info.checksum.clone());
        if let Err(error) = shelf.record(disk, &Checksum { method, value }) {
            // The layer is here, and can be hashed.
            log::warn("checksum-not-recorded", &[("disk", &disk), ("error", &error)]);
        }
        Ok(())
    }

    fn came_in(&self, disk: &str, info: &LayerInfo) -> Result<()> {
        let meta = DiskMeta::parse(disk, &info.meta)?;
        self.agent.replica.incoming().came_in(disk, Some(&meta))
    }

    /// Copies the files of a replica on the same node, if it has files.
    async fn copy_locally(self: &Arc<Self>, paths: FileLocalSync, items: Vec<Item>) -> Result<()> {
        let dir = paths.source_path.trim_start_matches('/').to_owned();
        let me = Arc::clone(self);
        blocking(move || {
            let dir = me.agent.host.join(dir);
            // Of files it is not known which backing file they lie on: both have one, or neither has.
            let theirs = VolumeMeta::read(&dir)?.unwrap_or_default().backing_file_path;
            if theirs.is_empty() != me.agent.replica.backing_identity()?.is_empty() {
                let text =
                    "of this replica and of the source one has a backing file, the other has none";
                return Err(Error::invalid(text));
            }
            // All or nothing: what is copied is as it should be, but the rest is quicker remotely.
            for item in &items {
                FileName::parse(&item.from)?;
                SparseFile::source(dir.join(&item.from))?;
            }
            items.iter().try_for_each(|item| me.copy_file(&dir, item))
        })
        .await
    }

    fn copy_file(&self, dir: &Path, item: &Item) -> Result<()> {
        let path = dir.join(item.from.trim());
        let source = SparseFile::source(&path)?;
        match FileName::parse(&item.to)? {
            FileName::Snapshot(disk) => {
                let Agent { replica, shelf, .. } = &*self.agent;
                let (replica, shelf) = (Arc::clone(replica), Arc::clone(shelf));
                let used = self.agent.uses.begin();
                let sink = IncomingSink::new(replica, shelf, &disk, Arc::clone(&self.traffic))?;
                copy_image(&source, &sink, &item.progress, &used)?;
                sink.finish(None)?;
                self.agent.replica.incoming().came_in(&disk, None)
            }
            FileName::SnapshotMeta(disk) => {
                let mut bytes = vec![0; source.size().min(1 << 20) as usize];
                source.read_at(0, &mut bytes)?;
                self.agent.replica.incoming().put_meta(&disk, DiskMeta::parse(&disk, &bytes)?)
            }
            _ => Err(Error::invalid(format!("{} cannot be received", item.to))),
        }
    }

    /// Says what it has cost.
    fn report(&self, begun: Instant, local: bool, files: usize) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.agent.totals.add(&self.traffic);
        let volume = self.agent.replica.volume_name();
        log::info(
            "rebuild",
            &[
                ("volume", &volume),
                ("files", &files),
                ("local", &local),
                ("equal_layers", &read(&self.skipped)),
                ("compared_bytes", &read(&self.traffic.compared)),
                ("received_bytes", &read(&self.traffic.received)),
                ("lost_connections", &read(&self.traffic.lost)),
                ("ms", &begun.elapsed().as_millis()),
            ],
        );
    }
}

/// Makes an image what another is; where it has something already, only what differs is written.
fn copy_image(source: &dyn Source, sink: &dyn Sink, progress: &Progress, used: &Use) -> Result<()> {
    let size = source.size();
    progress.whole.store(size, Ordering::Relaxed);
    sink.open(size)?;
    let mut bufs = [STEP, STEP].map(|step| AlignedBuf::zeroed(step as usize));
    let mut at = 0;
    while at < size {
        used.check()?;
        let Some(interval) = source.intervals(at, 1)?.pop() else {
            return Err(Error::invalid(format!("the image ends at {at}, before {size}")));
        };
        let end = if interval.data { interval.end().min(at + STEP) } else { interval.end() };
        let length = end - at;
        if interval.data {
            let [ours, theirs] = bufs.each_mut().map(|buf| &mut buf[..length as usize]);
            source.read_at(at, theirs)?;
            if !sink.existed() || !is_data(sink, at, end)? || {
                sink.read_at(at, ours)?;
                ours != theirs
            } {
                sink.write_at(at, theirs)?;
            }
        } else if sink.existed() {
            sink.hole(at, length)?;
        }
        progress.passed.fetch_add(length, Ordering::Relaxed);
        at = end;
    }
    Ok(())
}

/// Whether all of a range is data.
fn is_data(image: &dyn Source, start: u64, end: u64) -> Result<bool> {
    debug_assert!(start.is_multiple_of(GRAIN), "intervals start at the grain");
    let first = image.intervals(start, 1)?.pop();
    Ok(first.is_some_and(|first| first.data && first.end() >= end))
}
