//! Constraints between rows: `unique` and `ref`.
//!
//! ```toml
//! [entity.member]
//! key    = { id = "int" }
//! fields = { email = { type = "text", unique = true } }
//!
//! [entity.loan]
//! key    = { id = "int" }
//! fields = { member_id = { type = "int", ref = "member", on_delete = "refuse" }, room = "text", day = "int" }
//! unique = { slot = ["room", "day"] }
//! ```
//!
//! A row that is live takes one row of `members_email_unique(tenant, email | taken_by)`. A reference that must not be left without its
//! target is counted in `loans_member_id_refs(tenant, target | n)`. Both change in the plan of the row itself
//! ([`crate::house`]). Each constraint has a table of its own, so that adding one to a table with rows is noticed
//! when the store is made to fit the blueprint. A value that is null takes no row and refers to nothing.
//!
//! With `on_delete = "cascade"` the plan that deletes a target writes a row of `members_cascade(tenant, key | due_at, …)`, and a worker
//! deletes the rows that refer to it ([`crate::house`]). It finds them by an index of the field.
//!
//! An archetype reads its fields with [`SettingsReader::fields_or_constrained`], calls [`declare`] and gives the result to its resource.
//! What a reference names is looked up when all things are declared ([`resolve`]).

mod cascades;

use std::ops::Range;
use std::sync::Arc;

use statehouse_store::{Table, Type};

use super::{Declare, SettingsReader, TableDef, TableSpec};
use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::blueprint::settings::{Field, Settings};
use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::blueprint::{check_name, nearest};
use crate::code::Code;
use crate::resource::Resource;

pub(crate) use self::cascades::cascade_index;
use self::cascades::{add_cascade, report_blocked_cascades};

/// The setting of a thing, and of a field.
const UNIQUE: &str = "unique";
const REF: &str = "ref";
const ON_DELETE: &str = "on_delete";
/// What becomes of a reference when its target is deleted.
const REFUSE: &str = "refuse";
const KEEP: &str = "keep";
const CASCADE: &str = "cascade";
/// The archetype whose rows can be referred to: only its deletions are checked.
const TARGETS: &str = "entity";
/// The column that names the row which has taken a value.
pub(crate) const TAKEN_BY: &str = "taken_by";
/// The key and the number of a count of references.
const TARGET: &str = "target";
pub(crate) const REFERENCES: &str = "n";
/// Columns of a deletion that other rows follow.
pub(crate) const DELETED_AT: &str = "deleted_at";
pub(crate) const ERROR: &str = "error";
/// Actions that can take a value or refer to a row, those that delete a target, and those that read a row which they change.
const CHANGING: [&str; 7] = ["create", "update", "patch", "mutate", "restore", "append", "edit"];
const DELETING: [&str; 2] = ["delete", "erase"];
const RESTORING: [&str; 1] = ["restore"];
const READING: [&str; 9] =
    ["update", "patch", "mutate", "restore", "edit", "delete", "remove", "hide", "erase"];

/// What `ref` of a field says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldReference {
    /// The resource whose rows the field names.
    pub target: String,
    /// Where it stands.
    pub span: Range<usize>,
    /// What becomes of the field's row when its target is deleted.
    pub on_delete: OnDelete,
}

/// What becomes of a row that refers to another one when that is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDelete {
    /// The target cannot be deleted.
    Refuse,
    /// It stays as it is.
    Keep,
    /// It is deleted as well.
    Cascade,
}

/// The constraints between rows of one resource.
#[derive(Clone, Debug, Default)]
pub struct RowConstraints {
    /// Values that one row at most may have.
    pub unique: Vec<UniqueFields>,
    /// Fields that name rows.
    pub references: Vec<RowReference>,
    /// References of other resources, or its own, that forbid to delete a row.
    pub referenced_by: Vec<ReferenceCount>,
    /// References of other resources, or its own, whose rows are deleted with a row, and where that is noted.
    pub cascade: Option<Cascade>,
    /// References whose targets are not looked up yet.
    pending: Vec<PendingReference>,
}

