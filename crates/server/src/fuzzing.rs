//! Fuzz targets of the parsers that read what comes from the network, and those of the library.
//!
//! Each target takes any bytes. It panics if the parser panics, or if a property of the parser does not hold. Only the fuzzer
//! (`fuzz/`) and the tests use this module; the feature `fuzzing` compiles it.

use std::io::Write as _;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::FutureExt as _;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use jsonwebtoken::{EncodingKey, Header};
use serde_json::{Map, Value as Json};
use statehouse::fuzzing::FuzzTarget;
use statehouse_store::read::Cursor;
use statehouse_store::scan::Segment;
use statehouse_store::{Ids, ManualClock, Random, Time};

use crate::auth::jwt::TokenVerifier;
use crate::auth::networks::AllowedNetworks;
use crate::auth::{Scope, bearer, jwks, keys, open_mode, read_scopes, scopes_text};
use crate::config::{Jwt, JwtKeys};
use crate::http::{ActionPath, Context, body, conditions, path, strict};
use crate::seal::CursorSeal;

/// Name and function of each target of this crate.
const OWN: [(&str, FuzzTarget); 8] = [
    ("strict_json", strict_json),
    ("urls", urls),
    ("gzip_bodies", gzip_bodies),
    ("headers", headers),
    ("credentials", credentials),
    ("tokens", tokens),
    ("key_sets", jwks::fuzz_keys),
    ("sealed", sealed),
];

/// The most bytes that a body has in these targets.
const BODY_BYTES_MAX: usize = 64 << 10;
const SHARED_SECRET: &str = "a secret of thirty-two bytes, or more";

/// Name and function of each target.
pub fn targets() -> impl Iterator<Item = (&'static str, FuzzTarget)> {
    OWN.into_iter().chain(statehouse::fuzzing::TARGETS)
}

/// Runs the target of this name. A name that is not known is a panic: the fuzzer would otherwise test nothing.
pub fn run(name: &str, data: &[u8]) {
    let target = targets().find(|(known, _)| *known == name);
    assert!(target.is_some(), "there is no fuzz target {name}");
    if let Some((_, target)) = target {
        target(data);
    }
}

/// Strict JSON gives what any reader gives, or is rejected for a duplicate member or a large integer.
pub fn strict_json(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match (strict::read(text), serde_json::from_str::<Json>(text)) {
        (Ok(strict), plain) => assert_eq!(Some(strict), plain.ok(), "{text}"),
        (Err(_), Err(_)) => {}
        (Err(error), Ok(_)) => {
            let error = error.to_string();
            let is_known = error.contains("duplicate member") || error.contains("does not fit 64 bits");
            assert!(is_known, "{text}: {error}");
        }
    }
}

/// Paths and queries: what was encoded is decoded to the same text, and a query has each name once.
pub fn urls(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    assert_eq!(path::decoded(&path::segment(text), false).ok().as_deref(), Some(text));
    assert_eq!(path::decoded(&path::parameter(text), true).ok().as_deref(), Some(text));
    if let Some(parsed) = ActionPath::parse(text) {
        assert!(text.starts_with("/v1/") && !parsed.resource.is_empty(), "{text}");
    }
    let Ok(pairs) = path::pairs(Some(text)) else { return };
    let written: Vec<String> = pairs
        .iter()
        .map(|(name, value)| format!("{}={}", path::parameter(name), path::parameter(value)))
        .collect();
    let again = path::pairs(Some(&written.join("&")));
    assert_eq!(again.ok().as_ref(), Some(&pairs), "{text}");
}

/// Compressed bodies: no more than the limit is kept, and what was compressed is found again.
pub fn gzip_bodies(data: &[u8]) {
    if let Ok(bytes) = body::decompress(data, BODY_BYTES_MAX) {
        assert!(bytes.len() <= BODY_BYTES_MAX, "{} bytes", bytes.len());
    }
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let compressed = encoder.write_all(data).and_then(|()| encoder.finish());
    let Ok(compressed) = compressed else { return };
    let whole = body::decompress(&compressed, data.len());
    assert!(whole.is_ok_and(|whole| whole == data), "the bytes are not found again");
    assert!(data.is_empty() || body::decompress(&compressed, data.len() - 1).is_err(), "above the limit");
}

/// Headers of every request: conditions, idempotency keys, preferences, traces, origins and tenants.
pub fn headers(data: &[u8]) {
    const NAMES: [&str; 12] = [
        "if-match",
        "if-none-match",
        "idempotency-key",
        "prefer",
        "traceparent",
        "x-request-id",
        "host",
        "origin",
        "statehouse-tenant",
        "authorization",
        "sec-fetch-site",
        "x-forwarded-for",
    ];
    let mut given = HeaderMap::new();
    for line in data.split(|byte| *byte == b'\n') {
        let Some((first, value)) = line.split_first() else { continue };
        let name = NAMES.get(usize::from(*first) % NAMES.len()).copied().unwrap_or("host");
        if let Ok(value) = HeaderValue::from_bytes(value) {
            given.append(HeaderName::from_static(name), value);
        }
    }
    let _ =
        (conditions::expected(&given), conditions::none_match(&given), conditions::wait_preference(&given));
    if let Ok(Some(key)) = conditions::idempotency_key(&given) {
        assert!(
            (1..=255).contains(&key.len()) && key.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
            "{key:?}"
        );
    }
    let ids = Ids::new(Arc::new(ManualClock::at(Time::from_micros(1))), Random::seeded(1));
    let context = Context::of(&given, &ids);
    assert!(HeaderValue::from_str(&context.request_id).is_ok(), "{:?}", context.request_id);
    assert_eq!(context.trace_id().len(), 32, "{:?}", context.trace_id());
    let is_forwarded = given.contains_key("x-forwarded-for");
    let checked = open_mode::check(&given, &Uri::from_static("/v1/profile"), &[]);
    assert!(!is_forwarded || checked.is_err(), "a forwarded request was accepted");
    if let Ok(caller) = open_mode::caller(&given) {
        assert!(!statehouse::system::is_system(&caller.tenant));
    }
    let _ = bearer(&given);
}

