//! A05 Derived projection, as a view: counts, sums, extremes and the latest of a resource's rows, by group.
//!
//! ```text
//!   source rows (truth) ──► log ──► entries ──► totals by group
//!         └─ looked up, where the ──┘  └──────► rows in order, for min, max and latest
//!            log only names them
//! ```
//!
//! What the log tells of a source's rows is said by its archetype ([`crate::told`]).
//!
//! **Rows.** `profiles_by_status(tenant, generation, group_key, group columns…, members, sum_…, version)`: one for each group.
//! `profiles_by_status_entries`: what each source row counts for. `profiles_by_status_order(tenant, generation, group_key,
//! field, rank, source, value, version)`: the values of a group in their order, so that a minimum is right after the row
//! that had it is gone. With `total = true` also `profiles_by_status_total(tenant, generation, shard, members, sum_…, version)`: of
//! each source row the share is in one shard, so that no read has to add up groups.
//!
//! **Invariants.** Those of [`crate::infra::projection`], and:
//! - V1. A group's totals are the sums over its entries. *Whatever changes an entry takes its old share away and adds the new
//!   one, in one plan, by adding to the totals and not by writing them.*
//! - V2. A minimum, maximum or latest is that of an entry that is there. *It is the first or last of rows in order, which come
//!   and go with their entries in one plan.*
//! - V3. A deleted row counts nowhere. *A row that stays as a tombstone says so, and counts no more, unless the view groups by
//!   what says it* ([`RowFilter`]); *of one that is gone the log names the key, and nothing is found there.*
//! - V5. The total is the sum over the entries, and no row is in it twice or not at all while it goes from one group to another. *A
//!   source row has one shard, and its change is one addition in the plan of V1; one that only changes the group adds nothing.*
//! - V4. Nothing is counted that changes without the log being told. *Such columns are refused, and values of a state that
//!   change into each other in this way count as one* ([`crate::view_source::MergedValues`]).
//!
//! **Failures.** *Stale projection*: the lag is known, and a read with `after`, the token of a write, waits for it. *Missing
//! entry*, *duplicate entry*: effect and progress are one plan, and the row's version counts once. *Tombstone not
//! propagated*: V3, and the pipeline's I3. *Expensive reindex after schema change*: another definition is built beside the live
//! one, which goes on serving. *Stale ranking after source update*: V2.
//!
//! **Hotspots.** *Fanout on write*, *expensive ranking/recompute*: a source row changes a bounded number of rows. *Projection
//! lag*, *rebuild cost*: the pipeline's. *Query fanout across shards*: a group is one row, and one more read for each extreme.

mod archetype;
mod rank;
mod read;

pub use archetype::ARCHETYPE;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::table::TableBuilder;
use statehouse_store::{Bug, Record, Row, Table, Type, Value, bug};

use self::rank::{rank, unranked};
use crate::action::ActionHandler;
use crate::blueprint::{self, Blueprint};
use crate::declare::{Declare, ResourceSpec, SettingsReader};
use crate::infra::projection::{
    EntryContent, EntryDelta, GENERATION, Projector, RowLookup, SOURCE, SourceChange, SourceMention,
    entries_table,
};
use crate::resource::{Resource, key_text, stands_on_others};
use crate::view_source::{EventRow, EventShape, RowFilter, SourceRows, ViewSource};

const GROUP_KEY: &str = "group_key";
const MEMBERS: &str = "members";
const FIELD: &str = "field";
const RANK: &str = "rank";
const VALUE: &str = "value";
/// Bytes of a group's values, and of a source's key, that fit into the keys of the view's rows.
const KEY_BYTES_MAX: usize = 300;
/// The column of a total's rows that says which part of the sources is in it.
const SHARD: &str = "shard";
/// Into how many rows a total is divided: writers of different sources seldom meet, and a reader reads them all at once.
const TOTAL_SHARDS: u32 = 8;

