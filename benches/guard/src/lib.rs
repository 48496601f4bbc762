//! A store on a device in memory, and requests whose cost can be counted.

pub mod cases;
mod direct;
pub mod memory;
mod served;

/// A result whose error ends the measurement.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What a case needs is not to be had on this system.
#[derive(Debug)]
pub struct Unavailable(pub String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Read from an offset.
    Read(u64),
    /// Write to an offset.
    Write(u64),
    /// Make durable what was written.
    Flush,
}

/// A way for requests to reach the store.
pub(crate) trait Path {
    /// Does one request and checks that it was done. What is read is never zero in its first byte.
    fn request(&mut self, request: Request) -> Outcome<()>;
}
