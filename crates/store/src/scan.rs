//! Scans of whole tables, page by page, and their division into segments that workers scan independently.
//!
//! A [`Segment`] is opaque: engines with ordered keys divide a table by keys, DynamoDB by a hash of the partition key. What
//! holds on every engine:
//!
//! - The segments of one call of [`crate::Store::segments`] tile the scan: every row belongs to exactly one of them, also a
//!   row that is inserted later.
//! - A segment has a text form that can be stored. It keeps its meaning in another process.
//! - The remainder of a segment can be divided again, if the engine divides by keys.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use serde::{Deserialize, Serialize};

use crate::error::{PlanError, StoreError};
use crate::limits::PAGE_MAX;
use crate::read::{Cursor, admit_limit};
use crate::row::{Row, Tenant};
use crate::table::Table;
use crate::value::{Type, Value};

/// The most segments of one call of [`crate::Store::segments`].
pub const SEGMENTS_MAX: usize = 1_024;

/// A scan of all rows of a table, in an order that is the engine's own.
///
/// A row that exists from the beginning to the end of the scan is returned exactly once.
#[derive(Clone, Debug, PartialEq)]
pub struct Scan {
    table: Arc<Table>,
    tenant: Option<Tenant>,
    segment: Option<Segment>,
    limit: usize,
    after: Option<Cursor>,
}

/// A part of a scan. Printed, it is opaque text that [`Segment::parse`] reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    table: String,
    part: SegmentPart,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum SegmentPart {
    /// Rows in the order of tenant and key: above the first bound, up to and including the second.
    Keys { above: Option<Vec<Value>>, through: Option<Vec<Value>> },
    /// Rows whose partition key has this hash.
    Hash { index: u32, total: u32 },
}

impl Segment {
    /// One of `total` parts by the hash of the partition key.
    pub fn by_hash(table: &Table, index: u32, total: u32) -> Segment {
        Segment { table: table.name().to_owned(), part: SegmentPart::Hash { index, total } }
    }

    /// Divides what is left of a scan at these keys, which are sorted. Each is the tenant and the key of the last row of a
    /// segment.
    pub fn by_keys(scan: &Scan, boundaries: Vec<Vec<Value>>) -> Vec<Segment> {
        let mut above = scan.lower_bound().map(<[Value]>::to_vec);
        let end = scan.upper_bound().map(<[Value]>::to_vec);
        let mut segments = Vec::with_capacity(boundaries.len() + 1);
        for through in boundaries.into_iter().map(Some).chain([end]) {
            let part = SegmentPart::Keys { above, through: through.clone() };
            segments.push(Segment { table: scan.table.name().to_owned(), part });
            above = through;
        }
        segments
    }

    /// Parses the text of `Display`.
    pub fn parse(text: &str) -> Result<Segment, PlanError> {
        let bad = || PlanError::BadSegment { why: "it is not the text of a segment".into() };
        let bytes = BASE64.decode(text).map_err(|_| bad())?;
        serde_json::from_slice(&bytes).map_err(|_| bad())
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let json = serde_json::to_vec(self).map_err(|_| fmt::Error)?;
        f.write_str(&BASE64.encode(json))
    }
}

impl Scan {
    /// All rows of all tenants: for workers and tools, never on behalf of a tenant.
    pub fn all(table: &Arc<Table>) -> Scan {
        Scan { table: table.clone(), tenant: None, segment: None, limit: PAGE_MAX, after: None }
    }

    /// All rows of one tenant.
    pub fn of(table: &Arc<Table>, tenant: &Tenant) -> Scan {
        Scan { tenant: Some(tenant.clone()), ..Scan::all(table) }
    }

    /// Only the rows of a segment. The scan starts at the beginning of the segment.
    pub fn within(mut self, segment: Segment) -> Result<Scan, PlanError> {
        if segment.table != self.table.name() {
            let why = format!("it is a segment of table {}, not of {}", segment.table, self.table);
            return Err(PlanError::BadSegment { why });
        }
        let fits = match &segment.part {
            SegmentPart::Hash { index, total } => index < total,
            SegmentPart::Keys { above, through } => {
                above.iter().chain(through).all(|values| has_types(values, &self.key_types()))
            }
        };
        if !fits {
            return Err(PlanError::BadSegment { why: "its values have other types".into() });
        }
        self.segment = Some(segment);
        self.after = None;
        Ok(self)
    }

