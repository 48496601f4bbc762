//! What the page may ask the server of the store to do: some of the commands of the control socket, as they are there.

use crate::subject::Leave;
use dbs_control::api::Request;

pub(super) fn leave(request: &Request) -> Leave {
    use Request as R;
    match request {
        R::Info
        | R::VolumeShow { usage: false, .. }
        | R::VolumeChildren { .. }
        | R::SnapshotList { usage: false, .. }
        | R::SnapshotShow { usage: false, .. } => Leave::Look,
        R::VolumeShow { .. }
        | R::SnapshotList { .. }
        | R::SnapshotShow { .. }
        | R::SpaceMap { .. }
        | R::SpaceOwners { .. } => Leave::LookAtAll,
        R::SnapshotCreate { system: false, rebuilding: None, .. }
        | R::VolumeClone { rebuilding: false, .. }
        | R::SnapshotDelete { uuid: Some(_), .. }
        | R::SnapshotRollback { uuid: Some(_), .. }
        | R::VolumeDelete { uuid: Some(_), rebuilding: false, .. } => Leave::Change,
        R::SnapshotDelete { uuid: None, .. }
        | R::SnapshotRollback { uuid: None, .. }
        | R::VolumeDelete { uuid: None, .. } => Leave::Lacks("uuid"),
        _ => Leave::Never,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(method: &str, params: serde_json::Value) -> Leave {
        leave(&Request::from_wire(json!({ "method": method, "params": params })).unwrap())
    }

    #[test]
    fn what_takes_content_away_needs_the_uuid_that_was_confirmed() {
        let uuid = "0b7b51b0-54d2-4f6c-8e0b-6a3b8c1d2e3f";
        for (method, mut params) in [
            ("volume.delete", json!({"volume": "v"})),
            ("snapshot.delete", json!({"volume": "v", "snapshot": "s"})),
            ("snapshot.rollback", json!({"volume": "v", "snapshot": "s"})),
        ] {
            assert_eq!(of(method, params.clone()), Leave::Lacks("uuid"), "{method}");
            params["uuid"] = uuid.into();
            assert_eq!(of(method, params), Leave::Change, "{method}");
        }
    }

    #[test]
    fn everything_else_that_changes_a_store_is_refused() {
        let volume = json!({"volume": "v"});
        for (method, params) in [
            ("grow", json!({"size": 1})),
            ("vacuum", json!({})),
            ("check", json!({})),
            ("scrub", json!({})),
            ("dump", json!({})),
            ("flush", json!({})),
            ("top", json!({})),
            ("volume.list", json!({"usage": true})),
            ("volume.create", json!({"volume": "v", "size": 512})),
            ("volume.complete", volume.clone()),
            ("volume.flatten", volume.clone()),
            ("volume.set", json!({"volume": "v", "iops": 1})),
            ("volume.unlock", json!({"volume": "v", "secret": {"passphrase": "x"}})),
            ("volume.lock", volume.clone()),
            ("volume.rename", json!({"volume": "v", "new": "w"})),
            ("volume.delete", json!({"volume": "v", "uuid": "x", "rebuilding": true})),
            (
                "volume.clone",
                json!({"volume": "v", "snapshot": "s", "new": "w", "rebuilding": true}),
            ),
            ("snapshot.create", json!({"volume": "v", "snapshot": "s", "system": true})),
            ("snapshot.create", json!({"volume": "v", "snapshot": "s", "rebuilding": true})),
            ("snapshot.unprotect", json!({"volume": "v", "snapshot": "s"})),
            ("device.attach", volume),
            ("client.kick", json!({"client": 1})),
        ] {
            assert_eq!(of(method, params), Leave::Never, "{method}");
        }
    }

    #[test]
    fn no_command_that_any_page_may_send_writes() {
        for (method, params) in [
            ("info", json!({})),
            ("volume.show", json!({"volume": "v"})),
            ("snapshot.list", json!({"volume": "v", "usage": true})),
            ("space.map", json!({})),
            ("space.owners", json!({"offset": 0, "length": 1})),
        ] {
            assert!(
                matches!(of(method, params.clone()), Leave::Look | Leave::LookAtAll),
                "{method}"
            );
            let request =
                Request::from_wire(json!({ "method": method, "params": params })).unwrap();
            assert!(!request.writes(), "{method}");
        }
    }
}
