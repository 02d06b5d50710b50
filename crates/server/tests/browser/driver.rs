//! A small WebDriver client, over the HTTP crate that the server's tests use anyway.

use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value as Json, json};
use statehouse_store::clock::{Clock as _, SystemClock};

/// The program that drives the browser.
const DRIVER: &str = "STATEHOUSE_TEST_CHROMEDRIVER";
const ADVICE: &str = "has to be set to what `scripts/browser` prints";
/// Time that a page has to show what a test waits for.
const WAIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(25);

/// The driver of this process, and its port.
struct Driver {
    child: std::sync::Mutex<Child>,
    port: u16,
}

static DRIVER_PROCESS: OnceLock<Driver> = OnceLock::new();

/// Starts the driver once. The system chooses its port, which it prints.
fn driver_port() -> u16 {
    let driver = DRIVER_PROCESS.get_or_init(|| {
        let program = std::env::var(DRIVER).unwrap_or_else(|_| panic!("{DRIVER} {ADVICE}"));
        let mut child = Command::new(program)
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        let port = lines.find_map(|line| {
            let line = line.ok()?;
            // The first line repeats what was asked for.
            line.trim_end_matches('.').rsplit_once("on port ")?.1.parse().ok().filter(|port| *port != 0)
        });
        // The driver stops if its output is closed.
        std::thread::spawn(move || lines.for_each(drop));
        Driver { child: std::sync::Mutex::new(child), port: port.expect("the driver prints its port") }
    });
    driver.port
}

/// Ends the driver.
pub fn stop_driver() {
    if let Some(driver) = DRIVER_PROCESS.get() {
        let mut child = driver.child.lock().unwrap();
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A browser with one window.
pub struct Browser {
    client: Client<HttpConnector, Full<Bytes>>,
    base: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    pub async fn open(width: u32, height: u32) -> Browser {
        let profile = tempfile::tempdir().unwrap();
        let client = Client::builder(TokioExecutor::new()).build_http();
        let mut browser = Browser {
            client,
            base: format!("http://127.0.0.1:{}/session", driver_port()),
            _profile: profile,
        };
        let flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-extensions",
            "--force-prefers-reduced-motion",
        ];
        let mut arguments: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        arguments.push(format!("--user-data-dir={}", browser._profile.path().display()));
        arguments.push(format!("--window-size={width},{height}"));
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let session = browser.send("POST", "", wanted).await;
        browser.base = format!("{}/{}", browser.base, session["sessionId"].as_str().unwrap());
        browser
    }

    async fn send(&self, method: &str, path: &str, body: Json) -> Json {
        let body = if method == "GET" || method == "DELETE" { String::new() } else { body.to_string() };
        let request = http::Request::builder().method(method).uri(format!("{}{path}", self.base));
        let request =
            request.header("content-type", "application/json").body(Full::new(body.into())).unwrap();
        let response = self.client.request(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let mut answer: Json = serde_json::from_slice(&body).unwrap();
        assert!(parts.status.is_success(), "{method} {path}: {answer}");
        answer["value"].take()
    }

    /// Opens a page and waits until it is loaded.
    pub async fn go(&self, url: &str) {
        self.send("POST", "/url", json!({"url": url})).await;
    }

    /// Runs a script in the page and returns its result.
    pub async fn run(&self, script: &str, arguments: Json) -> Json {
        self.send("POST", "/execute/sync", json!({"script": script, "args": [arguments]})).await
    }

    /// Runs a script that calls its last argument with the result.
    pub async fn run_async(&self, script: &str) -> Json {
        self.send("POST", "/execute/async", json!({"script": script, "args": []})).await
    }

    /// The text of the page.
    pub async fn text(&self) -> String {
        let text = self.run("return document.body.innerText", Json::Null).await;
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until a script returns something that is true.
    pub async fn until(&self, script: &str) -> Json {
        let mut waited = Duration::ZERO;
        loop {
            let found = self.run(script, Json::Null).await;
            if !matches!(found, Json::Null | Json::Bool(false)) {
                return found;
            }
            assert!(waited < WAIT, "the page does not come to `{script}`: {}", self.text().await);
            SystemClock.sleep(PAUSE).await;
            waited += PAUSE;
        }
    }

    /// Shows pages as a screen of this width does.
    pub async fn emulate_width(&self, width: u32) {
        let screen = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false});
        let command = json!({"cmd": "Emulation.setDeviceMetricsOverride", "params": screen});
        self.send("POST", "/goog/cdp/execute", command).await;
    }

    /// Clicks an element and waits for the page that it leads to.
    pub async fn click_through(&self, selector: &str) {
        self.run("window.isOld = true", Json::Null).await;
        let clicked = self
            .run(
                "const at = document.querySelector(arguments[0]); if (at) at.click(); return !!at",
                json!(selector),
            )
            .await;
        assert_eq!(clicked, true, "nothing matches {selector}: {}", self.text().await);
        self.until("return !window.isOld && document.readyState === 'complete'").await;
    }

    /// Fails if the page broke the content security policy or a script failed.
    pub async fn assert_clean(&self, page: &str) {
        let entries = self.send("POST", "/se/log", json!({"type": "browser"})).await;
        for entry in entries.as_array().unwrap() {
            let (source, message) = (entry["source"].as_str().unwrap(), entry["message"].as_str().unwrap());
            let is_wrong =
                matches!(source, "security" | "javascript") || message.contains("Content Security Policy");
            assert!(!is_wrong, "{page}: {message}");
        }
    }

    /// The screen as PNG, if a folder for screenshots is named.
    pub async fn picture(&self, name: &str) {
        let Some(folder) = std::env::var_os("STATEHOUSE_TEST_PICTURES") else { return };
        use base64::Engine as _;
        let picture = self.send("GET", "/screenshot", Json::Null).await;
        let picture = base64::engine::general_purpose::STANDARD.decode(picture.as_str().unwrap()).unwrap();
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.png")), picture).unwrap();
    }

    pub async fn close(self) {
        self.send("DELETE", "", Json::Null).await;
    }
}
