//! The read of one row, strong or cached.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::Value;
use statehouse_store::limits::row_weight;

use super::{ACTIVE, CACHED, EntitySpec};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::cache::{Lookup, ReadToken};
use crate::resource::key_text;

pub(super) struct EntityRead {
    pub entity: Arc<EntitySpec>,
}

#[async_trait]
impl Read for EntityRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let text = |name: &str| call.input.text(name);
        let after = match text("after").map(ReadToken::parse_list) {
            None => Vec::new(),
            Some(Some(tokens)) => tokens,
            Some(None) => {
                let detail = "expected what writes returned as their token";
                return Err(Refusal::field("after", detail));
            }
        };
        if text("consistency") != Some(CACHED) {
            return self.strong(call, cx).await.map(|(answer, _)| Arc::new(answer));
        }
        match cx.cache.lookup(&call.tenant, &self.entity.name, &key_text(&call.key), &after) {
            Lookup::Hit(answer) => Ok(answer),
            Lookup::Bypass => self.strong(call, cx).await.map(|(answer, _)| Arc::new(answer)),
            Lookup::Miss(ticket) => {
                let (answer, bytes) = self.strong(call, cx).await?;
                let answer = Arc::new(answer);
                cx.cache.keep(ticket, &answer, bytes);
                Ok(answer)
            }
        }
    }
}

impl EntityRead {
    /// The row as it is, and what it weighs.
    async fn strong(&self, call: &Call, cx: &ActionContext<'_>) -> Result<(Answer, usize), Refusal> {
        let entity = &self.entity;
        let (row, hot) = entity.rows(call, cx).await?;
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