/// Fields whose values together one row at most may have.
#[derive(Clone, Debug)]
pub struct UniqueFields {
    /// The columns.
    pub fields: Vec<String>,
    /// The table with a row for each value that is taken.
    pub table: Arc<Table>,
}

/// A field that names a row.
#[derive(Clone, Debug)]
pub struct RowReference {
    /// The column.
    pub field: String,
    /// The resource whose rows it names.
    pub target: String,
    /// Their definition.
    pub def: Arc<TableDef>,
    /// Where references are counted, if they forbid to delete the target.
    pub counts: Option<Arc<Table>>,
}

/// The counts of a reference, as its target sees them.
#[derive(Clone, Debug)]
pub struct ReferenceCount {
    /// The resource that refers.
    pub resource: String,
    /// The column that does.
    pub field: String,
    /// The counts, by the key of the target.
    pub table: Arc<Table>,
}

/// Rows that are deleted with a row of the resource.
#[derive(Clone, Debug)]
pub struct Cascade {
    /// The references.
    pub references: Vec<ReferenceCount>,
    /// The rows that were deleted, and whose referring rows have to be.
    pub table: Arc<Table>,
    /// The name of the worker that deletes them.
    pub worker: String,
}

#[derive(Clone, Debug)]
struct PendingReference {
    field: Field,
    reference: FieldReference,
    counts: Option<Arc<Table>>,
}

impl PendingReference {
    /// Whether a row keeps its reference: it can neither be made without one nor lose it. A cycle of such references cannot be
    /// built up or taken down.
    fn is_lasting(&self) -> bool {
        !self.field.optional || (self.field.immutable && self.reference.on_delete == OnDelete::Refuse)
    }
}

impl RowConstraints {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.unique.is_empty()
            && self.references.is_empty()
            && self.referenced_by.is_empty()
            && self.cascade.is_none()
    }

    /// Adds the indexes by which the rows that refer to a row are found.
    pub(crate) fn with_indexes(&self, spec: TableSpec) -> TableSpec {
        let cascading =
            self.pending.iter().filter(|pending| pending.reference.on_delete == OnDelete::Cascade);
        let live = spec.live_state().map(|(column, _)| column.to_owned());
        cascading.fold(spec, |spec, pending| {
            let field = pending.field.name.as_str();
            let columns: Vec<&str> = live.as_deref().into_iter().chain([field]).collect();
            spec.index(&cascade_index(field), &columns, &[])
        })
    }

    /// The columns whose values matter, some of them twice.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        let unique = self.unique.iter().flat_map(|unique| &unique.fields);
        unique.chain(self.references.iter().map(|reference| &reference.field)).map(String::as_str)
    }

    /// The tables that they need.
    pub fn tables(&self) -> impl Iterator<Item = &Arc<Table>> {
        let resolved = self.references.iter().filter_map(|reference| reference.counts.as_ref());
        let pending = self.pending.iter().filter_map(|pending| pending.counts.as_ref());
        self.unique.iter().map(|unique| &unique.table).chain(resolved).chain(pending)
    }
}

/// Reads `unique`, `ref` and `on_delete` of a field.
pub(crate) fn read_field_constraints(
    name: &str,
    settings: &mut Settings,
    problems: &mut Problems,
) -> (bool, Option<FieldReference>) {
    let unique = settings.bool(UNIQUE, problems).unwrap_or(false);
    let target = settings.text(REF, problems);
    let on_delete = settings.choice(ON_DELETE, &[REFUSE, KEEP, CASCADE], problems);
    let Some(target) = target else {
        if on_delete.is_some() {
            let title = format!("`{ON_DELETE}` of `{name}` needs a `{REF}`");
            problems.add(BlueprintProblem::at(settings.span_of(ON_DELETE), title));
        }
        return (unique, None);
    };
    let on_delete = match on_delete {
        Some(KEEP) => OnDelete::Keep,
        Some(CASCADE) => OnDelete::Cascade,
        _ => OnDelete::Refuse,
    };
    (unique, Some(FieldReference { target, span: settings.span_of(REF), on_delete }))
}

