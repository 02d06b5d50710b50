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
//! that had it is gone.
//!
//! **Invariants.** Those of [`crate::infra::projection`], and:
//! - V1. A group's totals are the sums over its entries. *Whatever changes an entry takes its old share away and adds the new
//!   one, in one plan, by adding to the totals and not by writing them.*
//! - V2. A minimum, maximum or latest is that of an entry that is there. *It is the first or last of rows in order, which come
//!   and go with their entries in one plan.*
//! - V3. A deleted row counts nowhere. *A row that stays as a tombstone says so, and counts no more, unless the view groups by
//!   what says it* ([`Counts`]); *of one that is gone the log names the key, and nothing is found there.*
//! - V4. Nothing is counted that changes without the log being told. *Such columns are refused, and values of a state that
//!   change into each other in this way count as one* ([`crate::told::Alike`]).
//!
//! **Failures.** *Stale projection*: the lag is known, and a read with `after`, the token of a write, waits for it. *Missing
//! entry*, *duplicate entry*: effect and progress are one plan, and the row's version counts once. *Tombstone not
//! propagated*: V3, and the pipeline's I3. *Expensive reindex after schema change*: another definition is built beside the live
//! one, which goes on serving. *Stale ranking after source update*: V2.
//!
//! **Hotspots.** *Fanout on write*, *expensive ranking/recompute*: a source row changes a bounded number of rows. *Projection
//! lag*, *rebuild cost*: the pipeline's. *Query fanout across shards*: a group is one row, and one more read for each extreme.

mod archetype;
mod read;

pub use archetype::ARCHETYPE;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::table::Builder;
use statehouse_store::{Record, Row, Table, Type, Value};

use crate::action::Does;
use crate::blueprint::{self, Blueprint};
use crate::declare::{Declare, ResourceSpec, SettingsReader};
use crate::infra::projection::{
    Change, Content, Delta, GENERATION, Look, Mention, Projector, SOURCE, entries_table,
};
use crate::resource::{Resource, key_text, stands_on_others};
use crate::told::{Counts, How, RowTold, Telling, Told};

const GROUP_KEY: &str = "group_key";
const MEMBERS: &str = "members";
const FIELD: &str = "field";
const RANK: &str = "rank";
const VALUE: &str = "value";
/// Bytes of a group's values, and of a source's key, that fit into the keys of the view's rows.
const KEY_BYTES_MAX: usize = 300;

/// One declared view.
#[derive(Debug)]
struct View {
    name: String,
    of: String,
    told: Told,
    totals: Arc<Table>,
    entries: Arc<Table>,
    order: Arc<Table>,
    group_by: Vec<(String, Type)>,
    count: bool,
    sum: Vec<String>,
    min: Vec<String>,
    max: Vec<String>,
    latest: Vec<String>,
    /// Which rows count.
    counts: Counts,
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
    let Some(of) = of else {
        let advice = "name a resource: `of = \"profile\"`";
        settings.problem_with_advice("of", format!("`view.{name}` does not say what it is of"), advice);
        return None;
    };
    let (source, told) = match followed(&of, blueprint, resources) {
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
        fits &= check_columns(settings, setting, names, kinds, told, &of);
    }
    if !fits {
        return None;
    }
    let kind = |name: &str| told.table.type_of(name).unwrap_or(Type::Text);
    let group_by: Vec<(String, Type)> = group_by.iter().map(|name| (name.clone(), kind(name))).collect();
    let [totals, entries, order] = tables(name, &group_by, &sum, [&min, &max, &latest]);
    let view = Arc::new(View {
        name: name.to_owned(),
        counts: match told.counts {
            Counts::With(column, _) if group_by.iter().any(|(name, _)| name == column) => Counts::All,
            counts => counts,
        },
        of,
        told: told.clone(),
        totals: cx.build_internal(totals)?,
        entries: cx.build_internal(entries)?,
        order: cx.build_internal(order)?,
        group_by,
        count,
        sum,
        min,
        max,
        latest,
        after: makers(source),
    });
    let resource = ResourceSpec::without_rows(name, view.group_by.clone(), Telling::derived());
    let resource = view.tables().iter().fold(resource, ResourceSpec::table);
    cx.resource(resource.actions(read::actions(&view)).projection(view));
    Some(())
}

