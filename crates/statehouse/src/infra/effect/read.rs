//! The reads.

use statehouse_store::{Address, Consistency, Row, Store, Tenant, Value};

use super::EffectSpec;
use crate::action::Refusal;

impl EffectSpec {
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
}
