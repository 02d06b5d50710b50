//! A server for a browser.

use std::sync::Arc;

use statehouse::archetypes::specimens;
use statehouse::{Blueprint, House};
use statehouse_server::console::ConsoleSources;
use statehouse_server::{Config, Server};
use statehouse_store::{Migrate, ModelStore};
use tokio::net::TcpListener;

pub const PROFILES: &str = r#"
[house]
name = "profiles"

[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text", bio = "text?", points = { type = "int", default = 0 } }
"#;

/// A server that runs until the runtime of the trial ends.
pub struct BrowsedServer {
    pub house: Arc<House>,
    pub url: String,
}

impl BrowsedServer {
    pub async fn of(text: &str, config: Config) -> BrowsedServer {
        let blueprint = Blueprint::read("statehouse.toml", text).unwrap();
        let house = House::over(Arc::new(ModelStore::new()), &blueprint).unwrap();
        house.migrate(Migrate::Apply).await.unwrap();
        let house = Arc::new(house);
        house.start_workers(statehouse::worker::WorkerOptions::default());
        let sources = ConsoleSources { blueprint: Some(text.to_owned()), explainer: None };
        let server = Server::with_console(house.clone(), config, sources).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { server.serve(listener, std::future::pending()).await.unwrap() });
        BrowsedServer { house, url }
    }

    /// A house with the specimens of all archetypes.
    pub async fn with_all_archetypes() -> BrowsedServer {
        BrowsedServer::of(&specimens(), Config::default()).await
    }

    pub fn page(&self, path: &str) -> String {
        format!("{}/console{path}", self.url)
    }
}
