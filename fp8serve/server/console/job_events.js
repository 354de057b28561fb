// The events of one job, live: what has happened, then what happens, over broken connections, until the job has ended.

import { ask, events } from "./api.js";

const AGAIN_MS = 2000;

/** Calls `take` with every event and `ended` once the job has ended. Returns a function that ends the following. */
export function follow(id, take, ended) {
  const control = new AbortController();
  let after = 0;
  (async () => {
    while (!control.signal.aborted) {
      try {
        const answer = await ask(`finetune/${encodeURIComponent(id)}/events?after=${after}`, {
          headers: { Accept: "text/event-stream" },
          signal: control.signal,
        });
        for await (const { name, id: number, data } of events(answer)) {
          if (control.signal.aborted) return;
          if (name === "end") return ended();
          after = Number(number);
          take(data);
        }
      } catch (error) {
        const isRefusal = error.status >= 400 && error.status < 500 && error.status !== 429;
        if (isRefusal) return; // whoever asks for the job itself is told why
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  })();
  return () => control.abort();
}
