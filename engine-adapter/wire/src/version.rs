//! The version of this program, as `longhorn version` and a controller tell it.

use crate::proto::ptypes::VersionOutput;

/// Numbers of the interfaces: those of upstream 1.12, which ours follow.
const CLI_API: i64 = 12;
const CLI_API_MIN: i64 = 8;
const CONTROLLER_API: i64 = 6;
const CONTROLLER_API_MIN: i64 = 4;
const DATA_FORMAT: i64 = 1;

impl VersionOutput {
    /// Ours.
    #[must_use]
    pub fn ours() -> Self {
        Self {
            version: concat!("v", env!("CARGO_PKG_VERSION")).to_owned(),
            git_commit: option_env!("DBS_GIT_COMMIT").unwrap_or_default().to_owned(),
            build_date: option_env!("DBS_BUILD_DATE").unwrap_or_default().to_owned(),
            cli_api_version: CLI_API,
            cli_api_min_version: CLI_API_MIN,
            controller_api_version: CONTROLLER_API,
            controller_api_min_version: CONTROLLER_API_MIN,
            data_format_version: DATA_FORMAT,
            data_format_min_version: DATA_FORMAT,
        }
    }
}
