// The requests that are being answered, one by one, and the button that ends one.

import { get, post } from "./api.js";
import { button, element, renew, table } from "./dom.js";
import { count, seconds } from "./numbers.js";
import { announce } from "./state.js";

const COLUMNS = ["Request", "Tenant", "Model", "State", "Age", "Tokens", ""];

export class UnderWay {
  constructor() {
    this.node = element("div", { className: "card", id: "under-way" });
  }

  async refresh() {
    const { requests, total } = await get("requests");
    renew(this.node, [requests, total], () => [
      element("h3", {}, "Being answered now"),
      requests.length
        ? table(
            "Requests that are being answered, oldest first",
            COLUMNS,
            requests.map((one) => this.row(one)),
            "stacked",
          )
        : element("p", { className: "quiet" }, "No request."),
      total > requests.length
        ? element("p", { className: "quiet" }, `The oldest ${count(requests.length)} of ${count(total)}.`)
        : null,
    ]);
  }

  row(one) {
    const end = button("Cancel", () => this.cancel(one), {
      report: announce,
      "aria-label": `Cancel ${one.request_id}`,
    });
    end.dataset.key = one.id;
    return [
      one.request_id,
      one.tenant,
      one.model,
      one.answers > 1 ? `${one.state}, ${count(one.answers)} answers` : one.state,
      seconds(one.age),
      `${count(one.generated_tokens)} of ${count(one.max_new_tokens)}`,
      end,
    ];
  }

  async cancel({ id, request_id: name }) {
    await post(`requests/${encodeURIComponent(id)}/cancel`);
    announce(`The request ${name} was cancelled.`);
    await this.refresh();
  }
}
