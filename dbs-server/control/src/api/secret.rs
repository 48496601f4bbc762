//! Secrets of encrypted volumes in requests.

use super::Request;
use dbs_core::Secret;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// What a secret is on the wire: the only member of an object, by one of these names.
const KINDS: [&str; 2] = ["passphrase", "key_file"];
/// The member of a wrapped key that lets who reads it try passphrases.
const WRAPPED: &str = "wrapped";

/// A secret on its way to who has the store open: `{"passphrase": TEXT}`, or `{"key_file": HEX}` with the 32 bytes as 64
/// hexadecimal digits. It is never shown: [`Request::for_log`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given(pub Secret);

/// On the wire.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Wire {
    Passphrase(String),
    KeyFile(String),
}

impl Serialize for Given {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let wire = match &self.0 {
            Secret::Passphrase(text) => Wire::Passphrase((**text).clone()),
            Secret::KeyFile(key) => {
                Wire::KeyFile(key.iter().map(|byte| format!("{byte:02x}")).collect())
            }
        };
        wire.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Errors of `serde` say what was there, which may be the secret itself.
        let wrong = |_| {
            D::Error::custom(format!("a secret is an object of one text, {}", KINDS.join(" or ")))
        };
        let secret = match Wire::deserialize(deserializer).map_err(wrong)? {
            Wire::Passphrase(text) => Secret::passphrase(&text),
            Wire::KeyFile(digits) => Secret::key_file(digits.as_bytes(), "`key_file`"),
        };
        secret.map(Self).map_err(D::Error::custom)
    }
}

impl Request {
    /// Whether it carries a secret, and leaves a key with who carries it out.
    #[must_use]
    pub fn has_secret(&self) -> bool {
        matches!(
            self,
            Self::VolumeCreateEncrypted { .. }
                | Self::VolumeUnlock { .. }
                | Self::VolumeRekey { .. }
        )
    }

    /// As text for those who read logs: as on the wire, without secrets.
    #[must_use]
    pub fn for_log(&self) -> String {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if hide(&mut value) {
            return value.to_string();
        }
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Replaces all that looks like a secret; whether there was one.
fn hide(value: &mut Value) -> bool {
    match value {
        Value::Object(members) => {
            let one = members.len() == 1;
            let mut any = false;
            for (name, member) in members {
                let secret = (one && KINDS.contains(&name.as_str())) || name == WRAPPED;
                if secret && member.is_string() {
                    *member = "hidden".into();
                    any = true;
                } else {
                    any |= hide(member);
                }
            }
            any
        }
        Value::Array(all) => all.iter_mut().fold(false, |any, value| hide(value) | any),
        _ => false,
    }
}
