//! What replicas of our kind say to each other, and what they do not let each other do.

use crate::support::*;
use longhorn_wire::proto::dbs::fetch_request::Request as Fetch;
use longhorn_wire::proto::dbs::peer_client::PeerClient;
use longhorn_wire::proto::dbs::piece::State;
use longhorn_wire::proto::dbs::*;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

type Peer = PeerClient<Channel>;

fn peer(node: &Node) -> Peer {
    let port: u16 = node.address.rsplit_once(':').unwrap().1.parse().unwrap();
    let at = format!("http://127.0.0.1:{}", port + 2);
    PeerClient::new(node.runtime.block_on(Channel::from_shared(at).unwrap().connect()).unwrap())
}

fn layers(node: &Node, request: LayersRequest) -> Result<Vec<LayerInfo>, Status> {
    let mut peer = peer(node);
    let answer = node.runtime.block_on(async move { peer.layers(request).await });
    answer.map(|answer| answer.into_inner().layers)
}

pub fn layer(node: &Node, disk: &str, flattened: bool) -> LayerInfo {
    let request = LayersRequest { disks: vec![disk.to_owned()], flattened, checksums: true };
    layers(node, request).unwrap().pop().unwrap()
}

pub fn start(disk: &str, flattened: bool, stamp: &[u8]) -> Fetch {
    let (disk, stamp) = (disk.to_owned(), stamp.to_vec().into());
    Fetch::Start(FetchStart { disk, flattened, stamp })
}

pub fn known(offset: u64, length: u64, digests: Vec<u8>) -> Fetch {
    Fetch::Known(FetchKnown { offset, length, digests: digests.into() })
}

/// Fetches, and returns all that comes.
pub fn fetch(node: &Node, requests: Vec<Fetch>) -> Result<Vec<FetchResponse>, Status> {
    let mut peer = peer(node);
    node.runtime.block_on(async move {
        let requests = requests.into_iter().map(|r| FetchRequest { request: Some(r) });
        let requests: Vec<_> = requests.collect();
        let mut answers = peer.fetch(tokio_stream::iter(requests)).await?.into_inner();
        let mut all = Vec::new();
        while let Some(answer) = answers.message().await? {
            all.push(answer);
        }
        Ok(all)
    })
}

#[test]
fn layers_are_described_and_fetched_as_what_they_are() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    let mut client = peer(&node);
    let hello = client.hello(HelloRequest { version: 7 });
    let hello = runtime.block_on(hello).unwrap().into_inner();
    assert_eq!((hello.version, hello.block_bytes), (1, 4096));
    node.write(0..10, 1);
    node.snapshot("a");
    node.write(4..6, 2);
    node.discard(8, 1);
    node.snapshot("b");
    let info = layer(&node, "volume-snap-b.img", false);
    assert_eq!((info.size, info.data_bytes), (64 * MIB, 2 * BLOCK));
    assert!(info.checksum.is_empty() && info.map_digest.is_empty());
    let meta: serde_json::Value = serde_json::from_slice(&info.meta).unwrap();
    assert_eq!(meta["Parent"], "volume-snap-a.img");
    let first = start("volume-snap-b.img", false, &info.stamp);
    let got = fetch(&node, vec![first.clone(), known(0, 64 * MIB, vec![])]).unwrap();
    let pieces: Vec<_> = got.iter().flat_map(|answer| &answer.pieces).collect();
    let shape: Vec<_> =
        pieces.iter().map(|p| (p.offset / BLOCK, p.length / BLOCK, p.state())).collect();
    assert_eq!(shape, [(4, 2, State::Data), (8, 1, State::Zero)]);
    assert_eq!(pieces[0].data, [content_of(4, 2), content_of(5, 2)].concat());
    assert_eq!(got.last().unwrap().done, 64 * MIB);
    // Who has all of it gets nothing, who has too much is told.
    let mut digests = vec![0; 16 * 16];
    for block in [4, 5] {
        let hash = blake3::hash(&content_of(block, 2));
        digests[block as usize * 16..][..16].copy_from_slice(&hash.as_bytes()[..16]);
    }
    digests[8 * 16] = 1;
    let got = fetch(&node, vec![first.clone(), known(0, 16 * BLOCK, digests.clone())]).unwrap();
    assert!(got.iter().all(|answer| answer.pieces.is_empty()));
    digests[12 * 16] = 9;
    let got = fetch(&node, vec![first, known(0, 16 * BLOCK, digests)]).unwrap();
    let piece = &got[0].pieces[0];
    assert_eq!((piece.offset, piece.length, piece.state()), (12 * BLOCK, BLOCK, State::Absent));
    // All that one reads, with what was discarded in between.
    let info = layer(&node, "volume-snap-b.img", true);
    let first = start("volume-snap-b.img", true, &info.stamp);
    let got = fetch(&node, vec![first, known(0, info.size, vec![])]).unwrap();
    let pieces: Vec<_> = got.iter().flat_map(|answer| &answer.pieces).collect();
    let shape: Vec<_> = pieces.iter().map(|p| (p.offset / BLOCK, p.length / BLOCK)).collect();
    assert_eq!(shape, [(0, 8), (9, 1)]);
}

