//! NBD, the client's side: what it makes of a server that says anything.

use crate::input::Input;
use dbs_core::io::queue::Action;
use dbs_nbd::{Buffered, Client, ClientOptions, Pipeline};
use std::io::{self, Read, Write};

/// Requests of one input.
const REQUESTS_MAX: usize = 16;

/// A server whose answers are written down already; it then ends the connection.
pub(crate) struct Script<'a>(pub &'a [u8]);

impl Read for Script<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A client that asks for one thing after the other.
pub(crate) fn client(flags: u8, data: &[u8]) {
    let options = ClientOptions {
        contexts: vec!["base:allocation".to_owned(), "dbs:x".to_owned()],
        extended: flags & 2 != 0,
    };
    if flags & 8 != 0 {
        // An error is as good: it must end.
        let _ = Client::list(Script(data));
        return;
    }
    let mut input = Input::new(data);
    let plan = input.bytes(REQUESTS_MAX);
    let script = Script(input.rest());
    if flags & 4 != 0 {
        let _ = pipelined(plan, script, &options);
    } else {
        let _ = one_by_one(plan, script, &options);
    }
}

fn one_by_one(plan: &[u8], script: Script<'_>, options: &ClientOptions) -> io::Result<()> {
    let mut client = Client::over(script, "disk", options)?;
    let names: Vec<String> = client.contexts().map(str::to_owned).collect();
    for step in plan {
        let at = u64::from(step >> 3) << 12;
        let result = match step % 7 {
            0 | 1 => client.read_at(at, &mut [0; 8192]),
            2 => client.write_at(at, &[1; 4096], true),
            3 => client.trim(at, 4096, false),
            4 => client.write_zeroes(at, 4096, 0),
            5 => client.flush(),
            _ => match names.first() {
                Some(name) => client.block_status(name, at, 65536).map(|extents| {
                    let total: u64 = extents.iter().map(|extent| extent.length).sum();
                    assert!(total <= 65536 && extents.iter().all(|e| e.length > 0));
                }),
                None => Ok(()),
            },
        };
        // A refused request leaves the connection usable, a broken one does not.
        if result.is_err() && step & 1 == 0 {
            break;
        }
    }
    client.disconnect().map(drop)
}

fn pipelined(plan: &[u8], script: Script<'_>, options: &ClientOptions) -> io::Result<()> {
    let client = Client::over(Buffered::new(script), "disk", options)?;
    let mut pipeline = Pipeline::new(client, 4, 8192)?;
    let mut idle = vec![0, 1, 2, 3];
    for step in plan {
        let action = match step % 3 {
            0 => Action::Read,
            1 => Action::Write,
            _ => Action::Flush,
        };
        if let Some(slot) = idle.pop() {
            pipeline.start(slot, action, u64::from(step >> 2) << 12, 4096)?;
        }
        if idle.is_empty() || step & 0x80 != 0 {
            pipeline.finish(&mut idle)?;
            assert!(idle.iter().all(|slot| *slot < 4), "a slot that there is not");
        }
    }
    Ok(())
}
