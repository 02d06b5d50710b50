//! Calls of actions: finding an action, checking its arguments, and running it alone or with others as one plan.

use std::sync::Arc;

use serde_json::{Map, Value as Json};
use statehouse_store::{Time, Value};

use super::{CONFLICTS_MAX, House, Operation, Request, condition};
use crate::action::{Action, ActionHandler, Answer, Call, Code, Expected, Refusal, RouteKind, WriteHandler};
use crate::allow::Principal;
use crate::inputs::parse_inputs;
use crate::resource::{Resource, no_such};

/// An action of a house: its resource and itself, found by [`House::find_action`] once and called many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ActionRef {
    resource: usize,
    action: usize,
}

/// What a caller gives to an action.
#[derive(Clone, Debug, Default)]
pub struct CallArguments {
    /// The key of the row, for actions that name one.
    pub key: Vec<Value>,
    /// What the action takes.
    pub input: Map<String, Json>,
    /// What the caller says about the version it has seen.
    pub expected: Option<Expected>,
}

impl House {
    /// The action of that full name, to be called many times.
    pub fn find_action(&self, name: &str) -> Result<ActionRef, Refusal> {
        let (resource, action) = name.split_once('.').ok_or_else(|| {
            let message = format!("`{name}` is no action: write the resource, a dot and the action");
            Refusal::new(Code::NotFound, message)
        })?;
        self.find_action_of(resource, action)
    }

    /// The action of that name of a resource, to be called many times.
    pub fn find_action_of(&self, resource: &str, action: &str) -> Result<ActionRef, Refusal> {
        let found = self.resources.iter().enumerate().find(|(_, declared)| declared.name == resource);
        let names = || self.resources.iter().map(|resource| resource.name.as_str());
        let (index, resource) = found.ok_or_else(|| no_such("resource", resource, names()))?;
        let names = || resource.actions.iter().map(|action| &*action.name);
        let position = resource.actions.iter().position(|declared| declared.name == action);
        let missing = || no_such(&format!("action of {}", resource.name), action, names());
        Ok(ActionRef { resource: index, action: position.ok_or_else(missing)? })
    }

    /// All actions, each with its resource.
    pub fn actions(&self) -> impl Iterator<Item = (ActionRef, &Resource, &Action)> {
        self.resources.iter().enumerate().flat_map(|(number, resource)| {
            let actions = resource.actions.iter().enumerate();
            actions
                .map(move |(action, declared)| (ActionRef { resource: number, action }, resource, declared))
        })
    }

    /// The action of that full name.
    pub fn action(&self, name: &str) -> Result<(&Resource, &Action), Refusal> {
        self.resolve(self.find_action(name)?)
    }

    /// The action that a reference of this house names.
    pub fn resolve(&self, action: ActionRef) -> Result<(&Resource, &Action), Refusal> {
        let resource = self.resources.get(action.resource);
        let found = resource.and_then(|resource| Some((resource, resource.actions.get(action.action)?)));
        found.ok_or_else(|| Refusal::new(Code::Internal, "an action reference of another house"))
    }

    /// Runs one action, found by its name.
    pub async fn call(
        &self,
        caller: impl Into<Principal>,
        request: Request,
        operation: Operation,
    ) -> Result<Answer, Refusal> {
        let (action, arguments) = self.split(request)?;
        self.call_action(caller, action, arguments, operation).await
    }

    /// Runs one action.
    pub async fn call_action(
        &self,
        caller: impl Into<Principal>,
        reference: ActionRef,
        arguments: CallArguments,
        operation: Operation,
    ) -> Result<Answer, Refusal> {
        let (resource, action) = self.resolve(reference)?;
        let caller = caller.into();
        let tenant = &caller.tenant;
        let call = validate(resource, action, &caller, arguments)?;
        self.authorize(resource, action, &call).await?;
        match &action.handler {
            ActionHandler::Read(read) => {
                self.read_judged(resource, action, &**read, &call).await.map(Arc::unwrap_or_clone)
            }
            ActionHandler::Write(write @ WriteHandler { combiner: Some(combiner), .. }) => {
                let one = self.validated(resource, action, write, call);
                self.combine(reference, one, &**combiner, operation).await
            }
            ActionHandler::Write(write) => {
                let calls = [self.validated(resource, action, write, call)];
                let answers = self
                    .write(tenant, &calls, operation, CONFLICTS_MAX)
                    .await
                    .map_err(|refusal| Refusal { call: None, ..refusal })?;
                let answer = answers.into_iter().next();
                answer.ok_or_else(|| Refusal::new(Code::Internal, "a write had no answer"))
            }
            ActionHandler::MultiPlan(multi) => self.run_multi(resource, &**multi, &call, operation).await,
            ActionHandler::ForEach(each) => self.run_for_each(&caller, each, &call, &operation).await,
        }
    }

