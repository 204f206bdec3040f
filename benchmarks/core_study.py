"""How strong is the recurrence? Interdomain and its gates beside what others would choose, in language and in recall.

What is compared stands in `core_conditions`, which runs are asked for in `core_plan`, how they are trained in
`core_runs`, the tasks beside language in `core_tasks`, and what came of it in `core_table`. What a GPU has done again
of a CPU's runs was put into the result file by hand, as "again", and as "cut" what a CPU has done again since shares of
the delta rule are cut.

    python -m benchmarks.core_study --data ../shared/data    # all runs that results/core_study.json does not hold yet
    python -m benchmarks.core_study --data ../shared/data --device cuda --processes 2 --minutes 7
    python -m benchmarks.core_study --table                  # the tables as markdown
"""

import functools
from collections.abc import Iterator

from benchmarks import condition_study, studies
from benchmarks.core_conditions import RECALL, SIZES
from benchmarks.core_plan import KNOWN, plan
from benchmarks.core_runs import kind, large_at_once, make_run
from benchmarks.core_table import table
from benchmarks.harness import RESULTS

FILE = RESULTS / "core_study.json"
OTHERS = tuple(study for study, _ in KNOWN.values())
SOURCES = ("core_study", *OTHERS)


def main() -> None:
    parser = studies.parser(__doc__, "../shared/data", pool=True)
    parser.add_argument("--only", nargs="+", choices=(*SIZES, *RECALL), help="tasks to run (default: all)")
    parser.add_argument(
        "--backend",
        nargs="+",
        metavar=("BACKEND", "CONDITION"),
        help="of the operators of these conditions, or of all (default: chosen by itself)",
    )
    arguments = parser.parse_args()
    fresh = {"training": condition_study.TRAINING, "shape": condition_study.SHAPE}
    make = functools.partial(make_run, arguments.data, arguments.device, arguments.backend)

    others = {study: studies.load(RESULTS / f"{study}.json", {}) for study in OTHERS}

    def chosen(runs: list[dict]) -> Iterator[dict]:
        return (item for item in plan(runs, others) if arguments.only is None or item["task"] in arguments.only)

    def show(record: dict) -> str:
        return table(others | {"core_study": record})

    studies.show_or_run(arguments, FILE, fresh, chosen, make, show, pooled=(kind, large_at_once))


if __name__ == "__main__":
    main()
