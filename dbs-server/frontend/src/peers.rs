//! The connections of one reactor: from received bytes to requests that are ready, from replies to
//! batches, and the end of it all.

use super::outgoing::Batches;
use super::peer::{Charge, Limits, Peer, Protocol, Ready, Receive};
use super::tls::TlsStream;
use dbs_reactor::{Batch, Buf, Io, Slab, Socket};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How often clients are looked at that do not take their replies.
const TICK: Duration = Duration::from_secs(1);
/// Ticks that a client may take for the handshake of TLS.
const HANDSHAKE_TICKS: u32 = 10;

/// Something has happened to a connection, as told by a method of [`dbs_reactor::Handler`].
pub enum Event<'a> {
    /// It begins; these bytes were received before.
    Begun(&'a [u8]),
    /// Bytes have come.
    Received(io::Result<&'a [u8]>),
    /// A payload is complete.
    Filled(Buf, io::Result<()>),
    /// A batch is sent.
    Sent(Batch, io::Result<()>),
}

/// Connections by number. Their operations have the number as their tag, together with the bits of
/// [`Peers::tagged`].
///
/// A handler adds a connection, passes on what it is told of it with [`Peers::input`], starts the requests that makes ready,
/// then calls [`Peers::receive`]; it answers with [`Peers::answer`] and ends each of its turns with
/// [`Peers::settle`].
pub struct Peers<P: Protocol> {
    peers: Slab<Peer<P>>,
    /// Connections to look at at the end of the turn: something may be sent or over.
    touched: Vec<u32>,
    ready: Vec<Ready<P::Request>>,
    batches: Batches,
    limits: Limits,
    /// Ticks that a client may leave its replies untaken.
    patience: u64,
    tick: u32,
    ticking: bool,
    /// In the tags of all operations, above the number.
    tags: u64,
}

impl<P: Protocol> Peers<P> {
    /// No connections yet; each may have in flight what `limits` say, and is given up when it has
    /// taken nothing of its replies for `write_timeout`.
    #[must_use]
    pub fn new(limits: Limits, write_timeout: Duration) -> Self {
        Self {
            peers: Slab::default(),
            touched: Vec::new(),
            ready: Vec::new(),
            batches: Batches::default(),
            limits,
            patience: write_timeout.as_secs().max(1),
            tick: 0,
            ticking: false,
            tags: 0,
        }
    }

    /// Connections that are added from now on may have in flight what `limits` say.
    pub fn limit(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Sets these bits, above the lower 32, in the tags of all operations: a handler with more than
    /// connections of one kind tells them apart by that.
    #[must_use]
    pub fn tagged(mut self, tags: u64) -> Self {
        self.tags = tags;
        self
    }

    /// Adds a connection; its input begins with [`Peers::input`]. TLS may be at its start: requests are
    /// made of what comes when its handshake is over, which has its time.
    pub fn add(
        &mut self,
        io: &mut Io,
        socket: OwnedFd,
        protocol: P,
        tls: Option<TlsStream>,
    ) -> u32 {
        let socket = io.add_socket(socket);
        self.adopt(io, socket, protocol, tls)
    }

    /// The same of a socket that the reactor has already.
    pub fn adopt(
        &mut self,
        io: &mut Io,
        socket: Socket,
        protocol: P,
        tls: Option<TlsStream>,
    ) -> u32 {
        let stranger = tls.as_ref().is_some_and(TlsStream::is_handshaking).then_some(self.tick);
        let mut peer = Peer::new(socket, protocol, tls, self.limits);
        peer.stranger = stranger;
        if stranger.is_some() {
            tick_on(&mut self.ticking, io);
        }
        self.peers.insert(peer)
    }

    /// A connection's own state.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&P> {
        self.peers.get(number).map(|peer| &peer.protocol)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut P> {
        self.peers.get_mut(number).map(|peer| &mut peer.protocol)
    }

    /// The numbers and states of all connections.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &P)> {
        self.peers.iter().map(|(number, peer)| (number, &peer.protocol))
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// Takes what has happened to a connection: requests that are ready to run, to be handed back
    /// to [`Peers::receive`] empty, and why it is over, if the client does not speak the protocol.
    pub fn input(
        &mut self,
        io: &mut Io,
        number: u32,
        event: Event<'_>,
    ) -> (Vec<Ready<P::Request>>, Option<io::Error>) {
        let mut ready = std::mem::take(&mut self.ready);
        let Some(peer) = self.peers.get_mut(number) else { return (ready, None) };
        let taken = match event {
            // With none, too: TLS may have some.
            Event::Begun(bytes) => peer.take(bytes, io.buffers(), &mut ready),
            Event::Received(data) => {
                peer.receiving = false;
                match data {
                    Ok(data) if !data.is_empty() => peer.take(data, io.buffers(), &mut ready),
                    // A client that goes away is no error.
                    _ => {
                        peer.lose();
                        Ok(())
                    }
                }
            }
            Event::Filled(buf, result) => {
                peer.receiving = false;
                match result {
                    Ok(()) => peer.payload_filled(buf, &mut ready),
                    Err(_) => peer.lose(),
                }
                Ok(())
            }
            Event::Sent(batch, result) => {
                let (requests, bytes) = peer.out.sent(batch, &mut self.batches);
                peer.release(requests, bytes);
                if result.is_err() && !peer.broken {
                    give_up(io, peer);
                }
                peer.resume(io.buffers(), &mut ready)
            }
        };
        let failure = taken.err();
        if failure.is_some() {
            // What TLS has to say about it is sent with the last replies.
            peer.end();
        }
        (ready, failure)
    }

    /// Takes what has come before and had no room, after [`Peers::release`] has made some: further requests that are ready, and
    /// why the connection is over, as of [`Peers::input`]. Where requests are answered, that is done when the answer is sent.
    pub fn resume(
        &mut self,
        io: &Io,
        number: u32,
        ready: &mut Vec<Ready<P::Request>>,
    ) -> Option<io::Error> {
        let peer = self.peers.get_mut(number).filter(|peer| !peer.ended)?;
        let failure = peer.resume(io.buffers(), ready).err()?;
        peer.end();
        Some(failure)
    }

    /// Receives on, if there is room for it.
    pub fn receive(&mut self, io: &mut Io, number: u32, mut ready: Vec<Ready<P::Request>>) {
        ready.clear();
        self.ready = ready;
        self.touch(number);
        let Some(peer) = self.peers.get_mut(number) else { return };
        let socket = peer.socket;
        match peer.wants() {
            Receive::Nothing => {
                if peer.is_full() {
                    tick_on(&mut self.ticking, io);
                }
                return;
            }
            Receive::Any => io.receive(socket, self.tags | u64::from(number)),
            Receive::Payload(buf, start) => {
                io.fill(socket, buf, start, self.tags | u64::from(number));
            }
        }
        peer.receiving = true;
    }

    /// Adds a reply to those that go out at the end of the turn.
    #[inline]
    pub fn answer(&mut self, number: u32, cost: u64, reply: impl FnOnce(&mut Batch)) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        if peer.broken {
            peer.release(1, cost);
        } else {
            reply(peer.out.reply(cost, &mut self.batches));
        }
        self.touch(number);
    }

    /// Adds what answers no request to what goes out at the end of the turn: for who sends requests
    /// and takes replies.
    #[inline]
    pub fn tell(&mut self, number: u32, message: impl FnOnce(&mut Batch)) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        if !peer.broken {
            message(peer.out.message(&mut self.batches));
        }
        self.touch(number);
    }

    /// Whether a connection takes no more input, or is gone.
    #[must_use]
    pub fn has_ended(&self, number: u32) -> bool {
        self.peers.get(number).is_none_or(|peer| peer.ended)
    }

    /// Whether the client is gone, or was given up: nobody waits for its replies.
    #[must_use]
    pub fn is_lost(&self, number: u32) -> bool {
        self.peers.get(number).is_none_or(|peer| peer.lost || peer.broken)
    }

    /// A request needs no answer.
    pub fn forget(&mut self, number: u32, request: &P::Request) {
        self.release(number, request.cost_bytes());
    }

    /// A request that takes so many bytes needs no answer, or has one that nobody waits for now.
    pub fn release(&mut self, number: u32, bytes: u64) {
        if let Some(peer) = self.peers.get_mut(number) {
            peer.release(1, bytes);
        }
        self.touch(number);
    }

    /// Sends what has gathered, and takes leave of connections that are over: `gone` is given
    /// their state.
    pub fn settle(&mut self, io: &mut Io, mut gone: impl FnMut(P)) {
        let mut touched = std::mem::take(&mut self.touched);
        for number in touched.drain(..) {
            if let Some(peer) = self.settle_one(io, number) {
                let socket = peer.socket;
                // Before the client sees the end: then nothing of it is held any more.
                gone(peer.protocol);
                io.shutdown(socket);
                io.remove(socket);
            }
        }
        self.touched = touched;
    }

    fn settle_one(&mut self, io: &mut Io, number: u32) -> Option<Peer<P>> {
        let peer = self.peers.get_mut(number)?;
        if !peer.broken {
            peer.prepare_goodbye(&mut self.batches);
            match peer.out.next(peer.tls.as_deref_mut(), self.tick) {
                Ok(Some(batch)) => {
                    io.send(peer.socket, batch, self.tags | u64::from(number));
                    tick_on(&mut self.ticking, io);
                }
                Ok(None) => {}
                Err(_) => give_up(io, peer),
            }
        }
        let remaining = peer.remaining()?;
        if remaining > 0 {
            peer.protocol.remaining(remaining);
            return None;
        }
        self.peers.remove(number)
    }

    /// Ends connections that `which` holds for: when what is in flight is answered, with a word of
    /// farewell if the protocol has one, or at once.
    pub fn end(&mut self, io: &mut Io, at_once: bool, which: impl Fn(&P) -> bool) {
        let chosen = self.peers.iter().filter(|(_, peer)| which(&peer.protocol));
        let numbers: Vec<u32> = chosen.map(|(number, _)| number).collect();
        for number in numbers {
            if let Some(peer) = self.peers.get_mut(number) {
                if at_once {
                    give_up(io, peer);
                } else {
                    peer.end();
                    peer.farewell = true;
                    io.stop_receiving(peer.socket);
                }
            }
            self.touch(number);
        }
    }

    /// Once a second while something is being sent, somebody is in the handshake of TLS, or nothing is
    /// received for want of room: gives up those that take nothing of what is sent, or too long, and
    /// looks whether those that are not heard are still there.
    pub fn tick(&mut self, io: &mut Io) {
        self.tick = self.tick.wrapping_add(1);
        let mut waiting = false;
        let numbers: Vec<u32> = self.peers.iter().map(|(number, _)| number).collect();
        for number in numbers {
            let Some(peer) = self.peers.get_mut(number) else { continue };
            if peer.out.is_busy() {
                peer.out.progress(io.sent_so_far(peer.socket), self.tick);
            }
            if let Some(begun) = peer.stranger.filter(|_| peer.is_stranger()) {
                waiting = true;
                if self.tick.wrapping_sub(begun) > HANDSHAKE_TICKS && !peer.broken {
                    give_up(io, peer);
                    self.touched.push(number);
                }
            }
            if peer.is_full() {
                waiting = true;
                if io.has_hung_up(peer.socket) {
                    peer.lost = true;
                    peer.protocol.ended(true);
                }
            }
            let Some(since) = peer.out.since() else { continue };
            waiting = true;
            if u64::from(self.tick.wrapping_sub(since)) > self.patience && !peer.broken {
                give_up(io, peer);
            }
        }
        self.ticking = waiting;
        io.wake_at(waiting.then(|| Instant::now() + TICK));
    }

    /// Looks which clients are gone, also of those that are not heard because they have asked for too much.
    pub fn look(&mut self, io: &mut Io) {
        let numbers: Vec<u32> = self.peers.iter().map(|(number, _)| number).collect();
        for number in numbers {
            if let Some(peer) = self.peers.get_mut(number).filter(|peer| !peer.ended)
                && io.has_hung_up(peer.socket)
            {
                peer.lost = true;
                peer.protocol.ended(true);
            }
        }
    }

    fn touch(&mut self, number: u32) {
        if self.touched.last() != Some(&number) {
            self.touched.push(number);
        }
    }
}

fn tick_on(ticking: &mut bool, io: &mut Io) {
    if !std::mem::replace(ticking, true) {
        io.wake_at(Some(Instant::now() + TICK));
    }
}

/// The peer is gone, or too slow.
fn give_up<P: Protocol>(io: &mut Io, peer: &mut Peer<P>) {
    peer.broken = true;
    let (requests, bytes) = peer.out.abandon();
    peer.release(requests, bytes);
    peer.end();
    io.shutdown(peer.socket);
}
