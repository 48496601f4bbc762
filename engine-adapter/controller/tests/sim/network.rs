//! Connections between the data path and replicas: bytes on their way, in order, until one breaks; and what a replica
//! makes of them.

use crate::path::{bytes, sectors};
use crate::replica::{Lane, Reply, Request, SECTORS};
use crate::world::{Event, MS, World};
use dbs_reactor::Left;
use longhorn_controller::path::simulated::{Anew, Backend, Redial};
use longhorn_controller::rules::ReplicaId;
use longhorn_wire::frame::{Damaged, HEADER_BYTES, Header, NO_SPACE_TEXT, PLACE_BITS, Type};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::{Arc, PoisonError};

/// Bytes of a block.
const BLOCK: u64 = 4096;

thread_local! {
    /// The mistake that replicas make.
    pub static MISTAKE: Cell<Option<Mistake>> = const { Cell::new(None) };
}

/// A mistake of replicas that are connected to anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// What came on the former connections runs on, and what is still to come from them as well.
    NoFence,
    /// What was done is done again.
    DoneTwice,
}

impl Mistake {
    pub const ALL: [Self; 2] = [Self::NoFence, Self::DoneTwice];

    /// Whether it is made.
    pub fn is_made(self) -> bool {
        MISTAKE.get() == Some(self)
    }
}

/// A connection.
#[derive(Default, Debug, Clone)]
pub struct Link {
    pub replica: usize,
    /// Who has it, and how often it was made anew; nobody if it is not.
    client: Option<u64>,
    epoch: u32,
    /// Requests that the replica has in hand; but flushes, which change nothing and may run on beside newer connections.
    serving: usize,
    /// Of the replica's process.
    session: u64,
    /// Of the replica: from one close to the next.
    gate: u64,
    /// The reactor at the other end.
    lane: usize,
    /// What is on its way to the replica, and what has come of a message that is not complete.
    up: VecDeque<Vec<u8>>,
    come: Vec<u8>,
    down: VecDeque<Vec<u8>>,
    /// When the last of it comes.
    up_at: u64,
    down_at: u64,
    /// Nothing that is sent now arrives.
    cut: bool,
    /// The controller has ended it.
    left: bool,
}

impl World {
    /// Connections to a replica, if it can be reached; it has no mode yet.
    pub fn dial(&mut self, id: ReplicaId, replica: usize) -> Option<Backend> {
        let its = &mut self.replicas[replica];
        if !its.alive || its.stalled_until > self.now {
            return None;
        }
        (its.blemished, its.tainted, its.healed) = (false, false, 0);
        let (session, gate) = (its.session, its.gate);
        let lanes = self.path.lanes();
        let count = lanes.max(self.random.usize(1..4));
        // Older ones cannot be connected to anew.
        let new = self.old == 0 || self.random.u32(0..self.old) > 0;
        let client = new.then_some(self.last_link + 1);
        let new = Link { replica, client, session, gate, ..Link::default() };
        let links = (0..count).map(|index| self.link(Link { lane: index % lanes, ..new.clone() }));
        let links = links.collect();
        self.path.peers.insert(id, replica);
        let anew = client.map(|client| {
            let lanes = (0..lanes).map(|lane| ((client, lane), Lane::default()));
            self.replicas[replica].lanes.extend(lanes);
            let redials = Arc::clone(&self.path.redials);
            Anew(Arc::new(move |redial| {
                redials.lock().unwrap_or_else(PoisonError::into_inner).push((client, redial));
            }))
        });
        Some(Backend { links, flushes: true, anew })
    }

    /// Another connection; its name.
    fn link(&mut self, link: Link) -> u64 {
        self.last_link += 1;
        self.links.insert(self.last_link, link);
        self.last_link
    }

    /// Reactors want connections in place of those that broke. The network is not always there at once.
    pub fn hear_redials(&mut self) {
        let redials =
            std::mem::take(&mut *self.path.redials.lock().unwrap_or_else(PoisonError::into_inner));
        for (client, redial) in redials {
            if self.dark {
                continue;
            }
            let faults = self.weather.faults_ms > 0;
            let delay = redial.respite.as_micros() as u64;
            let delay = delay
                + match self.random.u32(if self.frail.is_some() { 6..20 } else { 0..20 }) {
                    0 if faults => self.random.u64(4000 * MS..9000 * MS),
                    1..=5 => self.random.u64(10 * MS..2000 * MS),
                    _ => self.latency(),
                };
            if let Some(replica) = self.path.peers.get(&redial.replica)
                && delay >= 4000 * MS
            {
                self.replicas[*replica].blemished = true;
            }
            self.after(delay, Event::Redial { client, redial });
        }
    }

