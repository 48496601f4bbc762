//! What replicas of this process have answered.

use super::super::link::Reply;
use super::super::local::Asker;
use super::Shard;
use dbs_reactor::{Buf, Io};
use longhorn_data::runner::{Ended, Told};
use longhorn_data::work::Outcome;
use longhorn_wire::frame::Type;
use std::io;

impl Shard {
    /// Something that workers, or the replica itself, have told.
    pub(in super::super) fn told(&mut self, io: &mut Io, told: Told<Asker>) {
        self.locals.runner.told(io, told);
        self.local_replies(io);
    }

    /// Transfers of a replica in this process have ended.
    pub(in super::super) fn moved(
        &mut self,
        io: &mut Io,
        tag: u64,
        buf: Buf,
        result: io::Result<()>,
    ) {
        self.locals.runner.moved(io, tag, buf, result);
        self.local_replies(io);
    }

    /// Takes what replicas in this process have answered.
    pub(in super::super) fn local_replies(&mut self, io: &mut Io) {
        if !self.locals.has_replies() {
            return;
        }
        let idle = std::mem::take(&mut self.locals.ended);
        let mut ended = std::mem::replace(&mut self.locals.runner.ended, idle);
        for Ended { whose, request, outcome } in ended.drain(..) {
            let (kind, size, payload) = match outcome {
                Outcome::Done(size) => (Type::Response, size, None),
                Outcome::Data(data, range) if range == (0..data.len()) => {
                    (Type::Response, range.len() as u32, Some(data))
                }
                Outcome::Data(data, range) => {
                    let part = copied(io, &data[range]);
                    (Type::Response, part.len() as u32, Some(part))
                }
                Outcome::Damaged(damaged) => {
                    (Type::Damaged, 0, Some(copied(io, &damaged.encode())))
                }
                Outcome::Failed(text) => (Type::Error, 0, Some(copied(io, text.as_bytes()))),
            };
            let length = payload.as_ref().map_or(0, |data| data.len() as u32);
            let reply = Reply::local(&request, kind, size, length);
            self.replied(io, (whose.slot, whose.serial), &reply, payload);
        }
        self.locals.ended = ended;
    }
}

fn copied(io: &Io, bytes: &[u8]) -> Buf {
    let mut buf = io.buffers().take(bytes.len());
    buf.copy_from_slice(bytes);
    buf
}