/// One declared view.
#[derive(Debug)]
struct ViewSpec {
    name: String,
    of: String,
    source_rows: SourceRows,
    totals: Arc<Table>,
    entries: Arc<Table>,
    order: Arc<Table>,
    /// The total over all groups, if it is kept.
    grand_total: Option<Arc<Table>>,
    group_by: Vec<(String, Type)>,
    count: bool,
    sum: Vec<String>,
    min: Vec<String>,
    max: Vec<String>,
    latest: Vec<String>,
    /// Which rows count.
    counts: RowFilter,
    /// What has to be done before there is something to see, for those who explain.
    after: Vec<String>,
}

/// Reads `[view.NAME]`, over a resource that is declared elsewhere in the blueprint.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let (name, (blueprint, resources)) = (cx.name(), cx.others()?);
    let settings = cx.settings();
    let of = settings.maybe_text("of");
    let group_by = settings.texts("group_by");
    let [sum, min, max] = ["sum", "min", "max"].map(|name| settings.texts(name));
    let latest: Vec<String> = settings.maybe_text("latest").into_iter().collect();
    let nothing_else = sum.is_empty() && min.is_empty() && max.is_empty() && latest.is_empty();
    let count = settings.flag("count", nothing_else);
    let total = settings.flag("total", false);
    check_total(settings, total, &group_by, count || !sum.is_empty());
    let Some(of) = of else {
        let advice = "name a resource: `of = \"profile\"`";
        settings.problem_with_advice("of", format!("`view.{name}` does not say what it is of"), advice);
        return None;
    };
    let (source, source_rows) = match followed(&of, blueprint, resources) {
        Ok(found) => found,
        Err((title, advice)) => {
            settings.problem_with_advice("of", title, advice);
            return None;
        }
    };
    let numbers = [Type::Int, Type::Float, Type::Time];
    let groups = [Type::Text, Type::Int, Type::Bool, Type::Time];
    let lists: [(&'static str, &[String], &[Type]); 5] = [
        ("group_by", &group_by, &groups),
        ("sum", &sum, &[Type::Int]),
        ("min", &min, &numbers),
        ("max", &max, &numbers),
        ("latest", &latest, &numbers),
    ];
    let mut fits = true;
    for (setting, names, kinds) in lists {
        fits &= check_columns(settings, setting, names, kinds, source_rows, &of);
    }
    if !fits {
        return None;
    }
    let kind = |name: &str| source_rows.table.type_of(name).unwrap_or(Type::Text);
    let group_by: Vec<(String, Type)> = group_by.iter().map(|name| (name.clone(), kind(name))).collect();
    let [totals, entries, order] = tables(name, &group_by, &sum, [&min, &max, &latest]);
    let view = Arc::new(ViewSpec {
        name: name.to_owned(),
        counts: match source_rows.filter {
            RowFilter::With(column, _) if group_by.iter().any(|(name, _)| name == column) => RowFilter::All,
            counts => counts,
        },
        of,
        source_rows: source_rows.clone(),
        totals: cx.build_internal(totals)?,
        entries: cx.build_internal(entries)?,
        order: cx.build_internal(order)?,
        grand_total: match total {
            true => Some(cx.build_internal(total_table(name, &sum))?),
            false => None,
        },
        group_by,
        count,
        sum,
        min,
        max,
        latest,
        after: makers(source),
    });
    let resource = ResourceSpec::without_rows(name, view.group_by.clone(), ViewSource::derived());
    let resource = view.tables().iter().fold(resource, ResourceSpec::table);
    cx.resource(resource.actions(read::actions(&view)).projection(view.clone()));
    if let Some(total) = &view.grand_total {
        let resource = ResourceSpec::without_rows(&view.total_name(), Vec::new(), ViewSource::derived());
        cx.resource(resource.action(read::total(&view, total)));
    }
    Some(())
}