/// Declares the constraints of rows in this table: reads `unique` and builds the tables that are needed. Hot fields cannot be
/// constrained, because they are not written with the row.
pub(crate) fn declare(
    cx: &mut Declare<'_>,
    table: &str,
    fields: &[Field],
    hot: &[String],
) -> Option<RowConstraints> {
    let settings = cx.settings();
    let before = settings.problem_count();
    let unique = ConstrainedFields { fields, hot }.read_unique(settings);
    let references: Vec<PendingReference> = fields
        .iter()
        .filter_map(|field| {
            let (reference, field) = (field.reference.clone()?, field.clone());
            Some(PendingReference { field, reference, counts: None })
        })
        .collect();
    for pending in references.iter().filter(|pending| hot.contains(&pending.field.name)) {
        let title = format!("`{}` is hot, so it cannot refer to a row", pending.field.name);
        settings.field_problem(&pending.field, title, Some("take it out of `hot`"));
    }
    if settings.problem_count() > before {
        return None;
    }
    let mut constraints = RowConstraints::default();
    for (name, fields) in unique {
        let named = Table::named(format!("{table}_{name}_unique"));
        let keyed = fields.iter().fold(named, |table, field| table.partition(&field.name, field.kind));
        let table = cx.build_internal(keyed.required(TAKEN_BY, Type::Text))?;
        let fields = fields.iter().map(|field| field.name.clone()).collect();
        constraints.unique.push(UniqueFields { fields, table });
    }
    for mut pending in references {
        if pending.reference.on_delete != OnDelete::Keep {
            let counts = Table::named(format!("{table}_{}_refs", pending.field.name));
            let counts = counts.partition(TARGET, pending.field.kind).required(REFERENCES, Type::Int);
            pending.counts = Some(cx.build_internal(counts)?);
        }
        constraints.pending.push(pending);
    }
    Some(constraints)
}

/// The fields of a thing, some of which are hot.
struct ConstrainedFields<'f> {
    fields: &'f [Field],
    hot: &'f [String],
}

/// The name of a constraint, and its fields.
type NamedFields<'f> = (String, Vec<&'f Field>);

impl<'f> ConstrainedFields<'f> {
    /// What is unique: by `unique = true` of a field, and by the setting of the thing.
    fn read_unique(&self, settings: &mut SettingsReader<'_>) -> Vec<NamedFields<'f>> {
        let mut unique: Vec<NamedFields<'f>> = Vec::new();
        for field in self.fields.iter().filter(|field| field.unique) {
            match self.check(field) {
                Ok(()) => unique.push((field.name.clone(), vec![field])),
                Err(why) => settings.field_problem(field, why, None),
            }
        }
        let entries = match settings.node(UNIQUE) {
            None => Vec::new(),
            Some(Node { value: TreeValue::Table(entries), .. }) => entries,
            Some(node) => {
                let title = format!("`{UNIQUE}` must be a table of names and lists of fields");
                let advice = "write `unique = { slot = [\"room\", \"day\"] }`";
                settings.add_problem(BlueprintProblem::at(node.span, title).advice(advice));
                Vec::new()
            }
        };
        for TreeEntry { key, key_span, value } in entries {
            let taken = unique.iter().any(|(name, _)| *name == key);
            let bad_name = check_name(&key).err().map(|why| format!("`{key}` cannot be a name: it {why}"));
            if let Some(title) = bad_name.or(taken.then(|| format!("`{key}` is unique twice"))) {
                settings.add_problem(BlueprintProblem::at(key_span, title));
                continue;
            }
            match self.listed(&value) {
                Ok(fields) => unique.push((key, fields)),
                Err(problem) => settings.add_problem(problem),
            }
        }
        unique
    }

    /// The fields that a list names.
    fn listed(&self, node: &Node) -> Result<Vec<&'f Field>, BlueprintProblem> {
        let TreeValue::List(items) = &node.value else {
            let title = format!("expected a list of fields, not {}", node.value.kind());
            return Err(BlueprintProblem::at(node.span.clone(), title));
        };
        let mut listed: Vec<&'f Field> = Vec::new();
        for item in items {
            let at = |title: String| BlueprintProblem::at(item.span.clone(), title);
            let TreeValue::Text(name) = &item.value else {
                return Err(at(format!("expected the name of a field, not {}", item.value.kind())));
            };
            let Some(field) = self.fields.iter().find(|field| field.name == *name) else {
                let problem = at(format!("`{name}` is unique and not declared in `fields`"));
                return Err(match nearest(name, self.fields.iter().map(|field| field.name.as_str())) {
                    Some(near) => problem.advice(format!("did you mean \"{near}\"?")),
                    None => problem,
                });
            };
            if listed.iter().any(|other| other.name == *name) {
                return Err(at(format!("`{name}` is listed twice")));
            }
            self.check(field).map_err(at)?;
            listed.push(field);
        }
        if listed.is_empty() {
            return Err(BlueprintProblem::at(node.span.clone(), "this list names no field"));
        }
        Ok(listed)
    }