/// The resource that a view is of, and how it is followed; or what is wrong with it, and what to do.
fn followed<'r>(
    of: &str,
    blueprint: &Blueprint,
    resources: &'r [Resource],
) -> Result<(&'r Resource, &'r Told), (String, String)> {
    let is_told = |resource: &&Resource| matches!(resource.telling, Telling::Rows(_));
    let names = || resources.iter().filter(is_told).map(|resource| resource.name.as_str());
    let title = format!("`{of}` is not a resource that a view can be of");
    let cannot = |telling: &Telling| match telling {
        Telling::Nothing { why, instead } => (format!("{title}: {why}"), instead.clone()),
        Telling::Rows(_) => (title.clone(), String::new()),
    };
    match resources.iter().find(|resource| resource.name == of) {
        Some(source) => match &source.telling {
            Telling::Rows(told) => Ok((source, told)),
            nothing => Err(cannot(nothing)),
        },
        // What stands on others may be declared after this view, or be the view itself.
        None if blueprint.thing(of).is_some_and(stands_on_others) => Err(cannot(&Telling::derived())),
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
    let maker = maker.or_else(|| source.actions.iter().find(|action| matches!(action.does, Does::Write(_))));
    let own = maker.map(|action| format!("{}.{}", source.name, action.name));
    maker.into_iter().flat_map(|action| action.after.clone()).chain(own).collect()
}

/// Reports names that are not columns of the source that can be used like this. Returns whether all are.
fn check_columns(
    settings: &mut SettingsReader<'_>,
    setting: &'static str,
    names: &[String],
    kinds: &[Type],
    told: &Told,
    of: &str,
) -> bool {
    let untold = |name: &str| told.untold.columns.contains(&name);
    let usable = || {
        let columns = told.table.columns().iter().filter(|column| kinds.contains(&column.kind));
        columns.map(|column| column.name.as_str()).filter(|name| !untold(name)).collect::<Vec<_>>().join(", ")
    };
    let mut fits = true;
    for name in names {
        let words: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let title = match told.table.column(name).map(|column| column.kind) {
            None => format!("`{of}` has no column `{name}` that a view can be made of"),
            Some(kind) if !kinds.contains(&kind) => {
                format!("`{name}` is {kind}; `{setting}` takes {}", words.join(", "))
            }
            Some(_) if untold(name) => {
                format!("`{name}` of `{of}` cannot be followed: {}", told.untold.why)
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
) -> [Builder; 3] {
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

/// A number as text of the same order.
fn rank(value: &Value) -> Option<String> {
    let ordered = |bits: u64| format!("{bits:016x}");
    let signed = |number: i64| number.cast_unsigned() ^ (1 << 63);
    match value {
        Value::Int(number) => Some(ordered(signed(*number))),
        Value::Time(time) => Some(ordered(signed(time.micros()))),
        Value::Float(number) => {
            let bits = number.to_bits();
            Some(ordered(if bits >> 63 == 0 { bits ^ (1 << 63) } else { !bits }))
        }
        _ => None,
    }
}

/// A number from such text.
fn unranked(rank: &str, kind: Type) -> Value {
    let Ok(bits) = u64::from_str_radix(rank, 16) else { return Value::Null };
    let signed = (bits ^ (1 << 63)).cast_signed();
    match kind {
        Type::Int => signed.into(),
        Type::Time => statehouse_store::Time::from_micros(signed).into(),
        Type::Float => Value::Float(f64::from_bits(if bits >> 63 == 1 { bits ^ (1 << 63) } else { !bits })),
        _ => Value::Null,
    }
}

impl View {
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
            Counts::All => None,
            Counts::With(column, _) | Counts::Having(column) => Some(column),
        };
        let groups = self.group_by.iter().map(|(name, _)| name.as_str());
        groups.chain(self.sum.iter().map(String::as_str)).chain(self.ranked()).chain(counted).collect()
    }

    /// What a source row means, whose columns are these.
    fn meaning(&self, get: &dyn Fn(&str) -> Value) -> Result<Option<Content>, String> {
        let counts = match self.counts {
            Counts::All => true,
            Counts::With(column, values) => get(column).as_text().is_some_and(|text| values.contains(&text)),
            Counts::Having(column) => !get(column).is_null(),
        };
        if !counts {
            return Ok(None);
        }
        let get = |name: &str| self.told.shown(name, get(name));
        let mut content = Content::new();
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
        let key: Vec<Value> = self.told.table.key_columns().iter().map(|column| get(&column.name)).collect();
        self.source_text(&key)
    }

    fn source_text(&self, key: &[Value]) -> Result<String, String> {
        let text = key_text(key);
        if text.len() > KEY_BYTES_MAX {
            return Err(format!("its key has {} bytes; a view takes up to {KEY_BYTES_MAX}", text.len()));
        }
        Ok(text)
    }

    /// What an entry adds to its group; the opposite of it if it is taken away.
    fn total(&self, generation: i64, content: &Content, sign: i64) -> Delta {
        let int = |name: &str| content.get(name).and_then(Value::as_int).unwrap_or(0);
        let mut amounts = BTreeMap::from([(MEMBERS.to_owned(), sign)]);
        for name in &self.sum {
            let name = format!("sum_{name}");
            let amount = int(&name).saturating_mul(sign);
            amounts.insert(name, amount);
        }
        let columns = self.group_by.iter().map(|(name, _)| {
            (name.clone(), content.get(&format!("by_{name}")).cloned().unwrap_or(Value::Null))
        });
        let columns = columns.collect();
        Delta::Add {
            table: self.totals.clone(),
            key: vec![generation.into(), of_group(content)],
            amounts,
            columns,
        }
    }

    fn order_key(&self, generation: i64, content: &Content, field: &str, source: &str) -> Option<Vec<Value>> {
        let rank = content.get(&format!("rank_{field}"))?.clone();
        Some(vec![generation.into(), of_group(content), field.into(), rank, source.into()])
    }
}

fn of_group(content: &Content) -> Value {
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

impl Projector for View {
    fn name(&self) -> &str {
        &self.name
    }

    fn definition(&self) -> String {
        let View { of, group_by, sum, counts, .. } = self;
        let groups: Vec<String> = group_by.iter().map(|(name, kind)| format!("{name} {kind}")).collect();
        let (sums, ranks) = (sum.join(","), self.ranked().join(","));
        format!("of {of} by {} sum {sums} order {ranks} counts {counts}", groups.join(","))
    }

    fn source(&self) -> &Arc<Table> {
        &self.told.table
    }

    fn entries(&self) -> &Arc<Table> {
        &self.entries
    }

    fn tables(&self) -> Vec<Arc<Table>> {
        vec![self.totals.clone(), self.entries.clone(), self.order.clone()]
    }

    fn wants(&self, record: &Record) -> bool {
        self.told.wants(record)
    }

    fn mentions(&self, record: &Record) -> Result<Vec<Mention>, String> {
        let mention = |told: RowTold<'_>| match told {
            RowTold::Whole(row, order) => {
                let get = |name: &str| self.told.value(row, name);
                let (source, content) = (self.source_key(&get)?, self.meaning(&get)?);
                Ok(Mention::Change(Change { source, order, content }))
            }
            RowTold::Partial(key, order) => {
                Ok(Mention::Partial { source: self.source_text(&key)?, key, order })
            }
        };
        self.told.rows(record, &self.used()).into_iter().map(mention).collect()
    }

    fn change_of(&self, row: &Row) -> Change {
        let get = |name: &str| row.get(name).cloned().unwrap_or(Value::Null);
        // What does not fit into a view is no entry, here as in the log, where it is parked with the reason.
        let source = self.source_key(&get);
        let content = if source.is_ok() { self.meaning(&get).unwrap_or(None) } else { None };
        let source = source.unwrap_or_else(|_| "(too long)".to_owned());
        let order = if self.look().is_some() { 0 } else { row.version() };
        Change { source, order, content }
    }

    fn look(&self) -> Option<&dyn Look> {
        match self.told.how {
            How::WithRow(_) => None,
            How::ByName(_) => Some(self),
        }
    }

    fn deltas(
        &self,
        generation: i64,
        source: &str,
        before: Option<&Content>,
        after: Option<&Content>,
    ) -> Vec<Delta> {
        let shares = before.map(|content| (content, -1)).into_iter().chain(after.map(|content| (content, 1)));
        let mut deltas: Vec<Delta> =
            shares.map(|(content, sign)| self.total(generation, content, sign)).collect();
        for field in self.ranked() {
            let key = |content: Option<&Content>| {
                content.and_then(|content| self.order_key(generation, content, field, source))
            };
            let (old, new) = (key(before), key(after));
            if old == new {
                continue;
            }
            let table = self.order.clone();
            deltas.extend(old.map(|key| Delta::Remove { table: table.clone(), key }));
            deltas.extend(new.map(|key| {
                let kind = self.told.table.type_of(field).unwrap_or(Type::Int);
                let rank = key.get(3).and_then(Value::as_text).unwrap_or_default();
                let value = Value::Json(unranked(rank, kind).to_json());
                Delta::Put { table, key, columns: Content::from([(VALUE.to_owned(), value)]) }
            }));
        }
        deltas
    }
}

impl Look for View {
    fn named(&self, record: &Record) -> Vec<Vec<Value>> {
        self.told.keys(record)
    }

    fn seen(&self, key: &[Value], row: Option<&Row>) -> Result<Change, String> {
        let source = self.source_text(key)?;
        let meaning = |row: &Row| self.meaning(&|name: &str| row.get(name).cloned().unwrap_or(Value::Null));
        Ok(Change { source, order: 0, content: row.map(meaning).transpose()?.flatten() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_order_of_their_numbers() {
        let ints = [i64::MIN, -5, -1, 0, 1, 7, i64::MAX].map(Value::Int);
        let floats = [f64::MIN, -1.5, -0.25, 0.0, 0.25, 1.5, f64::MAX].map(Value::Float);
        for (values, kind) in [(ints, Type::Int), (floats, Type::Float)] {
            let ranks: Vec<String> = values.iter().map(|value| rank(value).unwrap()).collect();
            assert!(ranks.is_sorted() && ranks.iter().collect::<std::collections::BTreeSet<_>>().len() == 7);
            for (rank, value) in ranks.iter().zip(&values) {
                assert_eq!(unranked(rank, kind), *value);
            }
        }
        assert_eq!(rank(&"text".into()), None);
    }
}
