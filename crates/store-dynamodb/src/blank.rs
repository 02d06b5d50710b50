//! Blanks events of erased rows in the log.
//!
//! The sequencer runs first, so that what is pending at the start of the range's walk stands in the log. Each record is written by one
//! update, on the condition that it was not trimmed. Only blanking changes a record, and blanking it twice is the same, so an update
//! without an answer is reported as unavailable and the caller retries.

use std::sync::Arc;

use statehouse_store::blank::BlankedRecord;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{BlankRange, BlankedPage, StoreError};

use crate::inner::DynamoInner;
use crate::record;
use crate::request_error::RequestError;

impl DynamoInner {
    /// Blanks events in up to as many records as the range says.
    pub(crate) async fn blank_events(
        self: &Arc<Self>,
        range: &BlankRange,
    ) -> Result<BlankedPage, StoreError> {
        let partition = range.partition;
        self.sequence(partition).await?;
        let limit = range.limit.clamp(1, PAGE_MAX);
        let mut page = BlankedPage { reached: range.through, events: 0 };
        // The request excludes no offset, so the first one is that behind `after`.
        let first = range.after.saturating_add(1);
        if first > range.through {
            return Ok(page);
        }
        let (items, _) = self.log_items(partition, first, Some(range.through), limit).await?;
        for item in &items {
            let (tenant, key, offset, events) = record::parse_stored(item)?;
            let record = BlankedRecord { tenant: &tenant, key, offset };
            let left = range.blank_stored(record, events);
            let left = left.map_err(|error| StoreError::corrupt(&self.tables.log, error.to_string()))?;
            if let Some((text, blanked)) = left {
                self.replace_events(partition, offset, &text).await?;
                page.events += blanked;
            }
            if items.len() >= limit {
                page.reached = offset;
            }
        }
        Ok(page)
    }

    async fn replace_events(&self, partition: u32, offset: u64, events: &str) -> Result<(), StoreError> {
        match self.client.write_one(&self.tables.replace_events(partition, offset, events)).await {
            // Written, or trimmed meanwhile.
            Ok(_) => Ok(()),
            Err(RequestError::UnknownOutcome(why)) => {
                Err(StoreError::unavailable(format!("it is not known whether an event was blanked: {why}")))
            }
            Err(error) => Err(error.into_error(&self.tables.log)),
        }
    }
}
