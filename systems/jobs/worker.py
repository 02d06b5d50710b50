"""A worker: claims jobs over HTTP, does them, and says what came of them. Python's standard library is all it needs.

    python3 worker.py http://127.0.0.1:8080 default

A job's payload says what to do: {"add": [1, 2]} is added up, {"hang_on_attempt": 1} never ends in that attempt, and
anything else is given back as it is. With --until-empty it ends when there is nothing left to do.
"""

import argparse
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request


def call(url, queue, action, body):
    """Calls an action of a queue, again if the outcome is unknown."""
    request = urllib.request.Request(
        f"{url}/v1/job_queue/{queue}/{action}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    for pause in (0.1, 0.5, 2, None):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code < 500 or pause is None:
                raise
        except (urllib.error.URLError, socket.timeout):
            if pause is None:
                raise
        time.sleep(pause)


def do(job):
    """What the job is about."""
    payload = job["payload"]
    if isinstance(payload, dict):
        if payload.get("hang_on_attempt") == job["attempt"]:
            time.sleep(3600)
        if "add" in payload:
            return sum(payload["add"])
    return payload


def beat(url, queue, held, lock, lease_ms):
    """Holds the jobs that are under way, three times in each lease."""
    while True:
        time.sleep(lease_ms / 3000)
        with lock:
            jobs = [{"job_id": job, "attempt": attempt} for job, attempt in held.items()]
        if jobs:
            try:
                call(url, queue, "heartbeat", {"jobs": jobs, "lease_ms": lease_ms})
            except OSError:
                pass  # Those that are lost are refused when they are completed.


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("queue")
    parser.add_argument("--name", default=f"python-{os.getpid()}")
    parser.add_argument("--lease-ms", type=int, default=30_000)
    parser.add_argument("--until-empty", action="store_true")
    options = parser.parse_args()
    held, lock = {}, threading.Lock()
    beats = (options.url, options.queue, held, lock, options.lease_ms)
    threading.Thread(target=beat, args=beats, daemon=True).start()
    while True:
        wanted = {"worker": options.name, "limit": 10, "lease_ms": options.lease_ms, "wait_ms": 2_000}
        jobs = call(options.url, options.queue, "claim", wanted)
        if not jobs and options.until_empty:
            return
        with lock:
            held.update({job["job_id"]: job["attempt"] for job in jobs})
        done, failed = [], []
        for job in jobs:
            name = {"job_id": job["job_id"], "attempt": job["attempt"]}
            try:
                done.append({**name, "result": {"by": options.name, "value": do(job)}})
            except Exception as error:  # Whatever goes wrong is told, and the job is tried again.
                failed.append({**name, "error": repr(error)})
        for action, outcomes in (("complete", done), ("fail", failed)):
            if outcomes:
                for outcome in call(options.url, options.queue, action, {"jobs": outcomes}):
                    if not outcome["done"]:
                        print(f"{outcome['job_id']}: {outcome['message']}", flush=True)
        with lock:
            for job in jobs:
                held.pop(job["job_id"], None)


if __name__ == "__main__":
    main()
