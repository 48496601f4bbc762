//! How a replica failed to expand, as replicas say it and controllers read it: JSON, in the message of the
//! gRPC status.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What became of a replica that failed to expand: the engine keeps replicas that are as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpandCode {
    /// Nobody knows.
    ResultUnknown,
    /// It failed, and nothing was undone.
    FunctionFailedWithoutRollback,
    /// It failed, and everything is as before.
    FunctionFailedRollbackSucceeded,
    /// It failed, and could not be undone.
    FunctionFailedRollbackFailed,
}

/// Why an expansion failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExpandError {
    /// What became of the replica.
    pub code: ExpandCode,
    /// What went wrong.
    #[serde(default)]
    pub message: String,
    /// What went wrong when it was undone.
    #[serde(default)]
    pub rollback_message: String,
}

impl ExpandError {
    /// An error after which this is so; nothing was undone.
    pub fn new(code: ExpandCode, message: impl fmt::Display) -> Self {
        Self { code, message: message.to_string(), rollback_message: String::new() }
    }

    /// The message of the status.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Texts always have a form in JSON.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// What the message of a status says, if it is of this form.
    #[must_use]
    pub fn from_json(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// What the message of a failed call says. One of another form leaves the result unknown, unless the
    /// call was refused before anything was done: then everything is as it was.
    #[must_use]
    pub fn of_call(message: &str, refused: bool) -> Self {
        let mut error = Self::from_json(message)
            .unwrap_or_else(|| Self::new(ExpandCode::ResultUnknown, message));
        if refused && error.code == ExpandCode::ResultUnknown {
            error.code = ExpandCode::FunctionFailedRollbackSucceeded;
        }
        error
    }
}

impl fmt::Display for ExpandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: code = {:?}, message = {}", self.code, self.message)?;
        if !self.rollback_message.is_empty() {
            write!(f, ", rollbackMessage: {}", self.rollback_message)?;
        }
        Ok(())
    }
}

impl std::error::Error for ExpandError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_read_from_json() {
        let text = r#"{"code":"FunctionFailedRollbackFailed","message":"m","rollbackMessage":"r"}"#;
        let failure = ExpandError::of_call(text, false);
        assert_eq!(failure.code, ExpandCode::FunctionFailedRollbackFailed);
        assert_eq!(failure.to_json(), text);
        let shown = "error: code = FunctionFailedRollbackFailed, message = m, rollbackMessage: r";
        assert_eq!(failure.to_string(), shown);
        for other in ["timed out", r#"{"code":"Else"}"#, "{}"] {
            let unknown = ExpandError::of_call(other, false);
            assert_eq!(unknown, ExpandError::new(ExpandCode::ResultUnknown, other));
            let refused = ExpandError::of_call(other, true);
            assert_eq!(refused.code, ExpandCode::FunctionFailedRollbackSucceeded, "{other}");
        }
        assert_eq!(ExpandError::of_call(text, true), failure);
    }
}