fn check_total(settings: &mut SettingsReader<'_>, total: bool, group_by: &[String], adds_up: bool) {
    if total && group_by.is_empty() {
        let title = "a view without `group_by` has one group, which is its total";
        settings.problem_with_advice("total", title, "leave out `total`");
    }
    if total && !adds_up {
        let title = "a total has counts and sums, and this view has neither";
        settings.problem_with_advice("total", title, "write `count = true` or `sum = [\"…\"]`");
    }
}

fn total_table(name: &str, sum: &[String]) -> TableBuilder {
    let total = Table::named(format!("{name}_total"))
        .partition(GENERATION, Type::Int)
        .sort(SHARD, Type::Int)
        .defaulted(MEMBERS, Type::Int, 0);
    sum.iter().fold(total, |total, column| total.defaulted(&format!("sum_{column}"), Type::Int, 0))
}

/// The resource that a view is of, and how it is followed; or what is wrong with it, and what to do.
fn followed<'r>(
    of: &str,
    blueprint: &Blueprint,
    resources: &'r [Resource],
) -> Result<(&'r Resource, &'r SourceRows), (String, String)> {
    let is_told = |resource: &&Resource| matches!(resource.view_source, ViewSource::Rows(_));
    let names = || resources.iter().filter(is_told).map(|resource| resource.name.as_str());
    let title = format!("`{of}` is not a resource that a view can be of");
    let cannot = |telling: &ViewSource| match telling {
        ViewSource::Nothing { why, instead } => (format!("{title}: {why}"), instead.clone()),
        ViewSource::Rows(_) => (title.clone(), String::new()),
    };
    match resources.iter().find(|resource| resource.name == of) {
        Some(source) => match &source.view_source {
            ViewSource::Rows(source_rows) => Ok((source, source_rows)),
            nothing => Err(cannot(nothing)),
        },
        // What stands on others may be declared after this view, or be the view itself.
        None if blueprint.thing(of).is_some_and(stands_on_others) => Err(cannot(&ViewSource::derived())),
        None => {
            let advice = match blueprint::nearest(of, names()) {
                Some(near) => format!("did you mean `{near}`?"),
                None if names().next().is_none() => "declare one: `[entity.NAME]`".to_owned(),
                None => format!("there are {}", names().collect::<Vec<_>>().join(", ")),
            };
            Err((title, advice))
        }
    }
}

/// The actions by which a resource comes to have a row.
fn makers(source: &Resource) -> Vec<String> {
    let maker = source.actions.iter().find(|action| action.shape == "create target");
    let maker = maker
        .or_else(|| source.actions.iter().find(|action| matches!(action.handler, ActionHandler::Write(_))));
    let own = maker.map(|action| format!("{}.{}", source.name, action.name));
    maker.into_iter().flat_map(|action| action.after.clone()).chain(own).collect()
}