    /// At most this many rows in a page; 1 to [`PAGE_MAX`].
    pub fn limit(mut self, rows: usize) -> Result<Scan, PlanError> {
        self.limit = admit_limit(rows)?;
        Ok(self)
    }

    /// Continues after a page. The cursor must be from a page of the same segment.
    pub fn after(mut self, cursor: Cursor) -> Result<Scan, PlanError> {
        cursor.check(&self.source(), &self.key_types())?;
        self.after = Some(cursor);
        Ok(self)
    }

    /// The types of the tenant and the key columns.
    fn key_types(&self) -> Vec<Type> {
        std::iter::once(Type::Text).chain(self.table.key_columns().iter().map(|column| column.kind)).collect()
    }

    fn source(&self) -> String {
        match &self.segment {
            Some(segment) => format!("{}/*/{segment}", self.table),
            None => format!("{}/*", self.table),
        }
    }

    /// The table.
    pub fn read_table(&self) -> &Arc<Table> {
        &self.table
    }

    /// The tenant whose rows are read; `None` for all tenants.
    pub fn tenant(&self) -> Option<&Tenant> {
        self.tenant.as_ref()
    }

    /// The most rows of a page.
    pub fn page_limit(&self) -> usize {
        self.limit
    }

    /// Tenant and key after which it continues.
    pub fn cursor_values(&self) -> Option<&[Value]> {
        self.after.as_ref().map(|cursor| cursor.values.as_slice())
    }

    /// Tenant and key above which its rows are: those of the cursor, or the begin of the segment.
    pub fn lower_bound(&self) -> Option<&[Value]> {
        self.cursor_values().or(match self.segment.as_ref().map(|segment| &segment.part) {
            Some(SegmentPart::Keys { above, .. }) => above.as_deref(),
            _ => None,
        })
    }

    /// Tenant and key up to which its rows are, inclusive.
    pub fn upper_bound(&self) -> Option<&[Value]> {
        match self.segment.as_ref().map(|segment| &segment.part) {
            Some(SegmentPart::Keys { through, .. }) => through.as_deref(),
            _ => None,
        }
    }

    /// The index and the number of segments by hash, for an engine that divides tables so. A segment by keys is an error.
    pub fn hash_segment(&self) -> Result<Option<(u32, u32)>, StoreError> {
        match self.segment.as_ref().map(|segment| &segment.part) {
            None => Ok(None),
            Some(SegmentPart::Hash { index, total }) => Ok(Some((*index, *total))),
            Some(SegmentPart::Keys { .. }) => Err(self.foreign_segment()),
        }
    }

    /// Checks that its segment, if it has one, is by keys, for an engine that divides tables so.
    pub fn require_key_segment(&self) -> Result<(), StoreError> {
        match self.segment.as_ref().map(|segment| &segment.part) {
            None | Some(SegmentPart::Keys { .. }) => Ok(()),
            Some(SegmentPart::Hash { .. }) => Err(self.foreign_segment()),
        }
    }

    fn foreign_segment(&self) -> StoreError {
        StoreError::schema(format!("a segment of table {}", self.table), "another engine made it")
    }

    /// The segment, if it has one.
    pub fn segment(&self) -> Option<&Segment> {
        self.segment.as_ref()
    }

    /// The cursor after a row of this scan.
    pub fn cursor_at(&self, row: &Row) -> Cursor {
        Cursor { source: self.source(), values: scan_key(row) }
    }
}

/// The position of a row in the order of tenant and key.
pub fn scan_key(row: &Row) -> Vec<Value> {
    let tenant = Value::from(row.tenant().as_str());
    std::iter::once(tenant).chain(row.key().iter().cloned()).collect()
}

fn has_types(values: &[Value], types: &[Type]) -> bool {
    values.len() == types.len() && values.iter().zip(types).all(|(value, kind)| value.kind() == Some(*kind))
}

/// Whether row `n` of `total` (from 1) is the last row of one of `max` equal parts, other than the last part.
pub fn ends_segment(n: usize, total: usize, max: usize) -> bool {
    n < total && n * max / total != (n - 1) * max / total
}

