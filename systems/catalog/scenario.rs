//! Editors of three shops change products and prices at the same time, shoppers look at them, and a setting of each
//! shop is changed by everybody.
//!
//! A product's label says its price. Both are changed in one batch under the versions that were seen, so that they can
//! never be seen to differ; a shop's rows carry its name, so that a row in the wrong shop would show.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use statehouse::{Code, Refusal};
use statehouse_store::random::Random;
use statehouse_store::{Tenant, Value};

use super::{
    Invariant, ScenarioContext, entities_are_sound, nothing_is_lost_or_doubled, number, request, under,
    versions_have_one_writer,
};

const SHOPS: [&str; 3] = ["east", "north", "west"];
const PRODUCTS: u64 = 8;

/// What editors and shoppers know to have been acknowledged.
#[derive(Default)]
struct CatalogAcknowledged {
    operations: Vec<String>,
    views: i64,
    changes: i64,
}

type CatalogShared = Arc<Mutex<CatalogAcknowledged>>;

fn note(shared: &CatalogShared, operation: &str, count: impl FnOnce(&mut CatalogAcknowledged)) {
    let mut acknowledged = shared.lock().unwrap_or_else(PoisonError::into_inner);
    acknowledged.operations.push(operation.to_owned());
    count(&mut acknowledged);
}

pub(super) async fn run(context: Arc<ScenarioContext>) -> Result<Vec<Invariant>> {
    let shared = CatalogShared::default();
    for shop in SHOPS {
        open_shop(&context, &shared, shop).await?;
    }
    context
        .callers(|context, person, random| {
            let shared = shared.clone();
            async move { work(&context, &shared, person, random).await }
        })
        .await?;
    let records = context.records().await?;
    let acknowledged = std::mem::take(&mut *shared.lock().unwrap_or_else(PoisonError::into_inner));
    let mut versions = 0;
    for shop in SHOPS {
        let tenant = Tenant::new(shop)?;
        for resource in ["product", "price", "setting"] {
            versions += entities_are_sound(context.scope(&tenant, resource)).await?.0;
        }
    }
    let mut invariants = vec![
        versions_have_one_writer(versions),
        nothing_is_lost_or_doubled(&records, &acknowledged.operations)?,
    ];
    let (mut views, mut changes, mut rows) = (0, 0, 0);
    for shop in SHOPS {
        let tenant = Tenant::new(shop)?;
        for product in 0..PRODUCTS {
            let (product, price) = (
                read_product(&context, &tenant, product).await?,
                read_price(&context, &tenant, product).await?,
            );
            views += number(&product, "views")?;
            rows += 2;
            let (label, amount) = (product["name"].as_str().unwrap_or_default(), number(&price, "amount")?);
            ensure!(
                label == name_of(shop, amount),
                "{shop}: the label says {label} and the price is {amount}"
            );
        }
        let setting =
            context.call(&tenant, request("setting.read", &["changes".into()], json!({})), "").await?;
        let setting = setting.map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
        let list = setting.body["value"].as_array().context("the setting is no list")?;
        ensure!(list.iter().all(|entry| entry == shop), "{shop} has an entry of another shop: {list:?}");
        changes += list.len() as i64;
        rows += 1;
    }
    ensure!(views == acknowledged.views, "{} views were counted and {views} are there", acknowledged.views);
    ensure!(changes == acknowledged.changes, "{} changes, and {changes} are there", acknowledged.changes);
    invariants.push(Invariant {
        holds: "label and price never differ",
        counted: format!("{} products", PRODUCTS as usize * SHOPS.len()),
    });
    invariants
        .push(Invariant { holds: "no row shows another shop's writes", counted: format!("{rows} rows") });
    invariants.push(Invariant {
        holds: "every view and every appended change is there once",
        counted: format!("{views} views, {changes} changes"),
    });
    Ok(invariants)
}

fn name_of(shop: &str, amount: i64) -> String {
    format!("{shop} for {amount}")
}

fn product_key(product: u64) -> [Value; 1] {
    [format!("product-{product}").into()]
}

