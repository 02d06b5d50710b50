//! The read of one row, strong or cached.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::Value;
use statehouse_store::limits::row_weight;

use super::{ACTIVE, CACHED, Entity};
use crate::action::{Answer, Call, Code, Desk, Read, Refusal};
use crate::cache::{Lookup, Token};
use crate::resource::key_text;

pub(super) struct Reader {
    pub entity: Arc<Entity>,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let text = |name: &str| call.input.get(name).and_then(Json::as_str);
        let after = match text("after").map(Token::parse_list) {
            None => Vec::new(),
            Some(Some(tokens)) => tokens,
            Some(None) => {
                let detail = "expected what writes returned as their token";
                return Err(Refusal::field("after", detail));
            }
        };
        if text("consistency") != Some(CACHED) {
            return self.strong(call, desk).await.map(|(answer, _)| Arc::new(answer));
        }
        match desk.cache.look(&call.tenant, &self.entity.name, &key_text(&call.key), &after) {
            Lookup::Hit(answer) => Ok(answer),
            Lookup::Bypass => self.strong(call, desk).await.map(|(answer, _)| Arc::new(answer)),
            Lookup::Miss(ticket) => {
                let (answer, bytes) = self.strong(call, desk).await?;
                let answer = Arc::new(answer);
                desk.cache.keep(ticket, &answer, bytes);
                Ok(answer)
            }
        }
    }
}

impl Reader {
    /// The row as it is, and what it weighs.
    async fn strong(&self, call: &Call, desk: &Desk<'_>) -> Result<(Answer, usize), Refusal> {
        let entity = &self.entity;
        let (row, hot) = entity.rows(call, desk).await?;
        let row =
            row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", entity.what(call))))?;
        entity.check_status(call, &row, ACTIVE)?;
        let mut body = row.to_json();
        if let Some(body) = body.as_object_mut() {
            for field in &entity.hot {
                let stored = hot.as_ref().and_then(|hot| hot.get(&field.name));
                let value = stored.or(field.default.as_ref()).map_or(Json::Null, Value::to_json);
                body.insert(field.name.clone(), value);
            }
        }
        let bytes = row_weight(&row) + hot.as_ref().map_or(0, row_weight);
        Ok((Answer::row(body), bytes))
    }
}
