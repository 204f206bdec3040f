"""How far a reader who follows a call must go: frames and files to the first product, calls of a layer, and climbs."""

import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import modeling_interdomain
from modeling_interdomain import InterdomainCache

PACKAGE = f"{Path(modeling_interdomain.__file__).parent}/"
# From the top down; rooms named together stand on one floor. A mixer's own room is above what all mixers share.
FLOORS = [
    {"modeling_interdomain", "classifier_interdomain"},
    {"inputs", "outputs", "generation", "model_cache", "saving"},
    {"registry", "configuration_interdomain"},
    {f"mixers/{name}" for name in ("interdomain", "s4d", "ssd", "selective_scan", "softmax", "window")},
    {"mixers/sparse"},
    {"mixers", "feed_forwards"},
    {"parallel", "layers", "cache"},
    {"ops/interdomain", "ops/s4d", "ops/ssd", "ops/selective_scan"},
    {"ops/diagonal"},
    {"ops/common"},
]
# Of ours, in one layer of a decode step.
MOST_CALLS = {"interdomain": 59, "rope-after": 60, "s4d": 59, "softmax": 24, "ssd": 48, "selective-scan": 46}
MOST_CLIMBS = {"ssd": 5}  # in one layer, of a training batch as of a decode step; elsewhere 4
MIXERS = {"rope-after": "interdomain", "selective-scan": "selective_scan"}


class Call(NamedTuple):
    file: str
    name: str
    caller: str  # its file

    @property
    def climbs(self) -> bool:
        return _floor(self.file) < _floor(self.caller)


def _room(file: str) -> str:
    folder, _, module = file.rpartition("/")
    return folder or module.removesuffix(".py")


def _floor(file: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if _room(file) in rooms)


def _own(frame) -> bool:
    """Whether a frame is a function of ours; comprehensions belong to the function that they stand in."""
    name = frame.f_code.co_name
    return frame.f_code.co_filename.startswith(PACKAGE) and (name[0] != "<" or name == "<lambda>")


def _file(frame) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE)


def _callers(frame):
    """The frames of ours that wait for one, from the nearest on."""
    while (frame := frame.f_back) is not None:
        if _own(frame):
            yield frame


class Walk(TorchDispatchMode):
    """Notes every call of ours, and what stands on the stack when the first matrix product is asked for."""

    PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []
        self.frames: list[str] | None = None
        self.files: set[str] = set()

    def __enter__(self):
        sys.setprofile(self._note)
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        sys.setprofile(None)

    def _note(self, frame, event, _):
        if event == "call" and _own(frame):
            caller = next(_callers(frame), None)
            self.calls.append(Call(_file(frame), frame.f_code.co_name, _file(frame if caller is None else caller)))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.frames is None and function.overloadpacket in self.PRODUCTS:
            self.frames = [f"{_file(frame)}: {frame.f_code.co_name}" for frame in _callers(sys._getframe())]
            self.files = {call.file for call in self.calls}
        return function(*args, **(kwargs or {}))


IDS = torch.arange(1, 11)[None]


def train(model) -> Walk:
    model.train()(IDS, labels=IDS).loss.backward()  # what is made once
    with Walk() as walk:
        model(IDS, labels=IDS)
    return walk


@torch.no_grad()
def decode(model) -> Walk:
    cache, token = InterdomainCache(model.config), torch.zeros(1, 1, dtype=torch.long)
    for ids in (IDS, token):
        model(ids, past_key_values=cache)
    with Walk() as walk:
        model(token, past_key_values=cache)
    return walk


def of_a_layer(take, make_model, name: str) -> Counter:
    """The calls that one layer more makes."""
    parts = {"token_mixers": MIXERS.get(name, name), "feed_forwards": "mlp", "dtype": torch.float32}
    shallow, deep = (Counter(take(make_model(name, num_hidden_layers=n, **parts)).calls) for n in (1, 2))
    assert not shallow - deep
    return deep - shallow


def test_few_frames_and_files_lie_before_the_first_product_of_training(make_model):
    walk = train(make_model(dtype=torch.float32))
    assert walk.frames[0] == "layers/common.py: project_all"  # of the first mixer
    assert len(walk.frames) <= 9, walk.frames
    assert len(walk.files) <= 10, sorted(walk.files)


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_decode_step_makes_few_calls_a_layer(name, make_model):
    calls = of_a_layer(decode, make_model, name)
    assert 0 < calls.total() <= MOST_CALLS[name], "\n".join(f"{n} {call}" for call, n in calls.items())


@pytest.mark.parametrize("take", [train, decode])
@pytest.mark.parametrize("name", MOST_CALLS)
def test_few_calls_climb_back_up(take, name, make_model):
    climbs = [call for call in of_a_layer(take, make_model, name).elements() if call.climbs]
    assert len(climbs) <= MOST_CLIMBS.get(name, 4), climbs
