//! The route table, built once from the actions of a house.
//!
//! Three paths below `/v1` ([`RouteKind`]) accept any method and look it up here, so that a wrong method gets a 405 with the
//! allowed ones, and a new archetype needs no route of its own. The entry that is found holds the action itself: nothing
//! looks it up again by its name.

use std::collections::HashMap;
use std::sync::Arc;

use http::Method;
use statehouse::action::{Action, ActionHandler, Method as ActionMethod, Route, RouteKind};
use statehouse::house::ActionRef;
use statehouse::{Answer, House, Resource};

use crate::auth::Access;
use crate::problem::{NOT_FOUND, Problem};
use crate::usage::{StoredRows, TIMER};

/// One action.
#[derive(Clone, Debug)]
pub struct RouteEntry {
    /// `profile.update`.
    pub name: Arc<str>,
    /// Its resource.
    pub resource: String,
    /// The declaration.
    pub declared: Action,
    /// The action, as the house calls it.
    pub action: ActionRef,
    /// Its HTTP method.
    pub method: Method,
    /// What a call of the action may create.
    pub creates: StoredRows,
}

impl RouteEntry {
    /// What a caller does that calls it.
    pub fn access(&self) -> Access<'_> {
        access_to(&self.resource, &self.declared)
    }

    /// Whether a path is that of the action.
    fn is_at(&self, path: &ActionPath<'_>) -> bool {
        self.declared.route.kind == path.kind() && path.action.is_none_or(|name| name == self.declared.name)
    }
}

/// Whether an action is cancelled when its client disconnects: it may wait long, and its result has no receiver then.
pub fn is_cancelled_with_caller(action: &Action) -> bool {
    matches!(action.handler, ActionHandler::MultiPlan(_))
}

/// What a call of an action may create: a `POST` to a collection and a `PUT` create a row, and setting a timer a timer.
pub fn created_by(resource: &Resource, action: &Action) -> StoredRows {
    let Route { method, kind } = action.route;
    let creates = action.is_write()
        && (method == ActionMethod::Put || (method == ActionMethod::Post && kind == RouteKind::Collection));
    let is_timer = creates && resource.archetype.keyword() == TIMER;
    StoredRows { rows: u64::from(creates), timers: u64::from(is_timer) }
}

/// How many of these answers say that a row was created. An answer without a token wrote nothing.
pub fn created_in(answers: &[Answer]) -> u64 {
    let is_new =
        |answer: &&Answer| answer.token.is_some() && (answer.created.is_some() || answer.version == Some(1));
    answers.iter().filter(is_new).count() as u64
}

/// What a caller does that calls an action.
pub fn access_of<'a>(resource: &'a Resource, action: &'a Action) -> Access<'a> {
    access_to(&resource.name, action)
}

fn access_to<'a>(resource: &'a str, action: &'a Action) -> Access<'a> {
    Access::Action {
        resource,
        action: &action.name,
        writes: action.is_write(),
        restricted: action.is_restricted,
        scope: action.scope.as_deref(),
    }
}

/// The path of a request for an action, without the method. Its segments are as sent: not decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionPath<'p> {
    /// The resource's name.
    pub resource: &'p str,
    /// The row's key.
    pub key: Option<&'p str>,
    /// The action's name, if it is a part of the path.
    pub action: Option<&'p str>,
}

impl<'p> ActionPath<'p> {
    /// The parts of a path below `/v1`, if an action can have it.
    pub fn parse(path: &'p str) -> Option<ActionPath<'p>> {
        let below = path.strip_prefix("/v1/")?;
        let mut segments = below.split('/');
        let parsed = ActionPath { resource: segments.next()?, key: segments.next(), action: segments.next() };
        (segments.next().is_none() && !below.split('/').any(str::is_empty)).then_some(parsed)
    }

    fn kind(&self) -> RouteKind {
        match (self.key, self.action) {
            (None, _) => RouteKind::Collection,
            (Some(_), None) => RouteKind::Item,
            (Some(_), Some(_)) => RouteKind::ItemAction,
        }
    }
}

/// The route table.
#[derive(Debug)]
pub struct Routes {
    by_resource: HashMap<String, Vec<Arc<RouteEntry>>>,
}

impl Routes {
    /// The routes of a house.
    pub fn of(house: &House) -> Routes {
        let mut by_resource: HashMap<String, Vec<Arc<RouteEntry>>> = HashMap::new();
        for (action, resource, declared) in house.actions() {
            let entry = RouteEntry {
                name: format!("{}.{}", resource.name, declared.name).into(),
                resource: resource.name.clone(),
                declared: declared.clone(),
                action,
                method: method(declared.route.method),
                creates: created_by(resource, declared),
            };
            by_resource.entry(resource.name.clone()).or_default().push(Arc::new(entry));
        }
        Routes { by_resource }
    }

    /// The action of a request.
    pub fn find(&self, path: &ActionPath<'_>, method: &Method) -> Result<Arc<RouteEntry>, Problem> {
        let entries = self.by_resource.get(path.resource).into_iter().flatten();
        let at_path: Vec<&Arc<RouteEntry>> = entries.filter(|entry| entry.is_at(path)).collect();
        // HEAD is GET without the body, which hyper omits.
        let wanted = if method == Method::HEAD { &Method::GET } else { method };
        if let Some(entry) = at_path.iter().find(|entry| entry.method == *wanted) {
            return Ok(Arc::clone(entry));
        }
        let mut allowed: Vec<&str> = at_path.iter().map(|entry| entry.method.as_str()).collect();
        if allowed.is_empty() {
            return Err(Problem::new(NOT_FOUND, "no resource or action has this path"));
        }
        if allowed.contains(&"GET") {
            allowed.push("HEAD");
        }
        Err(Problem::method_not_allowed(&allowed))
    }
}

/// The method as the `http` type.
pub fn method(method: statehouse::action::Method) -> Method {
    use statehouse::action::Method as Declared;
    match method {
        Declared::Get => Method::GET,
        Declared::Post => Method::POST,
        Declared::Put => Method::PUT,
        Declared::Patch => Method::PATCH,
        Declared::Delete => Method::DELETE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_below_v1_has_one_to_three_segments() {
        let parse = |path| ActionPath::parse(path).map(|path| (path.resource, path.key, path.action));
        assert_eq!(parse("/v1/profile"), Some(("profile", None, None)));
        assert_eq!(parse("/v1/profile/a%2Fb"), Some(("profile", Some("a%2Fb"), None)));
        assert_eq!(parse("/v1/seat/7/confirm"), Some(("seat", Some("7"), Some("confirm"))));
        for path in
            ["/v1", "/v1/", "/v2/profile", "/v1/profile/", "/v1//confirm", "/v1/a/b/c/d", "/v1/a/b/c/"]
        {
            assert_eq!(parse(path), None, "{path}");
        }
    }

    #[test]
    fn the_shape_of_a_path_follows_from_its_parts() {
        let kinds =
            ["/v1/a", "/v1/a/b", "/v1/a/b/c"].map(|path| ActionPath::parse(path).map(|path| path.kind()));
        assert_eq!(kinds, [RouteKind::Collection, RouteKind::Item, RouteKind::ItemAction].map(Some));
    }
}
