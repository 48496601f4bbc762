//! `longhorn version`.

use crate::proto::controller::controller_service_client::ControllerServiceClient;
use crate::proto::controller::{VersionDetailGetReply, VersionOutput};
use serde::Serialize;
use std::time::Duration;
use tonic::metadata::MetadataValue;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};

/// Calls of the command line are answered at once or not at all.
const TIMEOUT: Duration = Duration::from_secs(180);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Numbers of the interfaces: those of upstream 1.12, which ours follow.
const CLI_API: i64 = 12;
const CLI_API_MIN: i64 = 8;
const CONTROLLER_API: i64 = 6;
const CONTROLLER_API_MIN: i64 = 4;
const DATA_FORMAT: i64 = 1;

/// One side's version, as `longhorn-manager` reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    version: String,
    git_commit: String,
    build_date: String,
    #[serde(rename = "cliAPIVersion")]
    cli_api: i64,
    #[serde(rename = "cliAPIMinVersion")]
    cli_api_min: i64,
    #[serde(rename = "controllerAPIVersion")]
    controller_api: i64,
    #[serde(rename = "controllerAPIMinVersion")]
    controller_api_min: i64,
    data_format_version: i64,
    data_format_min_version: i64,
}

/// The output of the command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Versions {
    client_version: Version,
    server_version: Option<Version>,
}

impl Version {
    /// Ours.
    #[must_use]
    pub fn ours() -> Self {
        Self {
            version: concat!("v", env!("CARGO_PKG_VERSION")).to_owned(),
            git_commit: option_env!("DBS_GIT_COMMIT").unwrap_or_default().to_owned(),
            build_date: option_env!("DBS_BUILD_DATE").unwrap_or_default().to_owned(),
            cli_api: CLI_API,
            cli_api_min: CLI_API_MIN,
            controller_api: CONTROLLER_API,
            controller_api_min: CONTROLLER_API_MIN,
            data_format_version: DATA_FORMAT,
            data_format_min_version: DATA_FORMAT,
        }
    }
}

impl From<VersionOutput> for Version {
    fn from(output: VersionOutput) -> Self {
        Self {
            version: output.version,
            git_commit: output.git_commit,
            build_date: output.build_date,
            cli_api: output.cli_api_version,
            cli_api_min: output.cli_api_min_version,
            controller_api: output.controller_api_version,
            controller_api_min: output.controller_api_min_version,
            data_format_version: output.data_format_version,
            data_format_min_version: output.data_format_min_version,
        }
    }
}

/// An engine to ask.
pub struct Engine<'a> {
    /// `http://`, `tcp://` or nothing, and `HOST:PORT`.
    pub url: &'a str,
    /// If not empty, the engine refuses when it serves another volume.
    pub volume_name: &'a str,
    /// If not empty, likewise for the instance.
    pub instance_name: &'a str,
}

/// The versions as JSON, indented as upstream does; with an engine, its own, too.
///
/// # Errors
/// Why the engine did not tell its version.
pub fn versions(engine: Option<&Engine<'_>>) -> Result<String, String> {
    let server_version = engine.map(ask).transpose()?;
    let versions = Versions { client_version: Version::ours(), server_version };
    let mut text = Vec::new();
    let format = serde_json::ser::PrettyFormatter::with_indent(b"\t");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, format);
    versions.serialize(&mut serializer).map_err(|e| e.to_string())?;
    String::from_utf8(text).map_err(|e| e.to_string())
}

fn ask(engine: &Engine<'_>) -> Result<Version, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("starting a runtime: {e}"))?;
    let failed = |e: Status| format!("asking {} for its version: {}", engine.url, e.message());
    let reply = runtime.block_on(call(engine))?.map_err(failed)?.into_inner();
    reply.version.map(Version::from).ok_or_else(|| format!("{} told no version", engine.url))
}

async fn call(
    engine: &Engine<'_>,
) -> Result<Result<Response<VersionDetailGetReply>, Status>, String> {
    let address = engine.url.trim_start_matches("tcp://").trim_start_matches("http://");
    let address = address.strip_suffix("/v1").unwrap_or(address).trim_end_matches('/');
    let failed = |e: tonic::transport::Error| {
        let mut text = format!("cannot reach an engine at {address}: {e}");
        let mut source = std::error::Error::source(&e);
        while let Some(inner) = source {
            text += &format!(": {inner}");
            source = inner.source();
        }
        text
    };
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(failed)?;
    let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).connect().await.map_err(failed)?;
    let mut request = Request::new(());
    request.set_timeout(TIMEOUT);
    for (key, value) in
        [("volume-name", engine.volume_name), ("instance-name", engine.instance_name)]
    {
        if !value.is_empty() {
            let value: MetadataValue<_> =
                value.parse().map_err(|_| format!("`{value}` cannot be sent as a name"))?;
            request.metadata_mut().insert(key, value);
        }
    }
    Ok(ControllerServiceClient::new(channel).version_detail_get(request).await)
}

#[cfg(test)]
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
