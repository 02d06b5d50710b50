//! References whose rows are deleted with their target.

use statehouse_store::{SchemaError, Table, Type};

use super::{CASCADE, Cascade, DELETED_AT, ERROR, KEEP, ON_DELETE, ReferenceCount};
use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::infra::due;
use crate::resource::Resource;

/// The name of the index by which the rows are found whose field names a row.
pub(crate) fn cascade_index(field: &str) -> String {
    format!("ref_{field}")
}

/// Adds a reference to those whose rows are deleted with a row of a resource, and the table where deletions are noted.
pub(super) fn add_cascade(resource: &mut Resource, count: ReferenceCount) -> Result<(), SchemaError> {
    if let Some(cascade) = &mut resource.constraints.cascade {
        cascade.references.push(count);
        return Ok(());
    }
    let Some(def) = resource.row_def() else { return Ok(()) };
    let columns = def.table().key_columns().iter();
    let named = Table::named(format!("{}_cascade", def.table().name()));
    let keyed = columns.fold(named, |table, column| table.partition(&column.name, column.kind));
    let table = due::columns(keyed.required(DELETED_AT, Type::Time).optional(ERROR, Type::Text)).build()?;
    resource.tables.push(table.clone());
    let worker = format!("{}.cascade", resource.name);
    resource.constraints.cascade = Some(Cascade { references: vec![count], table, worker });
    Ok(())
}

/// Reports rows that have to be deleted with others, and cannot be while others refer to them.
pub(super) fn report_blocked_cascades(
    resources: &[Resource],
    cascades: &[(usize, ReferenceCount)],
    referenced_by: &[(usize, ReferenceCount)],
    problems: &mut Problems,
) {
    for (index, blocking) in referenced_by {
        let Some(target) = resources.get(*index) else { continue };
        let Some((to, cascading)) = cascades.iter().find(|(_, count)| count.resource == target.name) else {
            continue;
        };
        let span = resources
            .iter()
            .filter(|resource| resource.name == blocking.resource)
            .flat_map(|resource| &resource.constraints.pending)
            .find(|pending| pending.field.name == blocking.field)
            .map(|pending| pending.reference.span.clone());
        let owner = resources.get(*to).map_or("", |resource| resource.name.as_str());
        let title = format!(
            "`{}` keeps a row of `{}` from being deleted, which is deleted with its `{owner}` (`{}`)",
            blocking.field, target.name, cascading.field
        );
        let advice = format!("write `{ON_DELETE} = \"{CASCADE}\"` or `{ON_DELETE} = \"{KEEP}\"` here");
        problems.add(BlueprintProblem::at(span.unwrap_or(0..0), title).advice(advice));
    }
}