/// Reports names that are not columns of the source that can be used like this. Returns whether all are.
fn check_columns(
    settings: &mut SettingsReader<'_>,
    setting: &'static str,
    names: &[String],
    kinds: &[Type],
    source_rows: &SourceRows,
    of: &str,
) -> bool {
    let is_unlogged = |name: &str| source_rows.unlogged.columns.contains(&name);
    let usable = || {
        let columns = source_rows.table.columns().iter().filter(|column| kinds.contains(&column.kind));
        columns
            .map(|column| column.name.as_str())
            .filter(|name| !is_unlogged(name))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut fits = true;
    for name in names {
        let words: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let title = match source_rows.table.column(name).map(|column| column.kind) {
            None => format!("`{of}` has no column `{name}` that a view can be made of"),
            Some(kind) if !kinds.contains(&kind) => {
                format!("`{name}` is {kind}; `{setting}` takes {}", words.join(", "))
            }
            Some(_) if is_unlogged(name) => {
                format!("`{name}` of `{of}` cannot be followed: {}", source_rows.unlogged.why)
            }
            Some(_) => continue,
        };
        fits = false;
        let advice = match usable().as_str() {
            "" => format!("no column of `{of}` is {}, so leave out `{setting}`", words.join(" or ")),
            some => format!("`{setting}` of `{of}` can be of {some}"),
        };
        settings.problem_with_advice(setting, title, advice);
    }
    fits
}

fn tables(
    name: &str,
    group_by: &[(String, Type)],
    sum: &[String],
    ordered: [&Vec<String>; 3],
) -> [TableBuilder; 3] {
    let mut totals = Table::named(name).partition(GENERATION, Type::Int).sort(GROUP_KEY, Type::Text);
    let mut entries = entries_table(&format!("{name}_entries")).optional(GROUP_KEY, Type::Text);
    for (column, kind) in group_by {
        totals = totals.optional(column, *kind);
        entries = entries.optional(&format!("by_{column}"), *kind);
    }
    totals = totals.defaulted(MEMBERS, Type::Int, 0);
    for column in sum {
        totals = totals.defaulted(&format!("sum_{column}"), Type::Int, 0);
        entries = entries.optional(&format!("sum_{column}"), Type::Int);
    }
    let mut ranked: Vec<&String> = ordered.into_iter().flatten().collect();
    ranked.sort();
    ranked.dedup();
    for column in ranked {
        entries = entries.optional(&format!("rank_{column}"), Type::Text);
    }
    let order = Table::named(format!("{name}_order"))
        .partition(GENERATION, Type::Int)
        .partition(GROUP_KEY, Type::Text)
        .partition(FIELD, Type::Text)
        .sort(RANK, Type::Text)
        .sort(SOURCE, Type::Text)
        .required(VALUE, Type::Json);
    [totals, entries, order]
}

impl ViewSpec {
    /// The fields whose values stand in order.
    fn ranked(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.min.iter().chain(&self.max).chain(&self.latest).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The columns of a source row, besides its key, that say what it means.
    fn used(&self) -> Vec<&str> {
        let counted = match self.counts {
            RowFilter::All => None,
            RowFilter::With(column, _) | RowFilter::Having(column) => Some(column),
        };
        let groups = self.group_by.iter().map(|(name, _)| name.as_str());
        groups.chain(self.sum.iter().map(String::as_str)).chain(self.ranked()).chain(counted).collect()
    }

    /// What a source row means, whose columns are these.
    fn meaning(&self, get: &dyn Fn(&str) -> Value) -> Result<Option<EntryContent>, String> {
        let counts = match self.counts {
            RowFilter::All => true,
            RowFilter::With(column, values) => {
                get(column).as_text().is_some_and(|text| values.contains(&text))
            }
            RowFilter::Having(column) => !get(column).is_null(),
        };
        if !counts {
            return Ok(None);
        }
        let get = |name: &str| self.source_rows.shown(name, get(name));
        let mut content = EntryContent::new();
        let groups: Vec<Value> = self.group_by.iter().map(|(name, _)| get(name)).collect();
        content.insert(GROUP_KEY.to_owned(), group_key(&groups)?.into());
        let named = self.group_by.iter().zip(groups);
        content.extend(named.map(|((name, _), value)| (format!("by_{name}"), value)));
        for name in &self.sum {
            let value = get(name);
            // It is taken away by adding its opposite, which this one has not.
            if value.as_int() == Some(i64::MIN) {
                return Err(format!("its `{name}` is {}, which a view cannot add up", i64::MIN));
            }
            content.insert(format!("sum_{name}"), value);
        }
        let ranks = self.ranked().into_iter().filter_map(|name| Some((name, rank(&get(name))?)));
        content.extend(ranks.map(|(name, rank)| (format!("rank_{name}"), rank.into())));
        content.retain(|_, value| !value.is_null());
        Ok(Some(content))
    }

    fn source_key(&self, get: &dyn Fn(&str) -> Value) -> Result<String, String> {
        let key: Vec<Value> =
            self.source_rows.table.key_columns().iter().map(|column| get(&column.name)).collect();
        self.source_text(&key)
    }

    fn source_text(&self, key: &[Value]) -> Result<String, String> {
        let text = key_text(key);
        if text.len() > KEY_BYTES_MAX {
            return Err(format!("its key has {} bytes; a view takes up to {KEY_BYTES_MAX}", text.len()));
        }
        Ok(text)
    }

    /// The resource of the total over all groups.
    fn total_name(&self) -> String {
        format!("{}_total", self.name)
    }

    /// The shard of the total that has the share of a source.
    fn shard_of(source: &str) -> i64 {
        let hash = source.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        // The upper bits depend on all bytes.
        i64::try_from((hash >> 32) % u64::from(TOTAL_SHARDS)).unwrap_or(0)
    }

    /// What an entry adds up to; the opposite of it if it is taken away.
    fn amounts(&self, content: &EntryContent, sign: i64) -> BTreeMap<String, i64> {
        let int = |name: &str| content.get(name).and_then(Value::as_int).unwrap_or(0);
        let mut amounts = BTreeMap::from([(MEMBERS.to_owned(), sign)]);
        for name in &self.sum {
            let name = format!("sum_{name}");
            let amount = int(&name).saturating_mul(sign);
            amounts.insert(name, amount);
        }
        amounts
    }

    /// What an entry adds to the total over all groups (V5).
    fn grand(&self, generation: i64, source: &str, content: &EntryContent, sign: i64) -> Option<EntryDelta> {
        Some(EntryDelta::Add {
            table: self.grand_total.clone()?,
            key: vec![generation.into(), ViewSpec::shard_of(source).into()],
            amounts: self.amounts(content, sign),
            columns: EntryContent::new(),
        })
    }

    /// What an entry adds to its group; the opposite of it if it is taken away.
    fn total(&self, generation: i64, content: &EntryContent, sign: i64) -> EntryDelta {
        let amounts = self.amounts(content, sign);
        let columns = self.group_by.iter().map(|(name, _)| {
            (name.clone(), content.get(&format!("by_{name}")).cloned().unwrap_or(Value::Null))
        });
        let columns = columns.collect();
        EntryDelta::Add {
            table: self.totals.clone(),
            key: vec![generation.into(), of_group(content)],
            amounts,
            columns,
        }
    }

    fn order_key(
        &self,
        generation: i64,
        content: &EntryContent,
        field: &str,
        source: &str,
    ) -> Option<Vec<Value>> {
        let rank = content.get(&format!("rank_{field}"))?.clone();
        Some(vec![generation.into(), of_group(content), field.into(), rank, source.into()])
    }
}

fn of_group(content: &EntryContent) -> Value {
    content.get(GROUP_KEY).cloned().unwrap_or_else(|| "[]".into())
}

/// The values of a group as text: the same values always give the same, others another.
fn group_key(values: &[Value]) -> Result<String, String> {
    let text = Json::Array(values.iter().map(Value::to_json).collect()).to_string();
    if text.len() > KEY_BYTES_MAX {
        return Err(format!(
            "the values of its group have {} bytes; a view takes up to {KEY_BYTES_MAX}",
            text.len()
        ));
    }
    Ok(text)
}

impl Projector for ViewSpec {
    fn name(&self) -> &str {
        &self.name
    }

    fn definition(&self) -> String {
        let ViewSpec { of, group_by, sum, counts, .. } = self;
        let groups: Vec<String> = group_by.iter().map(|(name, kind)| format!("{name} {kind}")).collect();
        let (sums, ranks) = (sum.join(","), self.ranked().join(","));
        let total = if self.grand_total.is_some() { " total" } else { "" };
        format!("of {of} by {} sum {sums} order {ranks} counts {counts}{total}", groups.join(","))
    }

    fn source(&self) -> &Arc<Table> {
        &self.source_rows.table
    }

    fn entries(&self) -> &Arc<Table> {
        &self.entries
    }

    fn tables(&self) -> Vec<Arc<Table>> {
        let tables = [&self.totals, &self.entries, &self.order].into_iter().chain(&self.grand_total);
        tables.cloned().collect()
    }

    fn wants(&self, record: &Record) -> bool {
        self.source_rows.wants(record)
    }

    fn mentions(&self, record: &Record) -> Result<Vec<SourceMention>, String> {
        let mention = |found: EventRow<'_>| match found {
            EventRow::Whole(row, order) => {
                let get = |name: &str| self.source_rows.value(row, name);
                let (source, content) = (self.source_key(&get)?, self.meaning(&get)?);
                Ok(SourceMention::Change(SourceChange { source, order, content }))
            }
            EventRow::Partial(key, order) => {
                Ok(SourceMention::Partial { source: self.source_text(&key)?, key, order })
            }
            EventRow::Erased(key, version) => {
                Ok(SourceMention::Change(SourceChange::erased(self.source_text(&key)?, version)))
            }
        };
        self.source_rows.rows(record, &self.used()).into_iter().map(mention).collect()
    }

    fn change_of(&self, row: &Row) -> SourceChange {
        let get = |name: &str| row.get(name).cloned().unwrap_or(Value::Null);
        // What does not fit into a view is no entry, here as in the log, where it is parked with the reason.
        let source = self.source_key(&get);
        let content = if source.is_ok() { self.meaning(&get).unwrap_or(None) } else { None };
        let source = source.unwrap_or_else(|_| "(too long)".to_owned());
        let order = if self.row_lookup().is_some() { 0 } else { row.version() };
        SourceChange { source, order, content }
    }

    fn row_lookup(&self) -> Option<&dyn RowLookup> {
        match self.source_rows.shape {
            EventShape::Row(_) => None,
            EventShape::Key(_) => Some(self),
        }
    }

    fn deltas(
        &self,
        generation: i64,
        source: &str,
        before: Option<&EntryContent>,
        after: Option<&EntryContent>,
    ) -> Result<Vec<EntryDelta>, Bug> {
        let shares = before.map(|content| (content, -1)).into_iter().chain(after.map(|content| (content, 1)));
        let added = |(content, sign)| {
            let grand = self.grand(generation, source, content, sign);
            std::iter::once(self.total(generation, content, sign)).chain(grand)
        };
        let mut deltas: Vec<EntryDelta> = shares.flat_map(added).collect();
        for field in self.ranked() {
            let key = |content: Option<&EntryContent>| {
                content.and_then(|content| self.order_key(generation, content, field, source))
            };
            let (old, new) = (key(before), key(after));
            if old == new {
                continue;
            }
            let table = self.order.clone();
            deltas.extend(old.map(|key| EntryDelta::Remove { table: table.clone(), key }));
            if let Some(key) = new {
                let kind = self.source_rows.table.type_of(field);
                let rank = key.get(3).and_then(Value::as_text);
                let value = kind.zip(rank).and_then(|(kind, rank)| unranked(rank, kind));
                let value =
                    value.ok_or_else(|| bug!("view {}: {field} has the order key {key:?}", self.name))?;
                let columns = EntryContent::from([(VALUE.to_owned(), Value::Json(value.to_json()))]);
                deltas.push(EntryDelta::Put { table, key, columns });
            }
        }
        Ok(deltas)
    }
}

impl RowLookup for ViewSpec {
    fn named(&self, record: &Record) -> Vec<Vec<Value>> {
        self.source_rows.keys(record)
    }

    fn seen(&self, key: &[Value], row: Option<&Row>) -> Result<SourceChange, String> {
        let source = self.source_text(key)?;
        let meaning = |row: &Row| self.meaning(&|name: &str| row.get(name).cloned().unwrap_or(Value::Null));
        Ok(SourceChange { source, order: 0, content: row.map(meaning).transpose()?.flatten() })
    }
}
