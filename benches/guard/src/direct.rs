//! Requests made of the store itself, by the steps that a server takes.

use crate::memory::Memory;
use crate::{Outcome, Path, Request};
use dbs_core::Volume;
use dbs_core::volume::{self, Finish, Read, Start};
use std::sync::Arc;

/// A volume whose data is transferred here.
pub struct Direct {
    device: Arc<Memory>,
    volume: Volume,
    request: volume::Request,
    buffer: Vec<u8>,
}

impl Direct {
    /// Requests of `length` bytes to a volume on `device`.
    pub fn new(device: Arc<Memory>, volume: Volume, length: u64) -> Self {
        Self { device, volume, request: volume::Request::new(), buffer: vec![2; length as usize] }
    }

    fn read(&mut self, offset: u64) -> Outcome<()> {
        let Self { device, volume, request, buffer } = self;
        if volume.start_read(offset, buffer.len() as u64, request)? != Start::Io {
            return Err("there is nothing to read".into());
        }
        buffer[0] = 0;
        let mut parts = request.segments().iter();
        let done = parts.try_for_each(|part| {
            device.device_read(part.device, &mut buffer[part.start..part.start + part.length])
        });
        if request.finish_read(done, buffer)? != Read::Done {
            return Err("what was read is in doubt".into());
        }
        if buffer[0] == 0 { Err("what was read is zero".into()) } else { Ok(()) }
    }

    fn write(&mut self, offset: u64) -> Outcome<()> {
        let Self { device, volume, request, buffer } = self;
        if volume.start_write(offset, buffer.len() as u64, request)? != Start::Io {
            return Ok(volume.write_at(offset, buffer, false)?);
        }
        request.seal(buffer);
        let mut parts = request.segments().iter();
        let done = parts.try_for_each(|part| {
            device.device_write(part.device, &buffer[part.start..part.start + part.length])
        });
        match request.finish_write(done)? {
            Finish::Done => Ok(()),
            Finish::Commit => Ok(volume.flush()?),
        }
    }
}

impl Path for Direct {
    fn request(&mut self, request: Request) -> Outcome<()> {
        match request {
            Request::Read(offset) => self.read(offset),
            Request::Write(offset) => self.write(offset),
            Request::Flush => Ok(self.volume.flush()?),
        }
    }
}
