//! The route table, built once from the actions of a house.
//!
//! Three path patterns below `/v1` accept any method and look it up here, so that a wrong method gets a 405 with the
//! allowed ones, and a new archetype needs no route of its own.

use std::collections::HashMap;
use std::sync::Arc;

use http::Method;
use statehouse::House;
use statehouse::action::{Action, Does, Place};

use crate::problem::{NOT_FOUND, Problem};

/// One action.
#[derive(Clone, Debug)]
pub struct RouteEntry {
    /// `profile.update`.
    pub name: Arc<str>,
    /// The declaration.
    pub action: Action,
    /// Its HTTP method.
    pub method: Method,
}

impl RouteEntry {
    /// Whether it writes.
    pub fn writes(&self) -> bool {
        self.action.is_write()
    }

    /// Whether the action is cancelled when its client disconnects: it may wait long, and its result has no receiver then.
    pub fn is_cancelled_with_caller(&self) -> bool {
        matches!(self.action.does, Does::Several(_))
    }
}

#[derive(Debug, Default)]
struct ResourceRoutes {
    collection: Vec<Arc<RouteEntry>>,
    item: Vec<Arc<RouteEntry>>,
    item_actions: HashMap<String, Vec<Arc<RouteEntry>>>,
}

/// The route table.
#[derive(Debug)]
pub struct Routes {
    by_resource: HashMap<String, ResourceRoutes>,
}

/// The path of a request, without the method.
#[derive(Clone, Copy, Debug)]
pub enum RoutePattern<'p> {
    /// `/v1/{name}`.
    Collection,
    /// `/v1/{name}/{key}`.
    Item,
    /// `/v1/{name}/{key}/{action}`.
    ItemAction(&'p str),
}

impl Routes {
    /// The routes of a house.
    pub fn of(house: &House) -> Routes {
        let mut by_resource: HashMap<String, ResourceRoutes> = HashMap::new();
        for resource in house.resources() {
            let places = by_resource.entry(resource.name.clone()).or_default();
            for action in &resource.actions {
                let entry = Arc::new(RouteEntry {
                    name: format!("{}.{}", resource.name, action.name).into(),
                    action: action.clone(),
                    method: method(action.route.method),
                });
                match action.route.place {
                    Place::Collection => places.collection.push(entry),
                    Place::Item => places.item.push(entry),
                    Place::ItemAction => {
                        places.item_actions.entry(action.name.to_string()).or_default().push(entry);
                    }
                }
            }
        }
        Routes { by_resource }
    }

    /// The action of a request.
    pub fn find(
        &self,
        resource: &str,
        pattern: RoutePattern<'_>,
        method: &Method,
    ) -> Result<Arc<RouteEntry>, Problem> {
        let missing = || Problem::new(NOT_FOUND, "no resource or action has this path");
        let places = self.by_resource.get(resource).ok_or_else(missing)?;
        let entry = match pattern {
            RoutePattern::Collection => &places.collection,
            RoutePattern::Item => &places.item,
            RoutePattern::ItemAction(action) => places.item_actions.get(action).ok_or_else(missing)?,
        };
        // HEAD is GET without the body, which hyper omits.
        let wanted = if method == Method::HEAD { &Method::GET } else { method };
        entry.iter().find(|one| one.method == *wanted).cloned().ok_or_else(|| {
            let mut allowed: Vec<&str> = entry.iter().map(|one| one.method.as_str()).collect();
            if allowed.contains(&"GET") {
                allowed.push("HEAD");
            }
            Problem::method_not_allowed(&allowed)
        })
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
