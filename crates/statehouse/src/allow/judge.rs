//! Applies the rules of a resource to one call of a caller with claims.

use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::guard::Operand;
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Expr, Guard, Reason, Row, Step, Time, Value, eval};

use super::declare::is_list;
use super::{ActionRule, AllowRules, Claims};
use crate::action::{Action, Answer, Call, Code, PlanParts, Prepared, Refusal, RefusedStep, RouteKind};
use crate::declare::rule::{CheckedRule, RuleValues};
use crate::declare::table::TableDef;
use crate::resource::{Resource, key_text};

/// The label of an assertion that the rules hold for a row which the plan does not write.
const ALLOWED: &str = "allowed";

/// A call that rules govern.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GovernedCall<'a> {
    resource: &'a Resource,
    action: &'a Action,
    call: &'a Call,
    claims: &'a Claims,
    rules: &'a AllowRules,
}

impl<'a> GovernedCall<'a> {
    /// The call, if its caller has claims and the resource has rules.
    pub(crate) fn of(resource: &'a Resource, action: &'a Action, call: &'a Call) -> Option<GovernedCall<'a>> {
        let (claims, rules) = (call.claims.as_deref()?, resource.allow.as_deref()?);
        Some(GovernedCall { resource, action, call, claims, rules })
    }

    fn values(&self) -> RuleValues<'a> {
        RuleValues {
            inputs: Some(&self.call.input),
            claims: Some(self.claims),
            key: &self.call.key,
            binds: &[],
        }
    }

