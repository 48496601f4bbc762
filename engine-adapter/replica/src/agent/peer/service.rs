//! The server of [`dbs.Peer`](longhorn_wire::proto::dbs::peer_server::Peer).

use super::layer::{BLOCK, is_damage};
use super::offer::Offer;
use crate::agent::shelf::Shelf;
use crate::agent::uses::{Use, Uses, interrupted};
use dbs_core::{Error, ErrorKind};
use longhorn_wire::proto::dbs::fetch_request::Request as Fetch;
use longhorn_wire::proto::dbs::peer_server::Peer;
use longhorn_wire::proto::dbs::{
    FetchRequest, FetchResponse, FetchStart, HelloRequest, HelloResponse, LayersRequest,
    LayersResponse,
};
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// The version of the protocol spoken here.
pub const VERSION: u32 = 1;
/// Layers that one call may ask for.
const LAYERS: usize = 4096;
/// Fetches at a time; each takes a thread and some MiB.
const FETCHES: usize = 32;
/// Responses that wait for the network; of at most 1 MiB each.
const AHEAD: usize = 3;

/// Gives layers to other replicas.
#[derive(Clone)]
pub struct PeerService {
    shelf: Arc<Shelf>,
    uses: Uses,
    slots: Arc<Semaphore>,
}

impl PeerService {
    /// Of this shelf, whose store has these uses.
    #[must_use]
    pub fn new(shelf: Arc<Shelf>, uses: Uses) -> Self {
        Self { shelf, uses, slots: Arc::new(Semaphore::new(FETCHES)) }
    }
}

#[tonic::async_trait]
impl Peer for PeerService {
    type FetchStream = ReceiverStream<Result<FetchResponse, Status>>;

    async fn hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloResponse>, Status> {
        let version = request.into_inner().version.min(VERSION);
        Ok(Response::new(HelloResponse { version, block_bytes: BLOCK as u32 }))
    }

    async fn layers(
        &self,
        request: Request<LayersRequest>,
    ) -> Result<Response<LayersResponse>, Status> {
        let request = request.into_inner();
        if request.disks.len() > LAYERS {
            let text = format!("{} layers are too many for one call", request.disks.len());
            return Err(Status::invalid_argument(text));
        }
        let shelf = Arc::clone(&self.shelf);
        let described = tokio::task::spawn_blocking(move || shelf.describe(&request)).await;
        let layers = described.map_err(broken)?.map_err(|e| status(&e))?;
        Ok(Response::new(LayersResponse { layers }))
    }

    async fn fetch(
        &self,
        request: Request<Streaming<FetchRequest>>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() else {
            let text = format!("{FETCHES} layers are being read at once, try again later");
            return Err(Status::unavailable(text));
        };
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|first| first.request);
        let Some(Fetch::Start(start)) = first else {
            return Err(Status::invalid_argument("a fetch begins with its start"));
        };
        let shelf = Arc::clone(&self.shelf);
        let used = self.uses.begin();
        let (sender, receiver) = mpsc::channel(AHEAD);
        tokio::task::spawn_blocking(move || {
            let _slot = slot;
            if let Err(status) = offer(&shelf, &start, &mut requests, &sender, used) {
                // Nobody hears it if the caller has gone.
                let _ = sender.blocking_send(Err(status));
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn offer(
    shelf: &Shelf,
    start: &FetchStart,
    requests: &mut Streaming<FetchRequest>,
    sender: &mpsc::Sender<Result<FetchResponse, Status>>,
    used: Use,
) -> Result<(), Status> {
    let runtime = Handle::current();
    let mut asked = used.clone();
    let mut next = || {
        runtime.block_on(async {
            tokio::select! {
                request = requests.message() => request,
                () = asked.ended() => Err(status(&interrupted())),
            }
        })
    };
    let unchanged = || match shelf.stamp(&start.disk, start.flattened) {
        Ok(stamp) if stamp == start.stamp => Ok(()),
        Ok(_) => Err(Status::aborted(format!("{} has changed", start.disk))),
        Err(error) => Err(status(&error)),
    };
    let layer = shelf.open(&start.disk, start.flattened).map_err(|e| status(&e))?;
    unchanged()?;
    let mut offer = Offer::new(&*layer);
    let mut answered = used.clone();
    let mut emit = |response| {
        let gone = |_| Error::new(ErrorKind::Interrupted, "the other replica has gone");
        // It may be there and take nothing.
        runtime.block_on(async {
            tokio::select! {
                sent = sender.send(Ok(response)) => sent.map_err(gone),
                () = answered.ended() => Err(interrupted()),
            }
        })
    };
    while let Some(request) = next()? {
        let Some(Fetch::Known(known)) = request.request else {
            return Err(Status::invalid_argument("a fetch has one start"));
        };
        offer.answer(&known, &mut emit).map_err(|e| status(&e))?;
    }
    unchanged()
}

/// An error of the store as the other side sees it.
#[must_use]
pub fn status(error: &Error) -> Status {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::NotFound => Status::not_found(text),
        ErrorKind::Invalid => Status::invalid_argument(text),
        ErrorKind::NoSpace => Status::resource_exhausted(text),
        ErrorKind::Busy | ErrorKind::Interrupted => Status::aborted(text),
        ErrorKind::Unsupported => Status::unimplemented(text),
        // Not to be tried again, as what comes over a bad connection is.
        _ if is_damage(error) => Status::data_loss(text),
        _ => Status::unknown(text),
    }
}

fn broken(error: tokio::task::JoinError) -> Status {
    Status::internal(format!("the call ended abnormally: {error}"))
}
