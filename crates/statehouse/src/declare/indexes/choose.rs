//! Which index serves a call, and what to say if none does.

use serde_json::{Map, Value as Json};
use statehouse_store::{Query, Tenant, Value};

use super::ListIndex;
use super::list::{ListSource, SORT};
use crate::action::{Call, Refusal};
use crate::declare::table::TableDef;

/// The comparisons of a range, as the names of inputs end: `price.gte`.
pub(super) const COMPARISONS: [(&str, &str); 4] =
    [("gte", "at least"), ("gt", "greater than"), ("lte", "at most"), ("lt", "less than")];

/// The column and the comparison in the name of an input.
fn split(name: &str) -> Option<(&str, &str)> {
    let (column, comparison) = name.rsplit_once('.')?;
    COMPARISONS.iter().any(|(known, _)| *known == comparison).then_some((column, comparison))
}

/// What a call asks of an index, by the names of its inputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct IndexRequest {
    /// Columns that are to have a value.
    pub equal: Vec<String>,
    /// Columns that are to be in a range.
    pub ranged: Vec<String>,
    /// The column that orders the rows, and whether the greatest comes first.
    pub sort: Option<(String, bool)>,
}

impl IndexRequest {
    /// What these inputs ask for. Names that are no columns are passed over.
    fn of<'n>(names: impl Iterator<Item = &'n str>, sort: Option<&str>, def: &TableDef) -> IndexRequest {
        let is_column =
            |name: &str| def.columns().iter().any(|known| known.column.name == name && !known.hidden);
        let mut request = IndexRequest::default();
        for name in names {
            match split(name) {
                Some((column, _))
                    if is_column(column) && !request.ranged.iter().any(|known| known == column) =>
                {
                    request.ranged.push(column.to_owned());
                }
                None if is_column(name) => request.equal.push(name.to_owned()),
                _ => {}
            }
        }
        request.sort = sort.map(|sort| match sort.strip_prefix('-') {
            Some(column) => (column.to_owned(), true),
            None => (sort.strip_prefix('+').unwrap_or(sort).to_owned(), false),
        });
        request
    }

    /// What a call asks for.
    pub(super) fn of_call(call: &Call, def: &TableDef) -> IndexRequest {
        IndexRequest::of(call.input.names().filter(|name| *name != SORT), call.input.text(SORT), def)
    }

    /// What inputs ask for that were not parsed.
    pub(super) fn of_fields(fields: &Map<String, Json>, def: &TableDef) -> IndexRequest {
        let names = fields.keys().map(String::as_str).filter(|name| *name != SORT);
        IndexRequest::of(names, fields.get(SORT).and_then(Json::as_str), def)
    }

    /// The column that follows those with a value: that of the range, or that of the order.
    fn next(&self) -> Option<&str> {
        let sort = self.sort.as_ref().map(|(column, _)| column);
        self.ranged.first().or(sort).map(String::as_str)
    }

    /// Whether any index could serve it: one range at most, which is also the order.
    fn is_servable(&self) -> bool {
        let sort = self.sort.as_ref().map(|(column, _)| column);
        self.ranged.len() <= 1 && sort.is_none_or(|sort| self.ranged.iter().all(|ranged| ranged == sort))
    }

    /// How many leading columns of an index have a value, if the index has the columns for this request in its order.
    fn prefix_in(&self, index: &ListIndex) -> Option<usize> {
        let state = index.state.as_ref().map(|(state, _)| state);
        let equal: Vec<&String> = self.equal.iter().filter(|column| Some(*column) != state).collect();
        let prefix = index.columns.iter().take_while(|column| equal.contains(column)).count();
        let next = index.columns.get(prefix).map(String::as_str);
        let is_next = self.next().is_none_or(|wanted| next == Some(wanted));
        (prefix == equal.len() && prefix >= index.fixed && is_next).then_some(prefix)
    }

    /// A column of an index that may be null and has no condition: rows without it are not in the index (X5).
    fn unset_in<'i>(&self, index: &'i ListIndex, def: &TableDef) -> Option<&'i str> {
        let may_be_null = |name: &str| def.table().column(name).is_some_and(|column| !column.required);
        let has_condition = |name: &String| self.equal.contains(name) || self.ranged.contains(name);
        let unset = |name: &&String| may_be_null(name) && !has_condition(name);
        index.columns.iter().find(unset).map(String::as_str)
    }

    /// The index that serves this request, and how many of its leading columns have a value.
    pub(super) fn choose<'i>(&self, source: &'i ListSource) -> Option<(&'i ListIndex, usize)> {
        let fits = |index: &'i ListIndex| Some((index, self.prefix_in(index)?));
        let is_complete = |(index, _): &(&ListIndex, usize)| self.unset_in(index, &source.def).is_none();
        if !self.is_servable() {
            return None;
        }
        source.indexes.iter().filter_map(fits).find(is_complete)
    }

    /// The filters as a caller names them.
    fn named(&self) -> String {
        let ranges = self.ranged.iter().map(|column| format!("a range of {column}"));
        let sort = self.sort.iter().map(|(column, _)| format!("the order of {column}"));
        self.equal.iter().cloned().chain(ranges).chain(sort).collect::<Vec<_>>().join(", ")
    }

    /// The columns of the index that would serve it, as a blueprint writes them.
    fn columns(&self) -> Vec<String> {
        let sign = match &self.sort {
            Some((_, true)) => "-",
            _ if self.equal.is_empty() => "+",
            _ => "",
        };
        let next = self.next().filter(|next| !self.equal.iter().any(|column| column == next));
        self.equal.iter().cloned().chain(next.map(|next| format!("{sign}{next}"))).collect()
    }

    /// Why no index serves this request, and the line of the blueprint that would.
    pub(super) fn advice(&self, source: &ListSource) -> String {
        let (resource, def) = (&source.resource, &source.def);
        if !self.is_servable() {
            return format!(
                "a list has a range of one column, which is also its order; this one asks for {}",
                self.named()
            );
        }
        let unordered =
            |name: &&String| def.table().column(name).is_some_and(|column| !column.kind.is_ordered());
        if let Some(column) = self.equal.iter().chain(&self.ranged).find(unordered) {
            return format!("{column} has no order, so that {resource} cannot be listed by it");
        }
        let incomplete = source.indexes.iter().find(|index| self.prefix_in(index).is_some());
        if let Some((index, column)) = incomplete.and_then(|index| Some((index, self.unset_in(index, def)?)))
        {
            return format!(
                "index {} has no rows without {column}: add {column}.gte or another condition on {column}, or make \
                 it required in the blueprint",
                index.name
            );
        }
        let columns = self.columns();
        let bare = |column: &String| column.trim_start_matches(['+', '-']).to_owned();
        let name = format!("by_{}", columns.iter().map(bare).collect::<Vec<_>>().join("_"));
        let quoted: Vec<String> = columns.iter().map(|column| format!("\"{column}\"")).collect();
        let line = format!("{name} = [{}]", quoted.join(", "));
        let section = &source.section;
        match source.indexes.is_empty() {
            true => format!(
                "no index of {resource} has {}; add this line to [{section}] in the blueprint: indexes = {{ {line} }}",
                self.named()
            ),
            false => format!(
                "no index of {resource} has {}; add this to `indexes` of [{section}] in the blueprint: {line}",
                self.named()
            ),
        }
    }
}