    fn rule(&self) -> Option<&'a ActionRule> {
        self.rules.action(&self.action.name)
    }

    /// Whether a rule that governs the call reads the clock, so that only the engine can judge it.
    pub(crate) fn reads_clock(&self) -> bool {
        let rules = self.rules.visible().into_iter().chain(self.rule().map(|rule| &rule.rule));
        rules.into_iter().any(CheckedRule::reads_clock)
    }

    fn is_item(&self) -> bool {
        self.action.route.kind != RouteKind::Collection
    }

    /// The definition of the row that an action names, or, on the collection, makes.
    pub(crate) fn def(&self) -> Option<&'a Arc<TableDef>> {
        if self.is_item() { self.resource.row_def() } else { self.resource.def.as_ref() }
    }

    /// The table of the row that the call names, if it writes one.
    pub(crate) fn named_row(&self) -> Option<&'a Arc<TableDef>> {
        self.def().filter(|_| self.is_item())
    }

    /// Whether it makes a row, under a rule.
    pub(crate) fn makes_row(&self) -> bool {
        !self.is_item() && self.def().is_some() && self.rule().is_some()
    }

    fn what(&self) -> String {
        format!("{} {}", self.resource.name, key_text(&self.call.key))
    }

    /// The refusal of a row that the caller may not know of: the same as of a row that does not exist (A3).
    pub(crate) fn missing(&self) -> Refusal {
        Refusal::new(Code::NotFound, format!("{} does not exist", self.what()))
    }

    fn forbidden(&self) -> Refusal {
        let (name, action) = (&self.resource.name, &self.action.name);
        let of = if self.is_item() { self.what() } else { name.clone() };
        Refusal::new(
            Code::Forbidden,
            format!("{of}: the rules of {name} do not allow {action} to this caller"),
        )
    }

    /// The refusal of a call that no rule allows, where no row was judged.
    pub(crate) fn denied(&self) -> Refusal {
        if self.is_item() { self.missing() } else { self.forbidden() }
    }

    /// Replaces a refusal that says more about a row than that it does not exist.
    pub(crate) fn masked(&self, refusal: Refusal) -> Refusal {
        match refusal.code {
            Code::NotFound if self.is_item() => Refusal { call: refusal.call, ..self.missing() },
            _ => refusal,
        }
    }

    fn holds(&self, rule: &CheckedRule, row: &Row, now: Time) -> bool {
        rule.holds(&self.values(), row, now)
    }

    pub(crate) fn sees(&self, row: &Row, now: Time) -> bool {
        self.rules.visible().is_some_and(|rule| self.holds(rule, row, now))
    }

    /// Judges the row that a write names, as it was read before (A2, A3).
    pub(crate) fn judge_row(&self, row: Option<&Row>, now: Time) -> Result<(), Refusal> {
        let Some(rule) = self.rule() else {
            return Err(if row.is_some_and(|row| self.sees(row, now)) {
                self.forbidden()
            } else {
                self.missing()
            });
        };
        match row {
            None => Ok(()),
            Some(row) if !self.sees(row, now) => Err(self.missing()),
            Some(row) if !self.holds(&rule.rule, row, now) => Err(self.forbidden()),
            Some(_) => Ok(()),
        }
    }

    /// Judges a call that names no row: by its key, its inputs and the claims.
    pub(crate) fn judge_call(&self, now: Time) -> Result<(), Refusal> {
        let rule = self.rule().ok_or_else(|| self.denied())?;
        let guard = rule.rule.bind_over(&self.values(), &|name| self.key_part(name), now);
        if guard == Guard::always() { Ok(()) } else { Err(self.denied()) }
    }

    /// Judges a read before it is done (A4).
    pub(crate) fn judge_read(&self, now: Time) -> Result<(), Refusal> {
        let rule = self.rule().ok_or_else(|| self.denied())?;
        if rule.filter || !is_list(self.action) {
            return Ok(());
        }
        let filters = |name: &str| self.key_part(name).or_else(|| self.call.input.value(name).cloned());
        match rule.rule.bind_over(&self.values(), &filters, now) == Guard::always() {
            true => Ok(()),
            false => Err(self.forbidden()),
        }
    }

    fn key_part(&self, name: &str) -> Option<Value> {
        let index = self.resource.key.iter().position(|(key, _)| key == name)?;
        self.call.key.get(index).cloned()
    }

    /// Judges an answer: the row that it shows, or each row of a list (A4).
    pub(crate) fn judge_answer(&self, answer: Arc<Answer>, now: Time) -> Result<Arc<Answer>, Refusal> {
        let rule = &self.rule().ok_or_else(|| self.denied())?.rule;
        let holds = |shown: &Json| self.holds_for(rule, shown, now);
        match &answer.body {
            Json::Array(items) if items.iter().all(holds) => Ok(answer),
            Json::Array(items) => {
                let body = Json::Array(items.iter().filter(|item| holds(item)).cloned().collect());
                Ok(Arc::new(Answer { body, ..(*answer).clone() }))
            }
            shown if holds(shown) => Ok(answer),
            _ => Err(self.denied()),
        }
    }

    fn holds_for(&self, rule: &CheckedRule, shown: &Json, now: Time) -> bool {
        let known = |name: &str| self.key_part(name).or_else(|| member(shown, name));
        rule.bind_over(&self.values(), &known, now) == Guard::always()
    }

    /// Adds the rules to a prepared write (A2).
    pub(crate) fn restrict(&self, prepared: Prepared, now: Time) -> Result<Prepared, Refusal> {
        match prepared {
            Prepared::Unchanged(answer) => {
                let is_row = self.rules.visible().is_some_and(|rule| {
                    let is_known =
                        |name: &&str| self.key_part(name).or_else(|| member(&answer.body, name)).is_some();
                    // The row was judged before if the answer does not show what the rule names.
                    !rule.rule().columns().iter().all(is_known) || self.holds_for(rule, &answer.body, now)
                });
                if is_row || !self.is_item() { Ok(Prepared::Unchanged(answer)) } else { Err(self.missing()) }
            }
            Prepared::Write(mut parts) => {
                self.guard_steps(&mut parts, now)?;
                Ok(Prepared::Write(parts))
            }
        }
    }

    fn guard_steps(&self, parts: &mut PlanParts, now: Time) -> Result<(), Refusal> {
        let Some(def) = self.def() else { return Ok(()) };
        let rule = &self.rule().ok_or_else(|| self.denied())?.rule;
        let mut is_guarded = false;
        for step in &mut parts.steps {
            if !self.is_judged(def, step) {
                continue;
            }
            is_guarded = true;
            if step.verb == Verb::Put && step.expect != Expect::Present {
                self.judge_new(rule, step, now)?;
            }
            if step.expect != Expect::Absent {
                let guard = self.guard_of(rule, step, now)?;
                if guard.conjuncts().contains(&Guard::never()) {
                    return Err(self.forbidden());
                }
                step.guard = guard.and(step.guard.clone());
            }
        }
        if is_guarded {
            return Ok(());
        }
        if !self.is_item() {
            return self.judge_call(now);
        }
        let step = Step::assert(def.table(), self.call.key.iter().cloned()).label(ALLOWED);
        let guard = self.guard_of(rule, &step, now)?;
        parts.steps.push(step.guard(guard));
        Ok(())
    }

    /// Whether a step is on the row that the call names or makes.
    fn is_judged(&self, def: &TableDef, step: &Step) -> bool {
        let is_row = if self.is_item() { step.key == self.call.key } else { step.verb == Verb::Put };
        step.table.name() == def.table().name() && is_row
    }

    /// The guard of a step on a row that may be there.
    fn guard_of(&self, rule: &CheckedRule, step: &Step, now: Time) -> Result<Guard, Refusal> {
        let values = self.values();
        let visible = self.rules.visible().ok_or_else(|| self.missing())?;
        let mut guard = visible.bind(&values);
        for one in [rule.bind(&values), self.guard_after(rule, step, now)?] {
            if one != guard {
                guard = guard.and(one);
            }
        }
        Ok(guard)
    }

    /// What the rule demands of the row as a step leaves it; nothing if the step sets no column of the rule.
    fn guard_after(&self, rule: &CheckedRule, step: &Step, now: Time) -> Result<Guard, Refusal> {
        let columns = rule.rule().columns();
        let mut changed = Vec::new();
        for one in step.assignments.iter().filter(|one| columns.contains(&one.column.as_str())) {
            let Some(value) = constant(&one.expr, now) else { return Err(self.computed(&one.column)) };
            changed.push((one.column.as_str(), value));
        }
        if changed.is_empty() {
            return Ok(Guard::always());
        }
        let known =
            |name: &str| changed.iter().find(|(column, _)| *column == name).map(|(_, value)| value.clone());
        Ok(rule.bind_over(&self.values(), &known, now))
    }

    fn computed(&self, column: &str) -> Refusal {
        let what = if self.is_item() { self.what() } else { self.resource.name.clone() };
        let message =
            format!("{what}: a rule names {column}, which this call computes; set it to a value instead");
        Refusal::new(Code::Forbidden, message)
    }

    /// Judges a row that a step makes.
    fn judge_new(&self, rule: &CheckedRule, step: &Step, now: Time) -> Result<(), Refusal> {
        let columns = rule.rule().columns();
        let assigned = |name: &str| step.assignments.iter().find(|one| one.column == name);
        let computed =
            columns.iter().find(|name| assigned(name).is_some_and(|one| constant(&one.expr, now).is_none()));
        if let Some(column) = computed {
            return Err(self.computed(column));
        }
        let table = &step.table;
        let known = |name: &str| {
            if let Some(one) = assigned(name) {
                return constant(&one.expr, now);
            }
            let index = table.position(name)?;
            let default = || table.columns().get(index).and_then(|column| column.default.clone());
            Some(step.key.get(index).cloned().or_else(default).unwrap_or(Value::Null))
        };
        match rule.bind_over(&self.values(), &known, now) == Guard::always() {
            true => Ok(()),
            false => Err(self.denied()),
        }
    }

    /// The refusal if a step was refused because of the rules.
    pub(crate) fn verdict(&self, refused: &RefusedStep<'_>, now: Time) -> Option<Refusal> {
        let (Reason::Guard { .. }, Some(row), Some(rule)) = (refused.reason, refused.row, self.rule()) else {
            return None;
        };
        let def = self.def().filter(|def| self.is_judged(def, refused.step) || refused.label() == ALLOWED)?;
        debug_assert_eq!(row.table().name(), def.table().name());
        if !self.sees(row, now) {
            return Some(self.denied());
        }
        let after = self.guard_after(&rule.rule, refused.step, now).ok()?;
        let is_allowed = self.holds(&rule.rule, row, now) && eval::holds(&after, row, now);
        (!is_allowed).then(|| self.forbidden())
    }
}

