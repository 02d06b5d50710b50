//! Signatures by Standard Webhooks, so that a receiver can check with any of its libraries who sent a request.
//!
//! Three headers: `webhook-id`, the key of the effect, under which the receiver does it once; `webhook-timestamp`, in seconds,
//! by which old requests are told; and `webhook-signature`, `v1,` and the base64 of HMAC-SHA256 over
//! `{id}.{timestamp}.{body}`. During a rotation there are two secrets and two signatures with a space between them, and the
//! receiver accepts either.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use statehouse_store::random::{NoEntropy, secret_bytes};

/// What names the request.
pub const ID: &str = "webhook-id";
/// When it was sent.
pub const TIMESTAMP: &str = "webhook-timestamp";
/// The signatures.
pub const SIGNATURE: &str = "webhook-signature";

/// How a secret begins, if it says what it is.
const PREFIX: &str = "whsec_";
/// The least and the greatest number of bytes of a secret.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// A new secret.
pub fn new_secret() -> Result<String, NoEntropy> {
    Ok(format!("{PREFIX}{}", STANDARD.encode(secret_bytes::<32>()?)))
}

/// The signature of a request by one secret. What it says of a bad secret does not say the secret.
pub fn sign(secret: &str, id: &str, timestamp_seconds: i64, body: &[u8]) -> Result<String, String> {
    let mut mac = mac_of(secret)?;
    mac.update(format!("{id}.{timestamp_seconds}.").as_bytes());
    mac.update(body);
    Ok(format!("{VERSION}{}", STANDARD.encode(mac.finalize().into_bytes())))
}

/// The code of the symmetric signatures.
pub(crate) const VERSION: &str = "v1,";

/// The function that signs under a secret. What it says of a bad secret does not say the secret.
pub(crate) fn mac_of(secret: &str) -> Result<Hmac<Sha256>, String> {
    let encoded = secret.strip_prefix(PREFIX).unwrap_or(secret);
    let key =
        STANDARD.decode(encoded).map_err(|_| "the secret is not base64, with or without whsec_ before it")?;
    if !SECRET_BYTES.contains(&key.len()) {
        let (least, most) = (SECRET_BYTES.start(), SECRET_BYTES.end());
        return Err(format!("the secret has {} bytes; it needs {least} to {most}", key.len()));
    }
    Hmac::<Sha256>::new_from_slice(&key).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed with Python's `hmac` and `base64`:
    /// `"v1," + b64encode(hmac.new(b64decode(secret[6:]), f"{id}.{timestamp}.".encode() + body, sha256).digest()).decode()`.
    #[test]
    fn known_signatures() {
        const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        const SECOND: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
        const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
        for (secret, id, timestamp, body, expected) in [
            (
                FIRST,
                ID,
                1_614_265_330,
                "{\"test\": 2432232314}",
                "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
            ),
            (
                SECOND,
                ID,
                1_614_265_330,
                "{\"test\": 2432232314}",
                "v1,O4Gjv1HqPqsMrjmczoggs/sWA8gZD0VyHG+fLh4+ktI=",
            ),
            (
                SECOND,
                "acme:hook:order-7",
                1_800_000_000,
                "{\"paid\":\"für 7 €\"}",
                "v1,0X7GUimqX8YLRXmqKMqMM5oC+lPK84QDxDvEAy3E50k=",
            ),
            (
                SECOND,
                "acme:hook:order-7",
                1_800_000_000,
                "",
                "v1,31LMQ62JXwkMPW51abul5iGD7oLKEIjHXz6IGC8BNis=",
            ),
        ] {
            assert_eq!(sign(secret, id, timestamp, body.as_bytes()).as_deref(), Ok(expected));
            let bare = secret.strip_prefix(PREFIX).unwrap();
            assert_eq!(sign(bare, id, timestamp, body.as_bytes()).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn new_secrets_are_good_ones() {
        let (first, second) = (new_secret().unwrap(), new_secret().unwrap());
        assert!(first.starts_with(PREFIX) && first != second);
        assert!(sign(&first, "id", 1, b"").is_ok());
    }

    #[test]
    fn bad_secrets_are_refused_and_not_told() {
        for bad in
            ["", "whsec_", "whsec_c2hvcnQ=", "whsec_not base64!", &format!("whsec_{}", "QUFB".repeat(30))]
        {
            let why = sign(bad, "id", 1, b"").unwrap_err();
            assert!(bad.len() < 8 || !why.contains(bad), "{why}");
        }
    }
}