    /// Why a field cannot be unique.
    fn check(&self, field: &Field) -> Result<(), String> {
        let name = &field.name;
        match field.kind {
            _ if self.hot.contains(name) => Err(format!(
                "`{name}` is hot, so it cannot be unique: hot fields are not written with the row"
            )),
            Type::Json => {
                Err(format!("`{name}` is json, which cannot be unique: documents are not compared"))
            }
            Type::Float => Err(format!("`{name}` is float, which cannot be unique: floats are rounded")),
            _ => Ok(()),
        }
    }
}

/// Looks up what references name, when everything is declared. Reports those that cannot be.
pub(crate) fn resolve(resources: &mut [Resource], problems: &mut Problems) {
    let before = problems.len();
    let mut referenced_by: Vec<(usize, ReferenceCount)> = Vec::new();
    let mut cascades: Vec<(usize, ReferenceCount)> = Vec::new();
    let mut references: Vec<(usize, RowReference)> = Vec::new();
    let mut edges: Vec<ReferenceEdge> = Vec::new();
    for (from, resource) in resources.iter().enumerate() {
        for pending in &resource.constraints.pending {
            match found(resources, pending) {
                Err(problem) => problems.add(problem),
                Ok((to, def)) => {
                    let (field, target) = (pending.field.name.clone(), pending.reference.target.clone());
                    if let Some(table) = pending.counts.clone() {
                        let (resource, field) = (resource.name.clone(), field.clone());
                        let deletes = pending.reference.on_delete == OnDelete::Cascade;
                        let list = if deletes { &mut cascades } else { &mut referenced_by };
                        list.push((to, ReferenceCount { resource, field, table }));
                    }
                    let counts = pending.counts.clone();
                    references.push((from, RowReference { field, target, def, counts }));
                    if pending.is_lasting() && from != to {
                        edges.push(ReferenceEdge { from, to, span: pending.reference.span.clone() });
                    }
                }
            }
        }
    }
    report_cycles(resources, &edges, problems);
    report_blocked_cascades(resources, &cascades, &referenced_by, problems);
    if problems.len() > before {
        return;
    }
    for (index, count) in cascades {
        if let Some(resource) = resources.get_mut(index)
            && let Err(error) = add_cascade(resource, count)
        {
            problems.add(BlueprintProblem::at(0..0, error.to_string()));
        }
    }
    for (index, reference) in references {
        if let Some(resource) = resources.get_mut(index) {
            resource.constraints.references.push(reference);
        }
    }
    for (index, count) in referenced_by {
        if let Some(resource) = resources.get_mut(index) {
            resource.constraints.referenced_by.push(count);
        }
    }
    resources.iter_mut().for_each(add_codes);
}

