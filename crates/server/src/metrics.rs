//! Metrics in Prometheus' text format. No label contains a tenant or a key, because their number is unbounded.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse::House;
use statehouse::worker::{Gauge, WorkerStats};

/// Upper bounds of the duration buckets, in seconds.
const BUCKETS: [f64; 14] =
    [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// The counters.
#[derive(Debug, Default)]
pub struct Metrics {
    routes: Mutex<BTreeMap<Box<str>, RouteMetrics>>,
    problems: Mutex<BTreeMap<&'static str, u64>>,
    /// Open connections.
    pub connections: AtomicI64,
    /// Accepted connections.
    pub accepted: AtomicU64,
    /// Requests in flight.
    pub in_flight: AtomicI64,
    /// Open event streams.
    pub streams: AtomicI64,
    /// Waiting reads that were woken because their row may have changed.
    pub wait_wakeups: AtomicU64,
    /// Responses that were abandoned because their client did not accept them.
    pub stalled: AtomicU64,
}

/// Counters of one route.
#[derive(Clone, Debug, Default)]
struct RouteMetrics {
    statuses: BTreeMap<u16, u64>,
    durations: Durations,
}

#[derive(Clone, Debug, Default)]
struct Durations {
    buckets: [u64; BUCKETS.len()],
    sum: f64,
    count: u64,
}

/// Increments a gauge for as long as it lives.
#[derive(Debug)]
pub struct GaugeGuard<F: Fn(&Metrics) -> &AtomicI64>(Arc<Metrics>, F);

impl<F: Fn(&Metrics) -> &AtomicI64> GaugeGuard<F> {
    /// Increments the gauge.
    pub fn enter(metrics: &Arc<Metrics>, gauge: F) -> GaugeGuard<F> {
        gauge(metrics).fetch_add(1, Ordering::Relaxed);
        GaugeGuard(metrics.clone(), gauge)
    }
}

impl<F: Fn(&Metrics) -> &AtomicI64> Drop for GaugeGuard<F> {
    fn drop(&mut self) {
        self.1(&self.0).fetch_sub(1, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Counts a response. `route` is an action's name or a path pattern, never a path.
    pub fn answered(&self, route: &str, status: u16, code: Option<&'static str>, took: Duration) {
        if let Some(code) = code {
            *self.problems.lock().unwrap_or_else(PoisonError::into_inner).entry(code).or_default() += 1;
        }
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if !routes.contains_key(route) {
            routes.insert(route.into(), RouteMetrics::default());
        }
        let Some(RouteMetrics { statuses, durations }) = routes.get_mut(route) else { return };
        *statuses.entry(status).or_default() += 1;
        let seconds = took.as_secs_f64();
        durations.sum += seconds;
        durations.count += 1;
        for (bucket, bound) in durations.buckets.iter_mut().zip(BUCKETS) {
            *bucket += u64::from(seconds <= bound);
        }
    }

    /// Problems answered, by code.
    pub fn problems(&self) -> Vec<(&'static str, u64)> {
        let problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        problems.iter().map(|(code, count)| (*code, *count)).collect()
    }

    /// All metrics as text.
    pub fn text(&self, house: &House) -> String {
        let mut text = String::new();
        head(&mut text, "info", "gauge", "The server's version and the engine below it.");
        let (version, engine) = (env!("CARGO_PKG_VERSION"), house.store().engine());
        let _ = writeln!(text, "statehouse_info{{version=\"{version}\",engine=\"{engine}\"}} 1");
        self.write_requests(&mut text);
        write_workers(&mut text, house);
        write_gauges(&mut text, house);
        self.write_totals(&mut text, house);
        text
    }

    /// Requests and problems.
    fn write_requests(&self, text: &mut String) {
        head(text, "http_requests_total", "counter", "Requests answered, by action or path and status.");
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (route, RouteMetrics { statuses, .. }) in &routes {
            for (status, count) in statuses {
                let _ = writeln!(
                    text,
                    "statehouse_http_requests_total{{route=\"{route}\",status=\"{status}\"}} {count}"
                );
            }
        }
        head(text, "http_request_seconds", "histogram", "Time from the headers to the first byte.");
        for (route, RouteMetrics { durations, .. }) in &routes {
            let name = "statehouse_http_request_seconds";
            for (bound, count) in BUCKETS.iter().zip(durations.buckets) {
                let _ = writeln!(text, "{name}_bucket{{route=\"{route}\",le=\"{bound}\"}} {count}");
            }
            let Durations { sum, count, .. } = durations;
            let _ = writeln!(text, "{name}_bucket{{route=\"{route}\",le=\"+Inf\"}} {count}");
            let _ = writeln!(
                text,
                "{name}_sum{{route=\"{route}\"}} {sum}\n{name}_count{{route=\"{route}\"}} {count}"
            );
        }
        head(text, "problems_total", "counter", "Problems answered, by code.");
        for (code, count) in self.problems.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(text, "statehouse_problems_total{{code=\"{code}\"}} {count}");
        }
    }

    /// Metrics without labels.
    fn write_totals(&self, text: &mut String, house: &House) {
        let cache = house.cache().figures();
        let signed = |gauge: &AtomicI64| u64::try_from(gauge.load(Ordering::Relaxed)).unwrap_or(0);
        let total = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        for (name, kind, help, figure) in [
            ("http_connections", "gauge", "Connections that are open.", signed(&self.connections)),
            ("http_connections_total", "counter", "Connections accepted.", total(&self.accepted)),
            ("http_in_flight_requests", "gauge", "Requests in flight.", signed(&self.in_flight)),
            (
                "http_stalled_responses_total",
                "counter",
                "Responses abandoned because the client did not accept them.",
                total(&self.stalled),
            ),
            (
                "wait_wakeups_total",
                "counter",
                "Waiting reads woken because their row may have changed.",
                total(&self.wait_wakeups),
            ),
            ("event_streams", "gauge", "Event streams that are open.", signed(&self.streams)),
            ("cache_hits_total", "counter", "Cached reads that the cache answered.", cache.hits),
            ("cache_misses_total", "counter", "Cached reads of rows that it did not hold.", cache.misses),
            (
                "cache_bypasses_total",
                "counter",
                "Cached reads that it was not fresh enough for.",
                cache.bypasses,
            ),
            ("cache_bytes", "gauge", "Size of the cache.", cache.bytes),
        ] {
            head(text, name, kind, help);
            let _ = writeln!(text, "statehouse_{name} {figure}");
        }
    }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP statehouse_{name} {help}\n# TYPE statehouse_{name} {kind}");
}

/// What the workers of this process did.
fn write_workers(text: &mut String, house: &House) {
    let workers = house.worker_figures();
    for (name, kind, help, figure) in [
        ("worker_shards", "gauge", "Shards that this process works on, by worker.", |f: &WorkerStats| {
            f.held as f64
        }),
        ("worker_steps_total", "counter", "Steps of workers.", |f: &WorkerStats| f.steps as f64),
        ("worker_rows_total", "counter", "Rows processed by workers.", |f: &WorkerStats| f.rows as f64),
        ("worker_errors_total", "counter", "Failed steps and rows.", |f: &WorkerStats| f.errors as f64),
        (
            "worker_lag_seconds",
            "gauge",
            "Age of the oldest due work at the last check.",
            |f: &WorkerStats| f.lag.as_secs_f64(),
        ),
    ] as [(&str, &str, &str, fn(&WorkerStats) -> f64); 5]
    {
        head(text, name, kind, help);
        for figures in &workers {
            let (worker, figure) = (&figures.worker, figure(figures));
            let _ = writeln!(text, "statehouse_{name}{{worker=\"{worker}\"}} {figure}");
        }
    }
}

/// Gauges of single workers.
fn write_gauges(text: &mut String, house: &House) {
    let mut gauges: BTreeMap<&str, Vec<(String, Gauge)>> = BTreeMap::new();
    for worker in house.workers() {
        for gauge in worker.gauges() {
            gauges.entry(gauge.name).or_default().push((worker.name().to_owned(), gauge));
        }
    }
    for (name, gauges) in gauges {
        head(text, name, "gauge", gauges.first().map_or("", |(_, gauge)| gauge.about));
        for (worker, Gauge { label: (label, is), value, .. }) in &gauges {
            let _ = writeln!(text, "statehouse_{name}{{worker=\"{worker}\",{label}=\"{is}\"}} {value}");
        }
    }
}
