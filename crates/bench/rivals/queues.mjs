// Job queues for PostgreSQL that others have made, under the load of the benchmark `jobs`.
//
//     node queues.mjs URL FOLDER
//
// FOLDER has the packages (`scripts/rivals` prints it). One order a line comes in as JSON, and one answer a line goes out.
// Each queue has a schema of its own, which is gone at the end. They are set up for throughput, as their documentation says:
// graphile-worker with its local queue and completions in batches, pg-boss with fetches and completions in batches; and once more
// by its own workers, which look for jobs twice a second at most.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [url, folder] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const { Pool } = require("pg");
const PgBoss = require("pg-boss");
const { Logger, makeWorkerUtils, run } = require("graphile-worker");

const QUEUE = "noop";
const CONNECTIONS = 16;
const LOCAL_QUEUE = 500;
const CONCURRENCY = 24;
const FETCHERS = 2;
const FETCHED = 500;
const WORKERS = 4;
const POLLING_SECONDS = 0.5;

const pool = new Pool({ connectionString: url, max: CONNECTIONS });
pool.on("error", (error) => console.error(error));
pool.on("connect", (client) => client.on("error", (error) => console.error(error)));
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

class Graphile {
  schema = "bench_graphile";
  logger = new Logger(() => () => {});

  async start() {
    await pool.query(`drop schema if exists ${this.schema} cascade`);
    this.utils = await makeWorkerUtils({ pgPool: pool, schema: this.schema, logger: this.logger });
    await this.utils.migrate();
  }

  async enqueue(number) {
    await this.utils.addJob(QUEUE, { number });
  }

  async fill(jobs) {
    const specs = Array.from({ length: jobs }, (_, number) => ({ identifier: QUEUE, payload: { number } }));
    for (let first = 0; first < jobs; first += 1000) await this.utils.addJobs(specs.slice(first, first + 1000));
  }

  async isEmpty() {
    const { rows } = await pool.query(`select 1 from ${this.schema}._private_jobs limit 1`);
    return rows.length === 0;
  }

  /** Does all jobs, and returns when none is left in the table. */
  async drain(jobs) {
    let done = 0;
    const runner = await run({
      pgPool: pool,
      schema: this.schema,
      noHandleSignals: true,
      logger: this.logger,
      taskList: { [QUEUE]: () => void (done += 1) },
      preset: {
        worker: {
          concurrentJobs: CONCURRENCY,
          maxPoolSize: CONNECTIONS,
          localQueue: { size: LOCAL_QUEUE },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
        },
      },
    });
    while (done < jobs) await sleep(1);
    while (!(await this.isEmpty())) await sleep(1);
    const seconds = (performance.now() - this.began) / 1000;
    await runner.stop();
    return seconds;
  }

  async empty() {
    await pool.query(`delete from ${this.schema}._private_jobs`);
  }

  async stop() {
    await this.utils.release();
    await pool.query(`drop schema if exists ${this.schema} cascade`);
  }
}

class Boss {
  schema = "bench_pgboss";

  async start() {
    await pool.query(`drop schema if exists ${this.schema} cascade`);
    const options = { connectionString: url, max: CONNECTIONS, schema: this.schema, supervise: false, schedule: false };
    this.boss = new PgBoss(options);
    this.boss.on("error", (error) => console.error(error));
    await this.boss.start();
    await this.boss.createQueue(QUEUE);
  }

  async enqueue(number) {
    await this.boss.send(QUEUE, { number });
  }

  async fill(jobs) {
    const all = Array.from({ length: jobs }, (_, number) => ({ name: QUEUE, data: { number } }));
    for (let first = 0; first < jobs; first += 1000) await this.boss.insert(all.slice(first, first + 1000));
  }

  /** Fetches and completes until nothing is left. */
  async drain(jobs) {
    let done = 0;
    const fetcher = async () => {
      for (;;) {
        const fetched = await this.boss.fetch(QUEUE, { batchSize: FETCHED });
        if (fetched.length === 0) return;
        const { affected } = await this.boss.complete(QUEUE, fetched.map((job) => job.id));
        done += affected;
      }
    };
    // Two that fetch at once may both come back with nothing, and jobs are left.
    while (done < jobs) await Promise.all(Array.from({ length: FETCHERS }, fetcher));
    return (performance.now() - this.began) / 1000;
  }

  /** The same by its own workers, which look for jobs as often as they may. */
  async drainByWorkers() {
    const options = { batchSize: FETCHED, pollingIntervalSeconds: POLLING_SECONDS };
    for (let worker = 0; worker < WORKERS; worker += 1) await this.boss.work(QUEUE, options, async () => {});
    const left = `select 1 from ${this.schema}.job where name = $1 and state < 'completed' limit 1`;
    while ((await pool.query(left, [QUEUE])).rows.length > 0) await sleep(5);
    const seconds = (performance.now() - this.began) / 1000;
    await this.boss.offWork(QUEUE);
    return seconds;
  }

  async empty() {
    await pool.query(`delete from ${this.schema}.job`);
  }

  async stop() {
    await this.boss.stop({ graceful: false });
    await pool.query(`drop schema if exists ${this.schema} cascade`);
  }
}

/** Callers that each enqueue one job after another. */
async function enqueue(queue, callers, millis) {
  const began = performance.now();
  const times = [];
  const caller = async (number) => {
    while (performance.now() - began < millis) {
      const one = performance.now();
      await queue.enqueue(number);
      times.push(performance.now() - one);
    }
  };
  await Promise.all(Array.from({ length: callers }, (_, number) => caller(number)));
  const seconds = (performance.now() - began) / 1000;
  times.sort((a, b) => a - b);
  const at = (share) => (times[Math.floor(times.length * share)] ?? 0) / 1000;
  return { rate: times.length / seconds, p50: at(0.5), p99: at(0.99) };
}

const queues = { "graphile-worker": new Graphile(), "pg-boss": new Boss() };
for (const queue of Object.values(queues)) await queue.start();
console.log(JSON.stringify(Object.keys(queues)));

for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line);
  const queue = queues[order.queue];
  if (order.do === "enqueue") {
    const figures = await enqueue(queue, order.callers, order.millis);
    await queue.empty();
    console.log(JSON.stringify(figures));
  } else {
    await queue.fill(order.jobs);
    queue.began = performance.now();
    const seconds = await (order.do === "work" ? queue.drainByWorkers() : queue.drain(order.jobs));
    console.log(JSON.stringify({ seconds }));
  }
}
for (const queue of Object.values(queues)) await queue.stop();
await pool.end();
