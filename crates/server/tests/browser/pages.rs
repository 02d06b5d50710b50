//! Every page and every form, for the specimens of all archetypes.

use serde_json::{Value as Json, json};
use statehouse::action::{Action, RouteKind, WAIT};
use statehouse::resource::key_text;
use statehouse::{Code, Expected, Operation, Request, Resource};
use statehouse_drills::sample_inputs as sample;
use statehouse_store::Tenant;

use crate::driver::Browser;
use crate::site::BrowsedServer;

/// The pages of the house itself.
const PAGES: [&str; 10] = [
    "",
    "/log",
    "/groups",
    "/projections",
    "/queues",
    "/batch",
    "/atlas",
    "/atlas/booking",
    "/blueprint",
    "/keys",
];

/// Checks a page by axe-core and returns its serious findings.
pub async fn serious_findings(browser: &Browser) -> Vec<String> {
    let path = std::env::var("STATEHOUSE_TEST_AXE")
        .expect("STATEHOUSE_TEST_AXE has to be set to what `scripts/browser` prints");
    let axe = std::fs::read_to_string(path).unwrap();
    browser.run(&axe, Json::Null).await;
    let script = "const done = arguments[arguments.length - 1]; axe.run({resultTypes: ['violations']}).then((found) => done(
        found.violations.filter((one) => ['serious', 'critical'].includes(one.impact))
            .map((one) => one.id + ': ' + one.nodes.slice(0, 3).map((node) => node.html).join(' | '))), (error) => done([String(error)]))";
    let found = browser.run_async(script).await;
    found.as_array().unwrap().iter().map(|one| one.as_str().unwrap().to_owned()).collect()
}

/// A request of an action, with rows of its resource as samples.
fn sampled(server: &BrowsedServer, name: &str, variant: i64) -> Request {
    let (resource, action) = server.house.action(name).unwrap();
    sample::request(server.house.resources(), resource, action, variant)
}

/// Performs the actions that lead to one, as far as they can be performed at once.
async fn lead_to(server: &BrowsedServer, tenant: &Tenant, action: &Action) {
    for (variant, name) in (1..).zip(action.after.iter().filter(|name| *name != WAIT)) {
        let mut request = sampled(server, name, variant);
        request.expected = request.expected.map(|_| Expected::Any);
        let _ = server.house.call(tenant, request, Operation::default()).await;
    }
}

pub async fn every_page_renders() {
    let server = BrowsedServer::with_all_archetypes().await;
    let tenant = Tenant::new("default").unwrap();
    for resource in server.house.resources() {
        for action in &resource.actions {
            lead_to(&server, &tenant, action).await;
        }
    }
    let browser = Browser::open(1280, 900).await;
    let mut pages: Vec<(String, bool)> = PAGES.iter().map(|page| ((*page).to_owned(), true)).collect();
    let mut keywords = Vec::new();
    for resource in server.house.resources() {
        pages.push((format!("/r/{}", resource.name), true));
        // Forms of writes are shown by the trial that submits them.
        for action in resource.actions.iter().filter(|action| !action.is_write()) {
            pages.push((format!("/a/{}.{}", resource.name, action.name), false));
        }
        let keyword = resource.archetype.keyword();
        let write = resource.actions.iter().find(|action| action.is_write());
        if let Some(write) = write.filter(|_| !keywords.contains(&keyword)) {
            keywords.push(keyword);
            pages.push((format!("/a/{}.{}", resource.name, write.name), true));
        }
    }
    let mut findings = Vec::new();
    for (page, is_checked) in &pages {
        browser.go(&server.page(page)).await;
        let heading = browser.run("return document.querySelector('main h1')?.innerText", Json::Null).await;
        let text = heading.as_str().unwrap_or_default().to_owned();
        assert!(!text.is_empty() && text != "Internal error", "{page}: {}", browser.text().await);
        browser.assert_clean(page).await;
        if *is_checked {
            findings.extend(serious_findings(&browser).await.into_iter().map(|one| format!("{page}: {one}")));
        }
        browser.picture(&format!("page{}", page.replace('/', "-"))).await;
    }
    // Rows of the lists that need no filter.
    for resource in server.house.resources() {
        browser.go(&server.page(&format!("/r/{}", resource.name))).await;
        let row =
            browser.run("return document.querySelector('table[data-rows] th a')?.href", Json::Null).await;
        let Some(row) = row.as_str() else { continue };
        browser.go(row).await;
        let text = browser.text().await;
        assert!(text.contains("History"), "{row}: {text}");
        browser.assert_clean(row).await;
        findings.extend(serious_findings(&browser).await.into_iter().map(|one| format!("{row}: {one}")));
        browser.picture(&format!("row-{}", resource.name)).await;
    }
    browser.close().await;
    assert!(findings.is_empty(), "axe-core: {findings:#?}");
}

