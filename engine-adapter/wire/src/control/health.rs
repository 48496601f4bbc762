//! `grpc.health.v1.Health`: a process that answers is healthy. What is wrong with a replica, its
//! state says.

use super::Identity;
use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::health::health_server::Health;
use crate::proto::health::{
    HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse,
};
use tonic::{Request, Response, Status};

/// The one name under which the status is listed, as upstream's.
const LISTED: &str = "grpc";

/// The health service.
#[derive(Debug, Clone)]
pub struct HealthService {
    identity: Identity,
}

impl HealthService {
    /// The health of the process with this identity.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self { identity }
    }
}

fn serving() -> HealthCheckResponse {
    HealthCheckResponse { status: ServingStatus::Serving.into() }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        self.identity.check(request.metadata())?;
        Ok(Response::new(serving()))
    }

    async fn list(
        &self,
        request: Request<HealthListRequest>,
    ) -> Result<Response<HealthListResponse>, Status> {
        self.identity.check(request.metadata())?;
        let statuses = [(LISTED.to_owned(), serving())].into();
        Ok(Response::new(HealthListResponse { statuses }))
    }

    type WatchStream = tokio_stream::Once<Result<HealthCheckResponse, Status>>;

    async fn watch(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(tokio_stream::once(Ok(serving()))))
    }
}
