//! The reference: axum as its guide starts it, with one route that reads JSON and sends it back.

use anyhow::Result;
use axum::routing::post;
use axum::{Json, Router};
use tokio::net::TcpListener;

/// Starts it and returns its port.
pub async fn start() -> Result<u16> {
    let router =
        Router::new().route("/echo", post(|Json(body): Json<serde_json::Value>| async { Json(body) }));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(port)
}
