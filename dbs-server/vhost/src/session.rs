//! What a client says on its connection: it shares the memory of its guest, and describes the queues that are in it.

use super::client::Client;
use super::disk::{CONFIG_MAX_BYTES, QUEUES_MAX, config, feature, features};
use super::inflight::{self, Inflight, bytes_of_queue};
use super::memory::{Memory, REGIONS_MAX, Region, map_shared};
use super::message::{Message, Payload, invalid, receive, reply, request};
use super::queue::{self, Start};
use super::ring::{Broken, Places, Ring, SIZE_MAX};
use dbs_frontend::{Disk, Engine, Post, User};
use dbs_service::log;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

/// What of the protocol this side can do.
mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const ALL: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD;
}

/// In the number of a queue: no file comes with it.
const NO_FILE: u64 = 1 << 8;

/// A connection.
pub struct Session {
    socket: UnixStream,
    client: Arc<Client>,
    engine: Arc<Engine<queue::Message>>,
    /// What the client makes use of.
    features: u64,
    protocol: u64,
    memory: Option<Arc<Memory>>,
    /// Notes of requests under way, for so many queues of so many places.
    inflight: Option<(Arc<Memory>, u16, u16)>,
    queues: Vec<Queue>,
}

/// A queue, as far as it is described.
#[derive(Default)]
struct Queue {
    size: u16,
    /// In the client's own addresses.
    places: Option<[u64; 3]>,
    /// What is to be taken next.
    next: u16,
    kick: Option<OwnedFd>,
    call: Option<File>,
    failed: Option<File>,
    enabled: bool,
    /// Its number at the reactor that serves it.
    served: Option<(u64, Post<queue::Message>)>,
}

/// The requests that a client had under way are of the volume or snapshot with this uuid, which had the name before.
#[derive(Debug)]
pub struct OtherVolume(pub String);

impl fmt::Display for OtherVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its requests under way are of another volume, with the uuid {}", self.0)
    }
}

impl Error for OtherVolume {}

/// What is sent back.
enum Reply {
    /// Nothing, or only that all is well.
    Done,
    /// What was asked for.
    With(Vec<u8>),
    /// That, and a file.
    File(Vec<u8>, OwnedFd),
}

impl Session {
    /// A connection that is new.
    pub fn new(
        socket: UnixStream,
        client: Arc<Client>,
        engine: Arc<Engine<queue::Message>>,
    ) -> Self {
        let queues = (0..QUEUES_MAX).map(|_| Queue::default()).collect();
        let (features, protocol, memory, inflight) = (0, 0, None, None);
        Self { socket, client, engine, features, protocol, memory, inflight, queues }
    }

    /// Does what the client asks until it goes; nothing of it is under way then.
    ///
    /// # Errors
    /// What it has done that no client does, or how its connection was lost.
    pub fn run(&mut self) -> io::Result<()> {
        let ended = self.serve();
        // All are told before any is waited for.
        let stopping: Vec<_> = self.queues.iter_mut().map(|queue| queue.stop(true)).collect();
        for stopped in stopping.into_iter().flatten() {
            // An error: it was not there any more.
            let _ = stopped.recv();
        }
        ended
    }

