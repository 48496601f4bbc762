//! Transfers and syncs that somebody in between delays, shortens or lets fail.

use super::{Job, Move};
use crate::interpose::{Interpose, Part};
use crate::targets::Segment;
use std::io;
use std::os::unix::fs::FileExt;
use std::thread;

impl Job {
    /// As [`Job::run`], as far as somebody in between lets it.
    pub(super) fn run_behind(&mut self, interposer: &dyn Interpose) -> io::Result<()> {
        if let Move::Sync = self.what {
            let fate = interposer.begin(0, Part::Sync);
            thread::sleep(fate.delay);
            if let Some(errno) = fate.errno {
                return Err(io::Error::from_raw_os_error(errno));
            }
            let result = self.file.sync_data();
            interposer.end(fate.ticket, result.is_ok());
            return result;
        }
        for Segment { mut offset, start, len } in self.segments.iter().copied() {
            let mut rest = start..start + len;
            while !rest.is_empty() {
                let part = match &self.what {
                    Move::Read(_) => Part::Read(rest.len()),
                    Move::Write(payload) => Part::Write(&payload[rest.clone()]),
                    Move::Sync => Part::Sync,
                };
                let fate = interposer.begin(offset, part);
                thread::sleep(fate.delay);
                if let Some(errno) = fate.errno {
                    return Err(io::Error::from_raw_os_error(errno));
                }
                let now = rest.start..rest.end.min(rest.start.saturating_add(fate.len));
                let (count, none) = match &mut self.what {
                    Move::Read(buf) => {
                        (self.file.read_at(&mut buf[now], offset), io::ErrorKind::UnexpectedEof)
                    }
                    Move::Write(payload) => {
                        (self.file.write_at(&payload[now], offset), io::ErrorKind::WriteZero)
                    }
                    Move::Sync => return Ok(()),
                };
                interposer.end(fate.ticket, count.is_ok());
                let count = count?;
                if count == 0 {
                    return Err(none.into());
                }
                offset += count as u64;
                rest.start += count;
            }
        }
        Ok(())
    }
}
