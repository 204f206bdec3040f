"""Every command that a page names, and every one that a result file records, is one that its program takes."""

import argparse
import re
import runpy
import shlex
import sys

import pytest
from transformers import HfArgumentParser

from benchmarks.harness import RESULTS
from modeling_interdomain.registry import TOKEN_MIXERS
from tests.pages import pages

# A command ends with its line or its cell of a table; between quotes a bar belongs to it.
COMMAND = re.compile(r"python -m ((?:examples|conversion|benchmarks)(?:'[^'\n]*'|[^`|'\n])*)")
RECORDED = re.compile(r'"command": "python -m ([^"]*)"')


def commands() -> list[str]:
    """Program and arguments, comments left out, of every complete command."""
    text = "\n".join(path.read_text() for path in pages()).replace("\\\n", " ")
    recorded = "\n".join(path.read_text() for path in RESULTS.glob("*.json"))
    written = [*COMMAND.findall(text), *RECORDED.findall(recorded)]
    found = (shlex.join(shlex.split(command, comments=True)) for command in written)
    return sorted({command for command in found if "..." not in command})


class Accepted(Exception):
    """The arguments were parsed, and the program goes no further."""


def stop_after(parse):
    def parse_and_stop(self, arguments=None, **options):
        parse(self, arguments)
        raise Accepted

    return parse_and_stop


def test_there_are_commands():
    assert len(commands()) > 30


@pytest.fixture
def own_registry():
    """A program may register a mixer of its own, which other tests have, or have yet to, in this process."""
    before = dict(TOKEN_MIXERS)
    for name, mixer in before.items():
        if not mixer.__module__.startswith("modeling_interdomain."):
            del TOKEN_MIXERS[name]
    yield
    TOKEN_MIXERS.clear()
    TOKEN_MIXERS.update(before)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # another test has imported the program
@pytest.mark.parametrize("command", commands())
def test_a_program_takes_the_arguments_that_a_page_gives_it(monkeypatch, command, own_registry):
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_after(parse))
    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", stop_after(parse))
    program, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(Accepted):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
