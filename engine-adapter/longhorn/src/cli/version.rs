//! `longhorn version`.

use super::args::{Globals, VersionArgs};
use super::client::{block_on, connect};
use super::output::{Failure, json, print};
use crate::client::Version;
use dbs_core::{Error, Result};
use serde::Serialize;

/// The output of the command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Versions {
    client_version: Version,
    server_version: Option<Version>,
}

/// Prints our version, and that of the controller unless told not to ask.
///
/// # Errors
/// Why the controller did not tell its version.
pub fn run(args: &VersionArgs, globals: &Globals) -> std::result::Result<(), Failure> {
    // Upstream's word for it.
    let failed = |e: Error| Failure::behind("Error running info command", e);
    let server = if args.client_only { Ok(None) } else { ask(globals).map(Some) };
    server.and_then(|server| print(&versions(server)?)).map_err(failed)
}

/// The versions as JSON.
fn versions(server_version: Option<Version>) -> Result<String> {
    let versions = Versions { client_version: Version::ours(), server_version };
    json(&versions).map_err(|e| Error::io(e.into(), "encoding JSON"))
}

fn ask(globals: &Globals) -> Result<Version> {
    block_on(async { connect(globals)?.version().await })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_output_has_upstream_s_shape() {
        let text = versions(None).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(value["serverVersion"].is_null() && text.contains("\n\t\"serverVersion\": null\n"));
        let client = value["clientVersion"].as_object().unwrap();
        let keys: Vec<_> = text.lines().filter_map(|l| l.trim().strip_prefix('"')).collect();
        let keys: Vec<_> = keys.iter().map(|l| l.split('"').next().unwrap()).collect();
        assert_eq!(
            keys,
            [
                "clientVersion",
                "version",
                "gitCommit",
                "buildDate",
                "cliAPIVersion",
                "cliAPIMinVersion",
                "controllerAPIVersion",
                "controllerAPIMinVersion",
                "dataFormatVersion",
                "dataFormatMinVersion",
                "serverVersion"
            ]
        );
        assert_eq!(client["cliAPIVersion"], 12);
        assert_eq!(client["dataFormatMinVersion"], 1);
        assert!(client["gitCommit"].is_string() && client["buildDate"].is_string());
    }
}