    /// Runs one action that reads, found by its name. The answer may be shared with other callers.
    pub async fn read(&self, caller: impl Into<Principal>, request: Request) -> Result<Arc<Answer>, Refusal> {
        let (action, arguments) = self.split(request)?;
        self.read_action(caller, action, arguments).await
    }

    /// Runs one action that reads. The answer may be shared with other callers.
    pub async fn read_action(
        &self,
        caller: impl Into<Principal>,
        action: ActionRef,
        arguments: CallArguments,
    ) -> Result<Arc<Answer>, Refusal> {
        let (resource, action) = self.resolve(action)?;
        let ActionHandler::Read(read) = &action.handler else {
            return Err(Refusal::new(
                Code::InvalidInput,
                format!("{}.{} writes", resource.name, action.name),
            ));
        };
        let call = validate(resource, action, &caller.into(), arguments)?;
        self.authorize(resource, action, &call).await?;
        self.read_judged(resource, action, &**read, &call).await
    }

    /// Runs several writes as one plan, found by their names: all or none. A refusal says which call it is about
    /// ([`Refusal::call`]), unless it is about all of them, like that of a plan which is too large.
    pub async fn batch(
        &self,
        caller: impl Into<Principal>,
        requests: Vec<Request>,
        operation: Operation,
    ) -> Result<Vec<Answer>, Refusal> {
        let numbered = requests.into_iter().enumerate();
        let calls = numbered.map(|(index, request)| self.split(request).map_err(|no| no.of_call(index)));
        let calls: Result<Vec<(ActionRef, CallArguments)>, Refusal> = calls.collect();
        self.batch_actions(caller, calls?, operation).await
    }

    /// Runs several writes as one plan, as [`House::batch`] does.
    pub async fn batch_actions(
        &self,
        caller: impl Into<Principal>,
        calls: Vec<(ActionRef, CallArguments)>,
        operation: Operation,
    ) -> Result<Vec<Answer>, Refusal> {
        self.write_batch(&caller.into(), calls, operation, CONFLICTS_MAX).await
    }

    pub(super) fn split(&self, request: Request) -> Result<(ActionRef, CallArguments), Refusal> {
        let Request { action, key, input, expected } = request;
        Ok((self.find_action(&action)?, CallArguments { key, input, expected }))
    }

    pub(super) fn validated<'a>(
        &self,
        resource: &'a Resource,
        action: &'a Action,
        write: &'a WriteHandler,
        call: Call,
    ) -> ValidatedCall<'a> {
        ValidatedCall { resource, action, write, call, now: self.clock.now() }
    }
}

/// A call whose arguments fit its action.
pub(super) struct ValidatedCall<'a> {
    pub(super) resource: &'a Resource,
    pub(super) action: &'a Action,
    pub(super) write: &'a WriteHandler,
    pub(super) call: Call,
    /// The process clock when it was validated, to describe a condition that failed.
    pub(super) now: Time,
}

/// What a read has to say of inputs that it does not declare, by their names.
fn undeclared_advice(action: &Action, input: &Map<String, Json>) -> Vec<(String, String)> {
    let ActionHandler::Read(read) = &action.handler else { return Vec::new() };
    let is_declared = |name: &str| action.input.iter().any(|property| property.name == name);
    let undeclared = input.keys().filter(|name| !is_declared(name));
    undeclared.filter_map(|name| Some((name.clone(), read.undeclared(name, input)?))).collect()
}

/// Checks a call against the action's form and parses its inputs.
pub(super) fn validate(
    resource: &Resource,
    action: &Action,
    caller: &Principal,
    arguments: CallArguments,
) -> Result<Call, Refusal> {
    let CallArguments { key, mut input, expected } = arguments;
    let condition = condition::take_condition(resource, action, &mut input)?;
    let advice = undeclared_advice(action, &input);
    let input = parse_inputs(&action.input, input).map_err(|mut errors| {
        for error in &mut errors {
            let advice = advice.iter().find(|(name, _)| error.pointer.strip_prefix('/') == Some(name));
            if let Some((_, advice)) = advice {
                error.detail.clone_from(advice);
            }
        }
        Refusal::invalid(errors)
    })?;
    let names_row = action.route.kind != RouteKind::Collection;
    if names_row && key.len() != resource.key.len() {
        let names: Vec<&str> = resource.key.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Refusal::field("key", format!("a key of {} is {}", resource.name, names.join(","))));
    }
    if action.needs_version && expected.is_none() {
        let message = format!(
            "{}.{} overwrites what others may have written: say which version you have seen, with If-Match over HTTP \
             or --version on the command line",
            resource.name, action.name
        );
        return Err(Refusal::new(Code::VersionRequired, message));
    }
    let Principal { tenant, claims, actor } = caller.clone();
    Ok(Call { tenant, key, input, expected, condition, claims, actor })
}
