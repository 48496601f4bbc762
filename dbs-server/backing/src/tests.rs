use super::*;
use dbs_core::ErrorKind;
use std::process::{Command, Output};

const SIZE: usize = 3 << 20;

/// Content with holes, text that packs well, and noise that does not.
fn content(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = vec![0; SIZE + 512];
    for part in bytes.chunks_mut(48 << 10) {
        match rng.u8(..3) {
            0 => {}
            1 => part.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 100) as u8),
            _ => rng.fill(part),
        }
    }
    bytes
}

fn there_is_qemu_img() -> bool {
    let there = Command::new("qemu-img").arg("--version").output().is_ok();
    if !there {
        println!("SKIPPED: needs qemu-img");
    }
    there
}

fn qemu_img(args: &[&str], dir: &Path) {
    let run = || Command::new("qemu-img").args(args).current_dir(dir).output().unwrap();
    // For an encrypted image it measures how quick this machine is, and fails if something else takes it meanwhile.
    let in_vain = |output: &Output| String::from_utf8_lossy(&output.stderr).contains("CPU usage");
    let output = (0..20).map(|_| run()).find(|output| !in_vain(output)).unwrap_or_else(run);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn error_of(path: &Path) -> (ErrorKind, String) {
    match open(path) {
        Ok(image) => panic!("{} was opened", image.name()),
        Err(error) => (error.kind(), error.to_string()),
    }
}

/// As qemu-img made it, in pieces of any size.
#[test]
fn images_read_as_what_they_were_made_of() {
    if !there_is_qemu_img() {
        return;
    }
    let mut rng = fastrand::Rng::with_seed(3);
    let dir = tempfile::tempdir().unwrap();
    let expected = content(&mut rng);
    fs::write(dir.path().join("raw"), &expected).unwrap();
    let kinds = [
        &["-o", "compat=1.1"][..],
        &["-o", "compat=0.10"],
        &["-c"],
        &["-o", "cluster_size=512"],
        &["-c", "-o", "cluster_size=4k"],
        &["-c", "-o", "cluster_size=2M"],
        &["-o", "preallocation=metadata"],
    ];
    let mut images = vec![open(&dir.path().join("raw")).unwrap()];
    for (at, kind) in kinds.iter().enumerate() {
        let name = format!("image{at}");
        let args = [&["convert", "-O", "qcow2"], *kind, &["raw", &name]].concat();
        qemu_img(&args, dir.path());
        images.push(open(&dir.path().join(name)).unwrap());
    }
    for image in &images {
        assert_eq!(image.size(), expected.len() as u64);
        let mut all = vec![0xaa; expected.len()];
        image.read_at(0, &mut all).unwrap();
        assert!(all == expected, "{}", image.identity());
        for _ in 0..200 {
            let at = rng.usize(..expected.len() / 512) * 512;
            let length = (rng.usize(1..300) * 512).min(expected.len() - at);
            let mut part = vec![0xaa; length];
            image.read_at(at as u64, &mut part).unwrap();
            assert!(part == expected[at..][..length], "{} {at}+{length}", image.identity());
        }
        assert!(image.read_at(expected.len() as u64, &mut [0; 512]).is_err());
    }
    let mut identities: Vec<_> = images.iter().map(|image| image.identity()).collect();
    identities.sort_unstable();
    identities.dedup();
    assert_eq!(identities.len(), images.len(), "{identities:?}");
}

/// What cannot be read right is refused by name: a backing file of its own could be any file of the host.
#[test]
fn what_is_not_read_is_refused() {
    if !there_is_qemu_img() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let refused = |args: &[&str], text: &str| {
        // What was there would be locked or asked for.
        let _ = fs::remove_file(&path);
        qemu_img(args, dir.path());
        let (kind, said) = error_of(&path);
        assert!(kind == ErrorKind::Unsupported && said.contains(text), "{args:?}: {said}");
        assert!(said.contains(path.to_str().unwrap()), "{said}");
    };
    fs::write(dir.path().join("raw"), vec![1; 1 << 20]).unwrap();
    let create = ["create", "-q", "-f", "qcow2"];
    refused(
        &[&create[..], &["-b", "raw", "-F", "raw", "image"]].concat(),
        "backing file of its own",
    );
    let aes = ["--object", "secret,id=s,data=x", "-o", "encrypt.format=luks,encrypt.key-secret=s"];
    refused(&[&create[..], &aes, &["image", "1M"]].concat(), "encrypted");
    refused(&[&create[..], &["-o", "data_file=d", "image", "1M"]].concat(), "another file");
    refused(&[&create[..], &["-o", "extended_l2=on", "image", "1M"]].concat(), "extended L2");
    refused(&[&create[..], &["-o", "compression_type=zstd", "image", "1M"]].concat(), "zlib");
    for format in ["vmdk", "vdi", "vhdx", "vpc", "qed"] {
        refused(&["create", "-q", "-f", format, "image", "1M"], "is not supported");
    }
}

#[test]
fn paths_and_sizes_are_those_of_upstream() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    assert_eq!(error_of(&path("none")).0, ErrorKind::NotFound);
    let (_, said) = error_of(dir.path());
    assert!(said.contains("expected exactly one file, found 0 files/subdirectories"), "{said}");
    fs::create_dir(path("sub")).unwrap();
    let (_, said) = error_of(dir.path());
    assert!(said.contains("expected exactly one file, found a subdirectory"), "{said}");
    fs::write(path("sub/only"), [1; 1024]).unwrap();
    let image = open(&path("sub")).unwrap();
    assert!(image.size() == 1024 && image.name().ends_with("sub/only`"), "{}", image.name());
    fs::write(path("odd"), [1; 1000]).unwrap();
    let (_, said) = error_of(&path("odd"));
    assert!(said.contains("should be a multiple of 512 bytes"), "{said}");
    fs::write(path("empty"), []).unwrap();
    assert_eq!(error_of(&path("empty")).0, ErrorKind::Invalid);
}

