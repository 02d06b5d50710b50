//! Servers on free ports, and a small client.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value as Json;
use statehouse::{Blueprint, House};
use statehouse_server::{Config, Server};
use statehouse_store::{Clock, Ids, ManualClock, Migrate, ModelStore, Random, Store};
use statehouse_store_sqlite::{SqliteOptions, SqliteStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::postgres::RestrictedSchema;

/// A named case.
pub type Case = (&'static str, fn(Site) -> Pin<Box<dyn Future<Output = ()> + Send>>);

/// Lists case functions under their own names.
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        pub const CASES: &[crate::support::Case] = &[$((stringify!($name), |site| Box::pin($name(site)))),*];
    };
}
pub(crate) use cases;

/// The engines that every case runs on.
pub const ENGINES: [&str; 2] = ["model", "sqlite"];

/// PostgreSQL with row-level security: for the cases about who may see and do what.
pub const RESTRICTED: &str = "postgres";

pub const BLUEPRINT: &str = r#"
[house]
name = "shop"

[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text", bio = "text?", points = { type = "int", default = 0 }, tags = "json?", views = { type = "int", default = 0 } }
hot    = ["views"]

[entity.seat]
key    = { event = "text", seat_no = "text" }
fields = { price = "float?", sold = { type = "bool", default = false } }
require_version = false
"#;

/// Where a case runs.
pub struct Site {
    engine: &'static str,
    folder: tempfile::TempDir,
    schema: Option<RestrictedSchema>,
}

impl Site {
    pub fn on(engine: &'static str) -> Site {
        let schema = (engine == RESTRICTED).then(RestrictedSchema::new);
        Site { engine, folder: tempfile::tempdir().unwrap(), schema }
    }

    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    pub async fn store(&self) -> Arc<dyn Store> {
        if let Some(schema) = &self.schema {
            return schema.open().await;
        }
        match self.engine {
            "model" => Arc::new(ModelStore::new()),
            "sqlite" => {
                let options = SqliteOptions::at(self.folder.path().join("house.db"));
                Arc::new(SqliteStore::open(options).await.unwrap())
            }
            other => panic!("there is no engine {other}"),
        }
    }

    pub async fn house(&self) -> Arc<House> {
        house_over(self.store().await).await
    }

    /// A house whose time moves only when a test says so. The store keeps its own.
    pub async fn house_at(&self, clock: &ManualClock) -> Arc<House> {
        let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT).unwrap();
        let clock: Arc<dyn Clock> = Arc::new(clock.clone());
        let ids = Ids::new(clock.clone(), Random::from_entropy());
        let house = House::with(self.store().await, &blueprint, clock, ids).unwrap();
        house.migrate(Migrate::Apply).await.unwrap();
        Arc::new(house)
    }

    /// A house without documents of any form: which of those can be stored is more than a schema can say.
    pub async fn house_without_json(&self) -> Arc<House> {
        let blueprint = BLUEPRINT.replace(", tags = \"json?\"", "");
        assert_ne!(blueprint, BLUEPRINT);
        self.house_of(&blueprint).await
    }

    pub async fn house_of(&self, blueprint: &str) -> Arc<House> {
        house_of(blueprint, self.store().await).await
    }

    /// A server with default settings.
    pub async fn server(&self) -> Running {
        self.server_with(Config::default()).await
    }

    pub async fn server_with(&self, config: Config) -> Running {
        Running::of(self.house().await, config).await
    }
}

pub async fn house_over(store: Arc<dyn Store>) -> Arc<House> {
    house_of(BLUEPRINT, store).await
}

pub async fn house_of(blueprint: &str, store: Arc<dyn Store>) -> Arc<House> {
    let blueprint = Blueprint::read("statehouse.toml", blueprint).unwrap();
    let house = House::over(store, &blueprint).unwrap();
    house.migrate(Migrate::Apply).await.unwrap();
    Arc::new(house)
}

