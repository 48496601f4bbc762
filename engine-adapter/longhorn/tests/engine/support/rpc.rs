//! A replica's own gRPC, for what the engine's command line does not show.

use longhorn_wire::proto::ptypes;
use longhorn_wire::proto::ptypes::replica_service_client::ReplicaServiceClient;
use std::time::Duration;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};

pub struct ReplicaRpc {
    runtime: Runtime,
    channel: Channel,
}

impl ReplicaRpc {
    pub fn connect(port: u16) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
        let endpoint =
            endpoint.connect_timeout(Duration::from_secs(20)).timeout(Duration::from_secs(60));
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Self { runtime, channel }
    }

    /// ReplicaGet.
    pub fn get(&self) -> ptypes::Replica {
        let mut client = ReplicaServiceClient::new(self.channel.clone());
        self.runtime.block_on(client.replica_get(())).unwrap().into_inner().replica.unwrap()
    }

    /// ReplicaOpen, as a starting engine does it.
    pub fn open(&self, size: i64) {
        let mut client = ReplicaServiceClient::new(self.channel.clone());
        let request = ptypes::ReplicaOpenRequest { is_upgrade: false, expected_backend_size: size };
        self.runtime.block_on(client.replica_open(request)).unwrap();
    }

    /// The health check an instance-manager does.
    pub fn healthy(&self) -> bool {
        use longhorn_wire::proto::health::HealthCheckRequest;
        use longhorn_wire::proto::health::health_check_response::ServingStatus;
        use longhorn_wire::proto::health::health_client::HealthClient;
        let mut client = HealthClient::new(self.channel.clone());
        let request = HealthCheckRequest { service: String::new() };
        let reply = self.runtime.block_on(client.check(request)).unwrap().into_inner();
        reply.status() == ServingStatus::Serving
    }
}
