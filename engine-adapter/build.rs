//! Compiles the protocol definitions in `proto/`, without `protoc`.

use prost::Message;
use std::env;
use std::error::Error;
use std::path::PathBuf;

const FILES: [&str; 6] = [
    "grpc/health.proto",
    "longhorn/common.proto",
    "longhorn/replica.proto",
    "longhorn/syncagent.proto",
    "longhorn/profiler.proto",
    "dbs/peer.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".dbs").compile_fds(descriptors)?;
    // Apart, so that our servers' reflection does not show what they do not offer.
    let controller = protox::compile(["longhorn/controller.proto"], ["proto"])?;
    let out = out.join("controller");
    std::fs::create_dir_all(&out)?;
    tonic_prost_build::configure().build_server(false).out_dir(out).compile_fds(controller)?;
    Ok(())
}