#[test]
fn what_changes_or_is_not_there_is_not_sent() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..100, 1);
    node.snapshot("a");
    node.write(50..150, 2);
    node.snapshot("b");
    let code = |outcome: Result<Vec<FetchResponse>, Status>| outcome.unwrap_err().code();
    let info = layer(&node, "volume-snap-b.img", false);
    let good = start("volume-snap-b.img", false, &info.stamp);
    assert_eq!(code(fetch(&node, vec![])), Code::InvalidArgument);
    assert_eq!(code(fetch(&node, vec![known(0, BLOCK, vec![])])), Code::InvalidArgument);
    assert_eq!(code(fetch(&node, vec![good.clone(), good.clone()])), Code::InvalidArgument);
    for bad in [known(0, 65 * MIB, vec![]), known(5, BLOCK, vec![]), known(0, BLOCK, vec![1])] {
        assert_eq!(code(fetch(&node, vec![good.clone(), bad])), Code::InvalidArgument);
    }
    let head = node.replica.head_disk().unwrap();
    for disk in ["volume-snap-x.img", "volume-snap-.incoming-a.img", "../a", "", &head] {
        let first = start(disk, false, &info.stamp);
        assert_eq!(code(fetch(&node, vec![first])), Code::NotFound, "{disk}");
        let request = LayersRequest { disks: vec![disk.to_owned()], ..Default::default() };
        assert_eq!(layers(&node, request).unwrap_err().code(), Code::NotFound, "{disk}");
    }
    let many = LayersRequest { disks: vec![String::new(); 5000], ..Default::default() };
    assert_eq!(layers(&node, many).unwrap_err().code(), Code::InvalidArgument);
    // A layer that becomes another one, before and during.
    let other = start("volume-snap-b.img", false, b"other");
    assert_eq!(code(fetch(&node, vec![other])), Code::Aborted);
    let outcome = runtime.block_on(async {
        let (sender, requests) = mpsc::channel(4);
        let send = async |request| {
            sender.send(FetchRequest { request: Some(request) }).await.unwrap();
        };
        send(good.clone()).await;
        send(known(0, MIB, vec![])).await;
        let mut answers =
            peer_of(&node).await.fetch(ReceiverStream::new(requests)).await.unwrap().into_inner();
        assert!(answers.message().await.unwrap().is_some());
        let replica = node.replica.clone();
        let merged = tokio::task::spawn_blocking(move || {
            replica.mark_removed("a").unwrap();
            replica.remove("volume-snap-a.img", false).unwrap();
        });
        merged.await.unwrap();
        drop(sender);
        while let Some(_more) = answers.message().await? {}
        Ok::<(), Status>(())
    });
    assert_eq!(outcome.unwrap_err().code(), Code::Aborted);
}

async fn peer_of(node: &Node) -> Peer {
    let port: u16 = node.address.rsplit_once(':').unwrap().1.parse().unwrap();
    let at = format!("http://127.0.0.1:{}", port + 2);
    PeerClient::new(Channel::from_shared(at).unwrap().connect().await.unwrap())
}

/// A fetch that is under way: the first answer for the first `length` bytes of a layer has come.
pub async fn fetching(
    node: &Node,
    disk: &str,
    length: u64,
) -> (mpsc::Sender<FetchRequest>, Streaming<FetchResponse>) {
    let mut peer = peer_of(node).await;
    let request = LayersRequest { disks: vec![disk.to_owned()], ..Default::default() };
    let info = peer.layers(request).await.unwrap().into_inner().layers.pop().unwrap();
    let (sender, requests) = mpsc::channel(4);
    for request in [start(disk, false, &info.stamp), known(0, length, vec![])] {
        sender.send(FetchRequest { request: Some(request) }).await.unwrap();
    }
    let mut answers = peer.fetch(ReceiverStream::new(requests)).await.unwrap().into_inner();
    answers.message().await.unwrap().unwrap();
    (sender, answers)
}

/// A deleted snapshot below counts until it is merged, and what a layer shows does not change by that.
#[test]
fn a_merge_under_way_changes_no_layer() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..1000, 1);
    node.snapshot("a");
    node.write(0..1000, 2);
    node.snapshot("b");
    // Marked as well, as a purge marks what it cannot delete; no head looks through it to be pruned.
    node.snapshot("c");
    node.replica.mark_removed("b").unwrap();
    node.replica.remove("volume-snap-a.img", false).unwrap();
    let before = layer(&node, "volume-snap-b.img", false);
    assert_eq!(before.data_bytes, 2000 * BLOCK);
    runtime.block_on(async {
        let (sender, mut answers) = fetching(&node, "volume-snap-b.img", MIB).await;
        let store = node.store.clone();
        let merged = tokio::task::spawn_blocking(move || {
            while store.work(16).unwrap().remaining > 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        merged.await.unwrap();
        drop(sender);
        while answers.message().await.unwrap().is_some() {}
    });
    let after = layer(&node, "volume-snap-b.img", false);
    assert_eq!((after.data_bytes, after.stamp), (1000 * BLOCK, before.stamp));
}

#[test]
fn only_so_many_are_served_at_once_and_only_of_this_volume() {
    let runtime = runtime();
    let node = Node::new(&runtime);
    node.write(0..100, 1);
    node.snapshot("a");
    let mut wrong = Request::new(HelloRequest { version: 1 });
    wrong.metadata_mut().insert("volume-name", "another".parse().unwrap());
    let mut client = peer(&node);
    let refused = runtime.block_on(client.hello(wrong)).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let info = layer(&node, "volume-snap-a.img", false);
    let first = FetchRequest { request: Some(start("volume-snap-a.img", false, &info.stamp)) };
    runtime.block_on(async {
        let mut open = Vec::new();
        let mut client = peer_of(&node).await;
        let mut begin = async || {
            let (sender, requests) = mpsc::channel(1);
            sender.send(first.clone()).await.unwrap();
            let answers = client.fetch(ReceiverStream::new(requests)).await;
            answers.map(|answers| (sender, answers))
        };
        let refused = loop {
            match begin().await {
                Ok(one) => open.push(one),
                Err(refused) => break refused,
            }
        };
        assert_eq!((open.len(), refused.code()), (32, Code::Unavailable));
        // Who goes away makes room.
        open.clear();
        for _ in 0..200 {
            if begin().await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("no room came back");
    });
}
