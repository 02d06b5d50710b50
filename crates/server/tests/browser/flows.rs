//! What people do with the console, step by step.

use serde_json::{Map, Value as Json, json};
use statehouse::audit::AuditActor;
use statehouse::{Operation, Request};
use statehouse_server::Config;
use statehouse_server::auth::keys::{self, NewKey};
use statehouse_server::auth::networks::AllowedNetworks;
use statehouse_server::auth::secret::HouseSecret;
use statehouse_server::config::Auth;
use statehouse_store::{Tenant, Value};

use crate::driver::Browser;
use crate::pages::serious_findings;
use crate::site::{BrowsedServer, PROFILES};

fn tenant() -> Tenant {
    Tenant::new("default").unwrap()
}

/// Calls an action past the console.
async fn call(server: &BrowsedServer, action: &str, key: Vec<Value>, input: Json, version: Option<i64>) {
    let Json::Object(input) = input else { panic!("an input is an object") };
    let request = Request { action: action.into(), key, input, expected: version.map(Into::into) };
    server.house.call(&tenant(), request, Operation::default()).await.unwrap();
}

async fn fill(browser: &Browser, fields: Json) {
    let script = "for (const [name, value] of Object.entries(arguments[0]))
        document.querySelector(`[data-field=\"${name}\"]`).value = value;
        document.querySelector('[data-action-form]')?.dispatchEvent(new Event('input'));";
    browser.run(script, fields).await;
}

pub async fn a_newcomer_writes_and_finds_the_record() {
    let server = BrowsedServer::of(PROFILES, Config::default()).await;
    let browser = Browser::open(1280, 900).await;
    browser.go(&server.page("")).await;
    assert!(browser.text().await.contains("Nothing is wrong"));
    browser.picture("home-empty").await;
    browser.click_through(".empty a.button").await;
    fill(&browser, json!({"user_id": "1", "display_name": "Ann"})).await;
    // The samples follow what is typed.
    let sample =
        browser.run("return document.querySelector('[data-template]').textContent", Json::Null).await;
    assert!(sample.as_str().unwrap().contains("\"display_name\":\"Ann\""), "{sample}");
    browser.picture("action-form").await;
    browser.click_through("form.action button[type=submit]").await;
    assert!(browser.text().await.contains("Written."), "{}", browser.text().await);
    browser.picture("action-done").await;
    browser.click_through(".actions a.button").await;
    let text = browser.text().await;
    assert!(text.contains("profile.created") && text.contains("Ann"), "{text}");
    browser.picture("row").await;
    browser.click_through(".timeline a").await;
    assert!(browser.text().await.contains("profile.created"));
    // The keyboard goes to pages and to the search.
    browser.run("for (const key of ['g', 'h']) document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))", Json::Null).await;
    browser.until("return location.pathname === '/console' && document.readyState === 'complete'").await;
    browser
        .run(
            "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))",
            Json::Null,
        )
        .await;
    assert_eq!(browser.run("return document.activeElement.type", Json::Null).await, "search");
    browser.assert_clean("the newcomer's pages").await;
    browser.close().await;
}

pub async fn two_people_edit_one_row() {
    let server = BrowsedServer::of(PROFILES, Config::default()).await;
    call(
        &server,
        "profile.create",
        Vec::new(),
        json!({"user_id": 1, "display_name": "Ann", "bio": "first"}),
        None,
    )
    .await;
    let browser = Browser::open(1280, 900).await;
    browser.go(&server.page("/a/profile.update?key=1")).await;
    // Another caller changes both fields in between.
    call(&server, "profile.patch", vec![1.into()], json!({"display_name": "Bea", "bio": "second"}), Some(1))
        .await;
    fill(&browser, json!({"display_name": "Cleo"})).await;
    browser.click_through("form.action button[type=submit]").await;
    let text = browser.text().await;
    for part in ["Conflict", "Ann", "Bea", "Cleo", "both changed"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(serious_findings(&browser).await, Vec::<String>::new());
    browser.picture("conflict").await;
    // The proposal is mine where I changed something and theirs elsewhere.
    let values =
        "return ['display_name', 'bio'].map((name) => document.querySelector(`[data-field=${name}]`).value)";
    assert_eq!(browser.run(values, Json::Null).await, json!(["Cleo", "second"]));
    browser
        .run("document.querySelector('[aria-label=\"Take theirs for display_name\"]').click()", Json::Null)
        .await;
    assert_eq!(browser.run(values, Json::Null).await, json!(["Bea", "second"]));
    fill(&browser, json!({"display_name": "Dora"})).await;
    browser.click_through("main form button[type=submit]").await;
    assert!(browser.text().await.contains("Written."), "{}", browser.text().await);
    let request =
        Request { action: "profile.read".into(), key: vec![1.into()], input: Map::new(), expected: None };
    let row = server.house.read(&tenant(), request).await.unwrap();
    assert_eq!(
        (&row.body["display_name"], &row.body["bio"], row.version),
        (&json!("Dora"), &json!("second"), Some(3))
    );
    browser.assert_clean("the conflict").await;
    browser.close().await;
}

pub async fn a_list_follows_the_log() {
    let server = BrowsedServer::of(PROFILES, Config::default()).await;
    let browser = Browser::open(1280, 900).await;
    browser.go(&server.page("/r/profile")).await;
    browser.until("return document.querySelector('[data-live-state]').classList.contains('on')").await;
    call(&server, "profile.create", Vec::new(), json!({"user_id": 5, "display_name": "Eve"}), None).await;
    browser.until("return document.querySelector('tr[data-key=\"5\"]') !== null").await;
    call(&server, "profile.patch", vec![5.into()], json!({"display_name": "Fay"}), Some(1)).await;
    browser
        .until("return document.querySelector('tr[data-key=\"5\"][data-version=\"2\"].flash') !== null")
        .await;
    browser.picture("list-live").await;
    browser.assert_clean("the live list").await;
    browser.close().await;
}

pub async fn a_person_logs_in() {
    let config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
    let server = BrowsedServer::of(PROFILES, config).await;
    let secret = HouseSecret::of(&server.house, None).await.unwrap();
    let new = NewKey {
        tenant: tenant(),
        name: "reader".into(),
        scopes: vec!["read".parse().unwrap()],
        expires_in: None,
        networks: AllowedNetworks::default(),
    };
    let created = keys::create(&server.house, &secret, new, &AuditActor::program("test")).await.unwrap();
    let browser = Browser::open(1280, 900).await;
    browser.go(&server.page("")).await;
    assert!(browser.text().await.contains("Log in"));
    assert_eq!(serious_findings(&browser).await, Vec::<String>::new());
    browser.picture("login").await;
    browser.run("document.getElementById('key').value = 'sth_wrong'", Json::Null).await;
    browser.click_through("button[type=submit]").await;
    assert!(browser.text().await.contains("not valid"));
    browser.run("document.getElementById('key').value = arguments[0]", json!(created.key)).await;
    browser.click_through("button[type=submit]").await;
    let text = browser.text().await;
    assert!(text.contains("role read") && !text.contains("Create the first"), "{text}");
    assert_eq!(browser.run("return document.cookie", Json::Null).await, "");
    // The session follows the log, too.
    browser.go(&server.page("/r/profile")).await;
    browser.until("return document.querySelector('[data-live-state]').classList.contains('on')").await;
    browser.click_through(".session form button").await;
    browser.go(&server.page("/log")).await;
    assert!(browser.text().await.contains("Log in"));
    browser.assert_clean("the login").await;
    browser.close().await;
}
