"""gdino-lab plan: the numbers and the memory of a run, without starting it and without a GPU."""

from __future__ import annotations

import json

from omegaconf import DictConfig


def run(config: DictConfig) -> int:
    from gdino_lab import preparation, settings
    from gdino_lab.memory import verdict
    from gdino_lab.memory.forecast import forecast, worst_of
    from gdino_lab.progress import format_table

    checked = settings.load(config)
    task, data, plan, notices = preparation.planned(checked)
    worst, notice = worst_of(checked, task, data)
    found = forecast(checked, task, worst, plan.world_size)
    words = [*notices, *([notice] if notice else []), *verdict.words(checked, task, found, plan.world_size)]
    if checked.plan.format == "json":
        print(json.dumps(plan.as_dict() | {"predicted": found.as_dict(), "words": words}, indent=2))
    else:
        print("\n".join(["plan:", *(f"  {line}" for line in plan.lines())]))
        print(json.dumps(plan.deepspeed, indent=2))
        print(format_table(verdict.table(found)))
        print("\n".join(words))
    return 0
