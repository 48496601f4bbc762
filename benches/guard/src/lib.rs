//! A store on a device in memory, and requests whose cost can be counted.

pub mod cases;
mod direct;
pub mod memory;
mod served;

/// A result whose error ends the measurement.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

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