/// A member of an object.
fn member(object: &Json, name: &str) -> Option<Value> {
    object.get(name).map(|json| if json.is_null() { Value::Null } else { Value::Json(json.clone()) })
}

/// The value of an assignment that does not depend on the row.
fn constant(expr: &Expr, now: Time) -> Option<Value> {
    match expr {
        Expr::Is(Operand::Value(value)) => Some(value.clone()),
        Expr::Is(Operand::Now { plus_micros }) => Some(Value::Time(eval::now_moved(now, *plus_micros))),
        _ => None,
    }
}

/// Whether a caller with claims may see an event of a resource; `None` if that depends on columns that the event does not have.
pub(crate) fn judge_event(
    resource: &Resource,
    claims: &Claims,
    key: &[Value],
    data: &Json,
    now: Time,
) -> Option<bool> {
    let Some(rule) = resource.allow.as_ref().and_then(|rules| rules.visible()) else { return Some(false) };
    let values = RuleValues { claims: Some(claims), key, ..RuleValues::default() };
    let shown = data.get("row").unwrap_or(&Json::Null);
    let known = |name: &str| {
        let index = resource.key.iter().position(|(key, _)| key == name);
        index.and_then(|index| key.get(index).cloned()).or_else(|| member(shown, name))
    };
    match rule.bind_over(&values, &known, now) {
        guard if guard == Guard::always() => Some(true),
        guard if guard == Guard::never() => Some(false),
        _ => None,
    }
}
