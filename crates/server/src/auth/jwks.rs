//! The key set of an issuer (JWKS), from a file or an address, kept fresh.
//!
//! Issuers rotate keys: a token may name one that this server has not seen. Then the set is fetched again, but not more
//! often than [`PAUSE`], so that forged tokens cannot make this server hammer the issuer. If the issuer cannot be
//! reached, the keys that are known stay in use.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey};
use statehouse_store::{Clock, Time};

use crate::SetupError;

/// The age at which a set is fetched again.
const FRESH: Duration = Duration::from_secs(300);
/// The least time between two fetches.
const PAUSE: Duration = Duration::from_secs(10);
/// The longest that a fetch may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest document.
const BYTES_MAX: usize = 1 << 20;

/// A key set.
pub struct KeySet {
    source: Source,
    clock: Arc<dyn Clock>,
    known: RwLock<Known>,
    /// Held while the set is fetched: one fetch serves all that wait for it.
    fetching: tokio::sync::Mutex<()>,
}

enum Source {
    File(PathBuf),
    Url(Uri, Box<Fetcher>),
}

type Fetcher = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

#[derive(Clone)]
struct Known {
    keys: Vec<Key>,
    tried_at: Time,
}

#[derive(Clone)]
struct Key {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

impl KeySet {
    /// A set in a file.
    pub async fn in_file(path: PathBuf, clock: Arc<dyn Clock>) -> Result<KeySet, SetupError> {
        KeySet::start(Source::File(path), clock).await
    }

    /// A set at an address. Plain `http` is for loopback addresses, where nobody can change it on the way.
    pub async fn at_url(url: &str, clock: Arc<dyn Clock>) -> Result<KeySet, SetupError> {
        let bad = |why: &str| SetupError::Tokens(format!("the address of the key set, {url}, {why}"));
        let uri: Uri = url.parse().map_err(|_| bad("is not a URL"))?;
        let local =
            uri.host().is_some_and(|host| host == "localhost" || host == "127.0.0.1" || host == "[::1]");
        if uri.scheme_str() != Some("https") && !(local && uri.scheme_str() == Some("http")) {
            return Err(bad("must begin with https://"));
        }
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(rustls::crypto::aws_lc_rs::default_provider())
            .map_err(|error| bad(&format!("cannot be reached without root certificates: {error}")))?
            .https_or_http()
            .enable_http1()
            .build();
        let client = Client::builder(TokioExecutor::new()).build(connector);
        KeySet::start(Source::Url(uri, Box::new(client)), clock).await
    }

    async fn start(source: Source, clock: Arc<dyn Clock>) -> Result<KeySet, SetupError> {
        let known = RwLock::new(Known { keys: Vec::new(), tried_at: clock.now() });
        let set = KeySet { source, clock, known, fetching: tokio::sync::Mutex::default() };
        let keys = set.fetch().await.map_err(SetupError::Tokens)?;
        set.known.write().unwrap_or_else(PoisonError::into_inner).keys = keys;
        Ok(set)
    }

    /// The keys that may have signed a token, with the algorithm of each.
    pub async fn candidates(&self, id: Option<&str>) -> Vec<(Algorithm, DecodingKey)> {
        let known = self.known();
        let age = self.clock.now().since(known.tried_at);
        let found = matching(&known.keys, id);
        if age > FRESH || (found.is_empty() && age > PAUSE) {
            self.refresh(known.tried_at).await;
            return matching(&self.known().keys, id);
        }
        found
    }

    fn known(&self) -> Known {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn refresh(&self, seen: Time) {
        let _one = self.fetching.lock().await;
        if self.known().tried_at != seen {
            return;
        }
        let fetched = self.fetch().await;
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.tried_at = self.clock.now();
        match fetched {
            Ok(keys) => known.keys = keys,
            Err(why) => {
                tracing::warn!(target: "statehouse::auth", why, "the key set could not be read again");
            }
        }
    }

    async fn fetch(&self) -> Result<Vec<Key>, String> {
        let document = match &self.source {
            Source::File(path) => {
                let read = tokio::fs::read(path).await;
                read.map_err(|error| format!("the key set in {} cannot be read: {error}", path.display()))?
            }
            Source::Url(uri, client) => tokio::select! {
                document = download(uri, client) => document?,
                () = self.clock.sleep(PATIENCE) => return Err(format!("{uri} did not answer in time")),
            },
        };
        let set: JwkSet =
            serde_json::from_slice(&document).map_err(|error| format!("the key set is not one: {error}"))?;
        Ok(set.keys.iter().filter_map(usable).collect())
    }
}

async fn download(uri: &Uri, client: &Fetcher) -> Result<Vec<u8>, String> {
    let response =
        client.get(uri.clone()).await.map_err(|error| format!("{uri} cannot be reached: {error}"))?;
    if !response.status().is_success() {
        return Err(format!("{uri} answered {}", response.status()));
    }
    let body = Limited::new(response.into_body(), BYTES_MAX).collect().await;
    body.map(|body| body.to_bytes().to_vec()).map_err(|error| format!("{uri}: {error}"))
}

fn usable(jwk: &jsonwebtoken::jwk::Jwk) -> Option<Key> {
    let algorithm = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => Algorithm::RS256,
        AlgorithmParameters::OctetKeyPair(pair) if pair.curve == EllipticCurve::Ed25519 => Algorithm::EdDSA,
        // A shared secret has no place in a set that is public, and no other kind is accepted.
        _ => return None,
    };
    let key = DecodingKey::from_jwk(jwk).ok()?;
    Some(Key { id: jwk.common.key_id.clone(), algorithm, key })
}

/// The keys of that id; all of them for a token that names none.
fn matching(keys: &[Key], id: Option<&str>) -> Vec<(Algorithm, DecodingKey)> {
    let fits = |key: &&Key| id.is_none() || key.id.is_none() || key.id.as_deref() == id;
    keys.iter().filter(fits).map(|key| (key.algorithm, key.key.clone())).collect()
}
