"""Trains and prints where plans were made, and how often calls were compared; run by tests.

The last word of the command line is `ahead`, or `asked`: then no documents are known beforehand.
"""

import sys
import threading
from collections import Counter
from typing import Any

from megatron_burst import pretrain_gpt
from megatron_burst.attention import preparing
from megatron_burst.transport.agreement import Agreement


def main() -> None:
    from megatron_burst.plugin import attach

    counts: Counter[str] = Counter()
    plan, compare = preparing._plan, Agreement.compare

    def counting_plan(context: Any, asked: Any) -> Any:
        counts[threading.current_thread().name] += 1
        return plan(context, asked)

    def counting_comparison(self: Agreement, said: Any, *, waits: bool) -> None:
        planned = counts[threading.current_thread().name]
        counts["compared"] += planned - counts["before"]  # with those plans that it follows
        counts["before"] = planned
        compare(self, said, waits=waits)

    preparing._plan, Agreement.compare = counting_plan, counting_comparison
    if sys.argv.pop() == "asked":
        attach._ahead = lambda *_: None
    pretrain_gpt.main()
    ahead = counts.pop("burst-plans", 0)
    compared = counts.pop("compared", 0)
    counts.pop("before", 0)
    sys.stdout.write(f"rank plans: {counts.total()} asked, {ahead} ahead, {compared} compared\n")