/// Checks the number of segments that a caller asks for.
pub fn check_segments(max: usize) -> Result<(), StoreError> {
    if max == 0 || max > SEGMENTS_MAX {
        let what = "segments of a scan (from 1)".to_owned();
        return Err(StoreError::LimitExceeded { what, limit: SEGMENTS_MAX, actual: max });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str) -> Arc<Table> {
        Table::named(name).partition("id", Type::Int).build().unwrap()
    }

    fn key(id: i64) -> Vec<Value> {
        vec!["acme".into(), id.into()]
    }

    #[test]
    fn segments_by_keys_tile_the_scan_and_can_be_divided_again() {
        let table = table("posts");
        let scan = Scan::all(&table);
        let segments = Segment::by_keys(&scan, vec![key(3), key(7)]);
        let bounds = |segment: &Segment| {
            let part = scan.clone().within(segment.clone()).unwrap();
            (part.lower_bound().map(<[Value]>::to_vec), part.upper_bound().map(<[Value]>::to_vec))
        };
        let all: Vec<_> = segments.iter().map(bounds).collect();
        assert_eq!(all, [(None, Some(key(3))), (Some(key(3)), Some(key(7))), (Some(key(7)), None)]);
        let middle = scan.clone().within(segments[1].clone()).unwrap();
        let row = Row::new(table.clone(), Tenant::new("acme").unwrap(), vec![5.into()], 1);
        let rest = middle.clone().after(middle.cursor_at(&row)).unwrap();
        let again: Vec<_> = Segment::by_keys(&rest, vec![key(6)]).iter().map(bounds).collect();
        assert_eq!(again, [(Some(key(5)), Some(key(6))), (Some(key(6)), Some(key(7)))]);
    }

    #[test]
    fn a_segment_has_a_text_form_and_belongs_to_its_table() {
        let (posts, other) = (table("posts"), table("other"));
        for segment in Segment::by_keys(&Scan::all(&posts), vec![key(3)])
            .into_iter()
            .chain([Segment::by_hash(&posts, 1, 4)])
        {
            assert_eq!(Segment::parse(&segment.to_string()).unwrap(), segment);
            let foreign = Scan::all(&other).within(segment.clone());
            assert!(matches!(foreign, Err(PlanError::BadSegment { .. })));
        }
        assert!(matches!(Segment::parse("!"), Err(PlanError::BadSegment { .. })));
        let text = Table::named("posts").partition("id", Type::Text).build().unwrap();
        let by_int = Segment::by_keys(&Scan::all(&posts), vec![key(3)]).remove(0);
        assert!(matches!(Scan::all(&text).within(by_int), Err(PlanError::BadSegment { .. })));
        let beyond = Segment::by_hash(&posts, 4, 4);
        assert!(matches!(Scan::all(&posts).within(beyond), Err(PlanError::BadSegment { .. })));
    }

    #[test]
    fn a_cursor_belongs_to_one_segment() {
        let table = table("posts");
        let segments = Segment::by_keys(&Scan::all(&table), vec![key(3)]);
        let row = Row::new(table.clone(), Tenant::new("acme").unwrap(), vec![2.into()], 1);
        let scan = |number: usize| Scan::all(&table).within(segments[number].clone()).unwrap();
        let cursor = scan(0).cursor_at(&row);
        assert!(scan(0).after(cursor.clone()).is_ok());
        assert!(matches!(scan(1).after(cursor.clone()), Err(PlanError::BadCursor { .. })));
        assert!(matches!(Scan::all(&table).after(cursor), Err(PlanError::BadCursor { .. })));
    }

    #[test]
    fn an_engine_rejects_the_segments_of_another() {
        let table = table("posts");
        let by_hash = Scan::all(&table).within(Segment::by_hash(&table, 0, 2)).unwrap();
        let by_keys = Segment::by_keys(&Scan::all(&table), vec![key(3)]).remove(0);
        let by_keys = Scan::all(&table).within(by_keys).unwrap();
        assert!(by_hash.require_key_segment().is_err());
        assert!(by_keys.hash_segment().is_err());
        assert_eq!(by_hash.hash_segment().unwrap(), Some((0, 2)));
        assert!(by_keys.require_key_segment().is_ok());
    }

    #[test]
    fn parts_are_equal_to_one_row() {
        for (total, max) in [(0, 3), (1, 3), (2, 3), (10, 3), (100, 7), (5, 5), (6, 5)] {
            let ends: Vec<usize> = (1..=total).filter(|n| ends_segment(*n, total, max)).collect();
            let mut sizes = Vec::new();
            let mut last = 0;
            for end in ends.into_iter().chain([total]) {
                sizes.push(end - last);
                last = end;
            }
            assert_eq!(sizes.len(), max.min(total).max(1), "{total} rows in {max} parts");
            let (min, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            assert!(most - min <= 1, "{total} rows in {max} parts: {sizes:?}");
        }
    }
}
