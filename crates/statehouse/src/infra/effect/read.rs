//! The reads.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::{Address, Consistency, Query, Row, Store, Tenant, Value};

use super::{BY_STATUS, Effect, PARKED, STATUS};
use crate::action::{Answer, Call, Code, Desk, Read, Refusal};
use crate::paging;
use crate::resource::key_text;

impl Effect {
    /// The row of a key, if there is one.
    pub(super) async fn find(
        &self,
        store: &dyn Store,
        tenant: &Tenant,
        key: &[Value],
    ) -> Result<Option<Row>, Refusal> {
        let address = Address::new(&self.table, tenant, key.iter().cloned())?;
        Ok(store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
    }

    pub(super) fn what(&self, key: &[Value]) -> String {
        format!("{} {}", self.name, key_text(key))
    }
}

pub(super) struct Reader {
    pub effect: Arc<Effect>,
    pub list: bool,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let effect = &self.effect;
        if self.list {
            let status = call.input.get(STATUS).and_then(Json::as_str).unwrap_or(PARKED);
            let query = Query::index(&effect.table, BY_STATUS, &call.tenant, [status.into()])?.backward();
            let page = desk.store.query(&paging::page_of(query, call)?).await?;
            return Ok(Arc::new(paging::answer(page.rows.iter().map(Row::to_json), page.next)));
        }
        let row = effect.find(desk.store, &call.tenant, &call.key).await?;
        let missing = || Refusal::new(Code::NotFound, format!("{} does not exist", effect.what(&call.key)));
        Ok(Arc::new(Answer::row(row.ok_or_else(missing)?.to_json())))
    }
}