/// API keys, scopes and networks: what is accepted is written as it is read.
pub fn credentials(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some((prefix, hidden)) = keys::parse(text) {
        assert!(text.starts_with(keys::MARK) && text.contains(prefix) && text.contains(hidden));
    }
    let scopes = read_scopes(text);
    assert_eq!(read_scopes(&scopes_text(&scopes)), scopes, "{text}");
    if let Ok(scope) = text.parse::<Scope>() {
        assert_eq!(scope.to_string(), text);
    }
    if let Ok(networks) = text.parse::<AllowedNetworks>() {
        let shown = networks.to_string();
        assert_eq!(shown.parse::<AllowedNetworks>().ok(), Some(networks), "{text}");
    }
    let mut given = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_str(text) {
        given.insert(AUTHORIZATION, value);
    }
    if let Ok(credential) = bearer(&given) {
        assert!(text.contains(credential));
    }
}

static VERIFIER: LazyLock<Option<TokenVerifier>> = LazyLock::new(|| {
    let config = Jwt::with(JwtKeys::Secret(SHARED_SECRET.to_owned()));
    let clock = Arc::new(ManualClock::at(Time::from_micros(1_000_000)));
    TokenVerifier::of(&config, clock, Duration::from_secs(1)).now_or_never().and_then(Result::ok)
});

/// Tokens: bytes that the issuer did not sign are no caller. Signed claims of any form are one only with a tenant and an end.
pub fn tokens(data: &[u8]) {
    assert!(VERIFIER.is_some(), "the verifier of tokens cannot be made");
    let (Ok(text), Some(verifier)) = (std::str::from_utf8(data), &*VERIFIER) else { return };
    let caller = |token: &str| {
        let verified = verifier.caller(token).now_or_never().and_then(Result::ok);
        verified.and_then(Result::ok)
    };
    assert!(caller(text).is_none(), "{text} was not signed");
    let Ok(claims) = serde_json::from_str::<Map<String, Json>>(text) else { return };
    let key = EncodingKey::from_secret(SHARED_SECRET.as_bytes());
    let Ok(token) = jsonwebtoken::encode(&Header::default(), &claims, &key) else { return };
    if let Some(caller) = caller(&token) {
        let has = |name: &str| claims.contains_key(name);
        assert!(has("exp") && has("tenant"), "{text}");
        assert_eq!(claims.get("tenant").and_then(Json::as_str), Some(caller.tenant.as_str()));
    }
    // A forged signature of claims that the issuer did sign.
    let mut forged = token.into_bytes();
    if let Some(byte) = forged.iter_mut().rev().nth(4) {
        *byte = if *byte == b'A' { b'B' } else { b'A' };
    }
    assert!(String::from_utf8(forged).is_ok_and(|forged| caller(&forged).is_none()), "a forged signature");
}

/// Sealed tokens and cursors, and the texts in them: only what was sealed is opened.
pub fn sealed(data: &[u8]) {
    static SEAL: LazyLock<CursorSeal> = LazyLock::new(|| CursorSeal::of(b"a secret", "cursors"));
    let context: [&[u8]; 2] = [b"acme", b"profile.list"];
    let closed = SEAL.close(&context, data);
    assert_eq!(SEAL.open(&context, &closed).as_deref(), Some(data));
    assert_eq!(SEAL.open(&[b"other", b"profile.list"], &closed), None, "opened for another tenant");
    let Ok(text) = std::str::from_utf8(data) else { return };
    assert_eq!(SEAL.open(&context, text), None, "{text} was not sealed");
    if let Ok(cursor) = Cursor::parse(text) {
        assert_eq!(Cursor::parse(&cursor.to_string()).ok(), Some(cursor), "{text}");
    }
    if let Ok(segment) = Segment::parse(text) {
        assert_eq!(Segment::parse(&segment.to_string()).ok(), Some(segment), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs that are near what the targets accept. The fuzzer starts from the same folder.
    fn seeds() -> Vec<Vec<u8>> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
        let mut paths: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
    }

    #[test]
    fn the_targets_hold_for_the_seeds_and_for_changed_seeds() {
        let (seeds, mut random) = (seeds(), Random::seeded(21));
        let mut below = |end: usize| usize::try_from(random.below(end.max(1) as u64)).unwrap();
        assert!(seeds.len() > 10, "the seeds are missing");
        for (name, _) in targets() {
            for seed in &seeds {
                run(name, seed);
            }
            for _ in 0..300 {
                let mut data = seeds[below(seeds.len())].clone();
                for _ in 0..=below(4) {
                    let index = below(data.len() + 1);
                    match below(3) {
                        0 => data.insert(index, u8::try_from(below(256)).unwrap()),
                        1 if index < data.len() => drop(data.remove(index)),
                        _ => data.extend_from_within(index..),
                    }
                    data.truncate(4_096);
                }
                run(name, &data);
            }
        }
    }

    #[test]
    fn every_target_has_a_program_of_the_fuzzer() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        for (name, _) in targets() {
            assert!(
                manifest.contains(&format!("name = \"{name}\"")),
                "fuzz/Cargo.toml has no program {name}"
            );
            let program = std::fs::read_to_string(folder.join(format!("fuzz_targets/{name}.rs"))).unwrap();
            assert!(program.contains(&format!("\"{name}\"")), "{name}");
        }
    }
}
