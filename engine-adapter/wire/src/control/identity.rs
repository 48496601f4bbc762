//! Whether a caller has reached the process it meant: ports are reused, and a stale address must
//! not hit another volume's replica.

use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Whose process this is. Unary calls that name somebody else are refused.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Volume; empty if unknown.
    pub volume: String,
    /// Instance; empty if unknown.
    pub instance: String,
    /// What the process is, as the refusal names it: `replica` or `controller`.
    pub kind: &'static str,
}

impl Identity {
    /// The identity of a replica and of its sync agent.
    #[must_use]
    pub fn replica(volume: &str, instance: &str) -> Self {
        Self { volume: volume.to_owned(), instance: instance.to_owned(), kind: "replica" }
    }

    /// The identity of a volume's controller.
    #[must_use]
    pub fn controller(volume: &str, instance: &str) -> Self {
        Self { volume: volume.to_owned(), instance: instance.to_owned(), kind: "controller" }
    }

    /// Compares what the caller says with what is known; what one of both does not say passes.
    ///
    /// # Errors
    /// `FailedPrecondition`.
    pub fn check(&self, metadata: &MetadataMap) -> Result<(), Status> {
        for (key, what, own) in
            [("volume-name", "volume", &self.volume), ("instance-name", "instance", &self.instance)]
        {
            let Some(given) = only(metadata, key) else { continue };
            let given = given.as_bytes();
            if !own.is_empty() && !given.is_empty() && given != own.as_bytes() {
                let given = String::from_utf8_lossy(given);
                let text = format!("incorrect {what} name {given}; check {} address", self.kind);
                return Err(Status::failed_precondition(text));
            }
        }
        Ok(())
    }
}

/// Whether the text of an error is, or passes on, the refusal of another process's [`Identity`].
#[must_use]
pub fn is_refusal(text: &str) -> bool {
    ["volume", "instance"].iter().any(|what| text.contains(&format!("incorrect {what} name ")))
}

/// The value of a key that occurs exactly once.
fn only<'a>(metadata: &'a MetadataMap, key: &str) -> Option<&'a MetadataValue<Ascii>> {
    let mut all = metadata.get_all(key).iter();
    all.next().filter(|_| all.next().is_none())
}

impl Interceptor for Identity {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        self.check(request.metadata())?;
        Ok(request)
    }
}