/// A server that runs until it is dropped or stopped.
pub struct Running {
    pub house: Arc<House>,
    pub port: u16,
    client: Client<HttpConnector, Full<Bytes>>,
    stop: Option<oneshot::Sender<()>>,
    task: Option<JoinHandle<()>>,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {self:?}"))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name} in {self:?}")).to_str().unwrap()
    }

    /// Checks that the answer is a problem of this kind, and returns it.
    pub fn problem(&self, status: u16, code: &str) -> Json {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/problem+json");
        let problem = self.json();
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(problem["status"], status);
        assert_eq!(problem["type"], format!("/problems/{code}"));
        assert_eq!(problem["request_id"], self.header("x-request-id"));
        assert_eq!(problem["trace_id"].as_str().unwrap().len(), 32);
        problem
    }

    pub fn ok(self, status: u16) -> Reply {
        assert_eq!(self.status, status, "{self:?}");
        self
    }
}

pub type Headers<'h> = &'h [(&'h str, &'h str)];
const JSON: (&str, &str) = ("content-type", "application/json");

impl Running {
    pub async fn of(house: Arc<House>, config: Config) -> Running {
        let server = Server::new(house.clone(), config).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            server.serve(listener, async { drop(stopped.await) }).await.unwrap();
        });
        let client = Client::builder(TokioExecutor::new()).build_http();
        Running { house, port, client, stop: Some(stop), task: Some(task) }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub async fn send(
        &self,
        method: &str,
        path: &str,
        headers: Headers<'_>,
        body: impl Into<Bytes>,
    ) -> Reply {
        let mut request = http::Request::builder().method(method).uri(self.url(path));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.client.request(request.body(Full::new(body.into())).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Reply { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], "").await
    }

    pub async fn get_with(&self, path: &str, headers: Headers<'_>) -> Reply {
        self.send("GET", path, headers, "").await
    }

    /// Sends JSON.
    pub async fn put(&self, method: &str, path: &str, headers: Headers<'_>, body: Json) -> Reply {
        let headers: Vec<(&str, &str)> = headers.iter().copied().chain([JSON]).collect();
        self.send(method, path, &headers, body.to_string()).await
    }

    pub async fn create(&self, user: i64) -> Reply {
        let body = serde_json::json!({"user_id": user, "display_name": "Ann"});
        self.put("POST", "/v1/profile", &[], body).await.ok(201)
    }

    /// A connection for bytes that no client library would send.
    pub async fn raw(&self) -> Raw {
        Raw(TcpStream::connect(("127.0.0.1", self.port)).await.unwrap())
    }

    /// How many records the log has.
    pub async fn written(&self) -> u64 {
        self.house.store().wait_log(&[], Duration::ZERO).await.unwrap().iter().sum()
    }

    /// Returns when so many requests are under way, apart from the one that asks.
    pub async fn until_under_way(&self, requests: usize) {
        let line = format!("statehouse_http_in_flight_requests {}\n", requests + 1);
        while !String::from_utf8_lossy(&self.get("/metrics").await.body).contains(&line) {
            tokio::task::yield_now().await;
        }
    }

    /// Tells the server to stop and waits until it has.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        self.task.take().unwrap().await.unwrap();
    }

    pub fn begin_stop(&mut self) {
        drop(self.stop.take());
    }
}

/// Plain bytes to and from a server.
pub struct Raw(pub TcpStream);

impl Raw {
    pub async fn say(&mut self, text: impl AsRef<[u8]>) {
        self.0.write_all(text.as_ref()).await.unwrap();
    }

    /// Everything until the server closes the connection.
    pub async fn rest(&mut self) -> String {
        let mut bytes = Vec::new();
        // A connection that is reset has said what it had to say.
        let _ = self.0.read_to_end(&mut bytes).await;
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What arrives until a text is among it.
    pub async fn until(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let count = self.0.read(&mut buffer).await.unwrap();
            seen.extend_from_slice(&buffer[..count]);
            let so_far = String::from_utf8_lossy(&seen).into_owned();
            if so_far.contains(text) {
                return so_far;
            }
            assert!(count > 0, "the connection ended without {text:?}: {so_far}");
        }
    }
}