    /// A replica is connected to anew.
    pub fn redial(&mut self, client: u64, redial: Redial) {
        let Some(replica) = self.path.peers.get(&redial.replica).copied() else { return };
        let its = &mut self.replicas[replica];
        if !its.alive {
            return redial.answer(Err("and nobody listens".to_owned()));
        }
        if let Some(wait) = its.stalled_until.checked_sub(self.now + 1) {
            return self.after(wait + 1, Event::Redial { client, redial });
        }
        let (session, gate, open) = (its.session, its.gate, its.open);
        let Some(lane) = its.lanes.get_mut(&(client, redial.lane)) else {
            return redial.answer(Err("and the replica was closed since".to_owned()));
        };
        lane.epoch = lane.epoch.max(redial.epoch);
        let former = |link: &Link| {
            (link.client, link.lane) == (Some(client), redial.lane) && link.epoch < redial.epoch
        };
        if !Mistake::NoFence.is_made() {
            let own = |link: &&mut Link| former(link) && link.session == session;
            let mut busy = false;
            for link in self.links.values_mut().filter(own) {
                link.up.clear();
                link.come.clear();
                busy |= link.serving > 0;
            }
            if busy {
                return self.after(10 * MS, Event::Redial { client, redial });
            }
            self.links.retain(|_, link| !(former(link) && link.cut && link.left));
        }
        let new = Link {
            replica,
            client: Some(client),
            epoch: redial.epoch,
            session,
            gate,
            lane: redial.lane,
            ..Link::default()
        };
        self.note(format!("{redial:?}: r{replica} is there, open {open}"));
        self.reconnects += 1;
        let links: Vec<_> = (0..redial.count).map(|_| self.link(new.clone())).collect();
        if let Some(lasts) = self.frail {
            for link in &links {
                self.links.entry(*link).and_modify(|link| link.cut = lasts == 0);
                self.after(lasts.max(MS), Event::Broken { link: *link });
            }
        }
        redial.answer(Ok(links));
    }

    /// What a reactor has done to its connections.
    pub fn sent(&mut self, left: Vec<Left>) {
        for one in left {
            match one {
                Left::Sent(number, bytes) => {
                    let delay = self.latency();
                    let Some(link) = self.links.get_mut(&number).filter(|link| !link.cut) else {
                        continue;
                    };
                    link.up_at = (self.now + delay).max(link.up_at + 1);
                    link.up.push_back(bytes);
                    let (delay, replica) = (link.up_at - self.now, link.replica);
                    self.after(delay, Event::Up { link: number });
                    // Now and then buffers are full; for long, if nobody reads.
                    let hangs = self.replicas[replica].stalled_until.saturating_sub(self.now);
                    match self.random.u32(0..12) {
                        0 => {
                            let delay = self.random.u64(100..20 * MS);
                            self.after(delay, Event::Taken { link: number });
                        }
                        1..=6 if hangs > 0 => self.after(hangs, Event::Taken { link: number }),
                        _ => self.taken(number),
                    }
                }
                Left::Ended(number) => {
                    if let Some(link) = self.links.get_mut(&number) {
                        link.left = true;
                    }
                }
            }
        }
    }

    /// What was being sent on a connection is on its way, unless that broke.
    pub fn taken(&mut self, number: u64) {
        if let Some(link) = self.links.get(&number).filter(|link| !link.cut) {
            self.path.lane(link.lane, |lane| lane.taken(number));
        }
    }

    /// How long until the replica of a connection runs; nothing if the connection leads nowhere.
    fn wait(&mut self, number: u64) -> Option<u64> {
        let link = self.links.get(&number)?;
        let its = &self.replicas[link.replica];
        if !its.alive || its.session != link.session {
            return None;
        }
        if its.open && its.gate != link.gate {
            // Opened again, it ends older connections.
            self.break_link(number, 0);
            return None;
        }
        Some(its.stalled_until.saturating_sub(self.now))
    }

