use super::*;
use serde_json::json;

#[test]
fn names_on_the_wire_are_stable() {
    for (request, wire) in [
        (Request::Info, json!({"method": "info"})),
        (Request::Grow { size: 5 }, json!({"method": "grow", "params": {"size": 5}})),
        (
            Request::VolumeCreate { volume: "a".into(), size: 1, rebuilding: false },
            json!({"method": "volume.create", "params": {"volume": "a", "size": 1}}),
        ),
        (Request::VolumeTrim, json!({"method": "volume.trim"})),
        (
            Request::VolumeRelease { volume: "a".into(), dry_run: true },
            json!({"method": "volume.release", "params": {"volume": "a", "dry_run": true}}),
        ),
        (
            Request::SnapshotRollback { volume: "a".into(), snapshot: "b".into() },
            json!({"method": "snapshot.rollback", "params": {"volume": "a", "snapshot": "b"}}),
        ),
    ] {
        assert_eq!(serde_json::to_value(&request).unwrap(), wire);
        assert_eq!(serde_json::from_value::<Request>(wire).unwrap(), request);
    }
}

#[test]
fn optional_parameters_may_be_absent() {
    let wire = json!({"method": "volume.resize", "params": {"volume": "a", "size": 1}});
    assert_eq!(
        serde_json::from_value::<Request>(wire).unwrap(),
        Request::VolumeResize { volume: "a".into(), size: 1, shrink: false }
    );
    let wire = json!({"method": "volume.list", "params": {}});
    assert_eq!(
        serde_json::from_value::<Request>(wire).unwrap(),
        Request::VolumeList { usage: false }
    );
}

#[test]
fn no_parameters_may_be_written_either_way() {
    for method in ["info", "flush", "volume.trim", "volume.list", "vacuum"] {
        let plain = Request::from_wire(json!({"method": method})).unwrap();
        let empty = Request::from_wire(json!({"method": method, "params": {}})).unwrap();
        assert_eq!(plain, empty);
    }
    for wire in [
        json!({"method": "info", "params": {"a": 1}}),
        json!({"method": "grow", "params": {}}),
        json!({"method": "grow"}),
        json!({"method": "flush", "params": []}),
        json!(["info"]),
    ] {
        let error = Request::from_wire(wire.clone()).unwrap_err();
        assert_eq!(
            error.to_string(),
            serde_json::from_value::<Request>(wire).unwrap_err().to_string()
        );
    }
}

#[test]
fn unknown_methods_and_parameters_are_refused() {
    for wire in [
        json!({"method": "format"}),
        json!({"method": "volume.delete"}),
        json!({"method": "volume.delete", "params": {}}),
        json!({"method": "volume.delete", "params": {"volume": 7}}),
        json!({"method": "volume.delete", "params": {"volume": "a", "dry_run": true}}),
        json!({"method": "grow", "params": {"size": -1}}),
        json!({"method": "info", "param": {}}),
        json!("info"),
        json!(null),
    ] {
        assert!(serde_json::from_value::<Request>(wire.clone()).is_err(), "{wire}");
    }
}

#[test]
fn readers_need_no_writing() {
    assert!(!Request::Check.writes());
    assert!(Request::Flush.writes());
    assert!(Request::VolumeTrim.writes());
    let release = |dry_run| Request::VolumeRelease { volume: "a".into(), dry_run };
    assert!(release(false).writes() && release(false).leaves_work());
    assert!(!release(true).writes() && !release(true).leaves_work());
    assert!(Request::VolumeDelete { volume: "a".into() }.leaves_work());
    assert!(!Request::VolumeComplete { volume: "a".into() }.leaves_work());
}
