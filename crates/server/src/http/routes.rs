//! The table of routes, made once from the actions of a house.
//!
//! Three places below `/v1` take any method and look it up here, so that a wrong method can be answered with the right
//! ones, and a new archetype needs no route of its own.

use std::collections::HashMap;
use std::sync::Arc;

use http::Method;
use statehouse::House;
use statehouse::action::{Action, Does, Place};

use crate::problem::{NOT_FOUND, Problem};

/// One action, ready to be called.
#[derive(Clone, Debug)]
pub struct Served {
    /// `profile.update`.
    pub name: Arc<str>,
    /// The declaration.
    pub action: Action,
    /// The method that calls it.
    pub method: Method,
}

impl Served {
    /// Whether it writes.
    pub fn writes(&self) -> bool {
        self.action.is_write()
    }

    /// Whether a client that goes away breaks it off: it may wait long, and what it does then is for nobody.
    pub fn ends_with_its_caller(&self) -> bool {
        matches!(self.action.does, Does::Several(_))
    }
}

#[derive(Debug, Default)]
struct Places {
    collection: Vec<Arc<Served>>,
    item: Vec<Arc<Served>>,
    item_actions: HashMap<String, Vec<Arc<Served>>>,
}

/// The table.
#[derive(Debug)]
pub struct Routes {
    by_resource: HashMap<String, Places>,
}

/// What a path names, apart from the method.
#[derive(Clone, Copy, Debug)]
pub enum Named<'p> {
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
        let mut by_resource: HashMap<String, Places> = HashMap::new();
        for resource in house.resources() {
            let places = by_resource.entry(resource.name.clone()).or_default();
            for action in &resource.actions {
                let served = Arc::new(Served {
                    name: format!("{}.{}", resource.name, action.name).into(),
                    action: action.clone(),
                    method: method(action.route.method),
                });
                match action.route.place {
                    Place::Collection => places.collection.push(served),
                    Place::Item => places.item.push(served),
                    Place::ItemAction => {
                        places.item_actions.entry(action.name.to_string()).or_default().push(served);
                    }
                }
            }
        }
        Routes { by_resource }
    }

    /// The action that a request calls.
    pub fn find(&self, resource: &str, named: Named<'_>, method: &Method) -> Result<Arc<Served>, Problem> {
        let missing = || Problem::new(NOT_FOUND, "no resource or action has this path");
        let places = self.by_resource.get(resource).ok_or_else(missing)?;
        let served = match named {
            Named::Collection => &places.collection,
            Named::Item => &places.item,
            Named::ItemAction(action) => places.item_actions.get(action).ok_or_else(missing)?,
        };
        // HEAD is GET without the body, which the protocol's implementation leaves out.
        let wanted = if method == Method::HEAD { &Method::GET } else { method };
        served.iter().find(|one| one.method == *wanted).cloned().ok_or_else(|| {
            let mut allowed: Vec<&str> = served.iter().map(|one| one.method.as_str()).collect();
            if allowed.contains(&"GET") {
                allowed.push("HEAD");
            }
            Problem::method_not_allowed(&allowed)
        })
    }
}

/// The method, as the protocol's implementation has it.
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
