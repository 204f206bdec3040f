"""pyproject.toml declares what the code imports, and as bounds the versions of `make test-oldest` and `test-newest`."""

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

from modeling_interdomain.layers import versions as module_versions
from modeling_interdomain.layers.versions import TESTED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LISTS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}


def pins(end: str) -> dict[str, str]:
    """The versions of tests/oldest.txt or tests/newest.txt."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (REPOSITORY / "tests" / f"{end}.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): pin for name, pin in found}


OLDEST, NEWEST = pins("oldest"), pins("newest")
# Which of them `make` has asked for; "" where these are the libraries that pip finds.
END = os.environ.get("VERSIONS", "")
# Lower bounds without a pin, by their package or by their extra.
UNPINNED = {
    "serving": "not among the oldest: an older `transformers serve` loads no model with code of its own",
    "torch": "no older one with a CPU build is at hand",
}

# What each folder may import: the dependencies and these extras.
EXTRAS = {
    "modeling_interdomain": ["triton", "kernels"],
    "vllm_interdomain": ["triton"],
    "conversion": ["examples"],
    "docs": ["examples"],
    "model_cards": ["examples"],
    "benchmarks": ["examples", "triton", "evaluation"],
    "examples": ["examples", "evaluation", "serving"],
    "tests": ["test"],
}
# Imported if it is there, and not declared: a peer in the GPU benchmarks, and an engine with an environment of its own.
OPTIONAL = {"fla", "vllm"}


def requirements(extra: str = "") -> list[Requirement]:
    """One list of pyproject.toml, with the lists that it names in place of their names."""
    found = []
    for requirement in map(Requirement, LISTS[extra]):
        if requirement.name == PROJECT["name"]:
            found += [each for name in requirement.extras for each in requirements(name)]
        else:
            found.append(requirement)
    return found


def ranges_of(extras) -> dict[str, SpecifierSet]:
    """What these lists together allow of each package."""
    ranges = defaultdict(SpecifierSet)
    for extra in extras:
        for requirement in requirements(extra):
            ranges[canonicalize_name(requirement.name)] &= requirement.specifier
    return ranges


def needing_peft() -> set[str]:
    return {extra for extra in LISTS if "peft" in ranges_of({extra})}


def test_the_oldest_versions_are_the_lower_bounds():
    bounds = {
        name: specifier.version
        for extra in LISTS.keys() - UNPINNED.keys()
        for requirement in map(Requirement, LISTS[extra])
        for specifier in requirement.specifier
        if specifier.operator == ">=" and (name := canonicalize_name(requirement.name)) not in UNPINNED
    }
    differing = [
        f"{name}: tests/oldest.txt has {OLDEST.get(name)}, pyproject.toml {bounds.get(name)}"
        for name in sorted(bounds.keys() | OLDEST.keys())
        if bounds.get(name) != OLDEST.get(name)
    ]
    assert not differing, "a lower bound is a version that is tested: change both files\n" + "\n".join(differing)


def test_the_newest_versions_are_in_range():
    """Of Transformers the range ends with them; what needs PEFT ends before, see tests/newest.txt."""
    ranges, outside = ranges_of(LISTS.keys() - needing_peft()), []
    for name in NEWEST.keys() & ranges.keys():
        if not ranges[name].contains(NEWEST[name]):
            outside.append(f"{name} {NEWEST[name]} of tests/newest.txt, pyproject.toml declares {ranges[name]}")
    assert not outside, "\n".join(outside)
    assert not ranges_of(needing_peft())["transformers"].contains(NEWEST["transformers"])


def test_the_code_knows_its_versions_of_transformers():
    (first, last), ranges = TESTED, ranges_of({""})["transformers"]
    assert ranges == SpecifierSet(f">={first[0]}.{first[1]}.0,<{last[0]}.{last[1] + 1}")
    assert f"Transformers {first[0]}.{first[1]} to {last[0]}.{last[1]}" in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("version", ["5.20.1", "5.25.0", "5.25.0.dev0", "6.0.0"])
def test_other_versions_of_transformers_are_a_warning_by_name(version, monkeypatch):
    warnings = []
    monkeypatch.setattr(module_versions.logger, "warning_once", warnings.append)
    for known in ("5.21.0", "5.22.1", "5.24.3"):
        module_versions.warn_if_untested(known)
    assert not warnings
    module_versions.warn_if_untested(version)
    (warning,) = warnings
    assert f"tested with Transformers 5.21 to 5.24, and {version} is installed" in warning


def test_installed_versions_are_in_range():
    # What serves needs a newer Transformers, and the tests of it are among all tests.
    left_out = {"oldest": {"serving", "test"}, "newest": needing_peft()}.get(END, set())
    outside = []
    for name, specifiers in sorted(ranges_of(LISTS.keys() - left_out).items()):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue  # of an extra that is not installed
        if not specifiers.contains(installed, prereleases=True):
            outside.append(f"{name} {installed} is installed, pyproject.toml declares {specifiers}")
    assert not outside, "install what is declared, or declare what has been tested\n" + "\n".join(outside)


@pytest.mark.skipif(not END, reason="make test-oldest and make test-newest ask for versions")
@pytest.mark.parametrize("name", pins(END) if END else [""])
def test_the_versions_asked_for_are_those_that_run(name):
    assert version(name) == pins(END)[name]
    assert Path(find_spec(name.replace("-", "_")).origin).is_relative_to(sys.prefix)


@pytest.mark.skipif(END != "", reason="its packages come from two folders; make test looks at one")
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