/// Another version of a file is another file. One block in the middle of a large file may go unseen.
#[test]
fn the_identity_is_that_of_the_bytes_and_not_of_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut bytes = content(&mut fastrand::Rng::with_seed(5));
    let mut of = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        change(&mut bytes);
        fs::write(path(name), &bytes).unwrap();
        open(&path(name)).unwrap().identity().to_owned()
    };
    let first = of("a", &|_| {});
    assert_eq!(of("b", &|_| {}), first);
    for change in [
        &(|bytes: &mut Vec<u8>| bytes[100] ^= 1) as &dyn Fn(&mut Vec<u8>),
        &|bytes| *bytes.last_mut().unwrap() ^= 1,
        &|bytes| bytes.extend([0; 512]),
        &|bytes| bytes.rotate_left(4096),
    ] {
        assert_ne!(of("c", change), first);
    }
}

/// What was cut off, as by a download that broke off, is an error and no zeros.
#[test]
fn an_image_that_is_cut_off_gives_no_zeros() {
    if !there_is_qemu_img() {
        return;
    }
    let mut rng = fastrand::Rng::with_seed(9);
    let dir = tempfile::tempdir().unwrap();
    let expected = content(&mut rng);
    fs::write(dir.path().join("raw"), &expected).unwrap();
    for kind in [&["-c"][..], &["-o", "cluster_size=4k"], &["-o", "cluster_size=64k"]] {
        qemu_img(&[&["convert", "-O", "qcow2"], kind, &["raw", "image"]].concat(), dir.path());
        let good = fs::read(dir.path().join("image")).unwrap();
        let mut errors = 0;
        for end in (512..good.len()).step_by(good.len() / 150) {
            let path = dir.path().join("cut");
            fs::write(&path, &good[..end]).unwrap();
            let Ok(image) = open(&path) else {
                errors += 1;
                continue;
            };
            for (at, wanted) in (0..).step_by(4096).zip(expected.chunks(4096)) {
                let mut block = vec![0xaa; wanted.len()];
                match image.read_at(at, &mut block) {
                    Ok(()) => assert!(block == wanted, "{kind:?} cut at {end}: {at}"),
                    Err(_) => errors += 1,
                }
            }
        }
        assert!(errors > 100, "{kind:?}: {errors}");
    }
}

/// No file makes a reader panic, hang, or take much memory.
#[test]
fn hostile_images_are_errors_or_bytes() {
    if !there_is_qemu_img() {
        return;
    }
    let mut rng = fastrand::Rng::with_seed(7);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("raw"), content(&mut rng)).unwrap();
    let (mut opened, mut read) = (0, 0);
    for kind in [&["-c"][..], &["-o", "cluster_size=4k"]] {
        qemu_img(&[&["convert", "-O", "qcow2"], kind, &["raw", "image"]].concat(), dir.path());
        let good = fs::read(dir.path().join("image")).unwrap();
        for round in 0..400 {
            let mut bad = good.clone();
            for _ in 0..rng.usize(1..6) {
                // The header, the tables behind it, or anywhere.
                let end = [112, 4 << 16, good.len()][round % 3].min(good.len());
                bad[rng.usize(4..end)] = if rng.bool() { rng.u8(..) } else { 0xff };
            }
            if rng.u8(..4) == 0 {
                bad.truncate(rng.usize(4..bad.len()));
            }
            let path = dir.path().join("bad");
            fs::write(&path, &bad).unwrap();
            let Ok(image) = open(&path) else { continue };
            opened += 1;
            let mut buf = vec![0; 256 << 10];
            for _ in 0..8 {
                let sectors = image.size().saturating_sub(buf.len() as u64) / 512;
                read += u32::from(image.read_at(rng.u64(..=sectors) * 512, &mut buf).is_ok());
            }
        }
    }
    assert!(opened > 50 && read > 100, "{opened} {read}");
}

/// The same file by `docs/format.md`, by which the golden image was made.
#[test]
fn the_golden_file_is_the_one_that_its_store_names() {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dbs-core/tests/fixtures/v2.0-backed");
    let dir = tempfile::tempdir().unwrap();
    let unpack = |name: &str| {
        let path = dir.path().join(name);
        let packed = File::open(folder.join(format!("backed.{name}.gz"))).unwrap();
        let mut packed = flate2::read::GzDecoder::new(packed);
        io::copy(&mut packed, &mut File::create(&path).unwrap()).unwrap();
        path
    };
    let (file, store) = (open(&unpack("file")).unwrap(), unpack("img"));
    let options = dbs_core::OpenOptions {
        read_only: true,
        tail: dbs_core::TailPlace::None,
        backing: vec![file],
        ..Default::default()
    };
    let store = dbs_core::Store::open(&store, &options).unwrap();
    let contents = fs::read_to_string(folder.join("backed.contents.txt")).unwrap();
    for line in contents.lines() {
        let spec = line.split(' ').next().unwrap();
        let open = store.volume(spec).unwrap();
        let mut bytes = vec![0xaa; open.size() as usize];
        open.read_at(0, &mut bytes).unwrap();
        let crc = dbs_core::format::crc::crc32c(&bytes);
        assert_eq!(format!("{spec} {} {crc:08x}", bytes.len()), line);
    }
}

/// Opening it would wait for somebody who writes.
#[test]
fn a_fifo_is_no_backing_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let (kind, text) = error_of(&path);
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(text.contains("no regular file") && text.contains("fifo"), "{text}");
}
