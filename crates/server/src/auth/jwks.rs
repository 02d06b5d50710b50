//! The key set (JWKS) of an issuer, from a file or an address.
//!
//! Issuers rotate keys: a token may name a key that this server has not seen. The server then fetches the set again, but
//! not more often than [`REFETCH_MIN`], so that forged tokens cannot cause a flood of requests to the issuer. If the
//! issuer is unreachable, the cached keys stay in use. A key that the issuer removed is trusted for at most
//! `credential_cache_ms`, or [`REFETCH_MIN`] if the set comes from an address.

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
use jsonwebtoken::jwk::{
    AlgorithmParameters, EllipticCurve, JwkSet, KeyAlgorithm, KeyOperations, PublicKeyUse,
};
use jsonwebtoken::{Algorithm, DecodingKey};
use statehouse_store::{Clock, Time};

use crate::SetupError;

/// Minimum time between two fetches.
const REFETCH_MIN: Duration = Duration::from_secs(10);
/// Timeout of a fetch.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Size limit of the document.
const BYTES_MAX: usize = 1 << 20;

/// A key set.
pub struct KeySet {
    source: KeySource,
    /// Age at which the set is loaded again.
    max_age: Duration,
    clock: Arc<dyn Clock>,
    cached: RwLock<CachedKeys>,
    /// Held during a fetch, so that concurrent callers share one fetch.
    fetching: tokio::sync::Mutex<()>,
}

enum KeySource {
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
    pub async fn in_file(
        path: PathBuf,
        clock: Arc<dyn Clock>,
        max_age: Duration,
    ) -> Result<KeySet, SetupError> {
        KeySet::load(KeySource::File(path), clock, max_age).await
    }

    /// Loads a set from an address. Plain `http` is allowed for loopback addresses only.
    pub async fn at_url(url: &str, clock: Arc<dyn Clock>, max_age: Duration) -> Result<KeySet, SetupError> {
        let bad = |why: &str| SetupError::Tokens(format!("the address of the key set, {url}, {why}"));
        let uri: Uri = url.parse().map_err(|_| bad("is not a URL"))?;
        let authority = uri.authority().map_or("", http::uri::Authority::as_str);
        if has_port(authority) && uri.port_u16().is_none() {
            return Err(bad("has a port that is not between 0 and 65535"));
        }
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
        KeySet::load(KeySource::Url(uri, Box::new(client)), clock, max_age.max(REFETCH_MIN)).await
    }

    async fn load(source: KeySource, clock: Arc<dyn Clock>, max_age: Duration) -> Result<KeySet, SetupError> {
        let cached = RwLock::new(CachedKeys { keys: Vec::new(), tried_at: clock.now() });
        let set = KeySet { source, max_age, clock, cached, fetching: tokio::sync::Mutex::default() };
        let keys = set.fetch().await.map_err(SetupError::Tokens)?;
        set.cached.write().unwrap_or_else(PoisonError::into_inner).keys = keys;
        Ok(set)
    }

    /// The keys that may have signed a token, each with its algorithm.
    pub async fn candidates(&self, id: Option<&str>) -> Vec<(Algorithm, DecodingKey)> {
        let cached = self.cached();
        let age = self.clock.now().since(cached.tried_at);
        let found = matching(&cached.keys, id);
        if age >= self.max_age || (found.is_empty() && age > REFETCH_MIN) {
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
            KeySource::File(path) => {
                let read = tokio::fs::read(path).await;
                read.map_err(|error| format!("the key set in {} cannot be read: {error}", path.display()))?
            }
            KeySource::Url(uri, client) => tokio::select! {
                document = download(uri, client) => document?,
                () = self.clock.sleep(FETCH_TIMEOUT) => return Err(format!("{uri} did not respond in time")),
            },
        };
        read_keys(&document)
    }
}

/// The keys of a document that can verify tokens.
fn read_keys(document: &[u8]) -> Result<Vec<VerificationKey>, String> {
    let set: JwkSet = serde_json::from_slice(document)
        .map_err(|error| format!("the document is not a key set: {error}"))?;
    Ok(set.keys.iter().filter_map(verification_key).collect())
}

/// A fuzz target: each key of a set has an algorithm that a public set may have.
#[cfg(feature = "fuzzing")]
pub fn fuzz_keys(document: &[u8]) {
    for key in read_keys(document).unwrap_or_default() {
        assert!([Algorithm::RS256, Algorithm::EdDSA].contains(&key.algorithm), "{:?}", key.algorithm);
    }
}

/// Whether an authority names a port, valid or not.
fn has_port(authority: &str) -> bool {
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    host.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'))
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
    let common = &jwk.common;
    let signs = common.public_key_use.as_ref().is_none_or(|purpose| *purpose == PublicKeyUse::Signature)
        && common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
    let expected = if algorithm == Algorithm::RS256 { KeyAlgorithm::RS256 } else { KeyAlgorithm::EdDSA };
    if !signs || common.key_algorithm.is_some_and(|given| given != expected) {
        return None;
    }
    let key = DecodingKey::from_jwk(jwk).ok()?;
    Some(VerificationKey { id: jwk.common.key_id.clone(), algorithm, key })
}

/// The keys with this id, or all keys for a token that names none.
fn matching(keys: &[VerificationKey], id: Option<&str>) -> Vec<(Algorithm, DecodingKey)> {
    let fits = |key: &&VerificationKey| id.is_none() || key.id.is_none() || key.id.as_deref() == id;
    keys.iter().filter(fits).map(|key| (key.algorithm, key.key.clone())).collect()
}
