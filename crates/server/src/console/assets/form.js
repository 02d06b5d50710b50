// Forms of actions: samples that follow what is typed, values taken from a conflict, and one submission for two clicks.

/** @param {HTMLFormElement} form @returns {Record<string, unknown>} */
export function inputOf(form) {
  /** @type {Record<string, unknown>} */
  const input = {};
  for (const field of /** @type {NodeListOf<HTMLInputElement>} */ (form.querySelectorAll("[data-field]"))) {
    const name = field.dataset.field ?? "";
    const isNull = /** @type {HTMLInputElement | null} */ (form.querySelector(`[data-null="${CSS.escape(name)}"]`))?.checked;
    if (isNull) {
      input[name] = null;
    } else if (field.value.trim() !== "" || "required" in field.dataset) {
      input[name] = field.dataset.kind === "json" ? parsed(field.value) : field.value;
    }
  }
  return input;
}

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

for (const form of /** @type {NodeListOf<HTMLFormElement>} */ (document.querySelectorAll("[data-action-form]"))) {
  const samples = /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-template]"));
  const update = () => {
    const input = JSON.stringify(inputOf(form));
    samples.forEach((sample) => (sample.textContent = (sample.dataset.template ?? "").replaceAll("{{input}}", () => input)));
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", () => {
    const button = /** @type {HTMLButtonElement | null} */ (form.querySelector("button[type=submit]"));
    if (button) setTimeout(() => (button.disabled = true));
  });
  form.addEventListener("click", (event) => {
    const take = /** @type {HTMLElement} */ (event.target).closest("[data-take]");
    if (!(take instanceof HTMLElement)) return;
    const name = CSS.escape(take.dataset.take ?? "");
    const field = /** @type {HTMLInputElement | null} */ (form.querySelector(`[data-field="${name}"]`));
    if (field) field.value = take.dataset.value ?? "";
    update();
  });
}
addEventListener("pageshow", () => {
  for (const button of /** @type {NodeListOf<HTMLButtonElement>} */ (document.querySelectorAll("button[type=submit]"))) {
    if (button.form?.matches("[data-action-form]")) button.disabled = false;
  }
});