fn price_key(product: u64) -> [Value; 2] {
    [format!("product-{product}").into(), "EUR".into()]
}

/// Products and prices come in together.
async fn open_shop(context: &ScenarioContext, shared: &CatalogShared, shop: &str) -> Result<()> {
    let tenant = Tenant::new(shop)?;
    for product in 0..PRODUCTS {
        let id = format!("product-{product}");
        let requests = [
            request("product.create", &[], json!({"product_id": id, "name": name_of(shop, 100)})),
            request("price.create", &[], json!({"product_id": id, "currency": "EUR", "amount": 100})),
        ];
        let operation = format!("{shop}-stock-{product}");
        context
            .batch(&tenant, &requests, &operation)
            .await?
            .map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
        note(shared, &operation, |_| {});
    }
    let operation = format!("{shop}-setting");
    let setting = request("setting.create", &[], json!({"name": "changes", "value": []}));
    context.call(&tenant, setting, &operation).await?.map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
    note(shared, &operation, |_| {});
    Ok(())
}

/// What one person does, in any shop.
async fn work(
    context: &ScenarioContext,
    shared: &CatalogShared,
    person: usize,
    mut random: Random,
) -> Result<()> {
    for number in 0..context.size.actions {
        let shop = random.pick(&SHOPS).copied().unwrap_or_default();
        let tenant = Tenant::new(shop)?;
        let product = random.below(PRODUCTS);
        let operation = format!("person-{person}-{number}");
        match random.below(10) {
            0 => {
                let key = ["changes".into()];
                let append = request("setting.mutate", &key, json!({"append": {"value": shop}}));
                context
                    .call(&tenant, append, &operation)
                    .await?
                    .map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
                note(shared, &operation, |acknowledged| acknowledged.changes += 1);
            }
            1..6 => {
                let view =
                    request("product.mutate", &product_key(product), json!({"increment": {"views": 1}}));
                context
                    .call(&tenant, view, &operation)
                    .await?
                    .map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
                note(shared, &operation, |acknowledged| acknowledged.views += 1);
            }
            _ => {
                let amount = i64::try_from(random.below(1_000))?;
                reprice(context, shared, shop, &tenant, product, amount, &operation).await?;
            }
        }
        context.done();
    }
    Ok(())
}

/// Changes label and price together, under the versions that were read; reads again when another caller was faster.
async fn reprice(
    context: &ScenarioContext,
    shared: &CatalogShared,
    shop: &str,
    tenant: &Tenant,
    product: u64,
    amount: i64,
    operation: &str,
) -> Result<()> {
    for attempt in 0.. {
        let seen = number(&read_product(context, tenant, product).await?, "version")?;
        let seen_price = number(&read_price(context, tenant, product).await?, "version")?;
        let label = request("product.patch", &product_key(product), json!({"name": name_of(shop, amount)}));
        let price = request("price.patch", &price_key(product), json!({"amount": amount}));
        let operation = format!("{operation}-{attempt}");
        match context.batch(tenant, &[under(seen, label), under(seen_price, price)], &operation).await? {
            // Nothing is logged where everything already was as wanted.
            Ok(answers) if answers.iter().all(|answer| answer.token.is_none()) => return Ok(()),
            Ok(_) => {
                note(shared, &operation, |_| {});
                return Ok(());
            }
            Err(Refusal { code: Code::VersionConflict, .. }) => {}
            Err(refusal) => bail!("{operation}: {refusal}"),
        }
    }
    Ok(())
}

async fn read_product(context: &ScenarioContext, tenant: &Tenant, product: u64) -> Result<serde_json::Value> {
    let answer = context.call(tenant, request("product.read", &product_key(product), json!({})), "").await?;
    Ok(answer.map_err(|refusal| anyhow::anyhow!("{refusal}"))?.body)
}

async fn read_price(context: &ScenarioContext, tenant: &Tenant, product: u64) -> Result<serde_json::Value> {
    let answer = context.call(tenant, request("price.read", &price_key(product), json!({})), "").await?;
    Ok(answer.map_err(|refusal| anyhow::anyhow!("{refusal}"))?.body)
}