/// The query of a call on an index, of which so many leading columns have a value.
pub(super) fn query(
    source: &ListSource,
    index: &ListIndex,
    prefix: usize,
    request: &IndexRequest,
    call: &Call,
) -> Result<Query, Refusal> {
    let mut values = state_of(index, call).into_iter().collect::<Vec<_>>();
    let given = |column: &String| call.input.value(column).cloned();
    values.extend(index.columns.iter().take(index.fixed).filter_map(given));
    let sorted = index.columns.iter().take(prefix).skip(index.fixed).filter_map(given);
    let tenant: &Tenant = &call.tenant;
    let mut query = Query::index(source.def.table(), &index.stored, tenant, values)?.prefix(sorted)?;
    if let Some(column) = request.ranged.first() {
        for (comparison, _) in COMPARISONS {
            let Some(value) = call.input.value(&format!("{column}.{comparison}")).cloned() else { continue };
            query = match comparison {
                "gte" => query.from(value)?,
                "gt" => query.above(value)?,
                "lte" => query.to(value)?,
                _ => query.below(value)?,
            };
        }
    }
    let backward = request.sort.as_ref().map_or(index.backward, |(_, backward)| *backward);
    Ok(if backward { query.backward() } else { query })
}

/// The state that leads an index: what the call asks for, or that of rows which count as existing (X4).
fn state_of(index: &ListIndex, call: &Call) -> Option<Value> {
    let (column, live) = index.state.as_ref()?;
    Some(call.input.value(column).cloned().unwrap_or_else(|| live.as_str().into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::declare::TableSpec;
    use statehouse_store::Type;

    fn source() -> ListSource {
        let def = TableSpec::named("tools")
            .partition("id", Type::Int)
            .text("category")
            .text("color")
            .int("price")
            .int("weight")
            .null()
            .json("notes")
            .build()
            .unwrap();
        let index = |name: &str, columns: &[&str], fixed: usize| ListIndex {
            name: name.into(),
            columns: columns.iter().map(|column| (*column).to_owned()).collect(),
            fixed,
            backward: false,
            stored: format!("ix_{name}"),
            state: None,
        };
        ListSource {
            resource: "tool".into(),
            section: "entity.tool".into(),
            key: vec![("id".into(), Type::Int)],
            def,
            indexes: vec![
                index("by_category", &["category", "color", "price"], 1),
                index("by_price", &["price"], 0),
                index("by_weight", &["category", "weight"], 1),
            ],
        }
    }

    fn chosen(fields: Json) -> Result<(String, usize), String> {
        let source = source();
        let Json::Object(fields) = fields else { unreachable!("it is an object") };
        let request = IndexRequest::of_fields(&fields, &source.def);
        let chosen = request.choose(&source).map(|(index, prefix)| (index.name.clone(), prefix));
        chosen.ok_or_else(|| request.advice(&source))
    }

    #[test]
    fn an_index_serves_equality_on_a_prefix_and_a_range_of_the_next_column() {
        use serde_json::json;
        let by = |name: &str, prefix: usize| Ok((name.to_owned(), prefix));
        assert_eq!(chosen(json!({"category": "hand"})), by("by_category", 1));
        assert_eq!(chosen(json!({"category": "hand", "color": "red", "price.gte": 1})), by("by_category", 2));
        assert_eq!(chosen(json!({"category": "hand", "sort": "-color"})), by("by_category", 1));
        assert_eq!(chosen(json!({"price.gt": 1, "price.lt": 5, "sort": "-price"})), by("by_price", 0));
        assert_eq!(chosen(json!({"price": 1})), by("by_price", 1));
        assert_eq!(chosen(json!({"category": "hand", "weight.lt": 3})), by("by_weight", 1));
        assert_eq!(chosen(json!({"category": "hand", "weight": 3})), by("by_weight", 2));
    }

    #[test]
    fn what_no_index_serves_gets_the_line_that_would() {
        use serde_json::json;
        let said = |fields: Json| chosen(fields).unwrap_err();
        assert!(said(json!({"color": "red"})).ends_with(": by_color = [\"color\"]"));
        let both = said(json!({"color": "red", "price.gte": 3, "sort": "-price"}));
        assert!(
            both.ends_with(
                "`indexes` of [entity.tool] in the blueprint: by_color_price = [\"color\", \"-price\"]"
            ),
            "{both}"
        );
        assert!(said(json!({"color.gte": "a"})).ends_with(": by_color = [\"+color\"]"));
        assert!(
            said(json!({"category": "hand", "sort": "weight"}))
                .contains("index by_weight has no rows without weight")
        );
        assert!(said(json!({"price.gt": 1, "weight.gt": 1})).contains("a range of one column"));
        assert!(said(json!({"notes": "x"})).contains("notes has no order"));
    }
}
