"""pyproject.toml declares what the code imports, and as lower bounds the versions that `make test-oldest` runs with."""

import ast
import os
import re
import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LISTS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
OLDEST = (REPOSITORY / "tests" / "oldest.txt").read_text()
PINS = {canonicalize_name(name): pin for name, pin in re.findall(r"^([\w.-]+)==([^\s;]+)", OLDEST, re.MULTILINE)}
# Lower bounds without a pin, by their package or by their extra.
UNPINNED = {
    "serving": "not among the oldest: an older `transformers serve` loads no model with code of its own",
    "torch": "no older one with a CPU build is at hand",
}

# What each folder may import: the dependencies and these extras.
EXTRAS = {
    "modeling_interdomain": ["triton", "kernels"],
    "conversion": ["examples"],
    "model_cards": ["examples"],
    "benchmarks": ["examples", "triton"],
    "examples": ["examples", "evaluation", "serving"],
    "tests": ["test"],
}
# Imported if it is there, and not declared: a peer in the GPU benchmarks.
OPTIONAL = {"fla"}


def requirements(extra: str = "") -> list[Requirement]:
    """One list of pyproject.toml, with the lists that it names in place of their names."""
    found = []
    for requirement in map(Requirement, LISTS[extra]):
        if requirement.name == PROJECT["name"]:
            found += [each for name in requirement.extras for each in requirements(name)]
        else:
            found.append(requirement)
    return found


def test_the_oldest_versions_are_the_lower_bounds():
    bounds = {
        name: specifier.version
        for extra in LISTS.keys() - UNPINNED.keys()
        for requirement in map(Requirement, LISTS[extra])
        for specifier in requirement.specifier
        if specifier.operator == ">=" and (name := canonicalize_name(requirement.name)) not in UNPINNED
    }
    differing = [
        f"{name}: tests/oldest.txt has {PINS.get(name)}, pyproject.toml {bounds.get(name)}"
        for name in sorted(bounds.keys() | PINS.keys())
        if bounds.get(name) != PINS.get(name)
    ]
    assert not differing, "a lower bound is a version that is tested: change both files\n" + "\n".join(differing)


def test_installed_versions_are_in_range():
    # What serves needs a newer Transformers, and the tests of it are among all tests.
    left_out = {"serving", "test"} if "OLDEST" in os.environ else set()
    ranges, outside = defaultdict(SpecifierSet), []
    for extra in LISTS.keys() - left_out:
        for requirement in requirements(extra):
            ranges[canonicalize_name(requirement.name)] &= requirement.specifier
    for name, specifiers in sorted(ranges.items()):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue  # of an extra that is not installed
        if not specifiers.contains(installed, prereleases=True):
            outside.append(f"{name} {installed} is installed, pyproject.toml declares {specifiers}")
    assert not outside, "install what is declared, or declare what has been tested\n" + "\n".join(outside)


@pytest.mark.skipif("OLDEST" not in os.environ, reason="make test-oldest asks for the oldest versions")
@pytest.mark.parametrize("name", PINS)
def test_the_oldest_versions_are_those_that_run(name):
    assert version(name) == PINS[name]
    assert Path(find_spec(name.replace("-", "_")).origin).is_relative_to(sys.prefix)


@pytest.mark.skipif("OLDEST" in os.environ, reason="its packages come from two folders; make test looks at one")
@pytest.mark.parametrize("folder", EXTRAS)
def test_what_is_imported_is_declared(folder):
    declared = {canonicalize_name(each.name) for extra in ["", *EXTRAS[folder]] for each in requirements(extra)}
    ours, distributions, missing = {*EXTRAS, *OPTIONAL}, packages_distributions(), set()
    for file in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - ours:
                owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
                if not owners & declared:
                    missing.add(f"{file.relative_to(REPOSITORY)} imports {name} of {' or '.join(sorted(owners))}")
    assert not missing, f"add to {EXTRAS[folder][0]!r} in pyproject.toml\n" + "\n".join(sorted(missing))