pub async fn every_page_fits_a_phone() {
    let server = BrowsedServer::with_all_archetypes().await;
    let browser = Browser::open(500, 800).await;
    browser.emulate_width(360).await;
    let resources = server.house.resources().iter().map(|resource| format!("/r/{}", resource.name));
    let forms = server
        .house
        .resources()
        .iter()
        .filter_map(|resource| Some(format!("/a/{}.{}", resource.name, resource.actions.first()?.name)));
    for page in PAGES.iter().map(|page| (*page).to_owned()).chain(resources).chain(forms) {
        browser.go(&server.page(&page)).await;
        let width = browser.run("return document.documentElement.scrollWidth", Json::Null).await;
        assert!(width.as_i64().unwrap() <= 360, "{page} is {width} px wide");
    }
    browser.go(&server.page("")).await;
    let is_hidden = "return getComputedStyle(document.querySelector('#side')).display === 'none'";
    assert_eq!(browser.run(is_hidden, Json::Null).await, true);
    browser.run("document.querySelector('[data-menu]').click()", Json::Null).await;
    assert_eq!(browser.run(is_hidden, Json::Null).await, false);
    browser.picture("phone-menu").await;
    browser.close().await;
}

/// Fills the form of an action and sends it.
async fn submit(
    browser: &Browser,
    server: &BrowsedServer,
    resource: &Resource,
    action: &Action,
    request: &Request,
) -> String {
    let key = key_text(&request.key);
    let query = if action.route.kind == RouteKind::Collection {
        String::new()
    } else {
        format!("?key={}", encoded(&key))
    };
    browser.go(&server.page(&format!("/a/{}.{}{query}", resource.name, action.name))).await;
    let script = "const [input, needsVersion] = arguments[0];
        for (const field of document.querySelectorAll('[data-field]')) {
            const value = input[field.dataset.field];
            if (value === undefined) { if (!('required' in field.dataset)) field.value = ''; continue; }
            field.value = typeof value === 'string' ? value : JSON.stringify(value);
        }
        const version = document.getElementById('version');
        if (version && !version.value) version.value = '*';";
    browser.run(script, json!([request.input, action.needs_version])).await;
    browser.click_through("main form.action button[type=submit]").await;
    browser.text().await
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

pub async fn every_action_form_is_submitted() {
    let server = BrowsedServer::with_all_archetypes().await;
    let browser = Browser::open(1280, 900).await;
    browser.go(&server.page("")).await;
    let (mut written, mut refused, mut wrong) = (0, 0, Vec::new());
    for resource in server.house.resources() {
        for action in resource.actions.iter().filter(|action| action.is_write()) {
            let name = format!("{}.{}", resource.name, action.name);
            let tenant = Tenant::new(name.replace('.', "-")).unwrap();
            lead_to(&server, &tenant, action).await;
            let choose =
                "fetch('/console/tenant', {method: 'POST', body: new URLSearchParams({tenant: '%'})})
                .then((answer) => arguments[0](answer.ok))";
            assert_eq!(browser.run_async(&choose.replace('%', tenant.as_str())).await, true);
            let request = sampled(&server, &name, 3);
            let text = submit(&browser, &server, resource, action, &request).await;
            browser.assert_clean(&name).await;
            // The same call by the library decides whether a refusal is the house's or the form's.
            let is_written = text.contains("Written.") || text.contains("Nothing had to change.");
            let codes = [Code::Internal, Code::InvalidInput, Code::VersionRequired];
            let titles = ["Internal error", "Invalid input", "Version required", "Malformed"];
            if is_written {
                written += 1;
            } else if titles.iter().any(|title| text.contains(title)) {
                let outcome = server.house.call(&tenant, request, Operation::default()).await;
                match outcome {
                    Err(refusal) if codes.contains(&refusal.code) => refused += 1,
                    other => wrong.push(format!("{name}: the library says {other:?}, the page {text}")),
                }
            } else {
                refused += 1;
            }
        }
    }
    browser.close().await;
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(written > 2 * refused, "{written} written, {refused} refused");
}
