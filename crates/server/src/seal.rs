//! Sealed cursors: opaque text that the server hands out and accepts again only in the same context.
//!
//! A cursor of the store contains the position in plain text, so a client could forge one that points into another query
//! or another tenant. The server therefore adds a keyed digest over the cursor *and* its context: tenant, action and
//! filter.
//!
//! Positions in the log tell how much all tenants write, so the content is encrypted too. The digest is the nonce (synthetic
//! IV): the key stream is the extended output of a second keyed hash of the digest. Equal content in an equal context gives
//! equal text, which reveals only that the position has not moved.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use subtle::ConstantTimeEq;

/// Bytes of the digest: 128 bits, infeasible to guess over a network.
const DIGEST_BYTES: usize = 16;

/// Seals and opens text with one key.
#[derive(Clone)]
pub struct CursorSeal {
    key: [u8; 32],
    stream_key: [u8; 32],
}

impl CursorSeal {
    /// Derives the seal for one purpose from the server's secret.
    pub fn of(secret: &[u8], purpose: &str) -> CursorSeal {
        let derive = |purpose: &str| blake3::derive_key(&format!("statehouse 2026 {purpose}"), secret);
        CursorSeal { key: derive(purpose), stream_key: derive(&format!("{purpose} encryption")) }
    }

    /// Keyed digest of several parts. Each part is preceded by its length, so that parts cannot be shifted.
    pub fn digest(&self, parts: &[&[u8]]) -> [u8; 32] {
        digest(blake3::Hasher::new_keyed(&self.key), parts)
    }

    /// The content and a digest over it and its context, as URL-safe text.
    pub fn close(&self, context: &[&[u8]], content: &[u8]) -> String {
        let tag = self.tag(context, content);
        let mut sealed = tag.to_vec();
        sealed.extend(self.crypt(&tag, content));
        BASE64.encode(sealed)
    }

    /// The content, if this seal closed it in this context.
    pub fn open(&self, context: &[&[u8]], sealed: &str) -> Option<Vec<u8>> {
        let sealed = BASE64.decode(sealed).ok()?;
        let (tag, content) = sealed.split_at_checked(DIGEST_BYTES)?;
        let content = self.crypt(tag, content);
        bool::from(tag.ct_eq(&self.tag(context, &content))).then_some(content)
    }

    /// Encrypts or decrypts: the content combined with the key stream of a tag.
    fn crypt(&self, tag: &[u8], content: &[u8]) -> Vec<u8> {
        let mut stream = vec![0; content.len()];
        blake3::Hasher::new_keyed(&self.stream_key).update(tag).finalize_xof().fill(&mut stream);
        stream.iter_mut().zip(content).for_each(|(byte, content)| *byte ^= content);
        stream
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

/// Digest of several parts without a key, each preceded by its length.
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
        let seal = CursorSeal::of(b"secret", "cursors");
        let sealed = seal.close(&[b"acme", b"list"], b"page 2");
        assert_eq!(seal.open(&[b"acme", b"list"], &sealed).as_deref(), Some(b"page 2".as_slice()));
        assert!(!BASE64.decode(&sealed).unwrap().windows(4).any(|part| part == b"page"));
        assert_eq!(seal.open(&[b"other", b"list"], &sealed), None);
        assert_eq!(seal.open(&[b"acmel", b"ist"], &sealed), None);
        assert_eq!(CursorSeal::of(b"other", "cursors").open(&[b"acme", b"list"], &sealed), None);
        assert_eq!(CursorSeal::of(b"secret", "keys").open(&[b"acme", b"list"], &sealed), None);
        let mut forged = BASE64.decode(&sealed).unwrap();
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(seal.open(&[b"acme", b"list"], &BASE64.encode(forged)), None);
        for text in ["", "x", "!!!!", "AAAA"] {
            assert_eq!(seal.open(&[b"acme", b"list"], text), None);
        }
    }
}