    /// Something has reached a replica.
    pub fn up(&mut self, number: u64) {
        match self.wait(number) {
            None => return,
            Some(0) => {}
            Some(wait) => return self.after(wait, Event::Up { link: number }),
        }
        // What comes on a connection that broke has been on its way for longer.
        if self.links.get(&number).is_some_and(|link| link.cut) && self.random.bool() {
            let delay = self.random.u64(MS..20 * MS);
            return self.after(delay, Event::Up { link: number });
        }
        let Some(link) = self.links.get_mut(&number) else { return };
        link.come.extend(link.up.pop_front().unwrap_or_default());
        while let Some((header, payload)) = self.next_message(number) {
            // Its workers may be done with them in another order.
            let delay = match self.random.u32(0..30) {
                0 => self.random.u64(MS..20 * MS),
                1..=5 => self.random.u64(100..2000),
                _ => self.random.u64(0..150),
            };
            // Pings are answered before.
            let poisoned = self.poison && header.kind() == Some(Type::Read);
            let delay = if poisoned { 20 * MS } else { delay };
            let flushes = header.kind() == Some(Type::Flush);
            let delay = if flushes { delay + self.flushing } else { delay };
            self.serve_in(delay, number, header, payload);
        }
    }

    /// A replica is to carry a request out, after so long.
    fn serve_in(&mut self, delay: u64, number: u64, header: Header, payload: Vec<u8>) {
        if let Some(link) = self.links.get_mut(&number) {
            link.serving += usize::from(header.kind() != Some(Type::Flush));
        }
        self.after(delay, Event::Serve { link: number, header, payload });
    }

    /// A replica carries a request out.
    pub fn serve(&mut self, number: u64, header: Header, payload: Vec<u8>) {
        if let Some(link) = self.links.get_mut(&number) {
            link.serving -= usize::from(header.kind() != Some(Type::Flush));
        }
        match self.wait(number) {
            None => return,
            Some(0) => {}
            Some(wait) => return self.serve_in(wait, number, header, payload),
        }
        if self.poison && header.kind() == Some(Type::Read) {
            return self.break_link(number, 0);
        }
        let reply = self.reply(number, header, &payload);
        let delay = self.latency();
        let Some(link) = self.links.get_mut(&number).filter(|link| !link.left && !link.cut) else {
            return;
        };
        link.down_at = (self.now + delay).max(link.down_at + 1);
        link.down.push_back(reply);
        let delay = link.down_at - self.now;
        self.after(delay, Event::Down { link: number });
    }

    /// Carries a request out; the bytes of the reply.
    fn reply(&mut self, number: u64, header: Header, payload: &[u8]) -> Vec<u8> {
        let Link { replica, client, lane, .. } = self.links[&number];
        let lane = (client.unwrap_or_default(), lane);
        let (offset, size) = (header.offset as usize / 512, header.size as usize / 512);
        let request = match header.kind() {
            Some(Type::Read) => Request::Read { first: offset, count: size },
            Some(Type::Write | Type::WriteAgain) => {
                Request::Write { first: offset, data: sectors(payload) }
            }
            Some(Type::Unmap | Type::UnmapAgain) => Request::Unmap { first: offset, count: size },
            Some(Type::Heal) => Request::Heal { block: offset / SECTORS, data: sectors(payload) },
            Some(Type::Flush) => Request::Flush,
            _ => Request::Ping,
        };
        let place = header.sequence & ((1 << PLACE_BITS) - 1);
        let again = matches!(header.kind(), Some(Type::WriteAgain | Type::UnmapAgain));
        let its = &mut self.replicas[replica];
        let done = its.lanes.get(&lane).and_then(|lane| lane.done.get(&place).copied());
        let reply = if again && done == Some(header.sequence) && !Mistake::DoneTwice.is_made() {
            Reply::Done
        } else {
            its.serve(&request, self.now)
        };
        if let Some(lane) = its.lanes.get_mut(&lane)
            && matches!(request, Request::Write { .. } | Request::Unmap { .. })
        {
            lane.done.remove(&place);
            if matches!(reply, Reply::Done) {
                lane.done.insert(place, header.sequence);
            }
        }
        self.notice(replica, &request, &reply);
        let plain = |kind, size, data: &[u8]| {
            let Header { sequence, offset, .. } = header;
            let length = data.len() as u32;
            let header = Header { size, length, ..Header::new(kind, sequence, offset, 0) };
            [&header.encode()[..], data].concat()
        };
        match reply {
            Reply::Data(data) => plain(Type::Response, header.size, &bytes(&data)),
            Reply::Done => plain(Type::Response, header.size, &[]),
            Reply::Healed(had_to_be) => {
                plain(Type::Response, if had_to_be { header.size } else { 0 }, &[])
            }
            Reply::NoSpace { .. } => plain(Type::Error, 0, NO_SPACE_TEXT.as_bytes()),
            Reply::Damaged { block } => {
                let text = format!("block {block} of r{replica} is damaged");
                let damaged = Damaged { offset: block as u64 * BLOCK, in_snapshot: false, text };
                plain(Type::Damaged, 0, &damaged.encode())
            }
            Reply::Failed => plain(Type::Error, 0, b"injected"),
            Reply::Refused(text) => plain(Type::Error, 0, text.as_bytes()),
        }
    }

