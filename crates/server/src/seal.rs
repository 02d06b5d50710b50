//! Sealed text: what is handed out and comes back later, opaque, unforgeable, and bound to where it belongs.
//!
//! A cursor of the store holds the position in clear, and a client could make one that points into what another
//! question, or another tenant, would see. So it is handed out with a keyed digest over it *and* its context: who asked,
//! which action, which filter. It is accepted only in the same context.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use subtle::ConstantTimeEq;

/// Bytes of the digest: 128 bits, more than anybody can try over a network.
const DIGEST_BYTES: usize = 16;

/// Seals and opens text under one key.
#[derive(Clone)]
pub struct Seal {
    key: [u8; 32],
}

impl Seal {
    /// A seal for one purpose, derived from the server's secret.
    pub fn of(secret: &[u8], purpose: &str) -> Seal {
        Seal { key: blake3::derive_key(&format!("statehouse 2026 {purpose}"), secret) }
    }

    /// The keyed digest of some parts, each with its length, so that no part can run into the next.
    pub fn digest(&self, parts: &[&[u8]]) -> [u8; 32] {
        digest(blake3::Hasher::new_keyed(&self.key), parts)
    }

    /// The content with a digest over it and its context, as text for a URL.
    pub fn close(&self, context: &[&[u8]], content: &[u8]) -> String {
        let mut sealed = self.tag(context, content).to_vec();
        sealed.extend_from_slice(content);
        BASE64.encode(sealed)
    }

    /// The content, if this seal closed it in this context.
    pub fn open(&self, context: &[&[u8]], sealed: &str) -> Option<Vec<u8>> {
        let sealed = BASE64.decode(sealed).ok()?;
        let (tag, content) = sealed.split_at_checked(DIGEST_BYTES)?;
        bool::from(tag.ct_eq(&self.tag(context, content))).then(|| content.to_vec())
    }

    fn tag(&self, context: &[&[u8]], content: &[u8]) -> [u8; DIGEST_BYTES] {
        let mut parts = context.to_vec();
        parts.push(content);
        let whole = self.digest(&parts);
        let mut tag = [0; DIGEST_BYTES];
        tag.iter_mut().zip(whole).for_each(|(to, from)| *to = from);
        tag
    }
}

/// The digest of some parts, each with its length, without a key.
pub fn fingerprint(parts: &[&[u8]]) -> String {
    blake3::Hash::from_bytes(digest(blake3::Hasher::new(), parts)).to_hex().to_string()
}

fn digest(mut hasher: blake3::Hasher, parts: &[&[u8]]) -> [u8; 32] {
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_seal_in_the_same_context_opens() {
        let seal = Seal::of(b"secret", "cursors");
        let sealed = seal.close(&[b"acme", b"list"], b"page 2");
        assert_eq!(seal.open(&[b"acme", b"list"], &sealed).as_deref(), Some(b"page 2".as_slice()));
        assert_eq!(seal.open(&[b"other", b"list"], &sealed), None);
        assert_eq!(seal.open(&[b"acmel", b"ist"], &sealed), None);
        assert_eq!(Seal::of(b"other", "cursors").open(&[b"acme", b"list"], &sealed), None);
        assert_eq!(Seal::of(b"secret", "keys").open(&[b"acme", b"list"], &sealed), None);
        let mut forged = BASE64.decode(&sealed).unwrap();
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(seal.open(&[b"acme", b"list"], &BASE64.encode(forged)), None);
        for text in ["", "x", "!!!!", "AAAA"] {
            assert_eq!(seal.open(&[b"acme", b"list"], text), None);
        }
    }
}
