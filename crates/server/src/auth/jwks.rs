//! The key set (JWKS) of an issuer, from a file or an address.
//!
//! Issuers rotate keys: a token may name a key that this server has not seen. The server then fetches the set again, but
//! not more often than [`REFETCH_MIN`], so that forged tokens cannot cause a flood of requests to the issuer. If the
//! issuer is unreachable, the cached keys stay in use.

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

/// Age at which a set is fetched again.
const MAX_AGE: Duration = Duration::from_secs(300);
/// Minimum time between two fetches.
const REFETCH_MIN: Duration = Duration::from_secs(10);
/// Timeout of a fetch.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Size limit of the document.
const BYTES_MAX: usize = 1 << 20;

/// A key set.
pub struct KeySet {
    source: Source,
    clock: Arc<dyn Clock>,
    cached: RwLock<CachedKeys>,
    /// Held during a fetch, so that concurrent callers share one fetch.
    fetching: tokio::sync::Mutex<()>,
}

enum Source {
    File(PathBuf),
    Url(Uri, Box<Fetcher>),
}

type Fetcher = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

#[derive(Clone)]
struct CachedKeys {
    keys: Vec<VerificationKey>,
    tried_at: Time,
}

#[derive(Clone)]
struct VerificationKey {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

impl KeySet {
    /// Loads a set from a file.
    pub async fn in_file(path: PathBuf, clock: Arc<dyn Clock>) -> Result<KeySet, SetupError> {
        KeySet::load(Source::File(path), clock).await
    }

    /// Loads a set from an address. Plain `http` is allowed for loopback addresses only.
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
        KeySet::load(Source::Url(uri, Box::new(client)), clock).await
    }

    async fn load(source: Source, clock: Arc<dyn Clock>) -> Result<KeySet, SetupError> {
        let cached = RwLock::new(CachedKeys { keys: Vec::new(), tried_at: clock.now() });
        let set = KeySet { source, clock, cached, fetching: tokio::sync::Mutex::default() };
        let keys = set.fetch().await.map_err(SetupError::Tokens)?;
        set.cached.write().unwrap_or_else(PoisonError::into_inner).keys = keys;
        Ok(set)
    }

    /// The keys that may have signed a token, each with its algorithm.
    pub async fn candidates(&self, id: Option<&str>) -> Vec<(Algorithm, DecodingKey)> {
        let cached = self.cached();
        let age = self.clock.now().since(cached.tried_at);
        let found = matching(&cached.keys, id);
        if age > MAX_AGE || (found.is_empty() && age > REFETCH_MIN) {
            self.refresh(cached.tried_at).await;
            return matching(&self.cached().keys, id);
        }
        found
    }

    fn cached(&self) -> CachedKeys {
        self.cached.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn refresh(&self, seen: Time) {
        let _one = self.fetching.lock().await;
        if self.cached().tried_at != seen {
            return;
        }
        let fetched = self.fetch().await;
        let mut cached = self.cached.write().unwrap_or_else(PoisonError::into_inner);
        cached.tried_at = self.clock.now();
        match fetched {
            Ok(keys) => cached.keys = keys,
            Err(why) => {
                tracing::warn!(target: "statehouse::auth", why, "the key set could not be refreshed");
            }
        }
    }

    async fn fetch(&self) -> Result<Vec<VerificationKey>, String> {
        let document = match &self.source {
            Source::File(path) => {
                let read = tokio::fs::read(path).await;
                read.map_err(|error| format!("the key set in {} cannot be read: {error}", path.display()))?
            }
            Source::Url(uri, client) => tokio::select! {
                document = download(uri, client) => document?,
                () = self.clock.sleep(FETCH_TIMEOUT) => return Err(format!("{uri} did not respond in time")),
            },
        };
        let set: JwkSet = serde_json::from_slice(&document)
            .map_err(|error| format!("the document is not a key set: {error}"))?;
        Ok(set.keys.iter().filter_map(verification_key).collect())
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

fn verification_key(jwk: &jsonwebtoken::jwk::Jwk) -> Option<VerificationKey> {
    let algorithm = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => Algorithm::RS256,
        AlgorithmParameters::OctetKeyPair(pair) if pair.curve == EllipticCurve::Ed25519 => Algorithm::EdDSA,
        // Shared secrets do not belong in a public set, and no other key type is accepted.
        _ => return None,
    };
    let key = DecodingKey::from_jwk(jwk).ok()?;
    Some(VerificationKey { id: jwk.common.key_id.clone(), algorithm, key })
}

/// The keys with this id, or all keys for a token that names none.
fn matching(keys: &[VerificationKey], id: Option<&str>) -> Vec<(Algorithm, DecodingKey)> {
    let fits = |key: &&VerificationKey| id.is_none() || key.id.is_none() || key.id.as_deref() == id;
    keys.iter().filter(fits).map(|key| (key.algorithm, key.key.clone())).collect()
}
