// What every page of the console does with a script: live regions, keyboard, menu, theme. Pages work without it.

const root = document.documentElement;
root.classList.add("js");

const THEME = "statehouse-theme";
const stored = localStorage.getItem(THEME);
if (stored) root.dataset.theme = stored;
document.querySelector("[data-theme-switch]")?.addEventListener("click", () => {
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem(THEME, root.dataset.theme);
});

const menu = document.querySelector("[data-menu]");
menu?.addEventListener("click", () => {
  const isOpen = root.classList.toggle("menu-open");
  menu.setAttribute("aria-expanded", String(isOpen));
});

// Keyboard: `/` searches, `g` and a letter goes to a page, `j` and `k` move in a table, Enter opens the row.
let leader = 0;
document.addEventListener("keydown", (event) => {
  const at = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (at.matches("input, textarea, select")) {
    if (event.key === "Escape") at.blur();
    return;
  }
  if (event.key === "/") {
    event.preventDefault();
    /** @type {HTMLElement | null} */ (document.querySelector("[data-search]"))?.focus();
  } else if (event.timeStamp - leader < 1500 && event.key.length === 1) {
    leader = 0;
    const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
    if (link) location.assign(/** @type {HTMLAnchorElement} */ (link).href);
  } else if (event.key === "g") {
    leader = event.timeStamp;
  } else if (event.key === "j" || event.key === "k") {
    move(event.key === "j" ? 1 : -1);
  }
});

/** @param {number} by */
function move(by) {
  const rows = [...document.querySelectorAll("table[data-rows] tbody tr")];
  if (rows.length === 0) return;
  const now = rows.findIndex((row) => row.getAttribute("aria-selected") === "true");
  const next = rows[Math.max(0, Math.min(rows.length - 1, now < 0 ? 0 : now + by))];
  rows.forEach((row) => row.removeAttribute("aria-selected"));
  next.setAttribute("aria-selected", "true");
  next.scrollIntoView({ block: "nearest" });
  /** @type {HTMLElement | null} */ (next.querySelector("a"))?.focus({ preventScroll: true });
}

document.addEventListener("click", (event) => {
  const button = /** @type {HTMLElement} */ (event.target).closest("[data-copy]");
  const text = button?.parentElement?.querySelector("pre")?.textContent;
  if (!button || !text) return;
  navigator.clipboard?.writeText(text).then(() => {
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
});

// Live regions: when the log has news about their resource, the page is fetched again and the regions are replaced.
const regions = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("[data-live]")]);
const state = document.querySelector("[data-live-state]");
const PAUSE_MS = 700;
let isWaiting = false;

/** @param {boolean} isOn */
function say(isOn) {
  if (!state) return;
  state.classList.toggle("on", isOn);
  state.textContent = isOn ? "● live" : "○ paused";
  state.setAttribute("title", isOn ? "This page follows the log" : "Not live");
}

/** @param {HTMLElement} region */
function isInUse(region) {
  const selection = getSelection();
  return region.matches(":focus-within") && !region.querySelector("tr[aria-selected]:focus-within")
    ? region.querySelector("input:focus, textarea:focus, select:focus") !== null
    : Boolean(selection && !selection.isCollapsed && region.contains(selection.anchorNode));
}

async function refresh() {
  const response = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!response.ok || response.redirected) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const region of regions) {
    const fresh = page.getElementById(region.id);
    if (!fresh || fresh.innerHTML === region.innerHTML || isInUse(region)) continue;
    const seen = new Map([...region.querySelectorAll("tr[data-key]")].map((row) => [key(row), version(row)]));
    const open = [...region.querySelectorAll("details")].map((one) => one.open);
    region.replaceChildren(...fresh.childNodes);
    [...region.querySelectorAll("details")].forEach((one, index) => (one.open = open[index] ?? one.open));
    for (const row of region.querySelectorAll("tr[data-key]")) {
      if (seen.get(key(row)) !== version(row)) row.classList.add("flash");
    }
  }
}

/** @param {Element} row */
const key = (row) => row.getAttribute("data-key");
/** @param {Element} row */
const version = (row) => row.getAttribute("data-version") ?? "";

function news() {
  if (isWaiting) return;
  isWaiting = true;
  setTimeout(async () => {
    isWaiting = false;
    await refresh().catch(() => say(false));
  }, PAUSE_MS);
}

if (regions.length > 0 && !new URLSearchParams(location.search).has("cursor")) {
  const of = regions[0].dataset.live;
  const stream = new EventSource("/console/live" + (of ? `?resource=${encodeURIComponent(of)}` : ""));
  stream.onopen = () => say(true);
  stream.onerror = () => say(false);
  stream.onmessage = news;
  addEventListener("pagehide", () => stream.close());
}
