//! Styles, scripts and the icon. Their names contain a digest of their content, so browsers may keep them for ever.

use std::sync::LazyLock;

use axum::response::{IntoResponse as _, Response};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};

use super::ROOT;
use crate::problem::{NOT_FOUND, Problem};
use crate::seal::fingerprint;

/// Digits of the digest in a name.
const DIGEST_DIGITS: usize = 12;

struct Asset {
    name: &'static str,
    media: &'static str,
    content: &'static str,
    /// `style-0123456789ab.css`.
    file: String,
}

static ASSETS: LazyLock<Vec<Asset>> = LazyLock::new(|| {
    let asset = |name: &'static str, media, content: &'static str| {
        let digest: String = fingerprint(&[content.as_bytes()]).chars().take(DIGEST_DIGITS).collect();
        let (stem, kind) = name.rsplit_once('.').unwrap_or((name, ""));
        Asset { name, media, content, file: format!("{stem}-{digest}.{kind}") }
    };
    vec![
        asset("style.css", "text/css; charset=utf-8", include_str!("assets/style.css")),
        asset("console.js", "text/javascript; charset=utf-8", include_str!("assets/console.js")),
        asset("form.js", "text/javascript; charset=utf-8", include_str!("assets/form.js")),
        asset("icon.svg", "image/svg+xml", include_str!("assets/icon.svg")),
    ]
});

/// The address of an asset.
pub(super) fn link(name: &str) -> String {
    let file = ASSETS.iter().find(|asset| asset.name == name).map_or(name, |asset| asset.file.as_str());
    format!("{ROOT}/assets/{file}")
}

/// An asset as a response.
pub(super) fn response(file: &str) -> Result<Response, Problem> {
    let asset = ASSETS.iter().find(|asset| asset.file == file);
    let asset = asset.ok_or_else(|| Problem::new(NOT_FOUND, "the console has no such file"))?;
    let headers = [(CONTENT_TYPE, asset.media), (CACHE_CONTROL, "public, max-age=31536000, immutable")];
    Ok((headers, asset.content).into_response())
}