/// The resource that a reference names, and its rows.
fn found(
    resources: &[Resource],
    pending: &PendingReference,
) -> Result<(usize, Arc<TableDef>), BlueprintProblem> {
    let PendingReference { field, reference: FieldReference { target, span, .. }, .. } = pending;
    let at = |title: String| BlueprintProblem::at(span.clone(), title);
    let targets = || resources.iter().filter(|resource| resource.archetype.keyword() == TARGETS);
    let position = resources.iter().position(|resource| resource.name == *target);
    let Some((index, resource)) = position.and_then(|index| Some((index, resources.get(index)?))) else {
        let problem = at(format!("`{}` refers to `{target}`, which is not declared", field.name));
        return Err(match nearest(target, targets().map(|resource| resource.name.as_str())) {
            Some(near) => problem.advice(format!("did you mean \"{near}\"?")),
            None => problem,
        });
    };
    let Some(def) = resource.row_def().filter(|_| resource.archetype.keyword() == TARGETS) else {
        let keyword = resource.archetype.keyword();
        return Err(at(format!("`{target}` is declared by `{keyword}`; a field can refer to an entity")));
    };
    match resource.key.as_slice() {
        [(_, kind)] if *kind == field.kind => Ok((index, def.clone())),
        [(name, kind)] => {
            let title =
                format!("`{}` is {}, and the key `{name}` of `{target}` is {kind}", field.name, field.kind);
            Err(at(title).advice(format!("write `type = \"{kind}\"`")))
        }
        several => {
            let names: Vec<&str> = several.iter().map(|(name, _)| name.as_str()).collect();
            let names = names.join(", ");
            Err(at(format!("`{target}` has a key of several columns ({names}), which one field cannot name")))
        }
    }
}

/// A lasting reference from one resource to another.
struct ReferenceEdge {
    from: usize,
    to: usize,
    span: Range<usize>,
}

/// Reports lasting references that form a cycle: the first of its rows cannot be made, or none of them can be deleted.
fn report_cycles(resources: &[Resource], edges: &[ReferenceEdge], problems: &mut Problems) {
    for edge in edges {
        let mut reached = vec![edge.to];
        let mut next = 0;
        while let Some(from) = reached.get(next).copied() {
            let further = edges.iter().filter(|other| other.from == from).map(|other| other.to);
            let new: Vec<usize> = further.filter(|to| !reached.contains(to)).collect();
            reached.extend(new);
            next += 1;
        }
        if reached.contains(&edge.from) {
            let name = |index: usize| resources.get(index).map_or("", |resource| resource.name.as_str());
            let title = format!(
                "`{}` refers to `{}`, which refers back: such rows could not be created or deleted",
                name(edge.from),
                name(edge.to)
            );
            let advice = "make one of the fields optional and not immutable, so that it can be empty";
            problems.add(BlueprintProblem::at(edge.span.clone(), title).advice(advice));
        }
    }
}

/// Adds the codes to the actions that can be refused with them.
fn add_codes(resource: &mut Resource) {
    let RowConstraints { unique, references, referenced_by, cascade, .. } = &resource.constraints;
    let is_read = !unique.is_empty() || !references.is_empty();
    let added = [
        (Code::Held, cascade.is_some(), RESTORING.as_slice()),
        (Code::NotUnique, !unique.is_empty(), CHANGING.as_slice()),
        (Code::MissingReference, !references.is_empty(), CHANGING.as_slice()),
        (Code::Referenced, !referenced_by.is_empty(), DELETING.as_slice()),
        (Code::Contended, is_read, READING.as_slice()),
    ];
    for (code, _, names) in added.into_iter().filter(|(_, is_used, _)| *is_used) {
        let actions = resource.actions.iter_mut().filter(|action| names.contains(&action.name.as_ref()));
        for action in actions.filter(|action| !action.refusals.contains(&code)) {
            action.refusals.push(code);
        }
    }
}
