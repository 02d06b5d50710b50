//! Signatures of messages: Standard Webhooks, and HMAC-SHA256 as most other senders use it.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, HeaderName};
use sha2::Sha256;
use statehouse_store::Time;

use crate::action::{Code, Refusal};
use crate::infra::effect::secret::{SecretReference, Secrets};
use crate::infra::effect::signature;

/// The most signatures of one message that are looked at.
const SIGNATURES_MAX: usize = 16;
/// Bytes of an HMAC-SHA256.
const MAC_BYTES: usize = 32;

/// How a message is signed, and how old it may be.
#[derive(Clone, Debug)]
pub(super) struct SignatureScheme {
    pub(super) kind: SignatureKind,
    /// The greatest difference between the time of the signature and this server's.
    pub(super) tolerance: Duration,
}

#[derive(Clone, Debug)]
pub(super) enum SignatureKind {
    Standard,
    Hmac(HmacScheme),
}

/// An HMAC-SHA256 in a header.
#[derive(Clone, Debug)]
pub(super) struct HmacScheme {
    pub(super) header: HeaderName,
    /// What stands before each signature: `sha256=`.
    pub(super) prefix: String,
    pub(super) encoding: Encoding,
    pub(super) timestamp: Option<TimestampPlace>,
    /// What is signed, one part after the other.
    pub(super) signed: Vec<SignedPart>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Hex,
    Base64,
}

/// Where the time of the signature stands.
#[derive(Clone, Debug)]
pub(super) enum TimestampPlace {
    Header(HeaderName),
    /// In the header of the signature, behind this.
    Prefix(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SignedPart {
    Text(String),
    Timestamp,
    Body,
}

/// What was found in the headers of a message.
struct Signed<'m> {
    /// What the signature is over, one part after the other.
    parts: Vec<&'m [u8]>,
    signatures: Vec<[u8; MAC_BYTES]>,
}

impl SignatureScheme {
    /// Verifies a message under any of the secrets (W1, W5).
    pub(super) fn verify(
        &self,
        headers: &HeaderMap,
        body: &[u8],
        now: Time,
        references: &[SecretReference],
        secrets: &Secrets,
    ) -> Result<(), Refusal> {
        let signed = match &self.kind {
            SignatureKind::Standard => self.standard(headers, body, now),
            SignatureKind::Hmac(scheme) => self.hmac(scheme, headers, body, now),
        };
        let signed = signed.map_err(unsigned)?;
        let (mut is_valid, mut usable, mut why) = (false, 0, None);
        for reference in references {
            match secrets.get(reference).and_then(|secret| self.mac(secret)) {
                Ok(mac) => {
                    usable += 1;
                    is_valid |= signed.is_by(&mac);
                }
                Err(problem) => why = Some(problem),
            }
        }
        match (is_valid, usable, why) {
            (true, ..) => Ok(()),
            // The message may be right, so it is not refused: the sender is to try again.
            (false, 0, Some(why)) => {
                Err(Refusal::new(Code::Unavailable, format!("an endpoint cannot verify signatures: {why}")))
            }
            _ => Err(unsigned("no signature of the message is by a secret of the endpoint".to_owned())),
        }
    }

    fn mac(&self, secret: &str) -> Result<Hmac<Sha256>, String> {
        match self.kind {
            SignatureKind::Standard => signature::mac_of(secret),
            SignatureKind::Hmac(_) => {
                Hmac::<Sha256>::new_from_slice(secret.as_bytes()).map_err(|error| error.to_string())
            }
        }
    }

    fn standard<'m>(&self, headers: &'m HeaderMap, body: &'m [u8], now: Time) -> Result<Signed<'m>, String> {
        let id = single(headers, signature::ID)?;
        let timestamp = single(headers, signature::TIMESTAMP)?;
        self.check_age(timestamp, now)?;
        let given = single(headers, signature::SIGNATURE)?.split(' ');
        let signatures = given.filter_map(|one| one.strip_prefix(signature::VERSION));
        let signatures =
            signatures.filter_map(|text| Encoding::Base64.decode(text)).take(SIGNATURES_MAX).collect();
        let parts = vec![id.as_bytes(), b".", timestamp.as_bytes(), b".", body];
        Ok(Signed { parts, signatures })
    }