    fn serve(&mut self) -> io::Result<()> {
        while let Some(message) = receive(&self.socket)? {
            let (request, need_reply) = (message.request, message.need_reply);
            let acknowledges = need_reply && self.protocol & protocol::REPLY_ACK != 0;
            match self.handle(message) {
                Ok(Reply::Done) if acknowledges => reply(&self.socket, request, &[0; 8], None)?,
                Ok(Reply::Done) => {}
                Ok(Reply::With(bytes)) => reply(&self.socket, request, &bytes, None)?,
                Ok(Reply::File(bytes, file)) => {
                    reply(&self.socket, request, &bytes, Some(file.as_fd()))?;
                }
                Err(error) => {
                    if acknowledges {
                        reply(&self.socket, request, &1u64.to_le_bytes(), None)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn handle(&mut self, message: Message) -> io::Result<Reply> {
        let Message { request, payload: mut fields, files, .. } = message;
        match request {
            request::GET_FEATURES => return with(features(self.client.opened.read_only)),
            request::SET_FEATURES => {
                self.features = fields.u64()?;
                if self.features & !features(self.client.opened.read_only) != 0 {
                    return Err(invalid("it takes features that it was not offered"));
                }
            }
            request::SET_OWNER => {}
            request::RESET_OWNER => self.rest_all(|queue| queue.kick = None),
            request::GET_PROTOCOL_FEATURES => return with(protocol::ALL),
            request::SET_PROTOCOL_FEATURES => self.protocol = fields.u64()?,
            request::GET_QUEUE_NUM => return with(QUEUES_MAX.into()),
            request::SET_MEM_TABLE => self.set_memory(&mut fields, files)?,
            request::SET_VRING_NUM => {
                let (index, size) = (self.index(fields.u32()?)?, fields.u32()?);
                let size = u16::try_from(size).ok().filter(|size| *size <= SIZE_MAX);
                let size = size.ok_or_else(|| invalid("a queue has more than 1024 places"))?;
                self.rest(index, |queue| queue.size = size);
            }
            request::SET_VRING_BASE => {
                let (index, next) = (self.index(fields.u32()?)?, fields.u32()? as u16);
                self.rest(index, |queue| queue.next = next);
            }
            request::SET_VRING_ADDR => {
                let (index, _flags) = (self.index(fields.u32()?)?, fields.u32()?);
                let (descriptors, used, available) = (fields.u64()?, fields.u64()?, fields.u64()?);
                let places = Some([descriptors, available, used]);
                self.rest(index, |queue| queue.places = places);
            }
            request::GET_VRING_BASE => {
                let index = self.index(fields.u32()?)?;
                self.rest(index, |queue| queue.kick = None);
                let next = self.queues.get(index).map_or(0, |queue| queue.next);
                let mut state = (index as u32).to_le_bytes().to_vec();
                state.extend(u32::from(next).to_le_bytes());
                return Ok(Reply::With(state));
            }
            request::SET_VRING_ENABLE => {
                let (index, enabled) = (self.index(fields.u32()?)?, fields.u32()? != 0);
                self.rest(index, |queue| queue.enabled = enabled);
            }
            request::SET_VRING_KICK => {
                let (index, file) = self.event(&mut fields, files)?;
                let kick = file.ok_or_else(|| invalid("a queue without an event to kick it"))?;
                self.rest(index, |queue| queue.kick = Some(kick));
            }
            request::SET_VRING_CALL => {
                let (index, file) = self.event(&mut fields, files)?;
                if let Some(queue) = self.queues.get_mut(index) {
                    queue.set_call(file.map(File::from))?;
                }
            }
            request::SET_VRING_ERR => {
                let (index, file) = self.event(&mut fields, files)?;
                self.rest(index, |queue| queue.failed = file.map(File::from));
            }
            request::SET_BACKEND_REQ_FD => {
                self.client.listens(files.into_iter().next().map(UnixStream::from));
            }
            request::GET_CONFIG => return self.config(&mut fields),
            // A guest can bring that about. There is nothing that it may set.
            request::SET_CONFIG => {}
            request::GET_INFLIGHT_FD => return self.new_inflight(&mut fields),
            request::SET_INFLIGHT_FD => self.set_inflight(&mut fields, files)?,
            other => return Err(invalid(format!("request {other} is none that is served here"))),
        }
        self.start_ready();
        Ok(Reply::Done)
    }

    /// Has a queue rest while something of it is changed.
    fn rest(&mut self, index: usize, change: impl FnOnce(&mut Queue)) {
        let Some(queue) = self.queues.get_mut(index) else { return };
        if let Some(stopped) = queue.stop(false) {
            queue.next = stopped.recv().unwrap_or(queue.next);
        }
        change(queue);
    }

    /// Has all queues rest.
    fn rest_all(&mut self, mut change: impl FnMut(&mut Queue)) {
        (0..self.queues.len()).for_each(|index| self.rest(index, &mut change));
    }

    fn index(&self, index: u32) -> io::Result<usize> {
        let index = index as usize;
        if index < self.queues.len() { Ok(index) } else { Err(invalid("there is no such queue")) }
    }

    /// A queue, and the event that comes with it.
    fn event(
        &self,
        fields: &mut Payload,
        files: Vec<OwnedFd>,
    ) -> io::Result<(usize, Option<OwnedFd>)> {
        let number = fields.u64()?;
        let index = self.index((number & 0xff) as u32)?;
        let file = files.into_iter().next().filter(|_| number & NO_FILE == 0);
        file.iter().try_for_each(check_event)?;
        Ok((index, file))
    }

    fn set_memory(&mut self, fields: &mut Payload, files: Vec<OwnedFd>) -> io::Result<()> {
        let (count, _padding) = (fields.u32()? as usize, fields.u32()?);
        if count > REGIONS_MAX || files.len() != count {
            return Err(invalid("a table of memory has more than 8 parts, or not a file for each"));
        }
        if self.memory.is_none() && !files.iter().all(keeps_its_length) {
            let why = "its file is not sealed: whoever cuts it off ends this server. With QEMU, use memory-backend-memfd";
            log::warn("vhost-user", &[("client", &self.client.who), ("memory", &why)]);
        }
        let mut parts = Vec::new();
        for file in files {
            let (guest, size) = (fields.u64()?, fields.u64()?);
            let (user, offset) = (fields.u64()?, fields.u64()?);
            parts.push((Region { guest, size, user, offset }, file));
        }
        let memory = Memory::map(parts)?;
        // Nothing uses what it was before from here on.
        self.rest_all(|_| {});
        self.memory = Some(Arc::new(memory));
        Ok(())
    }

    fn config(&self, fields: &mut Payload) -> io::Result<Reply> {
        let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let config = config(self.client.opened.disk.size(), self.client.opened.read_only);
        let end = (offset as usize).saturating_add(size as usize);
        let part = config.get(offset as usize..end);
        let part = part.ok_or_else(|| {
            invalid(format!("a disk has no configuration behind byte {CONFIG_MAX_BYTES}"))
        })?;
        let mut reply = Vec::with_capacity(12 + part.len());
        for field in [offset, size, flags] {
            reply.extend(field.to_le_bytes());
        }
        reply.extend_from_slice(part);
        Ok(Reply::With(reply))
    }

    fn new_inflight(&mut self, fields: &mut Payload) -> io::Result<Reply> {
        let (_size, _offset) = (fields.u64()?, fields.u64()?);
        let (queues, places) = (fields.u16()?, fields.u16()?);
        if queues == 0 || queues > QUEUES_MAX || places == 0 || places > SIZE_MAX {
            return Err(invalid("there are at most 64 queues of 1024 places"));
        }
        let size = inflight::bytes_of_region(queues, places);
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"dbs-vhost-inflight", flags)?);
        file.set_len(size)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        let memory = map_shared(file.try_clone()?.into(), 0, size)?;
        inflight::set_owner(&memory, size, &self.client.opened.uuid);
        // It begins: nothing was acknowledged to it. Who only reads says nothing of who writes.
        if !self.client.opened.read_only {
            self.client.opened.lost.store(false, Ordering::SeqCst);
        }
        self.inflight = Some((Arc::new(memory), queues, places));
        let mut reply = size.to_le_bytes().to_vec();
        reply.extend(0u64.to_le_bytes());
        reply.extend(queues.to_le_bytes());
        reply.extend(places.to_le_bytes());
        // As the compilers of all who speak this have it.
        reply.resize(24, 0);
        Ok(Reply::File(reply, file.into()))
    }

    fn set_inflight(&mut self, fields: &mut Payload, files: Vec<OwnedFd>) -> io::Result<()> {
        let (size, offset) = (fields.u64()?, fields.u64()?);
        let (queues, places) = (fields.u16()?, fields.u16()?);
        let file =
            files.into_iter().next().ok_or_else(|| invalid("no file of requests under way"))?;
        if places == 0 || size < bytes_of_queue(places) * u64::from(queues) {
            return Err(invalid("the region of requests under way is too short"));
        }
        let memory = map_shared(file, offset, size)?;
        // The socket is found by a name, which may be that of another volume by now.
        match inflight::owner(&memory, size) {
            Some(other) if other != self.client.opened.uuid => {
                return Err(io::Error::other(OtherVolume(other)));
            }
            // Older servers of a store noted no uuid; those of a carried volume always have.
            None if matches!(self.client.opened.disk, Disk::Carried(_)) => {
                return Err(invalid("nobody has noted of which volume its requests under way are"));
            }
            _ => {}
        }
        if self.inflight.is_none() {
            self.client.comes_again();
        }
        self.inflight = Some((Arc::new(memory), queues, places));
        Ok(())
    }

    /// Starts the queues of which all is known.
    fn start_ready(&mut self) {
        let enabled = self.features & feature::PROTOCOL == 0;
        let Some(memory) = self.memory.clone() else { return };
        for index in 0..self.queues.len() {
            let ready = self.queues.get(index).is_some_and(|queue| {
                queue.served.is_none() && queue.kick.is_some() && (queue.enabled || enabled)
            });
            if ready && let Err(Broken(why)) = self.start(index, Arc::clone(&memory)) {
                let who = &self.client.who;
                log::error("vhost-user", &[("client", who), ("queue", &index), ("error", &why)]);
                // Not tried again before it is described anew.
                self.queues.get_mut(index).into_iter().for_each(|queue| queue.kick = None);
            }
        }
    }

    fn start(&mut self, index: usize, memory: Arc<Memory>) -> Result<(), Broken> {
        let Some(queue) = self.queues.get_mut(index) else { return Ok(()) };
        let (Some(places), Some(kick)) = (queue.places, &queue.kick) else { return Ok(()) };
        let [Some(descriptors), Some(available), Some(used)] =
            places.map(|place| memory.guest_address(place))
        else {
            return Err(Broken("the queue is not in the guest's memory"));
        };
        let places = Places { descriptors, available, used };
        let event_index = self.features & feature::EVENT_INDEX != 0;
        let mut ring = Ring::new(&memory, places, queue.size, queue.next, event_index)?;
        let inflight = match &self.inflight {
            None => None,
            // A driver may take fewer places than it is offered.
            Some((_, queues, size)) if index >= usize::from(*queues) || *size < ring.size() => {
                return Err(Broken("the region of requests under way is of other queues"));
            }
            Some((notes, _, size)) => {
                let notes = Arc::clone(notes);
                let (notes, left) = Inflight::recover(notes, index as u16, *size, ring.used())?;
                if left.iter().any(|head| *head >= ring.size()) {
                    return Err(Broken("the region of requests under way is of a larger ring"));
                }
                ring.go_to(ring.used().wrapping_add(left.len() as u16));
                Some((notes, left))
            }
        };
        let (number, post) = self.engine.next();
        let client = Arc::clone(&self.client);
        // Without notes, nobody knows whether it comes again.
        let (opened, dropping) = (&client.opened, Arc::clone(&client.ended));
        let lost = self.inflight.as_ref().map(|_| Arc::clone(&opened.lost)).unwrap_or_default();
        let user = User::new(opened.disk.clone(), opened.read_only, number, lost, dropping);
        let none = |_| Broken("there are no more descriptors");
        let copy = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        let (call, failed) = (copy(&queue.call).map_err(none)?, copy(&queue.failed).map_err(none)?);
        let kick = kick.try_clone().map_err(none)?;
        let (index, durable) = (index as u16, self.features & feature::FLUSH == 0);
        let start = Start {
            number,
            client,
            index,
            user,
            memory,
            ring,
            inflight,
            durable,
            kick,
            call,
            failed,
        };
        post(queue::Message::Start(Box::new(start)));
        queue.served = Some((number, post));
        Ok(())
    }
}

impl Queue {
    /// Has it served no longer; what is to come when nothing of it is under way, if it was served.
    fn stop(&mut self, dropping: bool) -> Option<mpsc::Receiver<u16>> {
        let (number, post) = self.served.take()?;
        let (sender, stopped) = mpsc::channel();
        post(queue::Message::Stop(number, dropping, sender));
        Some(stopped)
    }

    /// Has it signalled in another way from now on, without a rest: guests do that often.
    fn set_call(&mut self, call: Option<File>) -> io::Result<()> {
        if let (Some((number, post)), copy) = (&self.served, call.as_ref().map(File::try_clone)) {
            post(queue::Message::Call(*number, copy.transpose()?));
        }
        self.call = call;
        Ok(())
    }
}

/// Sees that a file is an eventfd, and that writing to it waits for nobody: another kind could make a thread wait that
/// serves others, too.
fn check_event(file: &OwnedFd) -> io::Result<()> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(invalid("the event of a queue is no eventfd"));
    }
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?) | OFlag::O_NONBLOCK;
    fcntl(file, FcntlArg::F_SETFL(flags))?;
    Ok(())
}

/// Whether nobody can cut a file off that is mapped.
fn keeps_its_length(file: &OwnedFd) -> bool {
    // Other kinds of files have no seals.
    let seals = fcntl(file, FcntlArg::F_GET_SEALS).unwrap_or(0);
    SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK)
}

fn with(number: u64) -> io::Result<Reply> {
    Ok(Reply::With(number.to_le_bytes().to_vec()))
}
