//! A client of any gRPC service that describes itself: requests and answers are JSON, as the service's own
//! descriptions have them. So nothing of the manager's protocol is written down here.

use crate::raw::Raw;
use prost::Message;
use prost_reflect::prost_types::FileDescriptorProto;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor,
    MethodDescriptor, ReflectMessage as _, Value as Field,
};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio_stream::StreamExt as _;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

/// No call takes longer: a rebuild handles a file in three seconds.
const CALL: Duration = Duration::from_secs(120);

pub struct Service {
    runtime: Runtime,
    channel: Channel,
    methods: HashMap<String, MethodDescriptor>,
}

impl Service {
    /// The service of this name at a port, once somebody serves it.
    pub fn connect(port: u16, name: &str) -> Self {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        let deadline = Instant::now() + Duration::from_secs(60);
        let pool = loop {
            match runtime.block_on(describe(channel.clone(), name)) {
                Ok(pool) => break pool,
                Err(status) => assert!(Instant::now() < deadline, "{name}: {status}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let service = pool.get_service_by_name(name).expect("the service");
        let methods = service.methods().map(|method| (method.name().to_owned(), method)).collect();
        Self { runtime, channel, methods }
    }

    pub fn method(&self, name: &str) -> &MethodDescriptor {
        self.methods.get(name).unwrap_or_else(|| panic!("no method {name}"))
    }

    pub fn methods(&self) -> impl Iterator<Item = &str> {
        self.methods.keys().map(String::as_str)
    }

    pub fn call(&self, method: &str, request: &Value) -> Result<Value, Status> {
        let method = self.method(method);
        let request = self.request(method, request);
        let path = path(method);
        let mut client = Grpc::new(self.channel.clone());
        let reply = self.runtime.block_on(async {
            ready(&mut client).await?;
            client.unary(request, path, Raw).await
        })?;
        Ok(answer(method, &reply.into_inner()))
    }

    /// All that a stream has until it ends or, if it does not, the condition holds of what has come.
    pub fn stream(
        &self,
        method: &str,
        request: &Value,
        enough: impl Fn(&[Value]) -> bool,
    ) -> Vec<Value> {
        let method = self.method(method);
        let request = self.request(method, request);
        let path = path(method);
        let mut client = Grpc::new(self.channel.clone());
        self.runtime.block_on(async {
            ready(&mut client).await.unwrap();
            let mut stream =
                client.server_streaming(request, path, Raw).await.unwrap().into_inner();
            let mut all = Vec::new();
            while !enough(&all)
                && let Some(message) = stream.next().await
            {
                all.push(answer(method, &message.unwrap()));
            }
            all
        })
    }

    fn request(&self, method: &MethodDescriptor, request: &Value) -> Request<Vec<u8>> {
        let message = to_message(method.input(), request);
        let mut request = Request::new(message.encode_to_vec());
        request.set_timeout(CALL);
        request
    }
}

async fn ready(client: &mut Grpc<Channel>) -> Result<(), Status> {
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))
}

fn path(method: &MethodDescriptor) -> tonic::codegen::http::uri::PathAndQuery {
    let service = method.parent_service().full_name().to_owned();
    format!("/{service}/{}", method.name()).parse().unwrap()
}

fn answer(method: &MethodDescriptor, bytes: &[u8]) -> Value {
    to_json(&DynamicMessage::decode(method.output(), bytes).unwrap())
}

/// What a server says of a service, with all that this needs.
async fn describe(channel: Channel, service: &str) -> Result<DescriptorPool, Status> {
    let mut client = ServerReflectionClient::new(channel);
    let message_request = Some(MessageRequest::FileContainingSymbol(service.to_owned()));
    let request = ServerReflectionRequest { host: String::new(), message_request };
    let replies = client.server_reflection_info(tokio_stream::iter([request])).await?;
    let mut replies = replies.into_inner();
    let mut files = Vec::new();
    while let Some(reply) = replies.next().await {
        match reply?.message_response {
            Some(MessageResponse::FileDescriptorResponse(found)) => {
                let found = found.file_descriptor_proto.into_iter();
                files.extend(found.map(|file| FileDescriptorProto::decode(&file[..]).unwrap()));
            }
            other => panic!("{service}: {other:?}"),
        }
    }
    let mut pool = DescriptorPool::new();
    pool.add_file_descriptor_protos(files).unwrap();
    Ok(pool)
}

fn to_message(descriptor: MessageDescriptor, json: &Value) -> DynamicMessage {
    let mut message = DynamicMessage::new(descriptor.clone());
    for (name, value) in json.as_object().expect("an object") {
        let field = descriptor.get_field_by_name(name);
        let field = field.unwrap_or_else(|| panic!("{} has no {name}", descriptor.name()));
        message.set_field(&field, to_field(&field, value));
    }
    message
}

fn to_field(field: &FieldDescriptor, value: &Value) -> Field {
    if field.is_map() {
        let entry = field.kind();
        let entry = entry.as_message().unwrap().map_entry_value_field();
        let pairs = value.as_object().unwrap().iter();
        let pairs =
            pairs.map(|(key, value)| (MapKey::String(key.clone()), to_scalar(&entry, value)));
        return Field::Map(pairs.collect());
    }
    match value {
        Value::Array(items) => {
            Field::List(items.iter().map(|item| to_scalar(field, item)).collect())
        }
        value => to_scalar(field, value),
    }
}

fn to_scalar(field: &FieldDescriptor, value: &Value) -> Field {
    let number = || value.as_i64().unwrap_or_else(|| panic!("{}: {value}", field.name()));
    match field.kind() {
        Kind::Bool => Field::Bool(value.as_bool().unwrap()),
        Kind::Int32 => Field::I32(number().try_into().unwrap()),
        Kind::Int64 => Field::I64(number()),
        Kind::Enum(_) => Field::EnumNumber(number().try_into().unwrap()),
        Kind::String => Field::String(value.as_str().unwrap().to_owned()),
        Kind::Message(descriptor) => Field::Message(to_message(descriptor, value)),
        other => panic!("{}: {other:?}", field.name()),
    }
}

/// All fields, also those that have their default.
fn to_json(message: &DynamicMessage) -> Value {
    let descriptor = message.descriptor();
    let fields = descriptor.fields().map(|field| {
        let absent = field.supports_presence() && !message.has_field(&field);
        let value =
            if absent { Value::Null } else { json_of(&field, message.get_field(&field).as_ref()) };
        (field.name().to_owned(), value)
    });
    Value::Object(fields.collect())
}

fn json_of(field: &FieldDescriptor, value: &Field) -> Value {
    match value {
        Field::Bool(value) => json!(value),
        Field::I32(value) => json!(value),
        Field::I64(value) => json!(value),
        Field::U32(value) => json!(value),
        Field::U64(value) => json!(value),
        Field::F32(value) => json!(value),
        Field::F64(value) => json!(value),
        Field::String(value) => json!(value),
        Field::Bytes(value) => json!(String::from_utf8_lossy(value)),
        Field::EnumNumber(number) => match field.kind() {
            Kind::Enum(all) => json!(all.get_value(*number).map(|value| value.name().to_owned())),
            _ => json!(number),
        },
        Field::Message(message) => to_json(message),
        Field::List(items) => items.iter().map(|item| json_of(field, item)).collect(),
        Field::Map(pairs) => {
            let entry = field.kind();
            let entry = entry.as_message().unwrap().map_entry_value_field();
            let pair = |(key, value): (&MapKey, &Field)| {
                (key.as_str().unwrap().to_owned(), json_of(&entry, value))
            };
            Value::Object(pairs.iter().map(pair).collect::<Map<_, _>>())
        }
    }
}