    fn hmac<'m>(
        &self,
        scheme: &'m HmacScheme,
        headers: &'m HeaderMap,
        body: &'m [u8],
        now: Time,
    ) -> Result<Signed<'m>, String> {
        let header = single(headers, scheme.header.as_str())?;
        let elements = || header.split([',', ' ']).map(str::trim).filter(|element| !element.is_empty());
        let timestamp = match &scheme.timestamp {
            None => "",
            Some(TimestampPlace::Header(name)) => single(headers, name.as_str())?,
            Some(TimestampPlace::Prefix(prefix)) => {
                let mut found = elements().filter_map(|element| element.strip_prefix(prefix.as_str()));
                let missing =
                    || format!("the header {} has no time behind `{prefix}`, or several", scheme.header);
                let (Some(first), None) = (found.next(), found.next()) else { return Err(missing()) };
                first
            }
        };
        if scheme.timestamp.is_some() {
            self.check_age(timestamp, now)?;
        }
        let signatures = elements().filter_map(|element| element.strip_prefix(scheme.prefix.as_str()));
        let signatures =
            signatures.filter_map(|text| scheme.encoding.decode(text)).take(SIGNATURES_MAX).collect();
        let part = |part: &'m SignedPart| match part {
            SignedPart::Text(text) => text.as_bytes(),
            SignedPart::Timestamp => timestamp.as_bytes(),
            SignedPart::Body => body,
        };
        Ok(Signed { parts: scheme.signed.iter().map(part).collect(), signatures })
    }

    /// Refuses what was signed too long ago, or by a clock that is too far ahead.
    fn check_age(&self, timestamp: &str, now: Time) -> Result<(), String> {
        let is_number = !timestamp.is_empty() && timestamp.bytes().all(|byte| byte.is_ascii_digit());
        let seconds = timestamp.parse::<i64>().ok().filter(|_| is_number);
        let seconds = seconds.ok_or("the time of the signature is not a number of seconds since 1970")?;
        let at = Time::from_micros(seconds.saturating_mul(1_000_000));
        if at.since(now).max(now.since(at)) > self.tolerance {
            let tolerance = self.tolerance.as_secs();
            return Err(format!(
                "the message was not signed within {tolerance} s of this server's time; sign it again"
            ));
        }
        Ok(())
    }

    /// The headers of a signed message, each with what it has.
    pub(super) fn headers(&self) -> Vec<(String, &'static str)> {
        let time = "When it was signed, in seconds since 1970.";
        match &self.kind {
            SignatureKind::Standard => vec![
                (
                    signature::ID.to_owned(),
                    "The id of the message: of several with one id, one has an effect.",
                ),
                (signature::TIMESTAMP.to_owned(), time),
                (
                    signature::SIGNATURE.to_owned(),
                    "`v1,` and the base64 of the HMAC-SHA256, once or more often.",
                ),
            ],
            SignatureKind::Hmac(scheme) => {
                let own = (scheme.header.to_string(), "The HMAC-SHA256 of the message.");
                let header = match &scheme.timestamp {
                    Some(TimestampPlace::Header(name)) => Some((name.to_string(), time)),
                    _ => None,
                };
                [own].into_iter().chain(header).collect()
            }
        }
    }
}

fn unsigned(why: String) -> Refusal {
    Refusal::new(Code::InvalidSignature, why)
}

/// The only value of a header. A message with two of them could mean one to the sender and the other here.
fn single<'h>(headers: &'h HeaderMap, name: &str) -> Result<&'h str, String> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => value.to_str().map_err(|_| format!("the header {name} is not plain text")),
        (None, _) => Err(format!("the header {name} is missing")),
        (Some(_), Some(_)) => Err(format!("the header {name} is given several times")),
    }
}

impl Signed<'_> {
    /// Whether one of the signatures is by this function. The comparison takes the same time wherever they differ.
    fn is_by(&self, mac: &Hmac<Sha256>) -> bool {
        let mut mac = mac.clone();
        self.parts.iter().for_each(|part| mac.update(part));
        self.signatures.iter().any(|given| mac.clone().verify_slice(given).is_ok())
    }
}

impl Encoding {
    fn decode(self, text: &str) -> Option<[u8; MAC_BYTES]> {
        let bytes = match self {
            Encoding::Base64 => STANDARD.decode(text).ok()?,
            Encoding::Hex => hex(text)?,
        };
        bytes.try_into().ok()
    }
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    let pair = |[high, low]: &[u8; 2]| u8::try_from(digit(high)? * 16 + digit(low)?).ok();
    pairs.iter().map(pair).collect()
}
