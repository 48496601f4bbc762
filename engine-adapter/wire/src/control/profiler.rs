//! `profilerrpc.Profiler`: upstream's switch for the profiler of its runtime. There is none here
//! that listens on a port; the truth is that it is off.

use crate::proto::profilerrpc::profiler_server::Profiler;
use crate::proto::profilerrpc::{Op, ProfilerOpRequest, ProfilerOpResponse};
use tonic::{Request, Response, Status};

/// The profiler service.
#[derive(Debug, Clone, Copy)]
pub struct ProfilerService;

#[tonic::async_trait]
impl Profiler for ProfilerService {
    async fn profiler_op(
        &self,
        request: Request<ProfilerOpRequest>,
    ) -> Result<Response<ProfilerOpResponse>, Status> {
        match Op::try_from(request.into_inner().request_op) {
            Ok(Op::Show | Op::Disable) => Ok(Response::new(ProfilerOpResponse::default())),
            Ok(Op::Enable) => Err(Status::unimplemented(
                "this process has no profiler of its own: use `perf record -g -p PID`",
            )),
            Err(_) => Err(Status::invalid_argument("unknown profiler operation")),
        }
    }
}
