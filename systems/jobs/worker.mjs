// A worker: claims jobs over HTTP, does them, and says what came of them. It needs no packages.
//
//     node worker.mjs http://127.0.0.1:8080 default
//
// A job's payload says what to do: {"add": [1, 2]} is added up, {"hang_on_attempt": 1} never ends in that attempt, and
// anything else is given back as it is. With --until-empty it ends when there is nothing left to do.

import { parseArgs } from "node:util";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    name: { type: "string", default: `node-${process.pid}` },
    "lease-ms": { type: "string", default: "30000" },
    "until-empty": { type: "boolean", default: false },
  },
});
const [url, queue] = positionals;
const leaseMs = Number(values["lease-ms"]);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Calls an action of a queue, again if the outcome is unknown. */
async function call(action, body) {
  for (const pause of [100, 500, 2000, null]) {
    try {
      const answer = await fetch(`${url}/v1/job_queue/${queue}/${action}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
      });
      if (answer.ok) return await answer.json();
      if (answer.status < 500 || pause === null) throw new Refused(await answer.text());
    } catch (error) {
      if (error instanceof Refused || pause === null) throw error;
    }
    await sleep(pause);
  }
}

class Refused extends Error {}

/** What the job is about. */
async function perform({ payload, attempt }) {
  if (payload?.hang_on_attempt === attempt) await sleep(3_600_000);
  return payload?.add ? payload.add.reduce((sum, number) => sum + number, 0) : payload;
}

// Holds the jobs that are under way, three times in each lease.
const held = new Map();
setInterval(() => {
  const jobs = [...held].map(([job_id, attempt]) => ({ job_id, attempt }));
  // Those that are lost are refused when they are completed.
  if (jobs.length > 0) call("heartbeat", { jobs, lease_ms: leaseMs }).catch(() => {});
}, leaseMs / 3).unref();

for (;;) {
  const jobs = await call("claim", { worker: values.name, limit: 10, lease_ms: leaseMs, wait_ms: 2000 });
  if (jobs.length === 0 && values["until-empty"]) break;
  for (const { job_id, attempt } of jobs) held.set(job_id, attempt);
  const outcomes = await Promise.all(
    jobs.map(async (job) => {
      const name = { job_id: job.job_id, attempt: job.attempt };
      try {
        return { done: { ...name, result: { by: values.name, value: await perform(job) } } };
      } catch (error) {
        return { failed: { ...name, error: String(error) } };
      }
    }),
  );
  for (const [action, kind] of [["complete", "done"], ["fail", "failed"]]) {
    const told = outcomes.map((outcome) => outcome[kind]).filter(Boolean);
    if (told.length === 0) continue;
    for (const { done, job_id, message } of await call(action, { jobs: told })) {
      if (!done) console.log(`${job_id}: ${message}`);
    }
  }
  for (const { job_id } of jobs) held.delete(job_id);
}
