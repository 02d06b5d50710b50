//! Blanks events of erased rows in the log.
//!
//! A step reads records of one partition, decides what is left of their events, and writes those that change in one transaction. Only
//! blanking changes a record, and blanking it twice is the same, so concurrent steps need no lock beyond that of the record.

use statehouse_store::blank::BlankedRecord;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{BlankRange, BlankedPage, StoreError, Tenant};

use crate::connection::{Closing, DatabaseCall};
use crate::shared::Shared;
use crate::sql::{Arg, int_at, text_at};
use crate::tenancy::TransactionScope;

const LOG: &str = "statehouse_log";

impl Shared {
    /// Blanks events in up to as many records as the range says.
    pub(crate) async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        if range.partition >= self.partitions {
            return Err(StoreError::no_partition(range.partition, self.partitions as usize));
        }
        let limit = range.limit.clamp(1, PAGE_MAX);
        let (text, args) = self.records_to_blank(range, limit);
        let answers = self.read(&TransactionScope::All, &[DatabaseCall::new(text, args)]).await;
        let answers = answers.map_err(|fault| fault.into_error(&[]))?;
        let rows = answers.first().map(Vec::as_slice).unwrap_or_default();
        let mut page = BlankedPage { reached: range.through, events: 0 };
        let (mut positions, mut contents) = (Vec::new(), Vec::new());
        for row in rows {
            let corrupt = |why: String| StoreError::corrupt(LOG, why);
            let position = int_at(row, 0, LOG)?;
            let offset = u64::try_from(position).map_err(|_| corrupt("a position is negative".into()))?;
            let tenant = Tenant::new(text_at(row, 1, LOG)?).map_err(|error| corrupt(error.to_string()))?;
            let (key, events) = (text_at(row, 2, LOG)?, text_at(row, 3, LOG)?);
            let record = BlankedRecord { tenant: &tenant, key: &key, offset };
            let left = range.blank_stored(record, &events).map_err(|error| corrupt(error.to_string()))?;
            if let Some((text, blanked)) = left {
                positions.push(position);
                contents.push(text);
                page.events += blanked;
            }
            if rows.len() == limit {
                page.reached = offset;
            }
        }
        if !positions.is_empty() {
            self.write_blank(range.partition, positions, contents).await?;
        }
        Ok(page)
    }

    /// The statement that reads the records of a range.
    fn records_to_blank(&self, range: &BlankRange, limit: usize) -> (String, Vec<Arg<'static>>) {
        let text = format!(
            "select l.position, l.tenant, l.key, l.events::text\nfrom {} as l\nwhere l.partition = $1 and l.position > $2 \
             and l.position <= $3\norder by l.position\nlimit $4",
            self.names.log()
        );
        let number = |number: u64| Arg::Int(i64::try_from(number).unwrap_or(i64::MAX));
        let limit = Arg::Int(i64::try_from(limit).unwrap_or(i64::MAX));
        (text, vec![Arg::Partition(range.partition), number(range.after), number(range.through), limit])
    }

    /// Writes what is left of records. It is idempotent, so a lost answer is reported as unavailable and the caller retries.
    async fn write_blank(
        &self,
        partition: u32,
        positions: Vec<i64>,
        contents: Vec<String>,
    ) -> Result<(), StoreError> {
        let text = format!(
            "update {} as l\nset events = b.events::json\nfrom unnest($2::bigint[], $3::text[]) as b(position, events)\n\
             where l.partition = $1 and l.position = b.position",
            self.names.log()
        );
        let args = vec![Arg::Partition(partition), Arg::Ints(positions), Arg::Written(contents)];
        let session = self.fences.session(&self.connector).await?;
        let lock_timeout = self.options.lock_timeout.as_millis();
        let open = self.options.begin_sql(lock_timeout, "", &TransactionScope::All);
        let answers = session.run(Some(&open), &[DatabaseCall::new(text, args)], Some("commit")).await;
        match (answers.rows, answers.closing) {
            (Ok(_), Closing::Done) => Ok(()),
            (Ok(_), _) => Err(StoreError::unavailable("the connection broke while events were blanked")),
            (Err(fault), _) => Err(fault.into_error(&[])),
        }
    }
}
