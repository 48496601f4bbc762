//! Messages and services of Longhorn's control plane, generated from `proto/`.
#![allow(missing_docs, clippy::all, clippy::pedantic)]

/// Package `ptypes`: replica and sync agent.
pub mod ptypes {
    tonic::include_proto!("ptypes");
}

/// Package `profilerrpc`.
pub mod profilerrpc {
    tonic::include_proto!("profilerrpc");
}

/// Package `ptypes`: the controller.
pub mod controller {
    include!(concat!(env!("OUT_DIR"), "/controller/ptypes.rs"));
}

/// Package `dbs`: between the sync agents of two DBS replicas.
pub mod dbs {
    tonic::include_proto!("dbs");
}

/// Package `grpc.health.v1`.
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}

/// Whether a field has the value that it has if nobody sets it.
fn is_empty<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// All definitions of a replica's servers, for their reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// All definitions of a controller's server, for its reflection.
pub const CONTROLLER_DESCRIPTORS: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/controller/descriptors.bin"));
