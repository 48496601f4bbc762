//! What all gRPC servers of replicas and controllers share: who may call, health, reflection, the
//! profiler's switch, the server itself, and how an expansion failed.

pub mod expansion;
mod health;
mod identity;
mod profiler;
mod server;

pub use health::HealthService;
pub use identity::{Identity, is_refusal};
pub use profiler::ProfilerService;
pub use server::ControlServer;

use crate::proto::health::health_server::HealthServer;
use crate::proto::profilerrpc::profiler_server::ProfilerServer;
use crate::proto::{CONTROLLER_DESCRIPTORS, DESCRIPTORS};
use dbs_core::{Error, Result};
use tonic::server::NamedService;
use tonic::service::{Routes, RoutesBuilder};
use tonic_reflection::server::Builder;

/// The services that belong to every port of a replica: profiler and reflection of both versions, and
/// health where upstream has it. `own` are the names of the services that the caller adds to them.
///
/// # Errors
/// `Invalid` if the definitions this was built with contradict themselves.
pub fn routes(identity: &Identity, own: &[&str], with_health: bool) -> Result<RoutesBuilder> {
    described(identity, own, with_health, DESCRIPTORS)
}

/// The same for a controller's only port.
///
/// # Errors
/// As [`routes`].
pub fn controller_routes(identity: &Identity, own: &[&str]) -> Result<RoutesBuilder> {
    described(identity, own, true, CONTROLLER_DESCRIPTORS)
}

fn described(
    identity: &Identity,
    own: &[&str],
    with_health: bool,
    descriptors: &'static [u8],
) -> Result<RoutesBuilder> {
    let mut builder = Routes::builder();
    let mut names = own.to_vec();
    if with_health {
        let health = HealthServer::new(HealthService::new(identity.clone()));
        names.push(name_of(&health));
        builder.add_service(health);
    }
    let profiler = ProfilerServer::with_interceptor(ProfilerService, identity.clone());
    names.push(name_of(&profiler));
    builder.add_service(profiler);
    names.extend([
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ]);
    let reflection = || {
        let listed =
            names.iter().fold(Builder::configure(), |to, name| to.with_service_name(*name));
        listed.register_encoded_file_descriptor_set(descriptors)
    };
    let failed = |e: tonic_reflection::server::Error| {
        Error::invalid(format!("the definitions for reflection are unusable: {e}"))
    };
    builder.add_service(reflection().build_v1().map_err(failed)?);
    builder.add_service(reflection().build_v1alpha().map_err(failed)?);
    Ok(builder)
}

/// The full name of a service.
fn name_of<S: NamedService>(_: &S) -> &'static str {
    S::NAME
}
