//! Outbound requests of effects, and the questions about their outcome.

use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, HeaderName, Method};
use statehouse_store::{Row, StoreError, bug};

use super::worker::SendContext;
use super::{BODY, EffectSpec, HEADERS, JSON, SENT_KEY, URL, check_url, encoded, signature};
use crate::egress::OutboundRequest;

/// The minimal size of the response to a question that is read.
const QUESTION_BYTES: usize = 16_000;

/// Why a request cannot be made of a row.
#[derive(Debug)]
pub(super) enum UnsendableRow {
    /// A secret is missing, or is none.
    Yet(String),
    /// The blueprint does not allow it any more.
    Ever(String),
    /// Its row is damaged, or the program is wrong.
    Broken(StoreError),
}

impl From<StoreError> for UnsendableRow {
    fn from(error: StoreError) -> UnsendableRow {
        UnsendableRow::Broken(error)
    }
}

impl UnsendableRow {
    pub(super) fn ever(why: impl Into<String>) -> UnsendableRow {
        UnsendableRow::Ever(why.into())
    }
}

impl EffectSpec {
    /// The request of an effect.
    pub(super) fn outbound(
        &self,
        row: &Row,
        cx: &SendContext<'_, '_>,
    ) -> Result<OutboundRequest, UnsendableRow> {
        let sent_key = row.get_text(SENT_KEY)?;
        let body = self.bytes(row.get_optional_json(BODY)?);
        let mut headers = self.common_headers(sent_key, cx)?;
        if let Some(given) = row.get_optional_json(HEADERS)? {
            let given = given.as_object().ok_or_else(|| row.corrupt(HEADERS, "is not an object"))?;
            for (name, value) in given {
                let bad = || UnsendableRow::ever(format!("{name} cannot be a header"));
                let header: HeaderName = name.to_ascii_lowercase().parse().map_err(|_| bad())?;
                let value = value.as_str().and_then(|value| HeaderValue::from_str(value).ok());
                headers.insert(header, value.ok_or_else(bad)?);
            }
        }
        if !body.is_empty() {
            let kind = HeaderValue::from_str(&self.content_type);
            headers.insert(CONTENT_TYPE, kind.map_err(|_| UnsendableRow::ever("a bad content type"))?);
        }
        if !self.sign.is_empty() {
            let seconds = cx.context.clock.now().micros() / 1_000_000;
            for (name, value) in [
                (signature::ID, sent_key.to_owned()),
                (signature::TIMESTAMP, seconds.to_string()),
                (
                    signature::SIGNATURE,
                    self.signatures(sent_key, seconds, &body, cx).map_err(UnsendableRow::Yet)?,
                ),
            ] {
                let value = HeaderValue::from_str(&value);
                let value = value.map_err(|_| UnsendableRow::ever(format!("{name} cannot be a header")))?;
                headers.insert(HeaderName::from_static(name), value);
            }
        }
        let url = row.get_text(URL)?;
        let outbound = self.to(url, self.method.clone(), headers)?;
        // The blueprint may have changed since it was written down.
        self.check_host(&outbound.url).map_err(UnsendableRow::Ever)?;
        Ok(OutboundRequest { body, ..outbound })
    }

    /// During a rotation one of two secrets may be missing; a request without any signature is never sent.
    fn signatures(
        &self,
        id: &str,
        seconds: i64,
        body: &[u8],
        cx: &SendContext<'_, '_>,
    ) -> Result<String, String> {
        let mut signatures = Vec::new();
        for reference in &self.sign {
            match cx.secrets.get(reference) {
                Ok(secret) => {
                    let signed = signature::sign(secret, id, seconds, body);
                    signatures.push(signed.map_err(|why| format!("{reference}: {why}"))?);
                }
                Err(why) if self.sign.len() < 2 => return Err(why),
                Err(_) => {}
            }
        }
        if signatures.is_empty() {
            Err("there is no secret to sign with".into())
        } else {
            Ok(signatures.join(" "))
        }
    }

    /// The request that asks what became of an effect.
    pub(super) fn question(
        &self,
        row: &Row,
        cx: &SendContext<'_, '_>,
    ) -> Result<OutboundRequest, UnsendableRow> {
        let sent_key = row.get_text(SENT_KEY)?;
        let missing = || StoreError::from(bug!("{} has no URL to ask", self.name));
        let url = match self.settler.get().and_then(|settler| settler.status_url(row)) {
            Some(url) => url,
            None => self.reconcile_url.as_deref().ok_or_else(missing)?.replace("{key}", &encoded(sent_key)),
        };
        let mut headers = self.common_headers(sent_key, cx)?;
        headers.insert(ACCEPT, HeaderValue::from_static(JSON));
        // The answer has to be whole to be understood, also if little of it is kept.
        let answer_max = self.answer_max.max(QUESTION_BYTES);
        Ok(OutboundRequest { response_max: answer_max, ..self.to(&url, Method::GET, headers)? })
    }

    fn common_headers(&self, sent_key: &str, cx: &SendContext<'_, '_>) -> Result<HeaderMap, UnsendableRow> {
        let mut headers = HeaderMap::new();
        for (name, template) in &self.headers {
            headers.insert(name, template.header(&cx.secrets).map_err(UnsendableRow::Yet)?);
        }
        if let Some(name) = &self.key_header {
            let value = HeaderValue::from_str(sent_key);
            headers.insert(name, value.map_err(|_| UnsendableRow::ever("the key cannot be a header"))?);
        }
        Ok(headers)
    }

    fn to(&self, url: &str, method: Method, headers: HeaderMap) -> Result<OutboundRequest, UnsendableRow> {
        Ok(OutboundRequest {
            method,
            url: check_url(url, self.allow_private).map_err(UnsendableRow::Ever)?.uri,
            headers,
            body: Vec::new(),
            connect_timeout: self.connect_timeout,
            timeout: self.timeout,
            response_max: self.answer_max,
            allow_private: self.allow_private,
        })
    }
}
