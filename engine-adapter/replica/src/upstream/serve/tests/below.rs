//! Volumes of upstream's that rest on a backing image.

use super::*;

/// The image ends within an extent and within a block, and shows through where no file has anything.
const IMAGE: usize = 448 * BLOCK as usize + 3 * 512;

fn image_of(salt: usize) -> Vec<u8> {
    (0..IMAGE).map(|at| (at / 512 * 7 + salt) as u8 | 1).collect()
}

/// Upstream's replica of a volume that rests on an image beside its directory.
fn upstream_on_image(dir: &Path) {
    upstream_replica(dir);
    let base = dir.with_extension("base");
    fs::write(&base, image_of(1)).unwrap();
    edit(dir, |meta| meta.backing_file_path = base.display().to_string());
}

#[test]
fn a_chain_shows_the_image_where_no_file_has_anything() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_on_image(dir);
    let (chain, view) = (chain(dir), &upstream_views(dir)[HEAD]);
    let image = image_of(1);
    let at = 410 * BLOCK as usize;
    assert!(view[at..IMAGE] == image[at..], "some of it is seen");
    let mut random = fastrand::Rng::with_seed(8);
    let parts = (0..500).map(|_| {
        let at = random.u64(0..SIZE / 512);
        (at, random.u64(1..=(SIZE / 512 - at).min(600)))
    });
    for (at, count) in std::iter::once((0, SIZE / 512)).chain(parts) {
        let mut buf = vec![0xee; (count * 512) as usize];
        chain.read_at(at * 512, &mut buf).unwrap();
        assert!(buf == view[(at * 512) as usize..][..buf.len()], "{count} sectors from {at} on");
    }
}

/// As without an image; at some of the steps.
#[test]
fn a_process_that_serves_files_on_an_image_is_killed() {
    let place = tempfile::tempdir().unwrap();
    let mut left = BTreeMap::<_, u32>::new();
    for steps in (0..).step_by(3) {
        let dir = &place.path().join(format!("{steps}"));
        upstream_on_image(dir);
        let Some(state) = killed_at(dir, steps) else { break };
        *left.entry(state).or_default() += 1;
    }
    has_states(&left, &[MOVING, SERVING]);
}

#[test]
fn another_image_is_refused_before_a_file_is_moved_and_afterwards() {
    let place = tempfile::tempdir().unwrap();
    let dir = &place.path().join("r");
    upstream_on_image(dir);
    let base = base_of(dir).unwrap();
    let (other, large) = (place.path().join("other"), place.path().join("large"));
    fs::write(&other, image_of(2)).unwrap();
    fs::write(&large, vec![1; SIZE as usize]).unwrap();
    let before = names(dir);
    let begin = |base: Option<&Path>| begin(dir, "v", base, &StoreOptions::default(), &done);
    for (base, text) in
        [(None, "name it with --backing-file"), (Some(&*large), "backing file below")]
    {
        let refused = begin(base).unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
        assert_eq!(names(dir), before);
    }
    begin(Some(&base)).unwrap();
    let refused = find(dir, None).err().unwrap().to_string();
    assert!(refused.contains("name it with --backing-file"), "{refused}");
    for (base, fits) in [(&other, false), (&base, true)] {
        let store = store(dir);
        let options = ReplicaOptions {
            store_file: Some(dir.join(STORE_FILE)),
            backing_file: Some(base.clone()),
            taken: find(dir, Some(base)).unwrap(),
            take_over: Some(1),
            ..ReplicaOptions::new(dir, "v")
        };
        let opened = Replica::new(options, StoreSource::Own(store.clone()));
        let refused = opened.map(drop).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(refused.contains("not what they were"), !fits, "{refused}");
        store.close().unwrap();
    }
}