    /// What of an answer the referee has to know.
    fn notice(&mut self, replica: usize, request: &Request, reply: &Reply) {
        match (request, reply) {
            (_, Reply::Damaged { block }) => self.met_damage(replica, *block),
            (Request::Write { first, data }, Reply::NoSpace { written }) => {
                for wish in self.client.wishes.values_mut() {
                    if data.contains(&wish.value) && wish.overlaps(*first, data.len()) {
                        wish.full.insert(replica, *written);
                    }
                }
            }
            (Request::Heal { .. }, Reply::Healed(had_to_be)) => {
                self.replicas[replica].healed += 1 + u32::from(*had_to_be);
            }
            (Request::Heal { block, .. }, Reply::Failed) => {
                // Of what was on its way when a controller ended, replicas may hold different things.
                let mut sectors = block * SECTORS..(block + 1) * SECTORS;
                if sectors.any(|sector| self.client.content.in_doubt(sector)) {
                    self.replicas[replica].blemished = true;
                }
            }
            _ => {}
        }
    }

    /// Something has reached the controller.
    pub fn down(&mut self, number: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let its = &self.replicas[link.replica];
        if let Some(wait) = its.stalled_until.checked_sub(self.now + 1) {
            return self.after(wait + 1, Event::Down { link: number });
        }
        let Some(mut bytes) = link.down.pop_front() else { return };
        // Now and then in two parts.
        if bytes.len() > 1 && self.random.u32(0..8) == 0 {
            let rest = bytes.split_off(self.random.usize(1..bytes.len()));
            link.down.push_front(rest);
            let delay = self.random.u64(1..300);
            self.after(delay, Event::Down { link: number });
        }
        let lane = self.links[&number].lane;
        self.path.lane(lane, |lane| lane.come(number, &bytes));
    }

    /// The controller sees that a connection is gone. What has got through to the replica is there still.
    pub fn broken(&mut self, number: u64) {
        if let Some(link) = self.links.get_mut(&number) {
            link.down.clear();
            let why = self.random.bool().then_some(ErrorKind::ConnectionReset);
            self.path.lane(link.lane, |lane| lane.end(number, why));
        }
    }

    /// A connection breaks: what was sent last is lost, in both directions.
    pub fn break_link(&mut self, number: u64, delay: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        if std::mem::replace(&mut link.cut, true) {
            return;
        }
        for way in [&mut link.up, &mut link.down] {
            way.truncate(self.random.usize(0..way.len() + 1));
            if let Some(last) = way.back_mut() {
                last.truncate(self.random.usize(0..last.len() + 1));
            }
        }
        self.after(delay, Event::Broken { link: number });
    }

    /// Whether a connection that breaks may be made anew.
    pub fn is_renewed(&self, number: u64) -> bool {
        self.links.get(&number).is_some_and(|link| link.client.is_some())
    }

    /// Whether it is one of this reactor.
    pub fn is_of(&self, number: u64, lane: usize) -> bool {
        self.links.get(&number).is_some_and(|link| link.lane == lane)
    }

    /// The numbers of the connections to a replica.
    pub fn links_to(&self, replica: usize) -> Vec<u64> {
        let of_it = self.links.iter().filter(|(_, link)| link.replica == replica && !link.cut);
        of_it.map(|(number, _)| *number).collect()
    }

    /// The controller ends: some of what is on its way to replicas is carried out before they notice.
    pub fn land(&mut self) {
        let numbers: Vec<_> = self.links.keys().copied().collect();
        for number in numbers {
            while self.random.bool() && self.wait(number) == Some(0) {
                let Some(link) = self.links.get_mut(&number) else { break };
                let Some(some) = link.up.pop_front() else { break };
                link.come.extend(some);
                while let Some((header, payload)) = self.next_message(number) {
                    self.reply(number, header, &payload);
                }
            }
        }
    }

    /// The next complete message that has come on a connection.
    fn next_message(&mut self, number: u64) -> Option<(Header, Vec<u8>)> {
        let link = self.links.get_mut(&number)?;
        let header = Header::decode(link.come.get(..HEADER_BYTES)?).unwrap();
        let end = HEADER_BYTES + header.length as usize;
        let payload = link.come.get(HEADER_BYTES..end)?.to_vec();
        link.come.drain(..end);
        Some((header, payload))
    }
}
