"""Runs the suite and prints its skipped tests, with their reasons, as a markdown table.

python tests/transformers_suite/report.py            print the table
python tests/transformers_suite/report.py --readme   and write it into the README.md beside this file
"""

import argparse
import re
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import pytest


class SkipCollector:
    """A pytest plugin that remembers which tests were skipped, for which reason and in which test class."""

    def __init__(self):
        self.base_names, self.classes = {}, set()
        self.classes_by_skip = defaultdict(set)

    def pytest_collection_modifyitems(self, items):
        for item in items:
            # `parameterized` makes one numbered method for each set of parameters, of the function it keeps here.
            written = getattr(getattr(item, "function", None), "place_as", None)
            self.base_names[item.nodeid] = written.__name__ if written else item.name
            if item.cls is not None:
                self.classes.add(item.cls.__name__)

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            # A test that visits our classes of models in turn skips once for each, and one line tells it all.
            reason = re.sub(r"<class '.*'>|\bInterdomain\w+", "the model", report.longrepr[2].removeprefix("Skipped: "))
            self.classes_by_skip[reason, self.base_names[report.nodeid]].add(report.nodeid.split("::")[-2])

    def table(self):
        tests_by_reason = defaultdict(list)
        for (reason, test), classes in sorted(self.classes_by_skip.items()):
            where = "all" if classes == self.classes else " and ".join(sorted(classes))
            tests_by_reason[reason, where].append(f"`{test}`")
        yield "| Skipped tests | In | Reason |"
        yield "|---|---|---|"
        for (reason, classes), tests in tests_by_reason.items():
            yield f"| {', '.join(tests)} | {classes} | {reason} |".replace("\n", " ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true")
    arguments = parser.parse_args()
    collector = SkipCollector()
    with redirect_stdout(sys.stderr):
        status = pytest.main(["--quiet", str(Path(__file__).parent)], plugins=[collector])
    table = "\n".join(collector.table())
    print(table)
    if arguments.readme:
        marks = r"(<!-- transformers-suite -->\n).*?(<!-- end -->)"
        readme = Path(__file__).with_name("README.md")
        text = readme.read_text()
        readme.write_text(re.sub(marks, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL))
    sys.exit(status)
